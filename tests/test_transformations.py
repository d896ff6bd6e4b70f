"""A step is a pure function: under every transformation of JAX it gives what the plain call gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fusedopt
from tests.helpers import assert_close, assert_equal, avals, case, each_once, normal, one_of_each

# One optimizer for each path through the code; the others are marked slow.
CORE = ("adamw", "lars")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in one_of_each(CORE)]
SOLO = fusedopt.Packing(solo_from=64)
# Jitted and plain calls contract products and sums differently: a few roundings of float32.
ROUNDINGS = 1e-6


def tree(seed=0):
    shapes = {"a": {"kernel": (3, 5), "bias": (5,)}, "solo": (9, 8), "scalar": ()}
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return treedef.unflatten([jnp.asarray(normal(s, 10 * seed + i)) for i, s in enumerate(leaves)])


@functools.cache
def plain(name):
    """Parameters, state and updates of three eager steps: what every transformed run must give."""
    tx, params, state = case(name).make(0.1, packing=SOLO), tree(), None
    state = tx.init(params)
    for t in range(3):
        params, state = tx.apply(tree(t + 1), state, params)
    return params, state


def three_steps(tx, params, grads):
    """The same as a scan over stacked gradients."""

    def body(carry, g):
        p, s = carry
        return tx.apply(g, s, p), None

    return jax.lax.scan(body, (params, tx.init(params)), grads)[0]


def stacked(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


@pytest.mark.parametrize("name", EVERY)
def test_r106_scan_while_cond_and_remat(name):
    """One program with all four: their carries and branches demand stable types."""
    tx = case(name).make(0.1, packing=SOLO)
    grads = stacked([tree(t + 1) for t in range(3)])

    @jax.jit
    def run(params, grads):
        scanned = three_steps(tx, params, grads)

        def body(carry):
            t, p, s = carry
            g = jax.tree.map(lambda x: x[t], grads)
            step = jax.checkpoint(lambda g, s, p: tx.apply(g, s, p))
            p, s = jax.lax.cond(t >= 0, step, lambda g, s, p: (p, s), g, s, p)
            return t + 1, p, s

        _, *looped = jax.lax.while_loop(lambda c: c[0] < 3, body, (0, params, tx.init(params)))
        return scanned, tuple(looped)

    want, _ = plain(name)
    for params, state in run(tree(), grads):
        assert_close(params, want, ROUNDINGS)
        assert (int(state.count), bool(state.skipped)) == (3, False)
        assert avals(state) == avals(tx.init(tree()))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(n, m, marks=[] if (n, m) in (("adamw", "flat"), ("lars", "tree")) else [pytest.mark.slow])
        for n, m in each_once(("tree", "flat"))
    ],
)
def test_vmap_is_an_ensemble(name, mode):
    """Each member as if alone: parameters, state, learning rate, and whether its step is skipped."""
    tx = case(name).make(0.1, packing=SOLO)
    members = stacked([tree(t) for t in (0, 4, 5)])
    grads = stacked([tree(t) for t in (1, 2, 3)])
    grads["a"]["bias"] = grads["a"]["bias"].at[1, 0].set(jnp.nan)
    rates = jnp.array([0.1, 0.2, 0.3])

    def one(params, grads, lr):
        if mode == "flat":
            params, grads = fusedopt.pack(params, tx), fusedopt.pack(grads, tx)
        params, state = tx.apply(grads, tx.init(params), params, learning_rate=lr)
        return params.tree if mode == "flat" else params, state.skipped, state.count

    got, skipped, count = jax.jit(jax.vmap(one))(members, grads, rates)
    assert skipped.tolist() == [False, True, False]
    assert count.tolist() == [1, 0, 1]
    for i in range(3):
        pick = functools.partial(jax.tree.map, lambda x, i=i: x[i])
        want = pick(members) if i == 1 else one(pick(members), pick(grads), rates[i])[0]
        if i == 1:
            assert_equal(pick(got), want)
        else:
            assert_close(pick(got), want, ROUNDINGS)


@pytest.mark.parametrize("name", ["lars", pytest.param("adamw", marks=pytest.mark.slow)])
def test_vmap_of_vmap_of_init_and_update(name):
    tx = case(name).make(0.1, packing=SOLO)
    params = jax.tree.map(lambda x: jnp.stack([jnp.stack([x, 2 * x])] * 2), tree())
    states = jax.vmap(jax.vmap(tx.init))(params)
    assert states.count.shape == (2, 2)
    updates, states = jax.jit(jax.vmap(jax.vmap(tx.update)))(params, states, params)
    alone = tx.update(tree(), tx.init(tree()), tree())[0]
    assert_close(jax.tree.map(lambda x: x[1, 0], updates), alone, ROUNDINGS)
    assert states.count.tolist() == [[1, 1], [1, 1]]


def test_r09_a_learning_rate_for_each_member():
    tx = fusedopt.sgd(0.0)
    params = {"w": jnp.ones((2, 1, 3))}
    states = jax.vmap(tx.init)(params)
    updates, _ = jax.vmap(lambda g, s, lr: tx.update(g, s, learning_rate=lr))(params, states, jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(updates["w"], np.array([[[-0.1] * 3], [[-0.2] * 3]]), rtol=1e-6)
    # The stored value may differ by member as well.
    states = jax.vmap(lambda s, lr: tx.set_hyperparams(s, learning_rate=lr))(states, jnp.array([0.1, 0.2]))
    updates, _ = jax.vmap(tx.update)(params, states)
    np.testing.assert_allclose(updates["w"][:, 0, 0], [-0.1, -0.2], rtol=1e-6)


# ---------------------------------------------------------------------------------- derivatives


def outer(tx, steps):
    """The loss after some steps on a quadratic, of the learning rate and of the initial parameters."""

    def loss(p):
        return sum(jnp.sum((x - 1.0) ** 2) for x in jax.tree.leaves(p))

    def run(lr, params):
        state = tx.init(params)
        for t in range(steps):
            g = jax.grad(loss)(params)
            if t % 2:
                updates, state = tx.update(g, state, params, learning_rate=lr)
                params = jax.tree.map(jnp.add, params, updates)
            else:
                params, state = tx.apply(g, state, params, learning_rate=lr)
        return loss(params)

    return run


META = {
    "sgd": lambda: fusedopt.sgd(0.1, weight_decay=0.1),
    "nesterov": lambda: fusedopt.sgd(0.1, 0.9, True),
    "adamw": lambda: fusedopt.adamw(0.1, eps_root=1e-6, weight_decay=0.1),
    "lars": lambda: fusedopt.lars(0.1, weight_decay=0.1, trust_coefficient=0.5),
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param(n, k, marks=[] if (n, k) in (("adamw", 3), ("lars", 1)) else [pytest.mark.slow])
        for n in META
        for k in (1, 3)
    ],
)
def test_r134_gradients_through_steps_are_finite_differences(name, steps):
    run = outer(META[name](), steps)
    params = {"w": jnp.asarray(normal((2, 3), 1)), "b": jnp.asarray(normal((2,), 2)), "none": None}
    lr, direction = jnp.float32(0.05), {"w": jnp.asarray(normal((2, 3), 3)), "b": jnp.ones(2), "none": None}
    run = jax.jit(run)
    by_lr, by_params = jax.jit(jax.grad(run, (0, 1)))(lr, params)

    def central(f, h):
        return (float(f(h)) - float(f(-h))) / (2 * h)

    def along(h):
        return jax.tree.map(lambda p, d: p + h * d, params, direction)

    # float32 losses near 10 at h = 1e-2: noise 1e-6/1e-2, curvature h**2.
    np.testing.assert_allclose(by_lr, central(lambda h: run(lr + h * lr, params), 1e-2) / lr, rtol=5e-3)
    slope = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(by_params), jax.tree.leaves(direction), strict=True))
    np.testing.assert_allclose(slope, central(lambda h: run(lr, along(h)), 1e-2), rtol=5e-3)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in META])
def test_r134_gradients_are_finite_where_the_gradient_is_zero(name):
    """At the minimum of the inner loss, and with parameters of zero. optax needs eps_root too; LARS has norms of 0."""
    slopes = jax.jit(jax.grad(outer(META[name](), 1), (0, 1)))
    for params in ({"w": jnp.ones((2, 3)), "b": jnp.ones(2)}, {"w": jnp.zeros((2, 3)), "b": jnp.zeros(2)}):
        for g in jax.tree.leaves(slopes(jnp.float32(0.1), params)):
            assert bool(jnp.all(jnp.isfinite(g)))


def test_r134_without_eps_root_the_gradient_at_zero_is_not_finite():
    """As documented: the square root of Adam has no derivative at 0."""
    params = {"w": jnp.ones((2, 3))}
    by_params = jax.jit(jax.grad(outer(fusedopt.adam(0.1), 1), 1))(jnp.float32(0.1), params)
    assert not bool(jnp.all(jnp.isfinite(by_params["w"])))


@pytest.mark.parametrize(
    "hyperparameter", ["b2", *(pytest.param(h, marks=pytest.mark.slow) for h in ("b1", "eps", "weight_decay"))]
)
def test_gradients_of_other_hyperparameters(hyperparameter):
    params, grads = {"w": jnp.asarray(normal((2, 3), 1))}, {"w": jnp.asarray(normal((2, 3), 2))}
    tx = fusedopt.adamw(0.1, eps_root=1e-6)
    _, state = tx.update(grads, tx.init(params), params)
    at = {"b1": 0.8, "b2": 0.9, "eps": 0.1, "weight_decay": 0.3}[hyperparameter]

    @jax.jit
    def f(value):
        return jnp.sum(tx.update({"w": 2 * grads["w"]}, state, params, **{hyperparameter: value})[0]["w"] ** 2)

    # f is about 0.1, so differences at h = 1e-2 carry 1e-8/1e-2 of noise and a curvature of h**2.
    want = (f(at + 1e-2) - f(at - 1e-2)) / 2e-2
    np.testing.assert_allclose(jax.grad(f)(at), want, rtol=2e-2)


def test_gradients_of_the_decays_at_any_count():
    params = {"w": jnp.ones((1, 2))}
    tx = fusedopt.adam(0.1, eps_root=1e-6)
    state = tx.init(params)

    @jax.jit
    def slopes(t, b1, b2):
        at = state._replace(count=t - 1)
        return jax.grad(lambda b1, b2: jnp.sum(tx.update(params, at, b1=b1, b2=b2)[0]["w"]), (0, 1))(b1, b2)

    for t in (1, 10, 1000, 10**6, 2**31 - 2):
        for decays in ((0.9, 0.999), (0.5, 0.3)):
            assert np.all(np.isfinite(slopes(jnp.int32(t), *decays))), (t, decays)


def test_flat_params_have_the_gradients_of_their_tree():
    params = tree()
    flat = fusedopt.pack(params, packing=SOLO)

    def loss(p):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(p))

    got = jax.grad(lambda f: loss(f.tree))(flat)
    assert_equal(got.tree, jax.grad(loss)(params))
    assert got.layout is flat.layout
    tangent = jax.jvp(lambda f: loss(f.tree), (flat,), (flat,))[1]
    np.testing.assert_allclose(tangent, jax.jvp(loss, (params,), (params,))[1], rtol=1e-6)


# ------------------------------------------------------------------------------------- abstract


@pytest.mark.parametrize("name", EVERY)
def test_init_of_abstract_values_under_jit_and_vmap(name):
    tx = case(name).make(0.1, packing=SOLO)
    params = tree()
    concrete = tx.init(params)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert_equal(tx.init(structs), concrete)
    assert_equal(jax.jit(tx.init)(params), concrete)
    shapes = jax.eval_shape(tx.init, structs)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), concrete)


# ------------------------------------------------------------------------------------- sharding


def mesh_of(n):
    return jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["lars", pytest.param("adamw", marks=pytest.mark.slow)])
def test_r133_replicas_in_a_shard_map_stay_identical(name, check_vma):
    tx, params, grads = case(name).make(0.1, packing=SOLO), tree(), tree(1)
    state = tx.init(params)
    replicated = PartitionSpec()

    def step(params, state, grads):
        # Each device holds a share of the gradient; their mean is the gradient.
        share = jax.tree.map(lambda g: g * (2.0 * jax.lax.axis_index("data").astype(jnp.float32) / 3), grads)
        return tx.apply(jax.lax.pmean(share, "data"), state, params)

    run = jax.jit(jax.shard_map(step, mesh=mesh_of(4), in_specs=replicated, out_specs=replicated, check_vma=check_vma))
    got, new = run(params, state, grads)
    assert_close(got, tx.apply(grads, state, params)[0], ROUNDINGS)
    assert int(new.count) == 1
    for x in jax.tree.leaves((got, new)):
        copies = [np.asarray(s.data) for s in x.addressable_shards]
        assert len(copies) == 4
        assert all(np.array_equal(c, copies[0]) for c in copies)


@pytest.mark.parametrize("name", ["lars", pytest.param("adamw", marks=pytest.mark.slow)])
def test_sharded_leaves_under_plain_jit_give_the_right_numbers(name):
    """Packing them costs collectives (documented); the values are those of one device."""
    tx = case(name).make(0.1, packing=fusedopt.Packing(solo_from=512))
    shapes = {"small": (8, 6), "large": (32, 24), "b": (5,)}
    params = {name: jnp.asarray(normal(shape, i)) for i, (name, shape) in enumerate(shapes.items(), 1)}
    grads = jax.tree.map(lambda x: jnp.cos(x), params)
    mesh = mesh_of(4)
    specs = {"small": PartitionSpec("data"), "large": PartitionSpec(None, "data"), "b": PartitionSpec()}
    put = functools.partial(jax.tree.map, lambda x, s: jax.device_put(x, NamedSharding(mesh, s)))
    sharded, sharded_grads = put(params, specs), put(grads, specs)
    want, _ = tx.apply(grads, tx.init(params), params)
    got, state = jax.jit(lambda g, p: tx.apply(g, jax.jit(tx.init)(p), p))(sharded_grads, sharded)
    assert_close(got, want, ROUNDINGS)
    assert int(state.count) == 1
