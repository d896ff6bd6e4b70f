"""The reader of collectives, on a text made for it."""

from benchmarks.aot.collectives import collectives

TEXT = """
%inner (p: f32[8]) -> f32[2] {
  ROOT %r = f32[2]{0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[8], q: bf16[2,4]) -> f32[8] {
  %a = ((f32[2]{0}, bf16[2,4]{1,0}), (f32[8]{0}, bf16[8,4]{1,0})) all-gather-start(%r, /*index=1*/%q), dimensions={0}
  %d = (f32[8]{0}, bf16[8,4]{1,0}) all-gather-done(%a)
  %s = f32[] all-reduce-start(%x), to_apply=%add
  %t = ((f32[2]{0}), f32[2]{0}) all-reduce-start(%x), to_apply=%add
  ROOT %u = (f32[2]{0}, f32[4]{0}) all-gather(%x, %y), dimensions={0}
}
"""


def test_collectives_are_found_with_the_bytes_of_their_results():
    want = [
        ("reduce-scatter", (8,)),
        ("all-gather", (32, 64)),
        ("all-reduce", (4,)),
        ("all-reduce", (8,)),
        ("all-gather", (8, 16)),
    ]
    assert collectives(TEXT) == want
