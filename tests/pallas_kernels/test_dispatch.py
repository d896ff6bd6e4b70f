"""Which backend is chosen where, and what is said when it is not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import pallas_kernels as pk
from pallas_kernels import compat, dispatch
from tests.pallas_kernels.cases import KERNELS, needs_mosaic, sgd

HOPPER = "mosaic" if compat.MOSAIC_IN_COMMAND_BUFFERS else "triton"

# device kind, platform, the backend it gets
DEVICES = [
    ("cpu", "cpu", "xla"),
    ("TPU v5 lite", "tpu", "xla"),
    ("AMD Instinct MI300X", "gpu", "xla"),
    ("Tesla V100-SXM2-16GB", "gpu", "xla"),
    ("Tesla T4", "gpu", "xla"),
    ("NVIDIA A100-SXM4-80GB", "gpu", "triton"),
    ("NVIDIA A10G", "gpu", "triton"),
    ("NVIDIA GeForce RTX 3090", "gpu", "triton"),
    ("NVIDIA L4", "gpu", "triton"),
    ("NVIDIA L40S", "gpu", "triton"),
    ("NVIDIA GeForce RTX 4090", "gpu", "triton"),
    ("NVIDIA H100 80GB HBM3", "gpu", HOPPER),
    ("NVIDIA H200", "gpu", HOPPER),
    ("NVIDIA GH200 480GB", "gpu", HOPPER),
    ("NVIDIA B200", "gpu", HOPPER),
    ("NVIDIA GB300", "gpu", HOPPER),
    ("NVIDIA GeForce RTX 5090", "gpu", "triton"),
    ("NVIDIA Something New", "gpu", "xla"),
]


# The filter that importing the Triton files sets does not outlive the test in which they were imported.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def mesh_of(kind, platform="gpu"):
    return AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, None, platform))


@pytest.mark.parametrize(("kind", "platform", "backend"), DEVICES)
def test_the_table(kind, platform, backend):
    with use_abstract_mesh(mesh_of(kind, platform)):
        assert pk.resolve_backend() == backend
        assert pk.resolve_backend(backend) == backend
    support = pk.supported_backends(AbstractDevice(kind, None, platform))
    assert list(support) == list(dispatch.BACKENDS)
    assert next(name for name, s in support.items() if s) == backend
    for s in support.values():
        assert s.reason


class FakeDevice:
    """A device whose kind says nothing, whose capability does."""

    platform, device_kind = "gpu", "NVIDIA Something New"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "mosaic", "triton"),
    [("7.5", False, False), ("8.0", False, True), ("8.9", False, True), ("9.0", True, True), ("10.3", True, True)]
    + [("12.0", False, True), ("gfx942", False, False)],
)
def test_a_stated_capability_wins(capability, mosaic, triton):
    support = pk.supported_backends(FakeDevice(capability))
    assert bool(support["mosaic"]) == (mosaic and compat.HAS_MOSAIC)
    assert bool(support["triton"]) == triton
    assert support["xla"]


def test_support_reads_well():
    support = pk.supported_backends("Tesla T4")
    assert repr(support["triton"]) == "<no: needs compute capability >= 8.0, 'Tesla T4' has 7.5>"
    assert repr(support["xla"]) == "<yes: runs everywhere>"


def test_arguments_decide_before_the_mesh_in_use():
    on_a100 = NamedSharding(mesh_of("NVIDIA A100-SXM4-80GB"), P())
    argument = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=on_a100)
    with use_abstract_mesh(mesh_of("cpu", "cpu")):
        assert pk.resolve_backend(None, [argument]) == "triton"
    here = jnp.ones(4)
    with use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert pk.resolve_backend(None, [here]) == "xla"
        assert pk.resolve_backend(None, [np.ones(4, np.float32)]) == HOPPER


def test_a_default_device_by_name():
    with jax.default_device("cpu"):
        assert pk.resolve_backend() == "xla"


@pytest.mark.parametrize("backend", KERNELS)
def test_a_name_is_that_backend_or_every_reason(backend):
    with pytest.raises(ValueError, match=f"`backend`='{backend}' cannot run here") as error:
        pk.resolve_backend(backend)
    lines = str(error.value).splitlines()[1:]
    assert [re.match(r"  (\w+): (yes|no), .+", line)[1] for line in lines] == list(dispatch.BACKENDS)
    with pk.interpret():
        assert pk.resolve_backend(backend) == backend
        assert pk.resolve_backend() == "xla"


@needs_mosaic
def test_mosaic_leaves_float64_and_tails_to_the_next():
    double, ragged = jax.ShapeDtypeStruct((1024,), np.float64), jax.ShapeDtypeStruct((1025,), np.float32)
    with use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert pk.resolve_backend(None, [double]) == "triton"
        with pytest.raises(ValueError, match="mosaic: no, takes no float64 arrays"):
            pk.resolve_backend("mosaic", [double])
        assert kernels(ragged) == 1
        assert "mosaic" not in lowered(ragged).lower()
        assert "mosaic" in lowered(jax.ShapeDtypeStruct((1024,), np.float32)).lower()


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """Mosaic's refs cannot vary over the axes of a checked shard_map: there the next backend takes over."""
    mesh = mesh_of("NVIDIA H200")
    chosen = []

    def local(scalars, w):
        chosen.append(pk.resolve_backend(None, [w]))
        pk.norm(pk.segment_sumsq(lambda s, w: (w,), scalars, [w], (2048,)))
        return step(scalars, w)

    with use_abstract_mesh(mesh):
        sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=check_vma)
        w = jax.ShapeDtypeStruct((2048,), np.float32, sharding=NamedSharding(mesh, P("x")))
        scalars = jax.ShapeDtypeStruct((2,), np.float32, sharding=NamedSharding(mesh, P()))
        text = jax.jit(sharded).trace(scalars, w).lower(lowering_platforms=("cuda",)).as_text()
    assert chosen == ["triton" if check_vma else HOPPER]
    assert "my_step" in text


def step(scalars, w):
    return pk.elementwise(sgd, scalars, [w], [w], name="my_step")[0][0]


def lowered(w):
    scalars = jax.ShapeDtypeStruct((2,), np.float32)
    return jax.jit(step).trace(scalars, w).lower(lowering_platforms=("cuda",)).as_text()


def kernels(w):
    return lowered(w).count("custom_call")


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"])
def test_kernels_are_named_and_launched_once(kind):
    w = jax.ShapeDtypeStruct((2048,), np.float32)
    with use_abstract_mesh(mesh_of(kind)):
        assert kernels(w) == 1
        assert "my_step" in lowered(w)


def test_traced_for_a_gpu_and_lowered_for_a_cpu_it_is_the_definition():
    w = jax.ShapeDtypeStruct((2048,), np.float32)
    with use_abstract_mesh(mesh_of("NVIDIA H200")):
        traced = jax.jit(step).trace(jax.ShapeDtypeStruct((2,), np.float32), w)
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "custom_call" not in text
    assert "multiply" in text


@pytest.mark.parametrize("size", [2**31, 2**31 + 64, 2**33 + 1])
def test_beyond_int32_offsets_it_is_the_definition(size):
    w = jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    with use_abstract_mesh(mesh_of("NVIDIA H200")):
        assert pk.resolve_backend(None, [w]) == "xla"
        with pytest.raises(ValueError, match=rf"triton: no, takes at most 2\*\*31 - 1 elements, got {size}"):
            pk.resolve_backend("triton", [w])
        scalars = jax.ShapeDtypeStruct((2,), np.float32)
        out = jax.eval_shape(step, scalars, w)
        assert (out.shape, out.dtype) == (w.shape, w.dtype)
        out = jax.eval_shape(
            lambda s, w: pk.norm(pk.segment_sumsq(lambda s, w: (w.astype(np.float32),), s, [w], (size,))), scalars, w
        )
        assert out.shape == (1, 1)


def test_the_last_kernel_offset_fits_int32():
    last = jax.ShapeDtypeStruct((2**31 - 1,), np.float32)
    with use_abstract_mesh(mesh_of("NVIDIA A100-SXM4-80GB")):
        assert pk.resolve_backend(None, [last]) == "triton"
    # The masked tail's offsets run to the end of its block, one block short of wrapping around.
    assert (2**31 - 1) // pk.BLOCK * pk.BLOCK + pk.BLOCK - 1 <= np.iinfo(np.int32).max


def test_version_checks_agree():
    assert compat.HAS_MOSAIC == (tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11))
    assert set(dispatch.BACKENDS) == set(pk.Backend.__args__)
