"""States to and from optax: every optimizer, any chain, every bit, and what is missing by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    OPTIMIZERS,
    assert_close,
    assert_equal,
    case,
    each_once,
    filled,
    gradients,
    scan_steps,
    standard_promotion,
)

SHAPES = {
    "conv": {"kernel": (3, 3, 2, 5), "bias": (5,)},
    "fc": {"kernel": (1, 127), "bias": (129,)},
    "large": (129, 128),
    "head": [(2, 3), ()],
}
PACKINGS = {"default": None, "one": fusedopt.Packing(solo_from=None), "solo": fusedopt.Packing(solo_from=1)}


def some_params(dtype=jnp.float32):
    return jax.tree.map(jnp.asarray, filled(SHAPES, dtype=dtype))


def busy(state):
    """The state with numbers of its own in every array."""
    leaves, treedef = jax.tree.flatten(state)
    rng = np.random.default_rng(0)
    new = []
    for x in leaves:
        number = {"b": lambda x=x: rng.random(x.shape) < 0.5, "i": lambda x=x: rng.integers(1, 9, x.shape)}
        new.append(jnp.asarray(number.get(x.dtype.kind, lambda x=x: rng.random(x.shape))(), x.dtype))
    return treedef.unflatten(new)


def padded_like(state, params, tx):
    """A busy state whose padding is zero, as that of every state is."""
    state, layout = busy(state), tx.optimizer.layout_of_params(params)
    held = [b for b in layout.buckets if not b.frozen]
    for name in ("mu", "nu", "ema", "master", "accumulated"):
        buffers = getattr(state, name)
        owners = [b for b in held if name != "master" or b.dtype.itemsize < 4] if buffers else []
        new = []
        for b, x in zip(owners, buffers, strict=True):
            keep = np.zeros(x.shape, bool) if not b.solo else np.ones(x.shape, bool)
            for s in layout.segments_of(b) if not b.solo else ():
                keep[s.offset : s.offset + s.size] = True
            new.append(jnp.where(keep, x, jnp.zeros_like(x)))
        state = state._replace(**{name: tuple(new)})
    return state


# ------------------------------------------------------------------------------------- lossless


@pytest.mark.parametrize(("name", "flat"), each_once((True, False)))
def test_there_and_back_keeps_every_bit(name, flat):
    tx = case(name).make(1e-2, packing=PACKINGS["default" if flat else "one"])
    params = fusedopt.pack(some_params(), tx) if flat else some_params()
    state = padded_like(tx.init(params), params, tx)
    optax_state, extras = fusedopt.to_optax_state(tx, state, params)
    assert_equal(fusedopt.from_optax_state(tx, optax_state, params, extras), state)
    # Another packing in between changes nothing.
    other = case(name).make(1e-2, packing=PACKINGS["solo"])
    middle = fusedopt.from_optax_state(other, optax_state, some_params(), extras)
    again, extras = fusedopt.to_optax_state(other, middle, some_params())
    assert_equal(again, optax_state)
    assert_equal(fusedopt.from_optax_state(tx, again, params, extras), state)


def test_there_and_back_with_everything_that_optax_has_no_place_for():
    params = {**some_params(), "half": {"kernel": jnp.ones((4, 4), jnp.bfloat16)}, "n": jnp.int32(3), "none": None}
    frozen = fusedopt.Group("frozen", lambda path, leaf: path[0] == "conv", frozen=True)
    slow = fusedopt.Group("slow", lambda path, leaf: path[0] == "fc", learning_rate_scale=0.1, weight_decay=0.3)
    options = dict(master_weights=True, ema_decay=0.9, clip_norm=1.0, accumulate=4, groups=[frozen, slow])
    tx = fusedopt.chain(optax.trace(0.9), fusedopt.adamw(optax.linear_schedule(0.1, 0.0, 9), **options))
    state = tx.init(params)
    own = padded_like(state[1], params, tx)
    own = own._replace(master=tuple(x.astype(jnp.float32) for x in tx.init(params)[1].master))
    state = (busy(state[0]), own)
    optax_state, extras = fusedopt.to_optax_state(tx, state, params)
    assert set(extras) == {
        *("count", "skipped", "total_skipped", "grad_norm", "micro_step", "hyperparams", "ema", "master", "accumulated")
    }
    assert "weight_decay/slow" in extras["hyperparams"]
    assert list(extras["master"]) == ["half"]
    adam = optax_state[1][0]
    assert jax.tree.structure(adam.mu) == jax.tree.structure(params)
    assert adam.mu["half"]["kernel"].dtype == jnp.float32
    assert adam.mu["n"].dtype == jnp.int32
    assert not jnp.any(adam.mu["conv"]["kernel"])
    assert_equal(fusedopt.from_optax_state(tx, optax_state, params, extras), state)
    assert_equal(jax.jit(lambda s, p, e: fusedopt.from_optax_state(tx, s, p, e))(optax_state, params, extras), state)


@pytest.mark.parametrize(
    ("make", "twin"),
    [
        (fusedopt.adam, optax.adam),
        (fusedopt.adamw, lambda lr: optax.adamw(lr, mask=fusedopt.weight_mask)),
        (fusedopt.lion, lambda lr: optax.lion(lr, mask=fusedopt.weight_mask)),
        (fusedopt.lamb, lambda lr: optax.lamb(lr, mask=fusedopt.weight_mask)),
        (fusedopt.lars, lambda lr: optax.lars(lr, 0.1, fusedopt.weight_mask, trust_ratio_mask=fusedopt.weight_mask)),
        (fusedopt.sgd, optax.sgd),
        (lambda lr: fusedopt.sgd(lr, momentum=0.9), lambda lr: optax.sgd(lr, momentum=0.9)),
    ],
    ids=["adam", "adamw", "lion", "lamb", "lars", "sgd", "momentum"],
)
@pytest.mark.parametrize("lr", [0.1, optax.linear_schedule(0.1, 0.0, 9)], ids=["number", "schedule"])
def test_a_fresh_state_is_that_of_the_namesake(make, twin, lr):
    params, tx = some_params(), make(lr)
    want = twin(lr).init(params)
    for p in (params, fusedopt.pack(params)):
        got, _ = fusedopt.to_optax_state(tx, tx.init(p), p)
        assert_equal(jax.tree.map(jnp.abs, got), want)  # LARS has minus zeros
        assert [type(x) for x in got] == [type(x) for x in want]
    got, _ = fusedopt.to_optax_state(tx, tx.init(params), params, like=twin(lr))
    assert_equal(jax.tree.map(jnp.abs, got), want)


# ------------------------------------------------------------------------------------ R132: runs

FAST = ("adamw",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(c.name, marks=() if c.name in FAST else pytest.mark.slow)
        for c in OPTIMIZERS
        # The twin of eps_inside has an eps that means something else, and injects it.
        if c.twin is not None and c.name != "adamw_eps_inside"
    ],
)
def test_R132_a_run_that_visits_us_ends_where_the_run_in_optax_does(name):
    params, tx, twin = some_params(), case(name).make(1e-2), case(name).twin(1e-2)
    stacked = gradients(filled(SHAPES), 30)
    part = [jax.tree.map(lambda x, i=i: x[i : i + 10], stacked) for i in (0, 10, 20)]
    with standard_promotion():
        step = scan_steps(twin)
        want, optax_state = params, twin.init(params)
        want, optax_state = step(want, optax_state, part[0])
        visit, visit_state = want, optax_state
        for grads in part[1:]:
            want, optax_state = step(want, optax_state, grads)
        flat = fusedopt.pack(visit, tx)
        state = fusedopt.from_optax_state(tx, visit_state, flat)
        flat_grads = jax.vmap(lambda g: fusedopt.pack(g, tx))(part[1])
        flat, state = scan_steps(tx, "apply")(flat, state, flat_grads)
        visit_state, _ = fusedopt.to_optax_state(tx, state, flat, like=visit_state)
        visit, visit_state = step(flat.tree, visit_state, part[2])
    # Both are float32 runs of 30 steps; see test_optax_twin.py for their distance.
    assert_close(visit, want, 1e-6)
    assert_close(visit_state, optax_state, 1e-5)


# --------------------------------------------------------------------------------- where they sit

ADAM = dict(b1=0.87, b2=0.98, eps=1e-5)
QUICK = ("inject",)
WRAPPED = {
    "flat chain": lambda: optax.chain(
        optax.clip_by_global_norm(1e9),
        optax.scale_by_adam(**ADAM),
        optax.add_decayed_weights(0.05, fusedopt.weight_mask),
        optax.scale_by_schedule(lambda count: -1e-2),
    ),
    "nested chain": lambda: optax.chain(optax.chain(optax.clip(1e9)), optax.chain(case("adamw").twin(1e-2))),
    "multi steps": lambda: optax.MultiSteps(case("adamw").twin(1e-2), 1),
    "inject": lambda: optax.inject_hyperparams(optax.adamw, static_args=("mask",))(
        1e-2, **ADAM, weight_decay=0.05, mask=fusedopt.weight_mask
    ),
    "if finite": lambda: optax.apply_if_finite(case("adamw").twin(1e-2), 3),
    "partition": lambda: optax.partition(
        {"head": case("adamw").twin(1e-2), "rest": optax.chain(case("adamw").twin(1e-2))},
        lambda p: {k: jax.tree.map(lambda _, k=k: "head" if k == "head" else "rest", v) for k, v in p.items()},
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WRAPPED])
def test_moments_are_found_and_put_wherever_they_sit(name):
    params, tx, twin = some_params(), case("adamw").make(1e-2), WRAPPED[name]()
    grads = gradients(filled(SHAPES), 3)
    first, last = jax.tree.map(lambda x: x[:2], grads), jax.tree.map(lambda x: x[2], grads)
    with standard_promotion():
        start = twin.init(params)
        want, state = scan_steps(twin)(params, start, first)
        ours = fusedopt.from_optax_state(tx, state, want)
        assert_close(tx.apply(last, ours, want)[0], optax.apply_updates(want, twin.update(last, state, want)[0]), 1e-6)
        got, _ = fusedopt.to_optax_state(tx, ours, want, like=start)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    assert_close(got, state, 1e-7)  # a hyperparameter of inject_hyperparams may be a rounding off
    assert int(ours.count) == 2


def test_a_state_restored_as_dicts_will_do():
    params, tx, twin = some_params(), fusedopt.adamw(1e-2), optax.chain(optax.clip(1.0), optax.adamw(1e-2))
    state = busy(twin.init(params))
    raw = {"0": {}, "1": {"0": {"count": np.int32(7), "mu": state[1][0].mu, "nu": state[1][0].nu}, "1": {}, "2": {}}}
    state = (state[0], (state[1][0]._replace(count=jnp.int32(7)), *state[1][1:]))
    assert_equal(fusedopt.from_optax_state(tx, raw, params), fusedopt.from_optax_state(tx, state, params))


def test_a_chain_keeps_the_states_in_front():
    params = some_params()
    tx = fusedopt.chain(optax.trace(0.5), fusedopt.sgd(0.1, momentum=0.9))
    twin = optax.chain(optax.trace(0.5), optax.sgd(0.1, momentum=0.9))
    state = busy(twin.init(params))
    ours = fusedopt.from_optax_state(tx, state, params)
    assert_equal(ours[0], state[0])
    assert_equal(fusedopt.to_optax_state(tx, ours, params)[0], state)
    assert_equal(fusedopt.to_optax_state(tx, ours, params, like=twin)[0], state)
    with pytest.raises(
        ValueError, match="no state of transformation 0 of the chain, a TraceState with `trace/conv/bias`"
    ):
        fusedopt.from_optax_state(tx, state[1][0], params)
    with pytest.raises(ValueError, match="`like`: found no state of transformation 0"):
        fusedopt.to_optax_state(tx, ours, params, like=state[1][0])


def test_a_state_inside_of_optax_wrappers_becomes_that_of_the_same_wrappers():
    params, tx = some_params(), fusedopt.adamw(0.1)
    wrap = lambda inner: optax.MultiSteps(optax.chain(optax.clip(1.0), inner), 2)  # noqa: E731
    got, _ = fusedopt.to_optax_state(tx, wrap(tx).init(params), params)
    assert_equal(got, wrap(optax.adamw(0.1, mask=fusedopt.weight_mask)).init(params))


# --------------------------------------------------------------------------- numbers of their own


def test_gradients_that_multi_steps_has_gathered_go_on():
    params = some_params()
    ours = fusedopt.adamw(0.1, accumulate=4)
    theirs = optax.MultiSteps(optax.adamw(0.1, mask=fusedopt.weight_mask), 4)
    grads = [jax.tree.map(lambda x, t=t: x[t], gradients(filled(SHAPES), 4)) for t in range(4)]
    with standard_promotion():
        state = theirs.init(params)
        for g in grads[:3]:
            _, state = theirs.update(g, state, params)
        fused = fusedopt.from_optax_state(ours, state, params)
        assert int(fused.micro_step) == 3
        back, _ = fusedopt.to_optax_state(ours, fused, params, like=theirs)
        assert_close(back, state, 1e-6)
        updates, state = theirs.update(grads[3], state, params)
        assert_close(ours.apply(grads[3], fused, params)[0], optax.apply_updates(params, updates), 1e-5)
        state = state._replace(mini_step=jnp.int32(2))
        with pytest.raises(ValueError, match="MultiSteps has gathered 2 gradients of a step"):
            fusedopt.from_optax_state(fusedopt.adamw(0.1), state, params)


def test_injected_hyperparameters_are_taken_over_and_keep_their_digits():
    params, tx = some_params(), fusedopt.adamw(1e-2)
    theirs = optax.inject_hyperparams(optax.adamw)(1e-2)
    state = theirs.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(0.25)
    ours = fusedopt.from_optax_state(tx, state, params)
    assert float(tx.hyperparams(ours)["learning_rate"]) == 0.25
    # float32(1) - float32(0.999) is 0.00099998713, which is not what optax.adamw(1e-2) means.
    assert float(ours.hyperparams[tx.optimizer.hyperparams.names().index("b2")]) == pytest.approx(1e-3, rel=1e-7)
    back, extras = fusedopt.to_optax_state(tx, ours, params, like=state)
    assert float(back.hyperparams["learning_rate"]) == 0.25
    assert_equal(fusedopt.from_optax_state(tx, back, params, extras), ours)
    back.hyperparams["learning_rate"] = jnp.float32(1e-2)  # changed in optax, to the number that `tx` was made with
    ours = fusedopt.from_optax_state(tx, back, params, extras)
    assert float(tx.hyperparams(ours)["learning_rate"]) == np.float32(1e-2)


def test_master_weights_that_optax_has_left_behind_are_made_anew():
    params = {"w": jnp.full((2, 2), 1.0, jnp.bfloat16)}
    tx = fusedopt.adamw(1e-3, master_weights=True)
    state = tx.init(params)
    state = state._replace(master=jax.tree.map(lambda x: jnp.where(x == 1, np.float32(1.001), x), state.master))
    optax_state, extras = fusedopt.to_optax_state(tx, state, params)
    assert_equal(fusedopt.from_optax_state(tx, optax_state, params, extras), state)  # 1.001 rounds to 1 in bfloat16
    moved = {"w": params["w"].at[0, 0].set(2)}
    got = fusedopt.to_optax_state(tx, fusedopt.from_optax_state(tx, optax_state, moved, extras), moved)[1]["master"][
        "w"
    ]
    np.testing.assert_array_equal(got, np.float32([[2, 1.001], [1.001, 1.001]]))


def test_leaves_that_are_carried_along_have_no_moments_to_convert():
    params = {"w": jnp.ones((2, 2)), "n": jnp.int32(1), "flag": jnp.bool_(True), "none": None}
    tx = fusedopt.lars(0.1)
    state = padded_like(tx.init(params), params, tx)
    optax_state, extras = fusedopt.to_optax_state(tx, state, params)
    assert jax.tree.structure(optax_state[3].trace) == jax.tree.structure(params)
    assert_equal(fusedopt.from_optax_state(tx, optax_state, params, extras), state)


def test_velocities_of_paper_lars_become_those_of_optax_and_come_back():
    """optax's are steps: minus ours, times the learning rate where ours do not hold it (leaves without a ratio)."""
    params = {"w": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    grads = {"w": jnp.full((2, 2), 0.3), "bias": jnp.full(2, 0.7)}
    tx = fusedopt.lars(0.05, momentum=0.8)
    twin = optax.lars(0.05, momentum=0.8, trust_ratio_mask=fusedopt.weight_mask)  # without decay the same
    with standard_promotion():
        _, state = tx.apply(grads, tx.init(params), params)
        updates, optax_state = twin.update(grads, twin.init(params), params)
    got, extras = fusedopt.to_optax_state(tx, state, params)
    assert_close(got[3].trace, updates, 1e-6)
    np.testing.assert_allclose(got[3].trace["bias"], -0.05 * 0.7, rtol=1e-6)
    assert_equal(fusedopt.from_optax_state(tx, got, params, extras), state)
    assert_close(fusedopt.from_optax_state(tx, optax_state, params).mu, state.mu, 1e-6)
    # A velocity that has moved on in optax is not the one in `extras`.
    moved = (*got[:3], got[3]._replace(trace=jax.tree.map(lambda x: 2 * x, got[3].trace)))
    twice = jax.tree.map(lambda x: 2 * x, state.mu)
    assert_close(fusedopt.from_optax_state(tx, moved, params, extras).mu, twice, 1e-6)


# -------------------------------------------------------------------------------- R129: by path


def test_R129_a_new_head_begins_anew_and_the_rest_goes_on():
    old = {"body": {"kernel": jnp.ones((4, 4))}, "head": {"kernel": jnp.ones((4, 10))}}
    new = {"body": {"kernel": jnp.ones((4, 4))}, "head": {"kernel": jnp.ones((4, 3))}}
    tx = fusedopt.adamw(1e-3, ema_decay=0.5)
    state = padded_like(tx.init(old), old, tx)
    optax_state, extras = fusedopt.to_optax_state(tx, state, old)
    with pytest.raises(ValueError, match=r"`mu` of leaf `head/kernel`: got shape \(4, 10\), expected \(4, 3\)"):
        fusedopt.from_optax_state(tx, optax_state, new, extras)
    got = fusedopt.from_optax_state(tx, optax_state, fusedopt.pack(new), extras, fresh=[("head",)])
    moments, again = fusedopt.to_optax_state(tx, got, new)
    assert_equal(moments[0].mu["body"], optax_state[0].mu["body"])
    assert_equal(moments[0].nu["head"], {"kernel": jnp.zeros((4, 3))})
    assert_equal(again["ema"], {"body": extras["ema"]["body"], "head": new["head"]})
    assert int(got.count) == int(state.count)
    renamed = {"body": old["body"], "classifier": new["head"]}
    with pytest.raises(ValueError, match="has `mu` for leaf `head/kernel`, which is not in `params`"):
        fusedopt.from_optax_state(tx, optax_state, renamed, extras, fresh=[("classifier",)])
    fusedopt.from_optax_state(tx, optax_state, renamed, extras, fresh=[("classifier",), ("head",)])


def test_R127_leaves_that_share_a_buffers_shape_are_told_apart_by_path():
    old, new = {"a": jnp.ones((2, 3)), "c": jnp.ones((1, 3))}, {"a": jnp.ones((3, 3))}
    tx = fusedopt.adamw(1e-3)
    state = tx.init(old)
    assert [x.shape for x in state.mu] == [x.shape for x in tx.init(new).mu]
    optax_state, extras = fusedopt.to_optax_state(tx, state, old)
    with pytest.raises(ValueError, match="`mu` for leaf `c`, which is not in `params`"):
        fusedopt.from_optax_state(tx, optax_state, new, extras)
    with pytest.raises(ValueError, match=r"`mu` of leaf `a`: got shape \(2, 3\), expected \(3, 3\)"):
        fusedopt.from_optax_state(tx, optax_state, new, extras, fresh=[("c",)])
