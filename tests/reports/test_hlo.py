"""The reader of compiled programs, on texts written by hand."""

import pytest

from fusedopt.reports import hlo

TEXT = """HloModule jit_step

%fused (p: f32[8], q: s32[2]) -> (f32[8], pred[]) {
  %p = f32[8]{0} parameter(0)
  %q = s32[2]{0} parameter(1)
  %any = pred[] custom-call(%q), custom_call_target="any"
  ROOT %r = (f32[8]{0}, pred[]) tuple(%p, %any)
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

SLICES = """HloModule jit_split

%part (whole: f32[1000], at: s32[], unused: f32[50]) -> bf16[2,5] {
  %whole = f32[1000]{0} parameter(0)
  %at = s32[] parameter(1)
  %unused = f32[50]{0} parameter(2)
  %zero = s32[] constant(0)
  %place = s32[] add(%at, %zero)
  %doubled = f32[1000]{0} add(%whole, %whole)
  %piece = f32[10]{0} dynamic-slice(%doubled, %place), dynamic_slice_sizes={10}
  %narrow = bf16[10]{0} convert(%piece)
  ROOT %shaped = bf16[2,5]{1,0} bitcast(%narrow)
}

%sum (whole: f32[1000], zero: f32[]) -> f32[] {
  %whole = f32[1000]{0} parameter(0)
  %zero = f32[] parameter(1)
  ROOT %total = f32[] reduce(%whole, %zero), dimensions={0}, to_apply=%add
}

ENTRY %main (whole: f32[1000], at: s32[], other: f32[50]) -> (bf16[2,5], f32[20], f32[]) {
  %whole = f32[1000]{0} parameter(0)
  %at = s32[] parameter(1)
  %other = f32[50]{0} parameter(2)
  %zero = f32[] constant(0)
  %shaped = bf16[2,5]{1,0} fusion(%whole, %at, %other), kind=kLoop, calls=%part
  %plain = f32[20]{0} slice(%whole), slice={[0:20]}
  %total = f32[] fusion(%whole, %zero), kind=kLoop, calls=%sum
  ROOT %out = (bf16[2,5]{1,0}, f32[20]{0}, f32[]) tuple(%shaped, %plain, %total)
}
"""


def test_instructions():
    program = {x.name: x for x in hlo.entry(TEXT)}
    assert list(program) == ["p", "g", "m", "one", "scaled", "first", "a", "m1", "p1", "b", "out"]
    assert program["scaled"].sizes == (32, 1)
    assert program["scaled"].elements == 9
    assert program["scaled"].operands == ("g", "one")
    assert program["scaled"].calls == "fused"
    assert program["m"].sizes == (64,)
    assert program["m"].number == 2
    assert program["a"].label == "fusedopt_sgd"
    assert program["a"].operands == ("first", "p", "m")
    assert program["a"].aliases == {0: 1, 1: 2}
    assert program["b"].aliases == {0: 1}
    assert [program[name].target for name in ("a", "b", "p")] == ["__gpu$xla.gpu.triton", "mosaic_gpu_v2", ""]
    assert [x.name for x in hlo.entry(TEXT) if x.root] == ["out"]
    assert [x.name for x in hlo.kernels(hlo.entry(TEXT))] == ["scaled", "a", "b"]


def test_accessed_bytes_count_a_buffer_that_is_handed_on_once():
    scaled = 32 + 8 + 32 + 1
    a = (32 + 32 + 64) + (32 + 64)
    b = 32  # it reads `first` and goes on with the buffer that `a` has counted already
    assert hlo.accessed_bytes(TEXT) == scaled + a + b


def test_accessed_bytes_of_slices_are_theirs_and_not_those_of_the_whole():
    shaped = 4 * 10 + 4 + 0 + 2 * 10  # through an addition; the place; nothing of what is not used; the result
    plain = 4 * 20 + 4 * 20
    total = 4 * 1000 + 4 + 4
    assert hlo.accessed_bytes(SLICES) == shaped + plain + total


@pytest.mark.parametrize("op", sorted(hlo.CONTROL))
def test_what_runs_other_computations_is_named(op):
    loop = SLICES.replace("slice(%whole)", f"{op}(%whole)")
    assert hlo.uncountable(loop) == op
    assert hlo.uncountable(loop, bytes_too=False) == op
    assert hlo.uncountable(SLICES) == ""


def test_what_writes_a_part_of_its_result_has_kernels_but_no_bytes():
    written = SLICES.replace("f32[1000]{0} add(%whole, %whole)", "f32[1000]{0} dynamic-update-slice(%whole, %whole)")
    assert hlo.uncountable(written) == "dynamic-update-slice"
    assert hlo.uncountable(written, bytes_too=False) == ""


def test_a_kernel_that_goes_on_while_others_run_counts_once():
    text = SLICES.replace("slice(%whole)", "all-gather-start(%whole)").replace(
        "%total = f32[] fusion", "%d = f32[20]{0} all-gather-done(%plain)\n  %total = f32[] fusion"
    )
    assert len(hlo.kernels(hlo.entry(text))) == 3
