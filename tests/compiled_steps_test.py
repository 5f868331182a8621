"""XLA compiles the steps of every registered experiment whole, with no op that a TPU lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import compiled_steps_program
import processes
import pytest
from shrunk_experiments_test import FIRST_OF_MODEL, GROUPS

PROGRAM = Path(__file__).with_name("compiled_steps_program.py")
QUICK = "lm.python_source.Tiny"

NOT_ON_TPU_OPS = (
    r".*PyFunc.*|Print.*|Assert|.*Summary|.*Callback.*|XlaHostCompute|XlaSendToHost|XlaRecvFromHost",
    r"String.*|.*ToString|AsString|DecodeRaw|.*Parse.*|.*HashTable.*|LookupTable.*|.*Dataset.*",
    r"Where|Unique.*|BooleanMask|DynamicPartition|.*Sparse.*|.*Ragged.*|.*NonMaxSuppression.*",
    r"Collective.*|_Send|_Recv|_HostSend|_HostRecv",
)
"""Patterns of TensorFlow's ops: host code, strings and tables, dynamic shapes, communication."""

NOT_ON_TPU_HLO = (
    r"custom-call .*|infeed .*|outfeed .*|send.* .*|recv.* .*|rng .*|.* dynamic",
    r".* (c64|c128|f8.*)|set-dimension-size .*|get-dimension-size .*",
)
"""Patterns of HLO instructions: host code, the random numbers of a device, dynamic shapes."""

FLOAT64 = r".* f64"
USES_FLOAT64 = ("lm.one_billion_words.LstmWord",)
"""Sampled softmax draws its classes in float64, which a TPU emulates."""


def found(key: str, *, runs: bool) -> dict[str, Any]:
    done = processes.run([PROGRAM, json.dumps({"key": key, "runs": runs})])
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def matches(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(re.fullmatch(p, name) for p in patterns)]


@pytest.mark.parametrize(
    "key", [k if k == QUICK else pytest.param(k, marks=pytest.mark.matrix) for k in GROUPS]
)
def test_steps_compile_whole_without_ops_that_a_tpu_lacks(key: str) -> None:
    runs = key in FIRST_OF_MODEL or key in USES_FLOAT64
    result = found(key, runs=runs)
    assert "AssignVariableOp" in result["ops"]  # the update is part of the program
    assert any(name.startswith("dot ") for name in result["hlo"])
    assert not matches(result["ops"], NOT_ON_TPU_OPS)
    assert not matches(result["hlo"], NOT_ON_TPU_HLO)
    assert bool(matches(result["hlo"], (FLOAT64,))) == (key in USES_FLOAT64)
    if not runs:
        return
    plain, compiled = result["plain"], result["compiled"]
    for one, other in zip(plain["steps"], compiled["steps"], strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert set(compiled["evaluation"]) == set(plain["evaluation"])
    for name, pair in plain["evaluation"].items():
        assert compiled["evaluation"][name] == pytest.approx(pair, rel=1e-5, abs=1e-6), name


def test_the_inspection_sees_what_a_tpu_lacks() -> None:
    hlo = """
ENTRY %main (x: f32[3]) -> f64[<=3] {
  %x = f32[3]{0} parameter(0)
  %call.1 = (f32[2]{0}, s32[2]{0}) custom-call(%x), custom_call_target="TopK"
  ROOT %y.2 = f64[<=3]{0} convert(%x)
}
"""
    assert compiled_steps_program.instructions(hlo) == {
        "parameter f32",
        "custom-call TopK f32",
        "custom-call TopK s32",
        "convert f64",
        "convert dynamic",
    }
    names = sorted(compiled_steps_program.instructions(hlo))
    refused = ["convert dynamic", "custom-call TopK f32", "custom-call TopK s32"]
    assert matches(names, NOT_ON_TPU_HLO) == refused
    assert matches(["EagerPyFunc", "StringJoin", "Where", "MatMul"], NOT_ON_TPU_OPS) == [
        "EagerPyFunc",
        "StringJoin",
        "Where",
    ]
