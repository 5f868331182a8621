"""The inspection of compiled steps; tests/shrunk_experiments_test.py compiles every experiment."""

from __future__ import annotations

import compiled_steps


def test_the_inspection_sees_what_a_tpu_lacks() -> None:
    hlo = """
ENTRY %main (x: f32[3]) -> f64[<=3] {
  %x = f32[3]{0} parameter(0)
  %call.1 = (f32[2]{0}, s32[2]{0}) custom-call(%x), custom_call_target="TopK"
  %whole.3 = bf16[3,3]{1,0} set-dimension-size(bf16[3,3]{1,0} %x, s32[] %three), dimensions={1}
  %some.4 = s8[<=3]{0} set-dimension-size(s8[3]{0} %x, s32[] %n), dimensions={0}
  ROOT %y.2 = f64[<=3]{0} convert(%x)
}
"""
    assert compiled_steps.instructions(hlo) == {
        "parameter f32",
        "custom-call TopK f32",
        "custom-call TopK s32",
        "convert f64",
        "convert dynamic",
        "set-dimension-size bf16",
        "set-dimension-size s8",
        "set-dimension-size dynamic",
    }
    found = {
        "ops": ["EagerPyFunc", "MatMul", "StringJoin", "Where"],
        "hlo": sorted(compiled_steps.instructions(hlo)),
    }
    assert compiled_steps.problems("lm.python_source.Tiny", found) == [
        "EagerPyFunc",
        "StringJoin",
        "Where",
        "convert dynamic",
        "custom-call TopK f32",
        "custom-call TopK s32",
        "set-dimension-size dynamic",
        "the update is not in the program",
        "no product is in the program",
        "float64",
    ]
