"""Compiles for GPUs on a machine that has none, and reads what the GPU would run."""
