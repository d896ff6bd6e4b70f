"""Compiles for GPUs on a machine that has none, and reads what the GPU would run."""

import os

# With the CUDA plugin of the `aot` extra installed, JAX would look for a GPU and complain that there is none.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
