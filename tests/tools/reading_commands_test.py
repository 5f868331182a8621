"""tekso-ckpt show, grep, stats and diff: figures against NumPy, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_checkpoints import SPLIT, STATE, save

from tekso.framework.run import stored_tensors
from tekso.framework.run.weight_files import write_weights
from tekso.tools import ckpt


def run(*words: object) -> int:
    return ckpt.main(["tekso-ckpt", *map(str, words)])


def json_printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["verify"], 2, "verify takes PATH"),
        (["verify", "a", "b"], 2, "verify takes PATH, given 2 arguments: a b"),
        (
            ["verify", "nowhere"],
            1,
            "there is no nowhere: give a run, a checkpoint or a safetensors",
        ),
        (["verify", "empty"], 1, "empty has no checkpoint empty/step_…, and no file *.safetensors"),
        (["verify", "text"], 1, "text is neither a folder nor a file *.safetensors"),
        (["grep", "(", "empty"], 2, "'(' is not a regular expression: missing ), unterminated"),
        (["diff", "a"], 2, "diff takes PATH PATH [PATTERN], given 1 argument: a"),
        (["show", "empty", "--not_finite"], 2, "--not_finite does not work with show"),
        (["list", "--logdir=x", "--not_finite"], 2, "--not_finite works only with stats"),
        (["verify", "empty", "--last=2"], 2, "--last does not work with verify"),
        (["verify", "empty", "--format=safetensors"], 2, "should be one of <text|json>"),
    ],
)
def test_wrong_arguments_are_reported_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").touch()
    assert run(*words) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, error


def test_stats_are_those_of_numpy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tensors, "CHUNK_ELEMENTS", 4)  # so sums are made of several chunks
    path = save(tmp_path / "step_00000007")
    assert run("stats", path, "--format=json") == 0
    rows = {row["key"]: row for row in json_printed(capsys)["tensors"]}
    assert rows.keys() == STATE.keys()
    for key, value in STATE.items():
        wide, row = np.asarray(value).astype(np.float64), rows[key]
        wanted = (wide.mean(), wide.std(), wide.min(), wide.max(), np.linalg.norm(wide))
        got = [row[name] for name in ("mean", "std", "min", "max", "norm")]
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-15)
        assert (row["shape"], row["not_finite"]) == (list(wide.shape), 0)
    assert run("stats", path, "half$") == 0
    printed = capsys.readouterr().out
    assert "bfloat16" in printed and "all numbers of 1 tensors are finite" in printed
    assert SPLIT not in printed


def test_stats_are_of_finite_numbers_and_count_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = STATE[SPLIT].copy()
    bad[1, 2], bad[5, 0] = np.nan, -np.inf
    none = np.full(3, np.nan, np.float32)
    huge = np.array([1e300, -1e300])  # the square of one is not finite
    path = save(tmp_path / "step_7", {**STATE, SPLIT: bad, "weights/n": none, "weights/h": huge})
    assert run("stats", path, "--not_finite", "--format=json") == 0
    first, second = json_printed(capsys)["tensors"]
    finite = bad[np.isfinite(bad)].astype(np.float64)
    assert (first["key"], first["not_finite"]) == (SPLIT, 2)
    assert first["std"] == pytest.approx(finite.std(), rel=1e-12)
    assert (second["key"], second["not_finite"], second["mean"]) == ("weights/n", 3, None)
    assert run("stats", path, "--not_finite") == 0
    assert "5 numbers of 2 tensors are not finite" in capsys.readouterr().out
    assert run("stats", path, "weights/h", "--format=json") == 0
    (row,) = json_printed(capsys)["tensors"]
    assert (row["min"], row["norm"]) == (-1e300, pytest.approx(2**0.5 * 1e300))


def test_grep_lists_weights_and_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run" / "checkpoints" / "step_00000003")
    save(tmp_path / "run" / "checkpoints" / "step_00000007")
    assert run("grep", "a/w", tmp_path / "run", "--format=json") == 0
    found = json_printed(capsys)
    assert found["path"].endswith("run/checkpoints/step_00000007")
    assert found["tensors"][1] == {
        "key": SPLIT, "shape": [6, 5], "dims": ["x", "x"], "dtype": "float32", "size": 30,
        "size_bytes": 120,
    }  # fmt: skip
    assert [row["key"] for row in found["tensors"]] == ["learner/model/a/w/momentum", SPLIT]
    assert run("grep", "^weights/", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "6 × 5" in printed and "42 numbers in 2 tensors, 144 B" in printed
    assert run("grep", "nothing", tmp_path / "run") == 1
    assert "no tensor of " in capsys.readouterr().err


def test_show_has_totals_of_modules_with_their_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = {f"weights/model/s/layers/{i}/w": np.zeros((2, 3), np.float32) for i in range(2)}
    path = save(tmp_path / "step_00000007", {**STATE, **layer})
    assert run("show", path, "--format=json") == 0
    found = json_printed(capsys)
    assert (found["model"], found["step"]) == ("lm.Some", 7)
    keys = ("module", "depth", "tensors", "weights", "weight_bytes", "slot_bytes")
    assert [tuple(row[key] for key in keys) for row in found["modules"]] == [
        ("(all)", 0, 4, 54, 192, 128),
        ("model/a", 1, 1, 30, 120, 120),
        ("model/b", 1, 1, 12, 24, 0),
        ("model/s/layers", 1, 2, 12, 48, 0),
        ("model/s/layers/0", 2, 1, 6, 24, 0),
        ("model/s/layers/1", 2, 1, 6, 24, 0),
        ("(others)", 1, 0, 0, 0, 8),
    ]
    assert run("show", path) == 0
    printed = capsys.readouterr().out
    assert "lm.Some, step 7" in printed and "55.6%" in printed


def test_diff_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path / "step_00000007")
    assert run("diff", first, save(tmp_path / "step_00000008")) == 0
    assert capsys.readouterr().out == "4 tensors are equal to the last bit\n"
    changed = {**STATE, SPLIT: STATE[SPLIT].copy(), "weights/new": np.zeros(2, np.float32)}
    changed[SPLIT][2, 3] += 0.5
    changed[SPLIT][0, 0] *= 1.001
    changed["weights/model/b/half"] = changed["weights/model/b/half"][:2]
    changed["learner/updates/applied"] = np.float32(7)
    del changed["learner/model/a/w/momentum"]
    second = save(tmp_path / "step_00000009", changed)
    assert run("diff", first, second, "--format=json") == 1
    found = json_printed(capsys)
    assert found["only_in_first"] == ["learner/model/a/w/momentum"]
    assert found["only_in_second"] == ["weights/new"] and found["equal"] == 0
    dtype, weight, shape = found["different"]
    assert dtype["dtypes"] == ["int64", "float32"] and dtype["different"] == 0
    a, b = STATE[SPLIT].astype(np.float64), changed[SPLIT].astype(np.float64)
    assert weight["key"] == SPLIT and weight["different"] == 2
    assert weight["largest_absolute"] == np.abs(a - b).max()
    assert weight["largest_relative"] == (np.abs(a - b) / np.maximum(abs(a), abs(b))).max()
    norms = [np.linalg.norm(x.astype(np.float64)) for x in (a, b, a - b)]
    assert weight["relative_norm"] == pytest.approx(norms[2] / max(norms[:2]), rel=1e-6)
    assert shape["shapes"] == [[4, 3], [2, 3]] and shape["different"] is None
    assert run("diff", first, second) == 1
    printed = capsys.readouterr().out
    assert f"only in {second}: weights/new" in printed and "4 × 3 → 2 × 3" in printed
    assert "2 of 30" in printed and "3 tensors differ, 0 tensors are equal" in printed


def test_diff_compares_bits_and_values_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, values in {
        "a": [0.0, np.nan, np.inf, 1.0, np.inf],
        "b": [-0.0, np.nan, np.inf, np.nan, 2.0],
    }.items():
        files.append(tmp_path / f"{name}.safetensors")
        write_weights(str(files[-1]), {"w": np.array(values, np.float32)}, {"format": "np"})
    assert run("diff", *files, "--format=json") == 1
    (row,) = json_printed(capsys)["different"]
    assert row["different"] == 3 and row["largest_absolute"] == row["largest_relative"] == "inf"
    checkpoint = save(tmp_path / "step_00000007")
    write_weights(str(files[0]), {"model/a/w": STATE[SPLIT]}, {"format": "np"})
    assert run("diff", checkpoint, files[0], "weights/.*/w$") == 0
    assert "1 tensors are equal to the last bit" in capsys.readouterr().out


def test_commands_refuse_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "step_00000007")
    data = path / "tensors.data-00000-of-00002"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    assert run("stats", path) == 4
    assert f"{SPLIT} cannot be read: the bytes of {data} have changed" in capsys.readouterr().err
    data.unlink()
    for words in (["stats", path], ["grep", ".", path], ["show", path], ["diff", path, path]):
        assert run(*words) == 4
        error = capsys.readouterr().err
        assert f"{path} is damaged: {data.name} is missing" in error and error.count("\n") == 1


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    path = save(tmp_path / "step_00000007")
    program = [sys.executable, "-m", "tekso.tools.ckpt", "grep", ".", str(path)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.stderr == ""


def test_nothing_imports_tensorflow(tmp_path: Path) -> None:
    path = save(tmp_path / "step_00000007")
    program = (
        "import sys\n"
        "from tekso.tools import ckpt\n"
        f"for words in {WITHOUT_TENSORFLOW!r}:\n"
        f"    ckpt.main(['tekso-ckpt', *(word.format({str(path)!r}) for word in words)])\n"
        "print('tensorflow' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr


WITHOUT_TENSORFLOW = [
    ["verify", "{}"],
    ["show", "{}"],
    ["grep", ".", "{}"],
    ["stats", "{}"],
    ["diff", "{}", "{}"],
]
