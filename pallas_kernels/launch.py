"""What every kernel launch has in common: the platform it falls back on, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def launch(kernel: Callable[..., Any], definition: Callable[..., Any], *operands: Any, interpret: bool) -> Any:
    """`kernel(*operands)`, where the platform that finally runs it is CUDA, else `definition(*operands)`.

    The backend was chosen while tracing, the platform is known only when lowering. The derivative, forward and
    reverse, is the definition's.
    """

    @jax.custom_jvp
    def run(*operands):
        if interpret:
            return kernel(*operands)
        return lax.platform_dependent(*operands, cuda=kernel, default=definition)

    @run.defjvp
    def run_jvp(primals, tangents):
        _, out_tangents = jax.jvp(definition, primals, tangents)
        return run(*primals), out_tangents

    return run(*operands)
