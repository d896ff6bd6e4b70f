"""Where every leaf lies: regions, alignment, identity, and sizes beyond 2^31."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusedopt
from fusedopt import Packing
from tests.helpers import abstract, assert_equal, filled, normal, resnet, transformer


def layout_of(tree, tx=None, packing=None) -> fusedopt.FlatLayout:
    return jax.eval_shape(lambda p: fusedopt.pack(p, tx, packing=packing), tree).layout


ALL = Packing(solo_from=None)


def by_region(layout) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for s in layout.segments:
        out.setdefault(s.region, []).append("/".join(s.path))
    return out


# ------------------------------------------------------------------------------ regions, order


def test_regions_of_a_residual_net():
    layout = layout_of(abstract(resnet()), packing=ALL)
    assert by_region(layout) == {
        "bn_bias": ["block_0/bn/bias", "block_1/bn/bias", "bn_init/bias"],
        "bn_weight": ["block_0/bn/scale", "block_1/bn/scale", "bn_init/scale"],
        "fc_bias": ["head/bias"],
        "fc_weight": ["head/kernel"],
        # The first in tree order, which for a dict is the order of its sorted keys.
        "first_conv": ["block_0/conv/kernel"],
        "deep_conv": ["block_1/conv/kernel", "conv_init/kernel"],
    }
    assert [b.name for b in layout.buckets] == ["bias.float32", "weight.float32"]


def test_regions_of_a_transformer():
    layout = layout_of(abstract(transformer()), packing=ALL)
    assert by_region(layout) == {
        "bn_bias": ["block_0/ln/bias", "block_1/ln/bias"],
        "bn_weight": ["block_0/ln/scale", "block_1/ln/scale", "ln_f/scale"],
        "fc_bias": ["block_0/attn/bias", "block_0/mlp/bias", "block_1/attn/bias", "block_1/mlp/bias"],
        "fc_weight": ["block_0/mlp/kernel", "block_1/mlp/kernel", "embed/embedding"],
        "first_conv": ["block_0/attn/kernel"],
        "deep_conv": ["block_1/attn/kernel"],
    }


def test_regions_of_an_nnx_model_have_plain_paths():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 2, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.fc = nnx.Linear(2, 3, rngs=rngs)

    params = nnx.state(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), nnx.Param)
    layout = layout_of(params)
    assert by_region(layout) == {
        "bn_bias": ["norm/bias"],
        "bn_weight": ["norm/scale"],
        "fc_bias": ["conv/bias", "fc/bias"],
        "fc_weight": ["fc/kernel"],
        "first_conv": ["conv/kernel"],
    }
    assert by_region(layout_of(nnx.to_pure_dict(params))) == by_region(layout)


@pytest.mark.parametrize("align", [128, 256, 1024])
def test_segments_are_aligned_in_order_and_do_not_overlap(align):
    shapes = {f"w{n}": (1, n) for n in (1, 127, 128, 129, 0, 1000, 1024, 1025)} | {"scalar": (), "b": (3,)}
    layout = layout_of(abstract(shapes), packing=Packing(solo_from=None, align=align))
    for b in layout.buckets:
        end = 0
        for s in layout.segments_of(b):
            assert s.offset == end
            assert s.offset % align == 0
            assert s.padding == -s.size % align
            assert s.size == np.prod(s.shape)
            end = s.offset + s.size + s.padding
        assert b.shape[0] % 1024 == 0
        assert 0 <= b.size - end < 1024
    assert layout.size == sum(int(np.prod(s)) for s in shapes.values())
    assert layout.padding == sum(b.size for b in layout.buckets) - layout.size
    assert all(type(n) is int for s in layout.segments for n in (s.offset, s.size, s.padding, s.bucket))


def test_buckets_are_one_dtype_each_and_solo_ones_keep_their_shape():
    tree = {
        "a": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16),
        "b16": jax.ShapeDtypeStruct((2, 5), jnp.float16),
        "c": jax.ShapeDtypeStruct((2, 5), jnp.float32),
        "d": jax.ShapeDtypeStruct((7, 5), jnp.bfloat16),
        "e": jax.ShapeDtypeStruct((100, 2, 3), jnp.bfloat16),
    }
    layout = layout_of(tree, packing=Packing(solo_from=600))
    found = {b.name: (b.shape, b.dtype, [s.path[0] for s in layout.segments_of(b)]) for b in layout.buckets}
    assert found == {
        "weight.bfloat16": ((1024,), jnp.bfloat16, ["a", "d"]),
        "weight.bfloat16.e": ((100, 2, 3), jnp.bfloat16, ["e"]),
        "weight.float16": ((1024,), jnp.float16, ["b16"]),
        "weight.float32": ((1024,), jnp.float32, ["c"]),
    }
    assert [b.solo for b in layout.buckets] == [False, True, False, False]


def test_solo_from_counts_elements_and_includes_its_own_number():
    tree = abstract({"small": (1, 99), "large": (1, 100)})
    names = [b.name for b in layout_of(tree, packing=Packing(solo_from=100)).buckets]
    assert names == ["weight.float32", "weight.float32.large"]
    assert len(layout_of(tree, packing=Packing(solo_from=1)).buckets) == 2
    assert len(layout_of(tree, packing=ALL).buckets) == 1


def test_region_range_is_one_run_when_all_is_packed():
    layout = layout_of(abstract(resnet()), packing=ALL)
    bias, weight = layout.buckets
    end = {
        b.name: layout.segments_of(b)[-1].offset + 128 * -(-layout.segments_of(b)[-1].size // 128)
        for b in (bias, weight)
    }
    assert layout.region_range("bn_bias", "fc_bias") == [("bias.float32", 0, end["bias.float32"])]
    assert layout.region_range("bn_bias") == [("bias.float32", 0, 3 * 128)]
    assert layout.region_range("bn_weight") == [("bias.float32", 3 * 128, 3 * 128)]
    assert layout.region_range("fc_weight", "deep_conv") == [("weight.float32", 0, end["weight.float32"])]
    assert layout.region_range("bn_bias", "deep_conv") == [
        ("bias.float32", 0, end["bias.float32"]),
        ("weight.float32", 0, end["weight.float32"]),
    ]
    with pytest.raises(ValueError, match=r"`first`: expected one of .*got 'conv'"):
        layout.region_range("conv")
    with pytest.raises(ValueError, match="`last`='bn_bias' comes before `first`='fc_bias'"):
        layout.region_range("fc_bias", "bn_bias")
    assert layout_of(abstract({"w": (2, 2)})).region_range("bn_bias") == []


def test_a_segment_is_found_by_its_path():
    layout = layout_of(abstract(resnet()), packing=ALL)
    s = layout.segment(("head", "kernel"))
    assert (s.region, s.group, s.shape, s.size, s.padding) == ("fc_weight", "weight", (4, 10), 40, 88)
    with pytest.raises(KeyError, match="no trainable leaf at `head/weight`"):
        layout.segment(("head", "weight"))


def test_the_printed_table_has_a_line_for_every_leaf():
    tree = {
        "fc": {"kernel": jax.ShapeDtypeStruct((3, 5), jnp.float32), "bias": jax.ShapeDtypeStruct((5,), jnp.float32)}
    }
    lines = str(layout_of({**tree, "step": jnp.int32(0)})).splitlines()
    assert (
        lines.pop()
        == "2 leaves, 20 elements in 2 buckets, 2028 of padding (ends of buckets included), 1 leaves carried along"
    )
    assert [line.split() for line in lines] == [
        ["path", "region", "group", "bucket", "shape", "offset", "size", "padding"],
        ["fc/bias", "fc_bias", "bias", "bias.float32", "(5,)", "0", "5", "123"],
        ["fc/kernel", "fc_weight", "weight", "weight.float32", "(3,", "5)", "0", "15", "113"],
    ]
    assert "2 leaves, 20 elements, 2 buckets" in repr(layout_of(tree))


# ------------------------------------------------------------------------------------ identity


def test_equal_trees_have_one_layout_object():
    a, b = layout_of(abstract(resnet())), layout_of(filled(resnet()))
    assert a is b
    assert a is not layout_of(abstract(resnet(blocks=3)))


@pytest.mark.parametrize("twin", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_copies_of_a_layout_are_the_layout(twin):
    layout = layout_of(abstract(transformer()))
    assert twin(layout) is layout
    assert hash(twin(layout)) == hash(layout)


def test_layouts_differ_in_everything_that_matters():
    base = {"w": (3, 5), "b": (5,)}
    layouts = [
        layout_of(abstract(base)),
        layout_of(abstract({"w": (5, 3), "b": (5,)})),
        layout_of(abstract({"v": (3, 5), "b": (5,)})),
        layout_of(abstract(base, jnp.bfloat16)),
        layout_of(abstract(base), packing=Packing(align=256)),
        layout_of(abstract(base), packing=Packing(solo_from=5)),
        layout_of(abstract(base), fusedopt.adamw(0.1, mask=False)),
        layout_of({**abstract(base), "n": None}),
        layout_of({**abstract(base), "n": jnp.int32(0)}),
        layout_of(list(abstract(base).values())),
    ]
    for i, a in enumerate(layouts):
        assert all(a != b for b in layouts[:i])
    assert layouts[0] != "layout"


def test_a_layout_cannot_be_changed():
    layout = layout_of(abstract({"w": (3, 5)}))
    with pytest.raises(AttributeError):
        layout.align = 256
    with pytest.raises(AttributeError):
        layout.segments[0].offset = 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solo_from": 0}, "`solo_from`: expected None or a positive int, got 0"),
        ({"solo_from": 1.5}, "`solo_from`: expected None or a positive int, got 1.5"),
        ({"align": 64}, "`align`: expected a multiple of 128 that divides 1024, got 64"),
        ({"align": 384}, "`align`: expected a multiple of 128 that divides 1024, got 384"),
        ({"align": 2048}, "`align`: expected a multiple of 128 that divides 1024, got 2048"),
        ({"align": 128.0}, "`align`: expected a multiple of 128 that divides 1024, got 128.0"),
    ],
)
def test_packing_checks_itself(options, message):
    with pytest.raises(ValueError, match=message):
        Packing(**options)


def test_a_packing_that_is_none_is_refused():
    with pytest.raises(TypeError, match="`packing`: expected a Packing, got int"):
        fusedopt.adam(0.1, packing=4096)


# --------------------------------------------------------------------------------- large sizes

BIG = 2**31 + 64


def test_R110_a_leaf_above_2_to_the_31_elements_is_a_bucket_of_its_own():
    tree = abstract({"w": (2, BIG // 2), "v": (3, 5), "bias": (BIG,)}, jnp.bfloat16)
    layout = layout_of(tree, packing=ALL)
    assert [(b.name, b.shape) for b in layout.buckets] == [
        ("bias.bfloat16.bias", (BIG,)),
        ("weight.bfloat16", (1024,)),
        ("weight.bfloat16.w", (2, BIG // 2)),
    ]
    assert layout.size == 2 * BIG + 15
    for s in layout.segments:
        assert type(s.size) is int
    for tx in (fusedopt.sgd(0.1), fusedopt.adamw(0.1, packing=ALL)):
        state = jax.eval_shape(tx.init, tree)
        updates, new = jax.eval_shape(tx.update, tree, state, tree)
        assert updates == tree
        assert new == state


def test_R111_many_leaves_whose_sum_exceeds_2_to_the_31_go_to_several_buckets():
    n = 2**24 + 1
    tree = abstract({f"w{i:03}": (1, n) for i in range(260)})
    layout = layout_of(tree, packing=ALL)
    assert len(layout.buckets) == 3
    assert len({b.name for b in layout.buckets}) == 3
    assert all(b.size < 2**31 for b in layout.buckets)
    assert layout.size == 260 * n > 2**32
    assert sum(s.size for b in layout.buckets for s in layout.segments_of(b)) == 260 * n
    for b in layout.buckets:
        last = layout.segments_of(b)[-1]
        assert last.offset + last.size + last.padding <= b.size
        assert layout.segments_of(b)[0].offset == 0
    tx = fusedopt.lars(0.1, packing=ALL)
    small = abstract({f"w{i:03}": (1, n) for i in range(130)})  # tracing 260 leaves twice is slow
    state = jax.eval_shape(tx.init, small)
    assert len(state.mu) == 2
    assert jax.eval_shape(tx.apply, small, state, small) == (small, state)


# ------------------------------------------------------------------- abstract values, odd sizes


def test_init_takes_abstract_values_and_gives_the_state_of_arrays():
    tree = filled(resnet())
    for make in (fusedopt.adamw, fusedopt.lars):
        tx = make(0.1)
        assert_equal(tx.init(abstract(resnet())), tx.init(tree))


@pytest.mark.parametrize("sizes", [(8, 0), (0, 8, 0), (0,), (1, 1, 0, 1, 0)])
def test_R107_R109_empty_leaves_do_not_hide_their_neighbours(sizes):
    for make in (fusedopt.adamw, fusedopt.lars)[: 1 + (len(sizes) == 3)]:
        p = [jnp.ones((1, n)) for n in sizes]
        tx = make(0.1, weight_decay=0.0)
        new, state = jax.jit(tx.apply)(p, tx.init(p), p)
        for n, x in zip(sizes, new, strict=True):
            assert x.shape == (1, n)
            assert np.all(np.asarray(x) < 1.0)
        assert state.count == 1
        assert not state.skipped


def test_R112_gradients_from_a_transposed_op_are_read_by_index():
    p = jnp.asarray(normal((5, 7)))
    x = jnp.asarray(normal((3, 7), 1))

    def loss(w):
        return jnp.sum(jnp.sin(x @ w.T))

    tx = fusedopt.adamw(0.1)
    update = lambda g, p: tx.update(g, tx.init(p), p)[0]  # noqa: E731
    fused = jax.jit(lambda p: update(jax.grad(loss)(p), p))(p)
    apart = jax.jit(update)(jnp.asarray(np.ascontiguousarray(jax.grad(loss)(p))), p)
    np.testing.assert_allclose(fused, apart, rtol=1e-5)  # grad in one program and in another: a few roundings


def test_R115_R116_R117_all_groups_and_dtypes_share_one_count():
    p = {"w": jnp.ones((1, 4)), "h": jnp.ones((1, 4), jnp.bfloat16)}  # no leaf of group bias at all
    tx = fusedopt.adam(0.1, b1=0.0, b2=0.0)
    state, update = tx.init(p), jax.jit(tx.update)
    late = {"w": p["w"], "h": None}
    for t in range(1, 4):
        _, state = update(p, state, p)
        assert state.count == t
    for t in range(4, 7):  # one leaf without gradients: the others go on
        u, state = update(late, state, p)
        assert state.count == t
        assert_equal(u["h"], jnp.zeros((1, 4), jnp.bfloat16))
    u, state = update(p, state, p)
    for x in jax.tree.leaves(u):  # with b1 = b2 = 0 every step is the learning rate
        np.testing.assert_allclose(x.astype(jnp.float32), -0.1, rtol=4e-3)
