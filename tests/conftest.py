"""A hostile environment, so that the suite fails where a user's stricter settings would.

Eight CPU devices, strict dtype promotion, no implicit rank promotion; warnings are errors
(see pyproject.toml).
"""

import os
import pathlib
import sys

# XLA reads these once, when its backend starts, so they must be set before anything imports jax.
assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could configure it"

DEVICE_COUNT = "--xla_force_host_platform_device_count"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_COUNT}=8".strip()

# Most of the suite's time is compilation. Programs that XLA has compiled before, in another worker or an earlier run,
# are taken from a cache in the checkout; its keys hold the program, the flags, the device and the version of XLA.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402  (the environment must be set first)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
