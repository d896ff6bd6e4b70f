"""Calls of `pallas_kernels` that do not fit, and backends that cannot run here."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import fusedopt
import pallas_kernels as pk
from pallas_kernels import Pieces
from tests.errors.table import Row

ONES = jnp.ones(4)
SCALARS = jnp.ones(2)
TWO = Pieces((jnp.ones(10), jnp.ones(20)), ((10,), (20,)), 128, 1024, np.dtype(np.float32))


def first(s, *blocks):
    return (blocks[0],)


def elementwise(scalars=SCALARS, updated=(ONES,), read=(ONES,), **options):
    return lambda: pk.elementwise(first, scalars, updated, read, **options)


def sumsq(arrays=(ONES,), sizes=(4,), **options):
    return lambda: pk.segment_sumsq(first, jnp.ones(1), arrays, sizes, **options)


def mosaic_norms():
    """LARS on FlatParams whose rows are too short for Mosaic's norms."""
    params = fusedopt.pack({"w": jnp.ones((2, 2))})
    tx = fusedopt.lars(0.1, backend="mosaic")
    return tx.apply(params, tx.init(params), params)


ROWS = [
    # Backends.
    Row("backend-name", elementwise(backend="cuda"), ValueError, "`backend` must be None or one of …, got 'cuda'"),
    Row("backend-here", elementwise(backend="triton"), ValueError, "`backend`='triton' cannot run here:…"),
    Row(
        "backend-norms",
        mosaic_norms,
        ValueError,
        "`backend`='mosaic' takes norms of whole blocks: pack with packing=fusedopt.Packing(align=1024), got "
        "align=128, or leave `backend` to the device",
    ),
    # elementwise.
    Row(
        "elementwise-nothing",
        elementwise(updated=(), read=()),
        ValueError,
        "`updated` and `read` are both empty, expected at least one array",
    ),
    Row("elementwise-shape", elementwise(read=(jnp.ones(5),)), ValueError, "`read[0]` has shape (5,), expected (4,)"),
    Row(
        "elementwise-dtype",
        elementwise(read=(jnp.ones(4, jnp.int32),)),
        TypeError,
        "`read[0]` has dtype int32, expected one of bfloat16, float16, float32, float64",
    ),
    Row(
        "elementwise-emit",
        elementwise(emit=(jnp.int32,)),
        TypeError,
        "`emit[0]` has dtype int32, expected one of bfloat16, float16, float32, float64",
    ),
    Row(
        "elementwise-scalars-shape",
        elementwise(jnp.ones(17)),
        ValueError,
        "`scalars` has shape (17,), expected (k,) with k <= 16",
    ),
    Row(
        "elementwise-scalars-dtype",
        elementwise(jnp.ones(1, jnp.bfloat16)),
        TypeError,
        "`scalars` has dtype bfloat16, expected float32 or float64",
    ),
    Row(
        "elementwise-scalars-shapes",
        elementwise((jnp.ones(2),)),
        ValueError,
        "`scalars` have shapes [(2,)], expected up to 16 of ()",
    ),
    Row(
        "elementwise-scalars-dtypes",
        elementwise((jnp.float32(1), jnp.bfloat16(1))),
        TypeError,
        "`scalars` have dtypes ['float32', 'bfloat16'], expected all float32 or all float64",
    ),
    Row("elementwise-row", elementwise(row=100), ValueError, "`row` must be 128, 256, 512 or 1024, got 100"),
    Row(
        "elementwise-row-scalars",
        elementwise(row_scalars=(jnp.ones(1),)),
        ValueError,
        "`row_scalars` need 1-D buffers of a multiple of row=128 elements, got shape (4,)",
    ),
    Row(
        "elementwise-row-scalars-shape",
        elementwise(updated=(jnp.ones(256),), read=(), row_scalars=(jnp.ones(3),)),
        ValueError,
        "`row_scalars[0]` has shape (3,), expected (2,)",
    ),
    Row(
        "elementwise-results",
        elementwise(emit=(jnp.float32,)),
        ValueError,
        "`fn` must return 2 arrays (updated + emit), got 1",
    ),
    Row(
        "pieces-differ",
        elementwise(updated=(TWO,), read=(dataclasses.replace(TWO, row=256),)),
        ValueError,
        "`Pieces` of one call must have the same shapes and rows, got ((10,), (20,)) in rows of 256 beside "
        "((10,), (20,)) in rows of 128",
    ),
    Row(
        "piece-shape",
        elementwise(updated=(TWO.replaced([TWO.arrays[0]] * 2),), read=()),
        ValueError,
        "piece 1 of a buffer has shape (10,), expected (20,), its place in `Pieces.shapes`",
    ),
    # segment_sumsq.
    Row("sumsq-nothing", sumsq(arrays=()), ValueError, "`arrays` is empty, expected at least one array"),
    Row("sumsq-shape", sumsq(arrays=(ONES, jnp.ones(5))), ValueError, "`arrays[1]` has shape (5,), expected (4,)"),
    Row(
        "sumsq-dtype",
        sumsq(arrays=(ONES.astype(jnp.int32),)),
        TypeError,
        "`arrays[0]` has dtype int32, expected one of bfloat16, float16, float32, float64",
    ),
    Row(
        "sumsq-row",
        sumsq(row=64),
        ValueError,
        "`row` must be 128, 256, 512 or 1024, got 64",
    ),
    Row(
        "sumsq-rank",
        sumsq(arrays=(jnp.ones((128, 2)),), sizes=(5,)),
        ValueError,
        "`arrays` have shape (128, 2), expected 1-D with at least 128 elements for 1 segments",
    ),
    Row(
        "sumsq-pieces",
        sumsq(arrays=(TWO, TWO.joined), sizes=(10, 20)),
        ValueError,
        "`arrays` must be all in pieces, or none of them",
    ),
    Row("sumsq-sizes", sumsq(sizes=(-1,)), ValueError, "`sizes` must not be negative, got (-1,)"),
    Row(
        "sumsq-short",
        sumsq(sizes=(3,)),
        ValueError,
        "`arrays` have shape (4,), expected 1-D with at least 128 elements for 1 segments",
    ),
    Row(
        "sumsq-result",
        sumsq(arrays=(ONES.astype(jnp.bfloat16),)),
        TypeError,
        "`fn` result 0 has dtype bfloat16, expected that of `scalars`, float32",
    ),
    Row(
        "spread-values",
        lambda: pk.spread(jnp.ones(3), (1, 1), 128, 256),
        ValueError,
        "`values` has shape (3,), expected (2,)",
    ),
    Row(
        "spread-total",
        lambda: pk.spread(jnp.ones(2), (1, 1), 128, 100),
        ValueError,
        "`total` must be a multiple of 128 and at least 256, got 100",
    ),
    Row(
        "spread-too-few",
        lambda: pk.spread(jnp.ones(2), (1, 1), 128, 128),
        ValueError,
        "`total` must be a multiple of 128 and at least 256, got 128",
    ),
]
