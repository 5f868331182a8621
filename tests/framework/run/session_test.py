"""A session after an operation of TensorFlow: the figures of the trainer, and its weights back.

One process does all that a notebook does (`session_program.py`), beside a run of the trainer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest

SETTINGS = ("input.batch_size=4", "*.num_layers=2", "learner.ema_decay=0.5", "execution.xla=none")
PROGRAM = Path(__file__).with_name("session_program.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("session")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("".join(f"line {i} of a text\n" for i in range(900)))
    changes = [f"input.files={folder}/text/*.txt", *SETTINGS]
    changes += ["run.decode_at_end=false", "eval_inputs.dev.max_batches=1"]
    done = processes.run(
        [
            *("-m", "tekso.tools.trainer", "--model=lm.text_files.Bytes"),
            *(f"--logdir={folder}/run", "--steps=2", "--log_every=1"),
            *(f"--set={change}" for change in changes),
        ]
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    done = processes.run([PROGRAM, str(folder)])
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
    # One device computes in another order than two towers.
    assert found["before"] == pytest.approx(trained[0]["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(trained[0]["gradient_norm"], rel=1e-4)


def test_weights_of_a_run_are_loaded_with_and_without_averages(found: Any) -> None:
    assert found["training"] and found["evaluation"] and found["averages_differ"]
    assert found["assigned"]


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
    assert len(lines) == 3, found["stderr"]  # a line a session that was built


def test_wrong_batches_and_too_many_steps_are_sentences(found: Any) -> None:
    assert found["batch"] == (
        "SessionError: wrong batch: 'weights' is missing; 'ids' is float64, want int32"
    )
    assert found["end"].startswith("SessionError: cannot train 1 steps: 2 are done, run.steps is 2")


def test_a_loss_that_is_a_mean_is_refused_before_the_first_step(found: Any) -> None:
    assert (
        found["mean"].startswith("LossError: ") and "is no sum over the examples" in found["mean"]
    )
