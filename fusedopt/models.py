"""Parameter trees of known models, as shapes alone: what an optimizer sees of a network.

An optimizer's cost depends on how many arrays there are and how long each is, not on what the network computes. So a
tree here is a nested dict of `jax.ShapeDtypeStruct`, written out from the published architecture: no download and no
network library. Keys and layouts are Flax's: `kernel` is (height, width, in, out) for a convolution and (in, out) for a
dense layer, a norm has `scale` and `bias`, a lookup table is an `embedding`. Running statistics of batch norms are not
parameters and are left out. What the network needs besides parameters (strides, activations) is left out too.

`tests/benchmarks/test_models.py` holds each tree against the published number of parameters.
"""

from collections.abc import Callable
from itertools import pairwise

import jax
import numpy as np


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def dense(inputs: int, outputs: int) -> dict:
    return {"kernel": leaf(inputs, outputs), "bias": leaf(outputs)}


def conv(size: int, inputs: int, outputs: int) -> dict:
    return {"kernel": leaf(size, size, inputs, outputs), "bias": leaf(outputs)}


def norm(channels: int) -> dict:
    return {"scale": leaf(channels), "bias": leaf(channels)}


def conv_bn(size: int, inputs: int, outputs: int) -> dict:
    """A convolution without a bias and its batch norm, which has one. A depthwise convolution has `inputs` 1."""
    return {"conv": {"kernel": leaf(size, size, inputs, outputs)}, "bn": norm(outputs)}


def mlp(*widths: int) -> dict:
    return {f"dense_{i}": dense(a, b) for i, (a, b) in enumerate(pairwise(widths))}


def mlp_mnist() -> dict:
    """Dense(512), ReLU, Dense(10) on the 28x28 digits of LeCun et al. 1998."""
    return mlp(784, 512, 10)


def rl_mlp() -> dict:
    """Actor and critic of PPO for continuous control (Schulman et al. 2017): two tanh networks that share nothing.

    17 observations and 6 actions are those of MuJoCo's HalfCheetah. The spread of the actions, `log_std`, does not
    depend on the observation.
    """
    return {"actor": {**mlp(17, 64, 64, 6), "log_std": leaf(6)}, "critic": mlp(17, 64, 64, 1)}


def deep_narrow() -> dict:
    """200 dense layers of 48x48. From no paper: the number of arrays is nearly all that matters here."""
    return {f"layer_{i:03}": dense(48, 48) for i in range(200)}


def resnet50() -> dict:
    """ResNet-50 (He et al. 2015) for 1000 classes.

    Each stage has bottleneck blocks, 1x1 to `width`, 3x3, 1x1 to four times `width`; its first block has a projection
    on the shortcut, as the number of channels changes there.
    """
    tree, inputs = {"stem": conv_bn(7, 3, 64)}, 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for block in range(blocks):
            convs = {
                "reduce": conv_bn(1, inputs, width),
                "spatial": conv_bn(3, width, width),
                "expand": conv_bn(1, width, 4 * width),
            }
            if block == 0:
                convs["shortcut"] = conv_bn(1, inputs, 4 * width)
            tree[f"stage{stage}_block{block}"] = convs
            inputs = 4 * width
    return {**tree, "fc": dense(inputs, 1000)}


def efficientnet_b0() -> dict:
    """EfficientNet-B0 (Tan & Le 2019) for 1000 classes.

    Each block widens its input by `expansion` (the first stage does not), convolves depthwise, reweights the channels
    (squeeze-and-excite: Hu et al. 2018) and projects to `outputs`. The squeeze is to a quarter of the block's input,
    not of the widened one.
    """
    stages = [  # expansion, kernel size, outputs, blocks
        (1, 3, 16, 1),
        (6, 3, 24, 2),
        (6, 5, 40, 2),
        (6, 3, 80, 3),
        (6, 5, 112, 3),
        (6, 5, 192, 4),
        (6, 3, 320, 1),
    ]
    tree, inputs = {"stem": conv_bn(3, 3, 32)}, 32
    for stage, (expansion, size, outputs, blocks) in enumerate(stages, start=1):
        for block in range(blocks):
            wide, squeezed = expansion * inputs, inputs // 4
            layers = {
                "depthwise": conv_bn(size, 1, wide),
                "se": {"squeeze": conv(1, wide, squeezed), "excite": conv(1, squeezed, wide)},
                "project": conv_bn(1, wide, outputs),
            }
            if expansion > 1:
                layers["expand"] = conv_bn(1, inputs, wide)
            tree[f"stage{stage}_block{block}"] = layers
            inputs = outputs
    return {**tree, "head": conv_bn(1, inputs, 1280), "classifier": dense(1280, 1000)}


def vit_b16() -> dict:
    """ViT-B/16 (Dosovitskiy et al. 2020) on 224x224 images for 1000 classes.

    196 patches of 16x16 and a class token make 197 positions. Query, key and value of a block are one `in_proj` of
    768x2304, so a block has 12 leaves; kept apart they would have the same parameters in 16.
    """
    hidden = 768
    block = {
        "ln_1": norm(hidden),
        "attn": {"in_proj": dense(hidden, 3 * hidden), "out_proj": dense(hidden, hidden)},
        "ln_2": norm(hidden),
        "mlp": mlp(hidden, 4 * hidden, hidden),
    }
    return {
        "patch_embed": conv(16, 3, hidden),
        "cls_token": leaf(1, hidden),
        "pos_embed": {"embedding": leaf(197, hidden)},
        **{f"block_{i:02}": block for i in range(12)},
        "ln": norm(hidden),
        "head": dense(hidden, 1000),
    }


def gpt2_small() -> dict:
    """GPT-2, the smallest (Radford et al. 2019). The head is tied to the table of tokens, `wte`, and adds no leaf."""
    hidden = 768
    block = {
        "ln_1": norm(hidden),
        "attn": {"c_attn": dense(hidden, 3 * hidden), "c_proj": dense(hidden, hidden)},
        "ln_2": norm(hidden),
        "mlp": {"c_fc": dense(hidden, 4 * hidden), "c_proj": dense(4 * hidden, hidden)},
    }
    return {
        "wte": {"embedding": leaf(50257, hidden)},
        "wpe": {"embedding": leaf(1024, hidden)},
        **{f"h_{i:02}": block for i in range(12)},
        "ln_f": norm(hidden),
    }


def lora_7b() -> dict:
    """Adapters of rank 8 (LoRA: Hu et al. 2021) on the attention of Llama-2-7B (Touvron et al. 2023).

    Only the adapters are trained, so only they are here: `lora_a` and `lora_b` for the projections q, k, v and o of
    each of the 32 layers. All four projections are 4096x4096.
    """
    hidden, rank = 4096, 8
    adapter = {"lora_a": leaf(hidden, rank), "lora_b": leaf(rank, hidden)}
    return {f"layer_{i:02}": {f"{name}_proj": adapter for name in "qkvo"} for i in range(32)}


def many_small() -> dict:
    """3000 matrices of 50x70. From no paper: each array is small, 14 kB, and all together are 42 MB."""
    return {f"array_{i:04}": {"kernel": leaf(50, 70)} for i in range(3000)}


MODELS: dict[str, Callable[[], dict]] = {
    build.__name__: build
    for build in (
        mlp_mnist,
        rl_mlp,
        deep_narrow,
        resnet50,
        efficientnet_b0,
        vit_b16,
        gpt2_small,
        lora_7b,
        many_small,
    )
}


def shapes(name: str) -> dict:
    """The tree of the model `name`, of shapes. Raises ValueError for a name that is not in `MODELS`."""
    if name not in MODELS:
        raise ValueError(f"`name`: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]()
