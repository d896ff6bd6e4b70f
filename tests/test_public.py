"""What `import fusedopt` offers, costs and documents; `weight_mask`, `has_nan` and `chain`."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusedopt
from tests.helpers import (
    abstract,
    assert_close,
    assert_equal,
    filled,
    is_weight,
    paths_of,
    resnet,
    standard_promotion,
    transformer,
)

PUBLIC = [
    "DynamicLossScale",
    "FlatLayout",
    "FlatParams",
    "FusedState",
    "FusedTransformation",
    "Group",
    "Packing",
    "TrainState",
    "adam",
    "adamw",
    "chain",
    "check_restored",
    "from_optax_state",
    "has_nan",
    "lamb",
    "lars",
    "lion",
    "pack",
    "repack",
    "report",
    "sgd",
    "to_optax_state",
    "warmup_cosine",
    "weight_mask",
    "zero1",
]


def test_the_public_names_are_these():
    submodules = {n for n, v in vars(fusedopt).items() if inspect.ismodule(v)}
    lazy = {"TrainState"}  # needs Flax
    assert sorted(lazy | {n for n in vars(fusedopt) if not n.startswith("_") and n not in submodules}) == PUBLIC
    assert sorted(fusedopt.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(fusedopt))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    public = getattr(fusedopt, name)
    assert len(inspect.getdoc(public) or "") > 40
    if inspect.isclass(public):
        assert public.__doc__ != (public.__bases__[0].__doc__)
        for member, value in vars(public).items():
            if inspect.isfunction(value) and not member.startswith(("_", "tree_flatten", "tree_unflatten")):
                assert value.__doc__ or member in ("num_leaves", "segments_of", "sizes_of"), f"{name}.{member}"


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "lars", "lamb"])
def test_every_argument_is_documented(name):
    factory = getattr(fusedopt, name)
    text = (
        inspect.getdoc(factory)
        + inspect.getdoc(fusedopt.transforms)
        + (inspect.getdoc(fusedopt.adamw) if name == "adam" else "")
    )
    for argument in inspect.signature(factory).parameters:
        assert argument in text, argument


# optax's default where ours differs on purpose: the default groups stand for these masks.
OTHER_DEFAULTS = {("lars", "weight_decay_mask"): (True, None), ("lars", "trust_ratio_mask"): (True, None)}


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "lars", "lamb"])
def test_signatures_begin_with_those_of_optax(name):
    ours = inspect.signature(getattr(fusedopt, name)).parameters
    theirs = inspect.signature(getattr(optax, name)).parameters
    positional = [k for k, v in theirs.items() if v.kind is v.POSITIONAL_OR_KEYWORD]
    assert [k for k, v in ours.items() if v.kind is v.POSITIONAL_OR_KEYWORD] == positional
    assert set(theirs) <= set(ours)
    for argument, parameter in theirs.items():
        want, got = OTHER_DEFAULTS.get((name, argument), (parameter.default, parameter.default))
        assert parameter.default == want
        assert ours[argument].default == got
        assert ours[argument].kind is parameter.kind
    for argument in list(ours)[len(positional) :]:
        assert ours[argument].kind is inspect.Parameter.KEYWORD_ONLY
    assert ours["skip_nonfinite"].default is True
    for argument in ("packing", "backend", "ema_decay", "clip_norm", "accumulate"):
        assert ours[argument].default is None
    for argument, default in {"master_weights": False, "ema_debias": False}.items():
        assert ours[argument].default == default


def test_importing_fusedopt_pulls_in_no_optional_package():
    code = (
        "import sys, fusedopt; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'flax', 'matplotlib', 'orbax', 'rich', 'sklearn', "
        "'torch', 'pytest', 'IPython'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_importing_fusedopt_starts_no_backend():
    """Afterwards it is too late for `jax.distributed.initialize` and for the number of devices."""
    code = "import jax, fusedopt; jax.config.update('jax_num_cpu_devices', 2); print(jax.device_count('cpu'))"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.strip() == "2"


def test_an_optimizer_is_an_optax_transformation():
    tx = fusedopt.adamw(1e-3)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)


def test_optimizers_can_be_copied_inside_train_states():
    tx = fusedopt.adamw(1e-3)
    assert copy.deepcopy({"tx": tx})["tx"] is tx
    assert copy.copy(tx) is tx


# --------------------------------------------------------------------------------- weight_mask


@pytest.mark.parametrize("shapes", [resnet(), transformer()], ids=["resnet", "transformer"])
def test_weight_mask_is_true_for_what_decays_by_default(shapes):
    params = filled(shapes)
    mask = fusedopt.weight_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    leaves = jax.tree.leaves(params)
    assert jax.tree.leaves(mask) == [is_weight(p, x) for p, x in zip(paths_of(params), leaves, strict=True)]
    assert fusedopt.weight_mask(abstract(shapes)) == mask
    assert any(jax.tree.leaves(mask))
    assert not all(jax.tree.leaves(mask))


def test_weight_mask_by_name_and_rank():
    params = {
        "kernel": jnp.ones((2, 2)),
        "vector": jnp.ones(2),
        "scalar": jnp.ones(()),
        "bias": jnp.ones((2, 2)),
        "scale": jnp.ones((2, 2)),
        "beta": jnp.ones((2, 2)),
        "gamma": jnp.ones((2, 2)),
        "b": jnp.ones((2, 2)),
        "conv": jnp.ones((1, 1, 1, 1)),
        "steps": jnp.ones((2, 2), jnp.int32),
        "none": None,
    }
    true = {k for k, v in fusedopt.weight_mask(params).items() if v}
    assert true == {"kernel", "conv"}
    assert fusedopt.weight_mask(params)["none"] is None
    assert fusedopt.weight_mask({}) == {}


# ------------------------------------------------------------------------------------- has_nan


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_has_nan_sees_one_element_in_any_place(bad, dtype):
    ones = np.ones((100, 77), dtype)
    clean = {"a": ones, "b": np.float32(0), "n": None, "i": np.ones(3, np.int32)}
    has_nan = jax.jit(fusedopt.has_nan)
    assert not has_nan(clean)
    for place in ((0, 0), (50, 3), (99, 76)):
        dirty = ones.copy()
        dirty[place] = bad
        assert has_nan({**clean, "a": dirty})
    assert has_nan({**clean, "b": np.float32(bad)})
    flag = has_nan(clean)
    assert (flag.shape, flag.dtype) == ((), jnp.bool_)


def test_has_nan_of_large_finite_values_and_of_nothing_is_false():
    big = jnp.finfo(jnp.float32).max
    assert not fusedopt.has_nan([jnp.full((1000,), big), -jnp.full((1000,), big)])
    assert not fusedopt.has_nan({})
    assert not fusedopt.has_nan({"i": jnp.ones(3, jnp.int32), "n": None, "key": jax.random.key(0)})
    assert fusedopt.has_nan([1.0, float("nan")])


def test_has_nan_takes_flat_params():
    flat = fusedopt.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(2)})
    assert not fusedopt.has_nan(flat)
    assert fusedopt.has_nan(jax.tree.map(lambda x: x.at[0].set(jnp.nan), flat))


# --------------------------------------------------------------------------------------- chain


def test_chain_is_optax_chain_and_its_apply_equals_its_update():
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    grads = jax.tree.map(lambda x: 3.0 * x, params)
    last = fusedopt.adamw(0.1)
    ours = fusedopt.chain(optax.clip_by_global_norm(1.0), optax.trace(0.5), last)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.5), last)
    with standard_promotion():
        state, reference = ours.init(params), theirs.init(params)
        assert jax.tree.structure(state) == jax.tree.structure(reference)
        applied, applied_state = params, state
        update, apply, optax_update = jax.jit(ours.update), jax.jit(ours.apply), jax.jit(theirs.update)
        for _ in range(2):
            updates, state = update(grads, state, params)
            want, reference = optax_update(grads, reference, params)
            assert_equal(updates, want)
            applied, applied_state = apply(grads, applied_state, applied)
            params = optax.apply_updates(params, updates)
    assert_close(applied, params, 1.2e-7)  # two steps, each an fma or not
    assert_close(applied_state, state, 1.2e-7)
    assert ours.hyperparams(state)["learning_rate"] == last.hyperparams(state[-1])["learning_rate"]
    changed = ours.set_hyperparams(state, learning_rate=0.5)
    assert ours.hyperparams(changed)["learning_rate"] == 0.5
    assert_equal(changed[:-1], state[:-1])


def test_chain_passes_keywords_on():
    tx = fusedopt.chain(optax.scale(2.0), fusedopt.sgd(1.0))
    p = jnp.ones(2)
    updates, state = tx.update(p, tx.init(p), p, learning_rate=0.5, has_nan=False)
    np.testing.assert_array_equal(updates, -1.0)
    updates, state = tx.update(p, state, p, has_nan=True)
    np.testing.assert_array_equal(np.abs(updates), 0.0)
    assert state[-1].skipped


def test_a_chain_may_be_the_end_of_a_chain():
    p = jnp.ones(2)
    tx = fusedopt.chain(optax.scale(2.0), fusedopt.chain(optax.scale(3.0), fusedopt.sgd(1.0)))
    new, state = tx.apply(p, tx.init(p), p)
    np.testing.assert_array_equal(new, -5.0)
    assert tx.hyperparams(state)["learning_rate"] == 1.0
    state = tx.set_hyperparams(state, learning_rate=0.5)
    np.testing.assert_array_equal(tx.apply(p, state, p)[0], -2.0)


def test_chain_of_flat_params_clips_by_the_norm_of_the_tree():
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    tx = fusedopt.chain(optax.clip_by_global_norm(1.0), fusedopt.sgd(1.0))
    flat = fusedopt.pack(params, tx)
    new, _ = tx.apply(flat, tx.init(flat), flat)
    np.testing.assert_allclose(new.tree["w"], np.full((2, 3), 1 - 1 / 3), rtol=2.5e-7)
