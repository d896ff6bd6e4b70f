"""The reader of compiled programs, on a text written by hand."""

from benchmarks.aot import hlo

TEXT = """HloModule jit_step

%fused (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

ENTRY %main (p: f32[8], g: f32[8], m: bf16[4,8]) -> (f32[8], bf16[4,8]) {
  %p = f32[8]{0} parameter(0)
  %g = f32[8]{0} parameter(1)
  %m = bf16[4,8]{1,0} parameter(2)
  %one = s32[2]{0} constant({1, 2})
  %scaled = (f32[8]{0}, pred[]) fusion(%g, %one), kind=kLoop, calls=%fused
  %first = f32[8]{0} get-tuple-element(%scaled), index=0
  %a = (f32[8]{0}, bf16[4,8]{1,0}) custom-call(%first, /*index=1*/%p, %m), custom_call_target="__gpu$xla.gpu.triton", \
output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}, metadata={op_name="jit(step)/fusedopt_sgd/pallas_call"}
  %m1 = bf16[4,8]{1,0} get-tuple-element(%a), index=1
  %p1 = f32[8]{0} get-tuple-element(%a), index=0
  %b = bf16[4,8]{1,0} custom-call(%first, %m1), custom_call_target="mosaic_gpu_v2", \
output_to_operand_aliasing={{}: (1, {})}, metadata={op_name="jit(step)/fusedopt_sgd/pallas_call"}
  ROOT %out = (f32[8]{0}, bf16[4,8]{1,0}) tuple(%p1, %b)
}
"""


def test_instructions():
    program = {x.name: x for x in hlo.entry(TEXT)}
    assert list(program) == ["p", "g", "m", "one", "scaled", "first", "a", "m1", "p1", "b", "out"]
    assert program["scaled"].sizes == (32, 1)
    assert program["scaled"].operands == ("g", "one")
    assert program["m"].sizes == (64,)
    assert program["a"].label == "fusedopt_sgd"
    assert program["a"].operands == ("first", "p", "m")
    assert program["a"].aliases == {0: 1, 1: 2}
    assert program["b"].aliases == {0: 1}
    assert [program[name].target for name in ("a", "b", "p")] == ["__gpu$xla.gpu.triton", "mosaic_gpu_v2", ""]


def test_accessed_bytes_count_a_buffer_that_is_handed_on_once():
    scaled = 32 + 8 + 32 + 1
    a = (32 + 32 + 64) + (32 + 64)
    b = 32  # it reads `first` and goes on with the buffer that `a` has counted already
    assert hlo.accessed_bytes(hlo.entry(TEXT)) == scaled + a + b


def test_collectives_are_found_with_the_bytes_of_their_results():
    text = """
%inner (p: f32[8]) -> f32[2] {
  %r = f32[2]{0} reduce-scatter(%p), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}
ENTRY %main (p: f32[8], q: bf16[2,4]) -> f32[8] {
  %a = ((f32[2]{0}, bf16[2,4]{1,0}), (f32[8]{0}, bf16[8,4]{1,0})) all-gather-start(%r, /*index=1*/%q), dimensions={0}
  %d = (f32[8]{0}, bf16[8,4]{1,0}) all-gather-done(%a)
  %s = f32[] all-reduce-start(%x), to_apply=%add
  %t = ((f32[2]{0}), f32[2]{0}) all-reduce-start(%x), to_apply=%add
  %u = (f32[2]{0}, f32[4]{0}) all-gather(%x, %y), dimensions={0}
}
"""
    want = [
        ("reduce-scatter", (8,)),
        ("all-gather", (32, 64)),
        ("all-reduce", (4,)),
        ("all-reduce", (8,)),
        ("all-gather", (8, 16)),
    ]
    assert hlo.collectives(text) == want
