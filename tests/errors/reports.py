"""`fusedopt.report`, its pictures, and the models that the command line knows."""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusedopt
from fusedopt import models
from tests.errors.table import Row


def params():
    return {"a": {"kernel": jnp.ones((8, 4))}, "b": jnp.ones(3)}


def report(**options):
    return fusedopt.report(fusedopt.adamw(0.1), params(), **options)


def sharded():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    kernel = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    fusedopt.report(fusedopt.adamw(0.1), {"a": {"kernel": kernel}}).compile()


def apart():
    first, second = jax.devices()[:2]
    tree = {"a": jax.device_put(jnp.ones(3), first), "b": {"c": jax.device_put(jnp.ones(3), second)}}
    fusedopt.report(fusedopt.adamw(0.1), tree, mode="flat")


def without_matplotlib():
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        report().plot()


ROWS = [
    Row(
        "report-optax",
        lambda: fusedopt.report(optax.adamw(0.1), params()),
        TypeError,
        "`tx`: expected an optimizer made by fusedopt, got GradientTransformationExtraArgs, an optax transformation: write "
        "fusedopt.adamw for optax.adamw and so on, and fusedopt.chain for optax.chain",
    ),
    Row(
        "report-name",
        lambda: fusedopt.report("adamw", params()),
        TypeError,
        "`tx`: expected an optimizer made by fusedopt, got str",
    ),
    Row(
        "report-leaf",
        lambda: fusedopt.report(fusedopt.adamw(0.1), {"a": {"b": "text"}}),
        TypeError,
        "`params` leaf `a/b`: expected an array or a number, got str; keep what is not trained out of the tree",
    ),
    Row(
        "report-no-leaf",
        lambda: fusedopt.report(fusedopt.adamw(0.1), {"steps": jnp.arange(3)}),
        ValueError,
        "`params`: expected at least one floating point array, got none",
    ),
    Row(
        "report-mode",
        lambda: report(mode="update"),
        ValueError,
        "`mode`: expected one of 'optax', 'apply', 'flat' or None, got 'update'",
    ),
    Row(
        "report-mode-of-flat",
        lambda: fusedopt.report(fusedopt.adamw(0.1), fusedopt.pack(params()), mode="apply"),
        ValueError,
        "`mode`: 'apply' takes a tree, but `params` are FlatParams: pass params.tree",
    ),
    Row(
        "report-device",
        lambda: report(device=0),
        TypeError,
        "`device`: expected a jax.Device, the name of a device kind or None, got int",
    ),
    Row(
        "report-apart",
        apart,
        ValueError,
        "`params` leaf `b/c` is on other devices than the first one: SingleDeviceSharding(…)",
    ),
    # What a report does with a device of this machine.
    Row(
        "report-compile-for-a-name",
        lambda: report(device="NVIDIA H200").compile(),
        ValueError,
        "`device`: compiling needs a device of this machine, got the name 'NVIDIA H200'",
    ),
    Row(
        "report-compile-sharded",
        sharded,
        ValueError,
        "`params` leaf `a/kernel` is sharded, NamedSharding(…): a step of sharded leaves is compiled by the program around "
        "it; report its shapes without shardings",
    ),
    Row(
        "report-compile-backend",
        lambda: fusedopt.report(fusedopt.adamw(0.1, backend="triton"), params()).compile(),
        ValueError,
        "`backend`='triton' cannot run here:\n…triton: no, needs an NVIDIA GPU, the device is 'cpu' (platform 'cpu')\n…"
        "xla: yes, runs everywhere",
    ),
    Row(
        "report-bandwidth-of-a-name",
        lambda: report(device="NVIDIA H200").measure_bandwidth(),
        ValueError,
        "`device`: measuring needs a device of this machine, got the name 'NVIDIA H200'",
    ),
    # Pictures.
    Row(
        "report-no-matplotlib",
        without_matplotlib,
        ImportError,
        "`plot` needs matplotlib, which is not installed: install the extra, pip install 'fusedopt[report]'",
    ),
    Row(
        "report-figure",
        lambda: report().plot("layout.png"),
        TypeError,
        "`figure`: expected a matplotlib Figure or SubFigure, got str",
    ),
    Row(
        "no-such-model",
        lambda: models.shapes("resnet51"),
        ValueError,
        "`name`: expected one of mlp_mnist, rl_mlp, deep_narrow, resnet50, efficientnet_b0, vit_b16, gpt2_small, lora_7b, "
        "many_small, got 'resnet51'",
    ),
]
