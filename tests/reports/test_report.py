"""What a report says of layouts, memory and backends, against numbers written down and against what is really there."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import fusedopt
from fusedopt.reports import backends, contents
from pallas_kernels import compat
from tests.helpers import OPTIMIZER_NAMES, abstract, case, filled, ragged, standard_promotion

# In buckets: 3 biases of 128 with padding, filled up to 1024; a kernel of 8192; and a large one, alone.
SMALL = {
    "dense": {"kernel": (64, 128), "bias": (128,)},
    "norm": {"scale": (100,), "bias": (100,)},
    "large": {"kernel": (256, 128)},
}
PARAMETERS, IN_BUCKETS = 41_288, 1024 + 8192 + 32_768

FULL = dict(ema_decay=0.9, clip_norm=1.0, accumulate=2, master_weights=True)


def small(dtype=jnp.float32):
    return abstract(SMALL, dtype)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_regions():
    regions = fusedopt.report(fusedopt.adamw(0.1), small()).regions
    assert [r[:6] for r in regions] == [
        ("bias", "bn_bias", "float32", False, False, False),
        ("bias", "bn_weight", "float32", False, False, False),
        ("bias", "fc_bias", "float32", False, False, False),
        ("weight", "fc_weight", "float32", True, False, False),
    ]
    # leaves, parameters, solo, padding, bytes
    assert [r[6:] for r in regions] == [
        (1, 100, 0, 28, 400),
        (1, 100, 0, 28, 400),
        (1, 128, 0, 1024 - 3 * 128, 512),
        (2, 8192 + 32_768, 1, 0, 163_840),
    ]


def test_groups_frozen_leaves_and_trust_ratios_have_regions_of_their_own():
    stem = fusedopt.Group("stem", lambda path, leaf: path[0] == "dense", frozen=True)
    report = fusedopt.report(fusedopt.lars(0.1, groups=[stem], packing=fusedopt.Packing(solo_from=None)), small())
    assert [(r.group, r.region, r.leaves, r.solo, r.trust, r.frozen) for r in report.regions] == [
        ("stem", "fc_bias", 1, 0, True, True),
        ("stem", "fc_weight", 1, 0, True, True),
        ("bias", "bn_bias", 1, 0, False, False),
        ("bias", "bn_weight", 1, 0, False, False),
        ("weight", "fc_weight", 1, 0, True, False),
    ]
    assert report.state_memory["mu"] == (2, ("float32",), 4 * (1024 + 32_768), 4 * 824)
    assert report.optax_memory["mu"].bytes == 4 * (200 + 32_768)
    text = str(report)
    assert "frozen" in text
    assert "decay, trust ratio" in text


def test_memory_of_adamw():
    report = fusedopt.report(fusedopt.adamw(0.1), small())
    moments = (3, ("float32",), 4 * IN_BUCKETS, 4 * (IN_BUCKETS - PARAMETERS))
    assert report.state_memory["mu"] == report.state_memory["nu"] == moments
    assert report.params_memory == (5, ("float32",), 4 * PARAMETERS, 0)
    assert fusedopt.report(fusedopt.adamw(0.1), small(), mode="flat").params_memory == moments
    assert report.optax_name == "optax.adamw"
    assert report.optax_bytes == 2 * 4 * PARAMETERS + 4  # and its count


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "lars", "lamb", "lion"])
def test_bytes_of_the_state_are_those_of_its_arrays(name, dtype, options):
    tx = case(name).make(0.1, **options)
    params = jax.tree.map(lambda x: x.astype(dtype), jax.tree.map(jnp.asarray, ragged()))
    state = tx.init(params)
    report = fusedopt.report(tx, params)
    assert report.name == name
    assert report.state_bytes == report.device_state_bytes == nbytes(state)
    for field in ("mu", "nu", "ema", "master", "accumulated"):
        held = getattr(state, field)
        assert (field in report.state_memory) == bool(held), field
        if held:
            assert report.state_memory[field].buffers == len(held)
            assert report.state_memory[field].bytes == nbytes(held)


OPTAX = {
    "sgd": lambda **k: optax.sgd(0.1, **k),
    "momentum": lambda **k: optax.sgd(0.1, 0.9, **k),
    "adam": lambda **k: optax.adam(0.1, **k),
    "adamw": lambda **k: optax.adamw(0.1, mask=fusedopt.weight_mask, **k),
    "lars": lambda **k: optax.lars(0.1, **k),
    "lamb": lambda **k: optax.lamb(0.1, **k),
    "lion": lambda **k: optax.lion(0.1, **k),
}
OURS = {
    **{name: getattr(fusedopt, name) for name in OPTAX if name != "momentum"},
    "momentum": lambda lr, **k: fusedopt.sgd(lr, 0.9, **k),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OPTAX)
def test_bytes_of_optax_are_those_of_its_arrays(name, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), jax.tree.map(jnp.asarray, ragged()))
    report = fusedopt.report(OURS[name](0.1), params)
    with standard_promotion():
        assert report.optax_bytes == nbytes(OPTAX[name]().init(params))
        multi = optax.MultiSteps(OPTAX[name](), 3).init(params)
    accumulating = fusedopt.report(OURS[name](0.1, accumulate=3), params)
    assert accumulating.optax_bytes == nbytes(multi)
    assert accumulating.optax_name == f"{report.optax_name} in optax.MultiSteps"


@pytest.mark.parametrize(
    ("name", "argument"), [("adamw", "mu_dtype"), ("lion", "mu_dtype"), ("momentum", "accumulator_dtype")]
)
def test_optax_has_the_dtype_of_moments_too(name, argument):
    options = {argument: jnp.bfloat16}
    params = jax.tree.map(jnp.asarray, ragged())
    report = fusedopt.report(OURS[name](0.1, **options), params)
    assert report.optax_bytes == nbytes(OPTAX[name](**options).init(params))
    assert report.state_memory["mu"].dtypes == ("bfloat16",)


def facts(report):
    return (report.layout, report.regions, report.state_memory, report.optax_memory, report.choices, report.needed)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_arrays_shapes_and_flat_params_say_the_same(name):
    tx = case(name).make(0.1, ema_decay=0.9)
    arrays = filled(SMALL)
    assert facts(fusedopt.report(tx, arrays)) == facts(fusedopt.report(tx, small()))
    flat = fusedopt.pack(arrays, tx)
    of_flat, of_shapes = fusedopt.report(tx, flat), fusedopt.report(tx, small(), mode="flat")
    assert facts(of_flat) == facts(of_shapes)
    assert of_flat.mode == "flat"
    assert of_flat.params_memory == of_shapes.params_memory
    assert str(of_flat) == str(of_shapes)


def test_leaves_that_are_carried_along():
    params = {"w": jnp.ones((2, 2)), "n": None, "i": jnp.arange(3), "key": jax.random.key(0), "x": 1.5}
    report = fusedopt.report(fusedopt.adamw(0.1), params)
    assert (len(report.layout.segments), report.layout.size) == (2, 5)
    assert "2 leaves besides that are not floating point: carried along" in str(report)
    assert report.optax_memory["mu"].bytes == 4 * 5
    assert report.state_bytes == nbytes(fusedopt.adamw(0.1).init(params))


def test_a_chain_holds_what_its_parts_hold():
    tx = fusedopt.chain(optax.clip(1.0), optax.trace(0.9), fusedopt.adamw(0.1))
    params = filled(SMALL)
    report = fusedopt.report(tx, params)
    assert report.state_bytes == nbytes(tx.init(params))
    assert report.state_memory[contents.FRONT].bytes == report.optax_memory[contents.FRONT].bytes == 4 * PARAMETERS
    assert report.optax_bytes == 3 * 4 * PARAMETERS + 4
    assert "optax.adamw in the same chain" in str(report)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a chain"])
def test_zero1_shares_its_state(wrapped):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own = fusedopt.zero1(fusedopt.adamw(0.1), mesh)
    tx = fusedopt.chain(optax.clip(1.0), own) if wrapped else own
    report = fusedopt.report(tx, small(), mode="flat")
    flat = jax.device_put(fusedopt.pack(filled(SMALL), own), NamedSharding(mesh, P()))
    state = tx.init(flat)
    on_one = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert report.devices == 4
    assert report.device_state_bytes == on_one
    assert report.state_bytes == nbytes(state)
    # A bucket ends at a multiple of 4 blocks; of each a quarter is updated here.
    assert report.needed == {"look for NaN": 4 * (4096 + 40_960) // 4, "update": 7 * 4 * (4096 + 40_960) // 4}
    assert "on each of 4 devices" in str(report)
    on_gpus = fusedopt.report(tx, small(), mode="apply", device="NVIDIA H200")
    assert [(c.what, c.backend) for c in on_gpus.choices] == [("2 packed", WHOLE)]  # packed in every step, no pieces
    program = report.compile().program
    assert program.kernels["collectives"] == 3  # an all-gather for each bucket, one number for the search for NaN
    assert program.donated == on_one + nbytes(flat)


# ------------------------------------------------------------------------------------ backends


def choices(tx, mode, device, params=None):
    return [(c.what, c.backend) for c in fusedopt.report(tx, params or small(), mode=mode, device=device).choices]


WHOLE = "mosaic" if compat.MOSAIC_IN_COMMAND_BUFFERS else "triton"


@pytest.mark.parametrize(
    ("device", "mode", "expected"),
    [
        ("NVIDIA H200", "flat", [("2 packed", WHOLE), ("1 solo", "xla")]),
        ("NVIDIA H200", "apply", [("2 packed", "triton"), ("1 solo", "xla")]),
        ("NVIDIA H200", "optax", [("2 packed", "triton"), ("1 solo", "xla")]),
        ("NVIDIA A100-SXM4-80GB", "flat", [("2 packed", "triton"), ("1 solo", "xla")]),
        ("Tesla T4", "apply", [("2 packed, 1 solo", "xla")]),
        (None, "apply", [("2 packed, 1 solo", "xla")]),
    ],
)
def test_who_updates_what(device, mode, expected):
    assert choices(fusedopt.adamw(0.1), mode, device) == expected


@pytest.mark.parametrize("mode", ["flat", "apply", "optax"])
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla T4"])
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_who_updates_what_is_what_a_traced_step_does(kind, mode, monkeypatch):
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, None, "gpu"))
    module = importlib.import_module("pallas_kernels.elementwise")
    found, original = [], module._launcher
    monkeypatch.setattr(module, "_launcher", lambda name: (found.append(name), original(name))[1])
    tx = fusedopt.adamw(0.1, skip_nonfinite=False)
    params = small()
    if mode == "flat":
        params = jax.eval_shape(lambda p: fusedopt.pack(p, tx), params)
    state = jax.eval_shape(tx.init, params)
    step = tx.update if mode == "optax" else tx.apply
    with use_abstract_mesh(mesh):
        jax.eval_shape(step, params, state, params)
    taken = [name for name in found if name != "pieces"]  # a way of Triton's, chosen after it
    report = fusedopt.report(tx, small(), mode=mode, device=kind)
    said = [c.backend for c in report.choices for part in c.what.split(", ") for _ in range(int(part.split()[0]))]
    assert sorted(taken) == sorted(said)
    assert len(taken) == 3


def test_reasons():
    report = fusedopt.report(fusedopt.adamw(0.1), small(), device="NVIDIA H200")
    packed, solo = report.choices
    if compat.HAS_MOSAIC:
        assert packed.reasons["mosaic"].startswith("has no masked loads")
    assert packed.reasons["xla"] == "triton comes first"
    assert solo.reasons["triton"] == "leaves that are buckets of their own are left to XLA"
    assert "needs an NVIDIA GPU, the device is 'cpu'" in str(fusedopt.report(fusedopt.adamw(0.1), small()))
    asked = fusedopt.report(fusedopt.adamw(0.1, backend="xla"), small(), device="NVIDIA H200").choices
    assert [c.backend for c in asked] == ["xla"]
    assert asked[0].reasons["triton"] == "`backend`='xla' was asked for"


def test_a_backend_that_cannot_run_is_said_and_not_compiled():
    report = fusedopt.report(fusedopt.adamw(0.1, backend="triton"), small())
    assert report.choices[0].backend is None
    assert report.choices[0].reasons["triton"].startswith("needs an NVIDIA GPU")
    assert "none: it cannot run" in str(report)
    with pytest.raises(ValueError, match="`backend`='triton' cannot run here"):
        report.compile()


@pytest.mark.parametrize(
    ("align", "expected"),
    [(128, [("1 packed, 1 solo", "mosaic"), ("1 packed", None)]), (1024, [("2 packed, 1 solo", "mosaic")])],
)
def test_norms_by_mosaic_want_whole_blocks_where_leaves_are_packed(align, expected):
    """A step without them raises: a report must not say that it runs."""
    tx = fusedopt.lars(0.1, backend="mosaic", packing=fusedopt.Packing(align=align))
    report = fusedopt.report(tx, small(), mode="flat", device="NVIDIA H200")
    reasons = [c.reasons["mosaic"] for c in report.choices if c.backend is None]
    if compat.HAS_MOSAIC:
        assert [(c.what, c.backend) for c in report.choices] == expected
        assert all(why == "takes norms of whole blocks, packing=fusedopt.Packing(align=1024)" for why in reasons)
    else:
        assert [(c.what, c.backend) for c in report.choices] == [("2 packed, 1 solo", None)]
        assert all(why.startswith("needs jax >= 0.11") for why in reasons)


@pytest.mark.parametrize("deprecated", [True, False])
def test_a_backend_that_jax_will_drop_is_named(deprecated, monkeypatch):
    monkeypatch.setattr(compat, "TRITON_IS_DEPRECATED", deprecated)
    text = str(fusedopt.report(fusedopt.adamw(0.1), small(), device="NVIDIA A100-SXM4-80GB"))
    assert (f"jax {jax.__version__} deprecates Pallas' Triton backend" in text) == deprecated
    said = backends.deprecated("NVIDIA A100-SXM4-80GB")
    assert said.endswith("without it: whole buffers by xla and the leaves of trees by xla") == deprecated
    assert backends.deprecated("Tesla T4") == backends.deprecated() == ""


def test_the_arrays_say_where():
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA A100-SXM4-80GB", None, "gpu"))
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), small())
    report = fusedopt.report(fusedopt.adamw(0.1), there)
    assert report.device == "NVIDIA A100-SXM4-80GB"
    assert report.choices[0].backend == "triton"


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: fusedopt.report(optax.adamw(0.1), small()),
            TypeError,
            "`tx`: expected an optimizer made by fusedopt, got GradientTransformation.*, an optax transformation: write "
            "fusedopt.adamw for optax.adamw",
        ),
        (
            lambda: fusedopt.report(optax.chain(optax.clip(1.0), fusedopt.adamw(0.1)), small()),
            TypeError,
            "fusedopt.chain for optax.chain",
        ),
        (lambda: fusedopt.report("adamw", small()), TypeError, "`tx`: .* got str"),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), {"a": {"b": "text"}}),
            TypeError,
            "`params` leaf `a/b`: expected an array or a number, got str",
        ),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), lambda x: x),
            TypeError,
            "`params` leaf `<root>`: .* got function",
        ),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), {}),
            ValueError,
            "`params`: expected at least one floating point",
        ),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), {"i": jnp.arange(3)}),
            ValueError,
            "`params`: expected at least one floating point array, got none",
        ),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), small(), mode="update"),
            ValueError,
            "`mode`: expected one of 'optax', 'apply', 'flat' or None, got 'update'",
        ),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), fusedopt.pack({"w": jnp.ones(3)}), mode="apply"),
            ValueError,
            "`mode`: 'apply' takes a tree, but `params` are FlatParams: pass params.tree",
        ),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), small(), device="NVIDIA H200").compile(),
            ValueError,
            "`device`: compiling needs a device of this machine, got the name 'NVIDIA H200'",
        ),
        (
            lambda: fusedopt.report(fusedopt.adamw(0.1), small(), device="NVIDIA H200").measure_bandwidth(),
            ValueError,
            "`device`: measuring needs a device of this machine",
        ),
    ],
)
def test_errors_name_what_was_wrong(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_sharded_parameters_are_not_compiled_and_named():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data")))}
    report = fusedopt.report(fusedopt.sgd(0.1), params)
    assert report.layout.size == 32
    with pytest.raises(ValueError, match="`params` leaf `w` is sharded"):
        report.compile()
    apart = {"a": jax.device_put(jnp.ones(3), jax.devices()[1]), "b": jax.device_put(jnp.ones(3), jax.devices()[2])}
    with pytest.raises(ValueError, match="`params` leaf `b` is on other devices than the first one"):
        fusedopt.report(fusedopt.sgd(0.1), apart).compile()


def test_nothing_is_computed_and_no_array_is_kept():
    class Untouchable:
        shape, dtype = (3, 4), np.dtype(np.float32)

        def __array__(self, *args, **kwargs):
            raise AssertionError("its numbers were read")

    report = fusedopt.report(fusedopt.adamw(0.1), {"w": Untouchable()})
    assert report.layout.size == 12
