"""Every kind of pytree: structure kept, leaves that are no weights left alone, everything else refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import OPTIMIZER_NAMES, ROUNDING, assert_close, assert_equal, case, normal

LR = 0.1
# A step of ours against float64 at magnitudes near 1: two or three roundings of float32.
TOLERANCE = 1e-6

# One optimizer for each path through the code; the others take as long and are marked slow.
CORE = ("momentum", "adamw", "lars_optax")
EVERY = [pytest.param(n, marks=[] if n in CORE else [pytest.mark.slow]) for n in OPTIMIZER_NAMES]


class Pair(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


def kernel():
    return jnp.asarray(normal((3, 4), 1))


def bias():
    return jnp.asarray(normal((4,), 2))


CONTAINERS = {
    "dict": lambda: {"a": {"kernel": kernel(), "bias": bias()}},
    "list": lambda: [kernel(), [bias()]],
    "tuple": lambda: (kernel(), (bias(), ())),
    "root leaf": kernel,
    "frozen dict": lambda: flax.core.freeze({"a": {"kernel": kernel(), "bias": bias()}}),
    "namedtuple": lambda: {"a": Pair(kernel(), bias())},
    "dataclass": lambda: [Layer(kernel(), bias())],
    "none": lambda: {"a": None, "b": Pair(kernel(), None)},
    "masked node": lambda: {"a": optax.MaskedNode(), "b": kernel()},
    "empty branches": lambda: {"a": {}, "b": (), "c": {"d": []}, "e": kernel()},
    "integer keys": lambda: {0: kernel(), 1: {2: bias()}},
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("mode", ["update", "apply", "flat"])
def test_structure_and_values_survive(container, mode):
    params = CONTAINERS[container]()
    grads = jax.tree.map(lambda x: 2 * x, params)
    tx = fusedopt.sgd(LR)
    want = jax.tree.map(lambda x: np.asarray(x, np.float64) * (1 - 2 * LR), params)
    if mode == "update":
        updates, _ = tx.update(grads, tx.init(params), params)
        got = optax.apply_updates(params, updates)
    elif mode == "apply":
        got, _ = tx.apply(grads, tx.init(params), params)
    else:
        flat = fusedopt.pack(params)
        assert_equal(flat.tree, params)
        got = tx.apply(jax.tree.map(lambda x: 2 * x, flat), tx.init(flat), flat)[0].tree
    assert_close(got, want, TOLERANCE)


EMPTY = {
    "dict": {},
    "tuple": (),
    "nested": {"a": {}, "b": [(), {}]},
    "only none": {"a": None},
    "zero-size": {"a": np.zeros((0,), np.float32), "b": np.zeros((3, 0), np.float32)},
}


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars_optax"])
@pytest.mark.parametrize("tree", EMPTY)
def test_r98_r109_trees_without_elements(tree, name):
    tx, params = case(name).make(LR), jax.tree.map(jnp.asarray, EMPTY[tree])

    def three_steps(params):
        updates, state = tx.update(params, tx.init(params), params)
        out, state = tx.apply(params, state, params)
        flat = fusedopt.pack(params, tx)
        flat, state = tx.apply(flat, state, flat)
        return updates, out, flat.tree, state

    *results, state = three_steps(params)
    for got in results:
        assert_equal(got, params)
    assert (int(state.count), bool(state.skipped)) == (3, False)


@pytest.mark.parametrize("name", ["adamw", pytest.param("lars_optax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("solo_from", [1, None])
def test_r107_an_empty_leaf_anywhere_hides_no_other(name, solo_from):
    tx = case(name).make(LR, packing=fusedopt.Packing(solo_from=solo_from))
    trees = []
    for position in range(3):
        params = [jnp.ones((1, 8)), jnp.ones((2, 3))]
        params.insert(position, jnp.zeros((1, 0)))
        trees.append(params)
    for params, updates in zip(trees, [tx.update(p, tx.init(p), p)[0] for p in trees]):
        for u, p in zip(updates, params, strict=True):
            assert u.shape == p.shape
            assert np.all(np.asarray(u) < 0)


def test_r109_sizes_1_1_0_1_0():
    params = [jnp.ones((n,)) for n in (1, 1, 0, 1, 0)]
    tx = fusedopt.sgd(LR)
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates[3], np.float32(-0.1))
    assert [u.size for u in updates] == [1, 1, 0, 1, 0]


NUMBERS = {"python": 2.0, "numpy 0-d": np.float32(2.0), "numpy array": np.array([2.0, 2.0]), "numpy f64": np.float64(2)}


@pytest.mark.parametrize("kind", NUMBERS)
def test_python_and_numpy_leaves(kind):
    params, tx = {"x": NUMBERS[kind]}, fusedopt.adam(LR)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    assert updates["x"].dtype == jnp.float32  # what JAX holds it as without x64
    assert updates["x"].shape == np.shape(params["x"])
    np.testing.assert_allclose(updates["x"], -LR, rtol=1e-6)
    new, state = jax.jit(tx.apply)(params, state, params)
    np.testing.assert_allclose(new["x"], 2.0 - LR, rtol=1e-6)
    flat = fusedopt.pack(params)
    np.testing.assert_array_equal(flat.tree["x"], params["x"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_r139_odd_sizes_equal_each_leaf_alone(dtype):
    sizes = [1, 3, 5, 128, 129, 1025, 4096, 7]
    params = [jnp.asarray(normal((n, 1), i)).astype(dtype) for i, n in enumerate(sizes)]
    grads = [jnp.asarray(normal((n, 1), 50 + i)).astype(dtype) for i, n in enumerate(sizes)]
    tx = fusedopt.adamw(LR, weight_decay=0.1)
    together = tx.update(grads, tx.init(params), params)[0]
    for i in (0, 2, 5):
        alone = tx.update([grads[i]], tx.init([params[i]]), [params[i]])[0][0]
        # XLA contracts products and sums differently in vectors and in their remainders: one rounding.
        assert_close(together[i], alone, ROUNDING[np.dtype(dtype)])


@pytest.mark.parametrize("shape", [(4096,), (32, 32), (8, 128), (1024,), (16384,)])
def test_pack_copies_leaves_that_fill_their_bucket(shape):
    # A reshape, a concatenation of one and an astype may all hand out their operand.
    leaf = jnp.ones(shape)
    flat = fusedopt.pack({"x": leaf})
    assert flat.buckets[0].unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()
    jax.jit(lambda f: jax.tree.map(lambda x: x + 1, f), donate_argnums=0)(flat)
    np.testing.assert_array_equal(leaf, np.ones(shape, np.float32))


# ------------------------------------------------------------------------- leaves that are no weights


def carried():
    params = {"i": jnp.array([3, -4]), "w": jnp.ones((1, 2)), "flag": jnp.array([True, False]), "u": jnp.uint8(7)}
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
    assert grads["i"].dtype == jax.dtypes.float0
    return params, grads


@pytest.mark.parametrize("name", EVERY)
def test_r95_integers_and_booleans_stay(name):
    params, grads = carried()
    tx = case(name).make(LR)

    def both(params):
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), tx.apply(grads, tx.init(params), params)[0], state

    after, applied, state = both(params)
    for got in (after, applied):
        for key in ("i", "flag", "u"):
            assert_equal(got[key], params[key])
        assert bool(jnp.all(got["w"] < 1))
    assert all(b.dtype == jnp.float32 for b in (*state.mu, *state.nu))


def test_r95_the_same_under_jit_where_gradients_are_made_inside():
    params, _ = carried()
    tx = fusedopt.adamw(LR)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
        return tx.apply(grads, state, params)

    out, _ = step(params, tx.init(params))
    assert_equal(out["i"], params["i"])
    assert float(out["w"][0, 0]) < 1


@pytest.mark.parametrize("grad", ["integer", "none"])
def test_r95_integer_gradients_of_integers_are_passed_over(grad):
    params = {"i": jnp.array([100]), "w": jnp.ones((1, 2))}
    grads = {"i": jnp.array([5]) if grad == "integer" else None, "w": jnp.ones((1, 2))}
    tx = fusedopt.adam(LR)
    updates, _ = tx.update(grads, tx.init(params), params)
    # optax.adam gives a float update here, and apply_updates truncates 100 - 0.1 to 99.
    assert_equal(updates["i"], jnp.array([0]))
    if grad == "integer":
        twin = optax.adam(LR)
        with jax.numpy_dtype_promotion("standard"):
            theirs, _ = twin.update(grads, twin.init(params), params)
            assert int(optax.apply_updates(params, theirs)["i"][0]) == 99


def test_integers_in_flat_params():
    params, _ = carried()
    flat, tx = fusedopt.pack(params), fusedopt.adamw(LR)
    assert_equal(flat.tree, params)
    grads = jax.grad(lambda f: jnp.sum(f.tree["w"] ** 2), allow_int=True)(flat)
    updates, _ = tx.update(grads, tx.init(flat), flat)
    applied, _ = tx.apply(grads, tx.init(flat), flat)
    for got in (optax.apply_updates(flat, updates).tree, applied.tree):
        for key in ("i", "flag", "u"):
            assert_equal(got[key], params[key])
        assert bool(jnp.all(got["w"] < 1))


@pytest.mark.parametrize("mode", ["tree", "flat"])
def test_random_keys_are_carried_along(mode):
    params, tx = {"key": jax.random.key(3), "w": jnp.ones((1, 2))}, fusedopt.adamw(LR)
    if mode == "tree":
        out, _ = jax.jit(tx.apply)({"key": None, "w": jnp.ones((1, 2))}, tx.init(params), params)
    else:
        flat = fusedopt.pack(params)
        grads = jax.grad(lambda f: jnp.sum(f.tree["w"]), allow_int=True)(flat)
        out = tx.apply(grads, tx.init(flat), flat)[0].tree
    assert bool(jnp.all(jax.random.key_data(out["key"]) == jax.random.key_data(params["key"])))
    assert bool(jnp.all(out["w"] < 1))


# ------------------------------------------------------------------------------------ None gradients


def slot_of(state, layout, path, slot):
    """A leaf's part of a slot, in its own shape."""
    s = layout.segment(path)
    live = [b for b in layout.buckets if not b.frozen]
    buffer = np.asarray(getattr(state, slot)[live.index(layout.buckets[s.bucket])])
    return buffer.reshape(-1)[s.offset : s.offset + s.size].reshape(s.shape)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("solo_from", [1, None])
@pytest.mark.parametrize("name", EVERY)
def test_r94_no_gradient_is_not_a_zero_gradient(name, solo_from, in_place):
    """A leaf without gradient keeps parameter and slots to the bit; one with a zero gradient decays and coasts."""
    params = {k: jnp.asarray(normal((3, 5), i)) for i, k in enumerate(("absent", "other", "zero"))}
    ones = jax.tree.map(jnp.ones_like, params)
    tx = case(name).make(LR, packing=fusedopt.Packing(solo_from=solo_from))
    layout = fusedopt.pack(params, tx).layout
    grads = {"absent": None, "other": ones["other"], "zero": jnp.zeros((3, 5))}

    def step(grads, state, params):
        if in_place:
            return None, *tx.apply(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    _, before, state = step(ones, tx.init(params), params)
    updates, after, new = step(grads, state, before)
    other, ones = {"other": params["other"]}, {"other": ones["other"]}
    _, alone, alone_state = step(ones, tx.init(other), other)
    alone = step(ones, alone_state, alone)[1]
    if not in_place:
        assert_equal(updates["absent"], jnp.zeros((3, 5)))
    assert_equal(after["absent"], before["absent"])
    assert np.any(np.asarray(after["zero"]) != before["zero"])
    assert np.all(np.asarray(after["other"]) != before["other"])
    for slot in tx.optimizer.rule.slots:
        was, now = (slot_of(s, layout, ("absent",), slot) for s in (state, new))
        assert_equal(now, was)
        assert not np.array_equal(slot_of(new, layout, ("zero",), slot), slot_of(state, layout, ("zero",), slot))
    assert_close(alone, {"other": after["other"]}, TOLERANCE)  # the neighbour does not notice


def test_r94_the_documented_values():
    params = {"w": jnp.full((1, 2), 2.0), "v": jnp.full((1, 2), 2.0)}
    tx = fusedopt.adamw(LR, weight_decay=0.1)
    updates, _ = tx.update({"w": None, "v": jnp.zeros((1, 2))}, tx.init(params), params)
    assert_equal(updates["w"], jnp.zeros((1, 2)))
    np.testing.assert_allclose(updates["v"], -LR * 0.1 * 2.0, rtol=1e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_r94_all_gradients_none(in_place):
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(3), "none": None}
    none = jax.tree.map(lambda _: None, params)
    tx = fusedopt.adamw(LR)
    state = tx.init(params)
    fn = tx.apply if in_place else tx.update
    out, new = jax.jit(lambda s, p: fn(none, s, p))(state, params)
    assert_equal(out, params if in_place else jax.tree.map(jnp.zeros_like, params))
    assert_equal((new.mu, new.nu), (state.mu, state.nu))
    assert int(new.count) == 1


def test_r94_none_beside_a_nan_keeps_everything():
    params = {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 2))}
    tx = fusedopt.adamw(LR)
    _, state = tx.update(params, tx.init(params), params)
    updates, new = tx.update({"a": None, "b": jnp.array([[jnp.nan, 1.0]])}, state, params)
    assert_equal(updates, jax.tree.map(jnp.zeros_like, params))
    assert_equal((new.mu, new.nu, new.count), (state.mu, state.nu, state.count))
    assert bool(new.skipped)


def test_r116_a_leaf_that_gets_gradients_late_has_the_common_count():
    params = {"early": jnp.ones((1, 2)), "late": jnp.ones((1, 2))}
    tx = fusedopt.adam(1.0)
    state = tx.init(params)
    for t in range(11):
        grads = {"early": jnp.ones((1, 2)), "late": jnp.ones((1, 2)) if t == 10 else None}
        updates, state = tx.update(grads, state, params)
    assert int(state.count) == 11
    np.testing.assert_allclose(updates["early"], -1.0, rtol=1e-5)
    m, v = 0.1 / (1 - 0.9**11), 0.001 / (1 - 0.999**11)
    np.testing.assert_allclose(updates["late"], -m / np.sqrt(v), rtol=1e-5)


def test_r117_an_empty_group_still_counts():
    params = {"w": jnp.ones((1, 2))}
    tx = fusedopt.adam(1.0)
    state = tx.init(params)
    for t in range(1, 4):
        _, state = tx.update(params, state, params)
        assert int(state.count) == t


# ------------------------------------------------------------------------------------------ refusals


def refuse(error, tx, grads, params, *words, state=None):
    state = tx.init(params) if state is None else state
    for step in (tx.update, tx.apply):
        with pytest.raises(error) as info:
            step(grads, state, params)
        for word in words:
            assert word in str(info.value), str(info.value)


@pytest.mark.parametrize("solo_from", [1, None])
@pytest.mark.parametrize("shape", [(2,), (1, 2), (3, 1), (), (2, 3), (6,)])
def test_r100_a_broadcastable_shape_is_an_error(shape, solo_from):
    params = {"layer": {"w": jnp.ones((3, 2))}}
    grads = {"layer": {"w": jnp.ones(shape)}}
    tx = fusedopt.adam(LR, packing=fusedopt.Packing(solo_from=solo_from))
    refuse(ValueError, tx, grads, params, "layer/w", f"got shape {shape}", "expected (3, 2)")
    if shape == (2,):  # optax takes it
        twin = optax.sgd(LR)
        with jax.numpy_rank_promotion("allow"):
            assert twin.update(grads, twin.init(params), params)[0]["layer"]["w"].shape == (2,)


def test_a_missing_and_an_extra_leaf_are_named():
    params = {"a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
    grads = {"a": {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}}
    refuse(
        ValueError, fusedopt.sgd(LR), grads, params, "different structures", "`a/scale`", "`a/bias`", "grads", "params"
    )


def test_trees_that_differ_only_in_their_containers_are_the_same():
    params = {"a": [jnp.ones((2, 2)), jnp.ones(2)]}
    grads = flax.core.freeze({"a": (jnp.ones((2, 2)), jnp.ones(2))})
    tx = fusedopt.sgd(LR)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.parametrize("name", ["momentum", "adamw", "lars"])
def test_a_state_of_another_layout_is_refused(name):
    params = {"deep": {"w": jnp.ones((40, 40))}}
    tx = case(name).make(LR)
    other = tx.init({"deep": {"w": jnp.ones((10, 10))}})
    refuse(
        ValueError, tx, params, params, "another layout", "deep/w", "got shape (1024,)", "expected (2048,)", state=other
    )
    fewer = tx.init({"deep": {"w": jnp.ones((40, 40)), "b": jnp.ones(3)}})
    refuse(ValueError, tx, params, params, "another layout", "got 2 buffers", "expected 1", state=fewer)


def test_a_state_of_another_library_is_refused():
    params = {"w": jnp.ones((2, 2))}
    refuse(ValueError, fusedopt.sgd(LR), params, params, "`state`", "got tuple", state=optax.sgd(LR).init(params))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "adam_l2", "lars", "lars_optax"])
def test_r101_params_are_asked_for(name):
    params, tx = {"w": jnp.ones((2, 2))}, case(name).make(LR)
    with pytest.raises(ValueError, match="`params` are needed"):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_params_are_not_asked_for_without_decay(name):
    factory = {"sgd": fusedopt.sgd, "momentum": lambda lr: fusedopt.sgd(lr, 0.9), "adam": fusedopt.adam}[name]
    params, tx = {"w": jnp.ones((2, 2)), "n": None}, factory(LR)
    without, _ = tx.update(params, tx.init(params))
    with_params, _ = tx.update(params, tx.init(params), params)
    assert_equal(without, with_params)
    with pytest.raises(ValueError, match="`params` are needed"):
        tx.apply(params, tx.init(params), None)


@pytest.mark.parametrize("factory", [fusedopt.sgd, fusedopt.adam, fusedopt.adamw, fusedopt.lars])
def test_complex_leaves_are_refused_by_name(factory):
    with pytest.raises(TypeError, match=r"`params` leaf `a/z` is complex64"):
        factory(LR).init({"a": {"z": jnp.ones((2, 2), jnp.complex64)}})
    with pytest.raises(TypeError, match=r"`params` leaf `a/z` is complex64"):
        fusedopt.pack({"a": {"z": 1j}})


def test_complex_and_integer_gradients_of_a_weight_are_refused():
    params = {"a": {"w": jnp.ones((1, 2))}}
    tx = fusedopt.adamw(LR)
    refuse(TypeError, tx, {"a": {"w": jnp.ones((1, 2), jnp.int32)}}, params, "a/w", "int32")
    refuse(TypeError, tx, {"a": {"w": jnp.ones((1, 2), jnp.complex64)}}, params, "a/w", "complex64")
    refuse(TypeError, tx, {"a": {"w": jnp.ones((1, 2), jnp.bool_)}}, params, "a/w", "bool")


@pytest.mark.parametrize("leaf", ["text", object(), {1, 2}])
def test_leaves_that_are_no_arrays_are_refused_by_name(leaf):
    for make in (fusedopt.adam(LR).init, fusedopt.pack):
        with pytest.raises(
            TypeError, match=r"`params` leaf `a/x`: expected an array or a number, got " + type(leaf).__name__
        ):
            make({"a": {"x": leaf}})


def test_trees_and_flat_params_do_not_mix():
    params = {"w": jnp.ones((2, 2))}
    flat, tx = fusedopt.pack(params), fusedopt.adamw(LR)
    with pytest.raises(ValueError, match=r"`grads` are dict but `params` are FlatParams"):
        tx.update(params, tx.init(flat), flat)
    other = fusedopt.pack({"v": jnp.ones((2, 2))})
    with pytest.raises(ValueError, match=r"`grads` have layout .* `params`"):
        tx.update(other, tx.init(flat), flat)
    with pytest.raises(TypeError, match="FlatParams already"):
        fusedopt.pack(flat)
    with pytest.raises(TypeError, match="expected an optimizer made by fusedopt"):
        fusedopt.pack(params, optax.sgd(LR))


# --------------------------------------------------------------------- masks and groups on such trees


def test_masks_need_no_entry_for_leaves_that_are_not_updated():
    params = {"none": None, "i": jnp.array([1]), "w": jnp.ones((1, 2)), "v": jnp.ones((1, 2))}
    grads = {"none": None, "i": jnp.array([0]), "w": jnp.zeros((1, 2)), "v": jnp.zeros((1, 2))}
    for mask in (
        {"w": True, "v": False},
        {"none": None, "i": True, "w": True, "v": False},
        lambda p: jax.tree.map(lambda x: x is p["w"], p),
    ):
        tx = fusedopt.adamw(LR, weight_decay=1.0, mask=mask)
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_allclose(updates["w"], -LR, rtol=1e-6)
        np.testing.assert_array_equal(updates["v"], 0.0)


@pytest.mark.parametrize("mode", ["tree", "flat"])
def test_a_tree_that_selects_a_group_needs_no_entry_for_them_either(mode):
    params = {"none": None, "i": jnp.array([1]), "w": jnp.ones((1, 2)), "v": jnp.ones((1, 2))}
    group = fusedopt.Group("still", {"w": True, "v": False}, frozen=True)
    tx = fusedopt.sgd(LR, groups=[group])
    start = fusedopt.pack(params, tx) if mode == "flat" else params
    grads = jax.tree.map(jnp.ones_like, start)
    out, _ = tx.apply(grads, tx.init(start), start)
    out = out.tree if mode == "flat" else out
    np.testing.assert_array_equal(out["w"], 1.0)
    np.testing.assert_allclose(out["v"], 0.9, rtol=1e-6)


def test_a_missing_entry_of_a_mask_is_named():
    params = {"a": {"w": jnp.ones((1, 2))}, "b": {"w": jnp.ones((1, 2))}}
    with pytest.raises(ValueError, match=r"`mask` has no entry for leaf `b/w`; it covers `a`"):
        fusedopt.adamw(LR, mask={"a": True}).init(params)


class Valued(NamedTuple):
    value: Any
    scale: Any


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_a_field_called_value_is_masked_apart_from_its_neighbour(flags):
    # Paths drop a trailing `.value`, as Flax NNX wraps every variable in it.
    params = {"a": Valued(jnp.ones((1, 2)), jnp.ones((1, 2)))}
    tx = fusedopt.adamw(LR, weight_decay=1.0, mask={"a": Valued(*flags)})
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for got, decays in zip(updates["a"], flags, strict=True):
        np.testing.assert_allclose(got, -LR * decays, rtol=1e-6)


@jax.tree_util.register_pytree_node_class
class CallableModel:
    def __init__(self, w, b):
        self.w, self.b = w, b

    def __call__(self, x):
        raise AssertionError("a model or a mask that is a pytree must not be called")

    def tree_flatten(self):
        return (self.w, self.b), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_r85_a_model_that_can_be_called_is_a_tree():
    params, mask = CallableModel(jnp.ones((1, 2)), jnp.ones(2)), CallableModel(True, True)
    for tx in (
        fusedopt.adamw(LR, weight_decay=1.0, mask=mask),
        optax.inject_hyperparams(fusedopt.adamw, static_args=("mask",))(LR, weight_decay=1.0, mask=mask),
    ):
        updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
        for u in (updates.w, updates.b):
            np.testing.assert_allclose(u, -LR, rtol=1e-6)


def test_r90_the_three_forms_of_a_mask_agree():
    params = {"Dense": {"kernel": jnp.ones((1, 2)), "bias": jnp.ones(2)}, "other": jnp.ones((1, 2))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    full = {"Dense": {"kernel": True, "bias": True}, "other": False}
    results = []
    for mask in (full, {"Dense": True, "other": False}, lambda _: full):
        tx = fusedopt.adamw(LR, weight_decay=1.0, mask=mask)
        results.append(tx.update(zeros, tx.init(params), params)[0])
    for got in results:
        np.testing.assert_allclose(got["Dense"]["bias"], -LR, rtol=1e-6)
        np.testing.assert_array_equal(got["other"], 0.0)
        assert_equal(got, results[0])
    tx = fusedopt.adamw(LR, weight_decay=1.0, mask=True)
    np.testing.assert_allclose(tx.update(zeros, tx.init(params), params)[0]["other"], -LR, rtol=1e-6)


def test_r92_masks_of_arrays_and_tracers_are_refused():
    params = {"w": jnp.ones((1, 2))}
    with pytest.raises(TypeError, match="a mask is static"):
        fusedopt.adamw(LR, mask={"w": np.array([[True, False]])}).init(params)
    with pytest.raises(TypeError, match="a mask is static"):
        jax.jit(lambda flag: fusedopt.adamw(LR, mask={"w": flag}).init(params))(True)
    with pytest.raises(TypeError, match="static_args"):
        fusedopt.adamw(LR, mask=jnp.array(True))


# ---------------------------------------------------------------------------------------- layouts of XLA


def test_r112_gradients_out_of_transposes_and_convolutions():
    params = {"w": jnp.asarray(normal((6, 4), 3)), "k": jnp.asarray(normal((3, 3, 2, 4), 4))}
    x, image = jnp.asarray(normal((5, 4), 5)), jnp.asarray(normal((1, 8, 8, 2), 6))
    tx = fusedopt.adamw(LR, packing=fusedopt.Packing(solo_from=30))  # w packed, k alone

    def loss(p):
        y = jax.lax.conv_general_dilated(image, p["k"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum((x @ p["w"].T) ** 2) + jnp.sum(y**2)

    @jax.jit
    def fused(p):
        g = jax.grad(loss)(p)
        return g, tx.update(g, tx.init(p), p)[0], tx.apply(g, tx.init(p), p)[0]

    grads, updates, applied = fused(params)
    grads = jax.tree.map(lambda g: jnp.asarray(np.ascontiguousarray(g)), grads)
    want = tx.update(grads, tx.init(params), params)[0]
    assert_close(updates, want, TOLERANCE)
    assert_close(applied, optax.apply_updates(params, want), TOLERANCE)


def test_r102_equal_trees_have_one_layout_object():
    def tree():
        return {"a": jnp.ones((2, 3)), "b": jnp.ones(3)}

    first, second = fusedopt.pack(tree()), fusedopt.pack(jax.tree.map(lambda x: 5 * x, tree()))
    assert first.layout is second.layout
    assert jax.tree.structure(first) == jax.tree.structure(second)
    tx = fusedopt.adamw(LR)
    assert jax.tree.structure(tx.init(first)) == jax.tree.structure(tx.init(tree()))
