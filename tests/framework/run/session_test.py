"""A session after an operation of TensorFlow: the figures of the trainer, and its weights back.

One process does all that a notebook does (`session_program.py`), beside a run of the trainer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest

from tekso.framework.run.session_batches import too_many

SETTINGS = ("input.batch_size=4", "*.num_layers=1", "learner.ema_decay=0.5")
SETTINGS += ("execution.xla=none", "execution.towers=1")  # so that a step is traced once
PROGRAM = Path(__file__).with_name("session_program.py")


def trainer(*flags: str) -> Any:
    return processes.run(["-m", "tekso.tools.trainer", *flags], optimized=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("session")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"line {i} of a text\n" for i in range(900)))
    changes = [f"input.files={folder}/text/*.txt", *SETTINGS]
    changes += ["run.decode_at_end=false", "eval_inputs.dev.max_batches=1"]
    done = trainer(
        *("--model=lm.text_files.Bytes", f"--logdir={folder}/run", "--steps=2", "--log_every=1"),
        *(f"--set={change}" for change in changes),
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    done = processes.run([PROGRAM, str(folder)], optimized=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[dict[str, float]]:
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["split"] == "train"]


def test_losses_are_those_of_the_trainer_to_the_last_bit(found: Any, trained: Any) -> None:
    assert [f["loss"] for f in found["figures"]] == [f["loss"] for f in trained]
    assert found["second"] == [trained[0]["loss"]]  # another experiment in the same process


def test_gradients_and_loss_on_arrays_are_those_of_the_first_step(found: Any, trained: Any) -> None:
    # Op by op, sums have another order.
    assert found["before"] == pytest.approx(trained[0]["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(trained[0]["gradient_norm"], rel=1e-4)


def test_weights_of_a_run_are_loaded_with_and_without_averages(found: Any) -> None:
    assert found["training"] and found["evaluation"] and found["averages_differ"]
    assert found["assigned"]
    averages = [key for key in found["assigned_keys"] if key.startswith("learner/")]
    weights = [key for key in found["assigned_keys"] if key.startswith("weights/model/")]
    assert len(averages) == len(weights) == len(found["assigned_keys"]) / 2 > 0  # no other slots


def test_a_child_layer_takes_its_weights(found: Any) -> None:
    assert found["child"] == [2, 3, 128]
    assert found["missing"].startswith("CheckpointError: ")
    assert "missing model/no/" in found["missing"] and "'model/stack'" in found["missing"]


def test_executions_that_need_more_devices_say_what_to_do(found: Any) -> None:
    for name in ("mesh", "pipeline"):
        assert found[name].startswith("ExecutionError: this execution needs 2 logical CPU devices")
        assert "setup_cpu(logical_devices=2)" in found[name]


def test_threads_that_stay_are_reported_in_one_line(found: Any) -> None:
    lines = [line for line in found["stderr"].splitlines() if "its threads stay" in line]
    assert len(lines) == 1, found["stderr"]  # of several sessions


def test_wrong_batches_and_too_many_steps_are_sentences(found: Any) -> None:
    assert found["batch"] == (
        "SessionError: wrong arrays: 'weights' is missing; 'ids' is float64, expected int32"
    )
    assert found["predict"].startswith(
        "NotImplementedError: LanguageModel has no predict(): define LanguageModel.predict("
    )
    assert found["end"] == (
        "SessionError: cannot train 1 further step: 2 of run.steps=2 are done. For more, build a "
        'session with a larger run.steps, {"run.steps": 3}, and give it these weights: '
        "new_session.assign(session.theta()). To keep the state of the optimizer too, write "
        "session.save('runs/mine'), and continue it with tekso-trainer --logdir=runs/mine --steps=3"
    )
    assert "40 steps can still be trained: session.train(40). For more" in too_many(60, 60, 100)
    assert too_many(4, 3, 9, 5).endswith("2 steps can still be trained: session.train(2)")


def test_a_loss_that_is_a_mean_is_refused_before_the_first_step(found: Any) -> None:
    assert (
        found["mean"].startswith("LossError: ")
        and "is not a sum over the examples" in found["mean"]
    )


def test_a_task_that_could_not_be_checked_is_a_warning(found: Any) -> None:
    lines = [line for line in found["stderr"].splitlines() if "could not be checked" in line]
    assert len(lines) == 1 and "LanguageModel could not be checked on a few examples" in lines[0]


def test_a_saved_session_is_a_run_that_is_evaluated_and_resumed(
    found: Any, folder: Path, trained: list[dict[str, float]]
) -> None:
    saved = folder / "saved"
    assert found["saved"] == found["saved again"] == str(saved / "checkpoints" / "step_00000001")
    assert found["taken"].startswith("SessionError: ") and "did not save" in found["taken"]
    done = trainer("--mode=eval", f"--logdir={saved}", "--set=eval_inputs.dev.max_batches=1")
    assert done.returncode == 0, done.stderr
    assert json.loads((saved / "evaluations.jsonl").read_text())["step"] == 1
    (first, evaluated), (mark,) = records_of(saved), records_of(saved, "progress.jsonl")
    assert (evaluated["split"], evaluated["loss"]) == ("dev", found["evaluated"])
    spent = sum(first["seconds"].values())
    assert 0 < first["seconds"]["compile"] < spent < sum(mark["seconds"].values())
    done = trainer(f"--logdir={saved}", "--log_every=1", "--set=run.decode_at_end=false")
    assert done.returncode == 0, done.stderr
    steps = [record for record in records_of(saved) if record["split"] == "train"]
    for name in ("step", "loss", "tokens_seen"):  # as in a run that the trainer began
        assert [record[name] for record in steps] == [record[name] for record in trained]
    assert sum(steps[1]["seconds"].values()) > sum(mark["seconds"].values())
    assert "num_layers" in (saved / "params.diff.txt").read_text()


def records_of(logdir: Path, name: str = "metrics.jsonl") -> list[Any]:
    return list(map(json.loads, (logdir / name).read_text().splitlines()))
