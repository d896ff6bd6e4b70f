"""GPU kernels for elementwise updates and segment norms of buffers, and their definition in plain JAX."""

from pallas_kernels.dispatch import Backend as Backend
from pallas_kernels.dispatch import Support as Support
from pallas_kernels.dispatch import interpret as interpret
from pallas_kernels.dispatch import resolve_backend as resolve_backend
from pallas_kernels.dispatch import supported_backends as supported_backends
from pallas_kernels.elementwise import elementwise as elementwise
from pallas_kernels.elementwise import runs_pieces as runs_pieces
from pallas_kernels.elementwise_xla import rounded as rounded
from pallas_kernels.nonfinite import zero_or_nan as zero_or_nan
from pallas_kernels.pieces import Pieces as Pieces
from pallas_kernels.pieces import arrays_of as arrays_of
from pallas_kernels.pieces import join as join
from pallas_kernels.pieces import pieces_of as pieces_of
from pallas_kernels.segment_sumsq import SumSq as SumSq
from pallas_kernels.segment_sumsq import norm as norm
from pallas_kernels.segment_sumsq import segment_sumsq as segment_sumsq
from pallas_kernels.segment_sumsq import spread as spread
from pallas_kernels.tiling import BLOCK as BLOCK
from pallas_kernels.tiling import ROW as ROW
from pallas_kernels.total_sumsq import total_sumsq as total_sumsq

__all__ = [
    "BLOCK",
    "ROW",
    "Backend",
    "Pieces",
    "SumSq",
    "Support",
    "arrays_of",
    "elementwise",
    "interpret",
    "join",
    "norm",
    "pieces_of",
    "resolve_backend",
    "rounded",
    "runs_pieces",
    "segment_sumsq",
    "spread",
    "supported_backends",
    "total_sumsq",
    "zero_or_nan",
]
