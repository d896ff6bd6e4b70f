"""Every JAX version check of the package. Each says which version lets it go."""

from __future__ import annotations

import warnings
from typing import Any

import jax

VERSION: tuple[int, ...] = jax.__version_info__

# Mosaic GPU kernels take buffers as refs, which 0.10 cannot do under jit. Goes when jax >= 0.11 is required.
HAS_MOSAIC = VERSION >= (0, 11)


# From 0.12 on XLA captures Mosaic kernels in its command buffers (CUDA graphs); before, each of them is a launch of its
# own and cuts the graph in two. Goes when jax >= 0.12 is required.
MOSAIC_IN_COMMAND_BUFFERS = VERSION >= (0, 12)


# From 0.11 on JAX says whenever it lowers a Triton kernel that this backend of Pallas will be removed. Goes with the Triton
# files, when jax drops Triton.
TRITON_IS_DEPRECATED = VERSION >= (0, 11)


# XLA for CPUs compiles two slices of equal sizes once if their offsets are operands. From 0.11 on an optimization_barrier
# keeps them operands; before, it is gone when kernels are made. Goes when jax >= 0.11 is required.
BARRIERS_REACH_KERNELS = VERSION >= (0, 11)


def out_type(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output: as varying over the axes of a shard_map as its most varying operand.

    Under `check_vma=True` pallas_call refuses outputs that do not say so.
    """
    mat = max((jax.typeof(x).mat for x in operands), key=lambda mat: len(mat.varying))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=mat)


def mosaic_interpret() -> Any:
    """The `interpret=` value that runs a Mosaic kernel on CPU."""
    # Missing in 0.10, where nothing asks for it.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def ignore_triton_deprecation() -> None:
    """jax >= 0.11 warns whenever a Triton kernel is lowered, long after our call: only a filter can reach it.

    It speaks to the authors of kernels. Goes with the Triton files, when jax drops Triton.
    """
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
