"""Tests of what tekso-trainer shows without training: help, a list, Params, weights, shardings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import processes
import pytest
from line_experiments import EXPERIMENTS, LINE, command, main

from tekso.framework import commands, registry
from tekso.framework.run import inspection
from tekso.framework.run.logdir import Logdir


def test_help_shows_our_flags_in_lines_that_fit(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--help") == 0
    text = capsys.readouterr().out
    flags = "model logdir mode set steps seed deterministic execution cpu_devices tpu import list"
    for flag in [*flags.split(), "format", "log_every", "checkpoint"]:
        assert f"  --{flag}" in text
    usage = commands.typed("tekso-trainer")  # as long as the path to it
    assert all(len(line) <= 100 for line in text.splitlines() if usage not in line)
    assert "showprefixforinfo" not in text


def test_list_shows_key_task_count_summary_and_place(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main("--list=lines.*Line") == 0
    lines = capsys.readouterr().out.splitlines()
    number = EXPERIMENTS[: EXPERIMENTS.index("@register")].count("\n") + 1
    assert lines[0] == "lines.experiments.Line  (Regression, 3 weights)"
    assert lines[1].strip() == "Fits a line."
    assert lines[2].strip() in (f"lines/experiments.py:{number + i}" for i in (0, 1))
    find = registry.list_experiments
    patterns: list[str] = []

    def found(pattern: str) -> list[registry.Entry]:
        patterns.append(pattern)
        return [*find("lines.*"), *find("lm.text_files.*")]  # all models take 15 s

    monkeypatch.setattr(registry, "list_experiments", found)
    assert main("--list", "--format=json") == 0
    assert patterns == ["*"]
    rows = json.loads(capsys.readouterr().out)
    unset = [row["problem"] for row in rows if row["key"] == "lm.text_files.Char"]
    assert len(unset) == 1 and "is not set" in unset[0]
    assert all("ValueError" not in row.get("problem", "") for row in rows)
    broken = {row["key"]: row.get("problem", "") for row in rows}
    assert "ZeroDivisionError" in broken["lines.experiments.Faulty"]


def test_a_list_has_a_dash_and_the_reason_where_weights_cannot_be_counted(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--list=lm.text_files.Char") == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "lm.text_files.Char  (LanguageModel, - weights: task.model.vocab_size is not set)"
    )
    assert len(rest) == 2
    assert main("--list=lines.*Faulty") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("(-, - weights: ZeroDivisionError: division by zero)")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            "TypeError: steps: must be int, given 'many'",
            "TypeError: steps: must be int, given 'many'",
        ),
        (
            "TypeError: Mine: task (/my/own.py:285) must be Params, given the class T: write T.P()",
            "TypeError: Mine: task must be Params, given the class T",
        ),
        ("task.dim is not set: the width", "task.dim is not set"),
    ],
)
def test_the_reason_in_a_list_is_not_cut_at_a_name_or_a_place(problem: str, reason: str) -> None:
    assert inspection._reason({"problem": problem}) == reason


def test_inspect_params_shows_values_docs_and_origins(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [LINE, "--mode=inspect_params", "--set=task.dropout=0.25", "--steps=7"]
    assert main(*flags) == 0
    text = capsys.readouterr().out
    assert re.search(r"dropout = 0.25 +# \[--set\] Rate of dropout on x.", text)
    assert re.search(r"steps += 7 +# \[--steps\] Number of training steps.", text)
    assert "task  (lines.experiments:Regression)" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert main(*flags, "--format=json") == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)["params"]}
    assert rows["task.dropout"]["value"] == "0.25" and rows["task.dropout"]["origin"] == "--set"
    assert rows["input.batch_size"]["origin"].startswith("lines/experiments.py:")
    assert rows["eval_inputs.dev.batch_size"]["type"] == "int"


def test_inspect_model_counts_without_allocating(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [LINE, "--mode=inspect_model", "--set=task.dim=1_000_000_000_000"]
    assert main(*flags, "--format=json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["total_weights"] == 10**12 and table["total_bytes"] == 4 * 10**12
    (weight,) = table["weights"]
    assert weight == {
        "path": "w", "shape": [10**12], "dims": ["embed"], "size": 10**12, "dtype": "float32",
        "trainable": True,
    }  # fmt: skip
    assert main(*flags) == 0
    assert "total: 1,000,000,000,000 weights in 1 tensors, 4 TB" in capsys.readouterr().out


def inspect_sharding(package: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it compiles for devices that are not there."""
    return processes.run(command("--mode=inspect_sharding", *args), cwd=package)


@pytest.mark.slow
def test_inspect_sharding_of_4_9_billion_weights_on_512_devices(package: Path) -> None:
    done = inspect_sharding(
        package, "--model=lm.one_billion_words.Dff262144", "--execution=mesh_sharded",
        "--set=execution.mesh=batch:16;model:32", "--format=json",
        "--set=execution.rules=batch:batch;vocab:model;mlp:model;heads:model",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    layers, dim, heads, head_dim, d_ff, vocab, over = 6, 1024, 256, 256, 262_144, 32_768, 32
    split = layers * (4 * dim * heads * head_dim + 2 * dim * d_ff) + 2 * vocab * dim
    scales = (2 * layers + 1) * dim
    assert record["num_devices"] == 512 and record["axes"] == {"batch": 16, "model": over}
    assert record["weight_bytes_per_device"] == 4 * (split // over + scales)
    assert record["weight_bytes_per_device"] // 10**6 == 612
    weights = {weight["path"]: weight for weight in record["weights"]}
    hidden = weights["model/stack/layers/5/feed_forward/hidden/w"]
    assert hidden["dims"] == ["embed", "mlp"] and hidden["layout"] == [None, "model"]
    assert hidden["shard_shape"] == [dim, d_ff // over]
    assert hidden["bytes_per_device"] == 4 * dim * d_ff // over
    # Adafactor keeps rows, which are whole, and columns, of which a device holds its part.
    assert hidden["optimizer_bytes_per_device"] == 4 * (dim + d_ff // over)
    by_axis = {row["axis"]: row for row in record["collectives"]}
    assert {row["kind"] for row in record["collectives"]} == {"all-reduce"}
    # Gradients are added up over "batch", each of the size of its part; and three scalars.
    assert by_axis["batch"]["bytes"] == pytest.approx(record["weight_bytes_per_device"], abs=99)
    # A block costs one all-reduce forward and one backward, as do the two ends of the model.
    tokens = 256 * 256 // 16
    wholes = 2 * 2 * layers + 2
    assert by_axis["model"]["bytes"] == pytest.approx(4 * tokens * dim * wholes, rel=0.02)


def test_inspect_sharding_prints_lines_that_fit(package: Path) -> None:
    flags = [LINE, "--execution=mesh_sharded", "--set=execution.mesh=rows:2;columns:3"]
    rules = "--set=execution.rules=batch:rows;embed:columns"
    done = inspect_sharding(package, *flags, rules)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    assert "rows ↓ │ columns →  0  1  2" in done.stdout
    assert "embed:columns  shards 1 weight: 3 into 1 per device" in done.stdout
    assert re.search(r"^w +1 +4 B +8 B$", done.stdout, re.MULTILINE)
    assert re.search(r"^  all-reduce +rows +3 ", done.stdout, re.MULTILINE)
    wrong = inspect_sharding(package, *flags, "--set=execution.rules=batch:rows;embedd:columns")
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert "rule embedd:columns: no tensor of the model has a dim embedd; did you mean embed?" in (
        wrong.stderr
    )


def test_inspect_sharding_without_a_mesh_says_how_to_give_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(LINE, "--mode=inspect_sharding") == 1
    message = capsys.readouterr().err
    assert "DataParallel, which does not use a mesh" in message
    assert "--execution=mesh_sharded --set execution.mesh=" in message


def test_inspect_model_of_a_run_knows_the_vocabulary_that_it_has_learned(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("abcdef" * 20)
    tree = registry.get("lm.text_files.Char")().tree()
    tree.set({"input.files": str(tmp_path / "a.txt"), "input.length": 5})
    logdir = Logdir(str(tmp_path / "run"))
    logdir.write_params("lm.text_files.Char", tree, tree)
    flags = [f"--logdir={logdir.path}", "--mode=inspect_model"]
    assert main(*flags) == 1  # nothing was learned yet
    assert "task.model.vocab_size is not set" in capsys.readouterr().err
    tree.input.instantiate(assets_dir=logdir.assets)
    assert main(*flags, "--format=json") == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert {w["path"]: w["shape"] for w in weights}["model/embedding/table"] == [6 + 2, 128]
    assert main("--model=lm.text_files.Char", *flags) == 0
    assert "8 × 128" in capsys.readouterr().out
    assert main("--model=lm.text_files.Bytes", *flags) == 1
    assert "is the logdir of lm.text_files.Char" in capsys.readouterr().err


@pytest.mark.slow
def test_every_registered_model_of_this_repository_is_counted_or_says_why(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--list=lm.*", "--format=json") == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["total_weights"] or "--set task.model.vocab_size=" in row["problem"]
        assert row["summary"] and row["task"]
