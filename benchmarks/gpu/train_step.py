"""A whole training step of ResNet-50 in bfloat16: forward, backward and update in one jitted function.

The network is written out here in plain JAX, from the tree of `benchmarks.models`: the parameters stay float32 and are
cast where they are used, batch norms take the statistics of their batch, and the images are random. It trains nothing;
it says what the optimizer is worth beside the rest of a step, and whether buffers slow the rest down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import fusedopt
from benchmarks import models
from benchmarks.gpu import correctness
from benchmarks.gpu.record import Run
from benchmarks.gpu.timing import Candidate, JaxSteps, compare

SECONDS = 20.0
"""That a program takes to compile, convolutions tried out included."""

NETWORK = jnp.bfloat16

# (mode, backend), most important first; None is the library's choice.
STEPS = (("optax", None), ("flat", None), ("apply", None), ("no optimizer", None), ("flat", "xla"), ("apply", "xla"))


def tiny_shapes() -> dict:
    """The same kinds of layers, few and narrow: two stages of a block each."""
    tree, inputs = {"stem": models.conv_bn(7, 3, 4)}, 4
    for stage, width in ((1, 4), (2, 8)):
        tree[f"stage{stage}_block0"] = {
            "reduce": models.conv_bn(1, inputs, width),
            "spatial": models.conv_bn(3, width, width),
            "expand": models.conv_bn(1, width, 2 * width),
            "shortcut": models.conv_bn(1, inputs, 2 * width),
        }
        inputs = 2 * width
    return {**tree, "fc": models.dense(inputs, 10)}


def initial(shapes: Any, seed: int) -> Any:
    """Weights that keep the variance of what passes through them, norms that begin as they are."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        if len(x.shape) < 2:
            return np.full(x.shape, float(path[-1].key == "scale"), np.float32)
        inputs = np.prod(x.shape[:-1])
        return rng.standard_normal(x.shape, np.float32) * np.float32(np.sqrt(2 / inputs))

    return jax.tree.map_with_path(draw, shapes)


def conv_bn(p: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    kernel = p["conv"]["kernel"].astype(NETWORK)
    x = lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    wide = x.astype(jnp.float32)
    mean, square = (jnp.mean(y, (0, 1, 2), keepdims=True) for y in (wide, wide * wide))
    factor = p["bn"]["scale"] * lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-5)
    return (wide * factor + (p["bn"]["bias"] - mean * factor)).astype(NETWORK)


def block(p: Any, x: jax.Array, stride: int) -> jax.Array:
    y = jax.nn.relu(conv_bn(p["reduce"], x))
    y = jax.nn.relu(conv_bn(p["spatial"], y, stride))
    y = conv_bn(p["expand"], y)
    return jax.nn.relu(y + (conv_bn(p["shortcut"], x, stride) if "shortcut" in p else x))


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    x = jax.nn.relu(conv_bn(params["stem"], images.astype(NETWORK), 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    # The stages' names sort as they follow each other. The first block of each but the first halves the image.
    for name in sorted(k for k in params if k.startswith("stage")):
        x = block(params[name], x, 2 if name.endswith("_block0") and not name.startswith("stage1_") else 1)
    x = jnp.mean(x.astype(jnp.float32), (1, 2))
    fc = params["fc"]
    logits = (x.astype(NETWORK) @ fc["kernel"].astype(NETWORK)).astype(jnp.float32) + fc["bias"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def make(params: Any, batch: tuple, mode: str, backend: str | None, packing: fusedopt.Packing) -> JaxSteps:
    """A step of AdamW that takes and returns parameters and state."""
    params = jax.device_put(params, may_alias=False)
    if mode == "no optimizer":

        def gradients(params, images, labels):
            return jax.grad(loss_fn)(params, images, labels)

        return JaxSteps(gradients, [params], batch, donate=False)
    step: Callable[..., Any]
    if mode == "optax":
        tx = optax.adamw(1e-3, mask=fusedopt.weight_mask)

        def step(params, state, images, labels):
            grads = jax.grad(loss_fn)(params, images, labels)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state
    else:
        # optax looks at no gradient for NaN: neither does this one here.
        tx = fusedopt.adamw(1e-3, backend=backend, packing=packing, skip_nonfinite=False)
        if mode == "flat":
            params = fusedopt.pack(params, tx)

        def step(params, state, images, labels):
            def loss(params):
                return loss_fn(params.tree if mode == "flat" else params, images, labels)

            return tx.apply(jax.grad(loss)(params), state, params)

    return JaxSteps(step, [params, tx.init(params)], batch)


def part(run: Run) -> None:
    shapes = tiny_shapes() if run.tiny else models.shapes("resnet50")
    size, pixels = (2, 8) if run.tiny else (64, 224)
    params = initial(shapes, run.seed)
    rng = np.random.default_rng(run.seed)
    images = jax.device_put(rng.standard_normal((size, pixels, pixels, 3), np.float32))
    labels = jax.device_put(rng.integers(0, params["fc"]["bias"].size, size, np.int32))
    packing = correctness.packing("adamw", None)
    seconds = 1.0 if run.tiny else SECONDS
    candidates = []
    for mode, backend in STEPS:
        row = {"part": "train_step", "what": f"batch {size}", "model": "resnet50", "rule": "adamw", "mode": mode}
        row["backend"] = None if mode in ("optax", "no optimizer") else backend or "best"
        build = functools.partial(make, params, (images, labels), mode, backend, packing)
        candidates.append(Candidate(row, build, None, seconds, baseline=mode == "optax"))
    compare(run, candidates, together=False)
