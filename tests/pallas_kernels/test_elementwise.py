"""`elementwise` on every backend: kernels interpreted on CPU, against NumPy float64 and against the definition."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from tests.pallas_kernels.cases import (
    BACKENDS,
    CASES,
    KERNELS,
    SCALARS,
    buffers,
    close,
    double,
    f32,
    needs_mosaic,
    normal,
    sgd,
)

SHAPES = [*((n,) for n in (1, 127, 128, 129, 1000, 1024, 1025, 3000)), (), (33, 40), (3, 3, 16, 10)]
QUICK = [(1,), (129,), (1024,), (3000,), (), (33, 40)]


def slow_unless(quick, *values, **kwargs):
    """Each case compiles for half a second: `make test` runs a choice of them, `make test-all` runs all."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow, **kwargs)


ORACLE = [
    slow_unless(shape in QUICK if name == "adam" else shape == (1025,), name, shape, id=f"{name}-{shape}")
    for name in ("sgd", "momentum", "adam")
    for shape in SHAPES
]


def run(case, updated, read, backend, scalars=SCALARS, **kwargs):
    with pk.interpret():
        return jax.jit(
            lambda scalars, updated, read: pk.elementwise(
                case.fn, scalars, updated, read, emit=case.emit, backend=backend, **kwargs
            )
        )(scalars, updated, read)


def check(case, updated, read, out, extra=()):
    want = case.oracle((*double(SCALARS), *extra), *map(double, updated), *map(double, read))
    got = [*out[0], *out[1]]
    assert [x.dtype for x in got] == [*(x.dtype for x in updated), *map(np.dtype, case.emit)]
    for x, y in zip(got, want, strict=True):
        assert x.shape == updated[0].shape
        close(x, y)


@pytest.mark.parametrize(("name", "shape"), ORACLE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_oracle(backend, name, shape):
    case = CASES[name]
    updated, read = buffers(case, shape)
    check(case, updated, read, run(case, updated, read, backend))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision_buffers_round_once(backend, dtype):
    case = CASES["adam"]
    updated, read = buffers(case, (1025,), dtype)
    check(case, updated, read, run(case, updated, read, backend))


@pytest.mark.parametrize("row", [slow_unless(row in (128, 1024), row) for row in (128, 256, 512, 1024)])
@pytest.mark.parametrize("rows", [slow_unless(rows == 5, rows) for rows in (1, 5, 16)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_row_scalars(backend, rows, row):
    case = CASES["lars"]
    updated, read = buffers(case, (rows * row,))
    rates = normal(7, (rows,))
    out = run(case, updated, read, backend, row_scalars=[rates], row=row)
    check(case, updated, read, out, extra=[np.repeat(double(rates), row)])


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_float64(backend):
    with jax.enable_x64(True):
        w, g = normal(0, (1500,), np.float64), normal(1, (1500,), np.float64)
        scalars = jnp.asarray([0.1], np.float64)
        with pk.interpret():
            (new,), _ = pk.elementwise(lambda s, w, g: (w - s[0] * g,), scalars, [w], [g], backend=backend)
        assert new.dtype == np.float64
        np.testing.assert_allclose(new, np.asarray(w) - 0.1 * np.asarray(g), rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("name", ["momentum", "lars"])
@pytest.mark.parametrize("backend", KERNELS)
def test_x64_mode_keeps_dtypes_and_values(backend, name):
    """The compiler sees other loop counters and may contract other multiply-adds: one rounding."""
    case = CASES[name]
    updated, read = buffers(case, (1280,))
    kwargs = dict(row_scalars=[normal(7, (10,))]) if case.rates else {}
    before = run(case, updated, read, backend, **kwargs)
    with jax.enable_x64(True):
        after = run(case, updated, read, backend, **kwargs)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_empty_buffers_launch_nothing(backend, shape):
    w = jnp.zeros(shape)
    with pk.interpret():
        jaxpr = jax.make_jaxpr(lambda w: pk.elementwise(sgd, SCALARS, [w], [w], emit=[], backend=backend))(w)
        updated, emitted = pk.elementwise(lambda s, w: (w, w), SCALARS, [w], emit=[jnp.bfloat16], backend=backend)
    assert not jaxpr.eqns
    assert updated[0].shape == emitted[0].shape == shape
    assert emitted[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        *(("triton", size) for size in (128, 1000, 1024, 3000)),
        # Whole blocks: Mosaic leaves a tail to the definition, where fn looks at the flag.
        *(pytest.param("mosaic", size, marks=needs_mosaic) for size in (1024, 3072)),
    ],
)
def test_early_exit_leaves_every_bit(backend, size):
    """fn would write NaN everywhere: only a kernel that left before it keeps the NaN payloads and signed zeros."""
    odd = np.arange(size, dtype=np.uint32) * np.uint32(2654435761)
    w = jnp.asarray(odd.view(np.float32))
    fn = lambda s, w, g: (w * jnp.nan, w * jnp.nan)  # noqa: E731
    with pk.interpret():
        step = jax.jit(
            lambda flag, w: pk.elementwise(
                fn, jnp.stack([flag, flag]), [w], [w], emit=[jnp.bfloat16], early_exit=True, backend=backend
            )
        )
        (kept,), (zero,) = step(jnp.float32(1), w)
        (lost,), (poison,) = step(jnp.float32(0), w)
    np.testing.assert_array_equal(np.asarray(kept).view(np.uint32), odd)
    np.testing.assert_array_equal(double(zero), np.zeros(size))
    assert np.isnan(double(lost)).all()
    assert np.isnan(double(poison)).all()


@pytest.mark.parametrize("size", [1000, 2500])
@pytest.mark.parametrize("backend", BACKENDS)
def test_early_exit_agrees_with_fn(backend, size):
    def fn(s, w, g):
        skip = s[0] != 0
        new = w - jnp.where(skip, 0.0, s[1]) * jnp.where(skip, 0.0, g)
        return new, jnp.where(skip, 0.0, new)

    w, g = normal(0, (size,)), jnp.full((size,), jnp.nan)
    with pk.interpret():
        (new,), (emitted,) = pk.elementwise(fn, SCALARS + 1, [w], [g], emit=[f32], early_exit=True, backend=backend)
    np.testing.assert_array_equal(new, w)
    np.testing.assert_array_equal(emitted, np.zeros(size))


@pytest.mark.parametrize("axes", [(None, 0, None), (None, None, 0), (0, None, None), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("size", [slow_unless(size == 2100, size) for size in (1000, 1024, 2100)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap(backend, size, axes):
    def step(scalars, w, g):
        return pk.elementwise(sgd, scalars, [w], [g], backend=backend)[0][0]

    shapes = [(5,), (size,), (size,)]
    arguments = [normal(i, (3,) * (axes[i] == 0) + shapes[i]) for i in range(3)]
    with pk.interpret():
        got = jax.jit(jax.vmap(step, axes))(*arguments)
    s, w, g = (double(x) if axis == 0 else double(x)[None] for x, axis in zip(arguments, axes))
    close(got, w - s[:, 1:2] * g)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_twice(backend):
    """The inner one over the scalars, the outer one over the gradients; the weights are shared."""
    step = lambda s, w, g: pk.elementwise(sgd, s, [w], [g], emit=[], backend=backend)[0][0]  # noqa: E731
    s, w, g = normal(0, (2, 5)), normal(1, (1500,)), normal(2, (3, 1500))
    with pk.interpret():
        got = jax.vmap(jax.vmap(step, (0, None, None)), (None, None, 0))(s, w, g)
    close(got, double(w) - double(s)[None, :, 1, None] * double(g)[:, None])


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_with_emitted_and_row_scalars(backend):
    fn = lambda s, w, g: (w - s[-1] * g, s[-1] * g)  # noqa: E731
    w, g, rates = normal(0, (2, 1280)), normal(1, (1280,)), normal(2, (2, 10))
    with pk.interpret():
        (new,), (update,) = jax.vmap(
            lambda w, r: pk.elementwise(fn, SCALARS, [w], [g], row_scalars=[r], emit=[f32], backend=backend)
        )(w, rates)
    u = np.repeat(double(rates), 128, axis=1) * double(g)
    close(new, double(w) - u)
    close(update, u)


@pytest.mark.parametrize("size", [slow_unless(size == 1100, size) for size in (1024, 1100)])
@pytest.mark.parametrize("backend", KERNELS)
def test_derivatives_are_those_of_the_definition(backend, size):
    def loss(backend, scalars, w, m, g):
        (w, m), _ = pk.elementwise(CASES["momentum"].fn, scalars, [w, m], [g], backend=backend)
        return jnp.sum(w * w) + jnp.sum(jnp.sin(m))

    arguments = (jnp.asarray(SCALARS), *(normal(i, (size,)) for i in range(3)))
    with pk.interpret():
        got = jax.jit(jax.grad(lambda *a: loss(backend, *a), (0, 1, 2, 3)))(*arguments)
        forward = jax.jit(lambda a: jax.jvp(lambda *a: loss(backend, *a), a, a)[1])(arguments)
    want = jax.grad(lambda *a: loss("xla", *a), (0, 1, 2, 3))(*arguments)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(forward, sum(np.vdot(x, y) for x, y in zip(want, arguments, strict=True)), rtol=1e-4)


def loops(step):
    """The same three steps under each kind of control flow."""

    def scan(w):
        return jax.lax.scan(lambda w, _: (step(w), None), w, length=3)[0]

    def while_loop(w):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, w))[1]

    def cond(w):
        for flag in (True, True, True):
            w = jax.lax.cond(jnp.asarray(flag), step, lambda w: w, w)
        return w

    def remat(w):
        for _ in range(3):
            w = jax.checkpoint(step)(w)
        return w

    return scan, while_loop, cond, remat


@pytest.mark.parametrize("jit", [slow_unless(True, jax.jit, id="jit"), slow_unless(False, lambda f: f, id="eager")])
@pytest.mark.parametrize("loop", [0, 1, 2, 3], ids=["scan", "while", "cond", "remat"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_control_flow(backend, loop, jit):
    g, w = normal(0, (1100,)), normal(1, (1100,))
    step = lambda w: pk.elementwise(sgd, SCALARS, [w], [g], backend=backend)[0][0]  # noqa: E731
    with pk.interpret():
        got = jit(loops(step)[loop])(w)
    close(got, double(w) - 3 * double(SCALARS)[1] * double(g))


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_stay_intact(backend):
    case = CASES["adam"]
    updated, read = buffers(case, (2048,))
    before = [np.array(x) for x in (*updated, *read)]
    run(case, updated, read, backend)
    with pk.interpret():
        pk.elementwise(case.fn, SCALARS, updated, read, emit=case.emit, backend=backend)
    for x, y in zip(before, (*updated, *read), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("shape", [(1000,), (64, 100), (3, 3, 16, 10)])
def test_donated_buffers_are_reused(shape):
    case = CASES["adam"]
    updated, read = buffers(case, shape)
    step = jax.jit(lambda u, r: pk.elementwise(case.fn, SCALARS, u, r, emit=case.emit), donate_argnums=0)
    memory = step.lower(updated, read).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in updated)
    assert memory.temp_size_in_bytes < 1024


def test_donated_row_buffers_are_reused():
    case = CASES["lars"]
    updated, read = buffers(case, (12800,))
    step = jax.jit(lambda u, r, rates: pk.elementwise(case.fn, SCALARS, u, r, row_scalars=[rates]), donate_argnums=0)
    memory = step.lower(updated, read, normal(0, (100,))).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in updated)


@pytest.mark.parametrize("backend", ["xla", *KERNELS])
def test_shard_map(backend):
    """Each device its own part. The interpreters work only without vma checks."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, g = normal(0, (8 * 1024,)), normal(1, (8 * 1024,))
    step = lambda w, g: pk.elementwise(sgd, SCALARS, [w], [g], backend=backend)[0][0]  # noqa: E731
    with pk.interpret() if backend != "xla" else contextlib.nullcontext():
        got = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=backend == "xla"
            )
        )(w, g)
    close(got, double(w) - double(SCALARS)[1] * double(g))


def test_no_scalars_and_constants():
    (new,), (one,) = pk.elementwise(lambda s, w: (w * 2, 1.0), jnp.zeros((0,)), [jnp.ones(5)], emit=[jnp.float16])
    np.testing.assert_array_equal(new, np.full(5, 2.0))
    np.testing.assert_array_equal(one, np.ones(5, np.float16))
