"""The trees of `benchmarks.models` against the published sizes of their models."""

import re

import jax
import numpy as np
import pytest

from benchmarks import models

# Written down as figures, not computed from the builders. The totals of ResNet-50, EfficientNet-B0 and ViT-B/16 are
# those that torchvision reports, GPT-2's is that of Hugging Face's transformers.
SIZES = {
    "mlp_mnist": (4, 407_050),
    "rl_mlp": (13, 11_085),
    "deep_narrow": (400, 470_400),
    "resnet50": (161, 25_557_032),
    "efficientnet_b0": (213, 5_288_548),
    "vit_b16": (152, 86_567_656),
    "gpt2_small": (148, 124_439_808),
    "lora_7b": (256, 8_388_608),
    "many_small": (3000, 10_500_000),
}

SHAPES = {
    "mlp_mnist": {"dense_0/kernel": (784, 512), "dense_1/bias": (10,)},
    "rl_mlp": {
        "actor/dense_0/kernel": (17, 64),
        "actor/dense_2/kernel": (64, 6),
        "actor/log_std": (6,),
        "critic/dense_2/kernel": (64, 1),
    },
    "deep_narrow": {"layer_000/kernel": (48, 48), "layer_199/bias": (48,)},
    "resnet50": {
        "stem/conv/kernel": (7, 7, 3, 64),
        "stage1_block0/shortcut/conv/kernel": (1, 1, 64, 256),
        "stage2_block0/reduce/conv/kernel": (1, 1, 256, 128),
        "stage3_block5/spatial/conv/kernel": (3, 3, 256, 256),
        "stage4_block2/expand/bn/scale": (2048,),
        "fc/kernel": (2048, 1000),
    },
    "efficientnet_b0": {
        "stem/conv/kernel": (3, 3, 3, 32),
        "stage1_block0/depthwise/conv/kernel": (3, 3, 1, 32),
        "stage2_block0/expand/conv/kernel": (1, 1, 16, 96),
        "stage2_block0/se/squeeze/kernel": (1, 1, 96, 4),
        "stage6_block3/depthwise/conv/kernel": (5, 5, 1, 1152),
        "stage6_block3/se/excite/bias": (1152,),
        "stage7_block0/project/bn/bias": (320,),
        "head/conv/kernel": (1, 1, 320, 1280),
        "classifier/kernel": (1280, 1000),
    },
    "vit_b16": {
        "patch_embed/kernel": (16, 16, 3, 768),
        "cls_token": (1, 768),
        "pos_embed/embedding": (197, 768),
        "block_11/attn/in_proj/kernel": (768, 2304),
        "block_11/mlp/dense_1/kernel": (3072, 768),
        "head/bias": (1000,),
    },
    "gpt2_small": {
        "wte/embedding": (50257, 768),
        "wpe/embedding": (1024, 768),
        "h_00/attn/c_attn/kernel": (768, 2304),
        "h_11/mlp/c_proj/kernel": (3072, 768),
        "ln_f/scale": (768,),
    },
    "lora_7b": {"layer_00/q_proj/lora_a": (4096, 8), "layer_31/o_proj/lora_b": (8, 4096)},
    "many_small": {"array_0000/kernel": (50, 70), "array_2999/kernel": (50, 70)},
}


def by_path(tree):
    return {"/".join(key.key for key in path): x for path, x in jax.tree.leaves_with_path(tree)}


def test_every_model_has_its_figures_here():
    assert list(models.MODELS) == list(SIZES) == list(SHAPES)


@pytest.mark.parametrize("name", SIZES)
def test_leaves_and_parameters(name):
    assert models.describe(models.shapes(name)) == SIZES[name]


@pytest.mark.parametrize("name", SIZES)
def test_every_leaf_is_a_float32_shape(name):
    for x in jax.tree.leaves(models.shapes(name)):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert x.dtype == np.float32


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_some_leaves(name):
    leaves = by_path(models.shapes(name))
    assert {path: leaves[path].shape for path in SHAPES[name]} == SHAPES[name]


@pytest.mark.parametrize(
    ("name", "last_keys"),
    [
        ("resnet50", {"conv/kernel": 53, "bn/scale": 53, "bn/bias": 53, "fc/kernel": 1, "fc/bias": 1}),
        (
            "efficientnet_b0",
            {
                "conv/kernel": 49,  # the stem, the head, 15 expansions, 16 depthwise, 16 projections
                "bn/scale": 49,
                "bn/bias": 49,
                **{f"{layer}/{key}": 16 for layer in ("squeeze", "excite") for key in ("kernel", "bias")},
                "classifier/kernel": 1,
                "classifier/bias": 1,
            },
        ),
    ],
)
def test_layers_of_each_kind(name, last_keys):
    found = ["/".join(path.split("/")[-2:]) for path in by_path(models.shapes(name))]
    assert {key: found.count(key) for key in set(found)} == last_keys


def test_all_arrays_of_lora_have_one_size():
    assert {x.size for x in jax.tree.leaves(models.shapes("lora_7b"))} == {32_768}


def test_all_arrays_of_many_small_have_one_size():
    assert {x.size for x in jax.tree.leaves(models.shapes("many_small"))} == {3500}


# The larger models differ from these in size alone.
@pytest.mark.parametrize("name", ["mlp_mnist", "rl_mlp", "deep_narrow", "efficientnet_b0"])
def test_arrays_are_those_of_the_shapes_and_reproducible(name):
    expected, first, second = models.shapes(name), models.arrays(name, seed=3), models.arrays(name, seed=3)
    assert jax.tree.structure(first) == jax.tree.structure(expected)
    assert models.describe(first) == SIZES[name]
    for shape, a, b in zip(*map(jax.tree.leaves, (expected, first, second))):
        assert isinstance(a, np.ndarray)
        assert (a.dtype, a.shape) == (np.float32, shape.shape)
        np.testing.assert_array_equal(a, b)


def test_arrays_of_another_seed_differ():
    first, second = models.arrays("rl_mlp", seed=0), models.arrays("rl_mlp", seed=1)
    assert not any(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)))


@pytest.mark.parametrize("scale", [0.02, 0.001])
def test_arrays_are_near_one_for_scales_and_near_zero_elsewhere(scale):
    for path, x in by_path(models.arrays("efficientnet_b0", scale=scale)).items():
        center = 1 if path.endswith("/scale") else 0
        assert np.abs(x - center).max() < 7 * scale, path
        assert np.std(x) > 0, path


def test_arrays_of_one_model_do_not_share_memory():
    leaves = jax.tree.leaves(models.arrays("deep_narrow"))
    assert len({x.ctypes.data for x in leaves}) == len(leaves)


@pytest.mark.parametrize("get", [models.shapes, models.arrays])
def test_unknown_name(get):
    known = "mlp_mnist, rl_mlp, deep_narrow, resnet50, efficientnet_b0, vit_b16, gpt2_small, lora_7b, many_small"
    with pytest.raises(ValueError, match=re.escape(f"`name`: expected one of {known}, got 'resnet51'")):
        get("resnet51")
