"""The training loop: timetable, evaluations, signals, trouble."""

from __future__ import annotations

import functools
import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_runs import FakeProgram, Run, eval_batches, train_batches

from tekso.framework import watchdog
from tekso.framework.exit_codes import ExitCode
from tekso.framework.learner import NonFiniteStepsError
from tekso.framework.run.checkpoints import CheckpointError
from tekso.framework.task import Scored

PICTURE = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 5, 3)


def test_a_step_is_shown_once_when_the_process_is_warm_or_at_the_end(tmp_path: Path) -> None:
    for steps, shown in ((9, [4]), (11, [10]), (11, [])):  # the second continues after 9 steps
        run = Run(tmp_path)
        now: list[int] = []
        seen: list[int] = []
        take = functools.partial(_copy_last, now, seen)
        run.train(steps, program=FakeProgram(at_step=now.append), show_step=take)
        assert seen == shown


def _copy_last(source: list[int], target: list[int]) -> None:
    target.append(source[-1])


def test_what_decoding_shows_joins_the_evaluation_and_chooses_the_best(tmp_path: Path) -> None:
    run, asked = Run(tmp_path), []

    def score(name: str, is_last: bool, stopped: Any) -> Scored:
        asked.append((name, is_last, stopped()))
        figure = {1: 3.0, 2: 8.0, 3: 5.0}[len(asked)]
        return Scored({"bleu": figure}, f"after {len(asked)}\n", {"attention": PICTURE})

    run.train(15, metric="dev/bleu", goal="max", keep_best=1, keep_last=1, score=score)
    assert asked == [("dev", False, False), ("dev", False, False), ("dev", True, False)]
    assert [record["bleu"] for record in run.records("dev")] == [3.0, 8.0, 5.0]
    assert run.saved() == [10, 15]  # the best and the last
    assert "BLEU 8.00" in run.output.getvalue()
    folder = tmp_path / "decoded" / "dev"
    texts = {path.name: path.read_text() for path in folder.glob("*.txt")}
    assert texts == {f"step_{5 * n:09d}.txt": f"after {n}\n" for n in (1, 2, 3)}
    assert (folder / "attention.png").read_bytes() == PICTURE


def test_a_task_without_scores_leaves_no_folder(whole: Run) -> None:
    assert not (whole.path / "decoded").exists()


def test_a_run_logs_evaluates_and_saves_as_the_timetable_says(whole: Run) -> None:
    assert list(whole.losses()) == list(range(1, 21))
    assert list(whole.losses("dev")) == [5, 10, 15, 20]
    assert whole.saved() == [4, 8, 12, 16, 20]
    assert all(value == value for value in whole.losses().values())


def test_log_every_reports_the_first_the_last_and_every_so_many(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(11, log_every=4, eval_every=0, checkpoint_every=0)
    assert list(run.losses()) == [1, 4, 8, 11]
    assert list(run.losses("dev")) == [11] and run.saved() == [11]


def test_several_steps_in_a_call_are_the_same_run(tmp_path: Path, whole: Run) -> None:
    run = Run(tmp_path)
    run.train(steps_per_call=3, log_every=2)
    assert run.losses() == {step: whole.losses()[step] for step in (1, *range(2, 21, 2))}
    assert run.losses("dev") == whole.losses("dev") and run.saved() == whole.saved()
    # Evaluations after every 5 steps, checkpoints after every 4: calls end there.
    assert run.program.calls == [1, 3, 1, 3, 1, 1, 1, 1, 3, 1, 3, 1]


def test_batches_of_another_shape_are_in_another_call(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[Any]:
        for step, batch in enumerate(train_batches(start), start):
            yield {"x": batch["x"][: 3 if step in (4, 10) else 5]}

    run, alone = Run(tmp_path / "a"), Run(tmp_path / "b")
    for one, steps_per_call in ((run, 2), (alone, 1)):
        one.path.mkdir()
        one.train(
            12, batches=batches, eval_every=0, checkpoint_every=0, steps_per_call=steps_per_call
        )
    assert run.losses() == alone.losses()
    assert run.program.calls == [1, 2, 1, 1, 2, 2, 1, 1, 1]
    assert "first with 2 steps a call, batches of 5 x 3" in run.output.getvalue()


def test_the_logged_loss_is_that_of_the_step_in_full_precision(whole: Run) -> None:
    program = FakeProgram()
    program.initialize()
    batches = train_batches(0)
    for step, loss in whole.losses().items():
        assert program.train_step(next(batches), step - 1)["loss"] == loss


def test_an_evaluation_weighs_every_example_once(whole: Run) -> None:
    program = FakeProgram()
    program.initialize()
    batches = train_batches(0)
    for step in range(5):
        program.train_step(next(batches), step)
    x = np.concatenate([batch["x"] for batch in eval_batches(0)])[:3]  # the last one is padding
    (record,) = [r for r in whole.records("dev") if r["step"] == 5]
    assert record["loss"] == pytest.approx(np.sum((x - program.w) ** 2) / 3, rel=1e-12)
    assert record["error"] == pytest.approx(np.abs(x - program.w).sum() / 3, rel=1e-12)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_the_next_start_continues(
    tmp_path: Path, whole: Run, number: signal.Signals
) -> None:
    def at_step(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    run = Run(tmp_path)
    outcome = run.train(program=FakeProgram(at_step=at_step))
    assert (outcome.step, outcome.stopped_by) == (7, number)
    assert run.saved() == [4, 7] and signal.getsignal(number) == before
    assert run.train().first_step == 7
    assert run.losses() == whole.losses() and run.losses("dev") == whole.losses("dev")


def test_a_signal_in_an_evaluation_saves_at_once_and_evaluates_later(
    tmp_path: Path, whole: Run
) -> None:
    run = Run(tmp_path)

    def interrupted(start: int) -> Iterator[Any]:
        for batch in eval_batches(start):
            os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    outcome = run.train(evaluations={"dev": interrupted})
    assert outcome.step == 5 and run.saved() == [4, 5] and run.losses("dev") == {}
    run.train()
    assert run.losses("dev") == whole.losses("dev")
    assert [r["step"] for r in run.records()][4:7] == [5, 5, 6]


def test_the_best_evaluation_is_saved_whenever_it_comes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(40, checkpoint_every=0, eval_every=3, keep_last=1, keep_best=1)
    losses = run.losses("dev")
    best = min(losses, key=losses.__getitem__)
    assert run.saved() == sorted({best, 40})
    assert "best so far" in run.output.getvalue()


def test_a_checkpoint_has_its_metrics_and_the_position_of_the_input(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(10, checkpoint_every=5)
    path = tmp_path / "checkpoints" / "step_00000005" / "checkpoint.json"
    description = json.loads(path.read_text())
    assert description["input"] == {"seed": 3, "position": 5, "eval_data": {"dev": "a"}}
    assert description["metrics"]["dev/loss"] == run.losses("dev")[5]


def test_another_weight_table_is_an_error_that_names_the_weights(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(4, checkpoint_every=4)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"step_00000004.*weights/w is \[3\], must be \[2\]"):
        run.train(8, program=FakeProgram(dim=2))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_trouble_of_the_learner_stops_the_run_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[Any]:
        for step, batch in enumerate(train_batches(start), start):
            yield batch if step < 6 else {"x": np.full((5, 3), np.inf)}

    run = Run(tmp_path)
    with pytest.raises(NonFiniteStepsError):
        run.train(batches=batches)
    assert run.saved() == [4]


def test_an_input_that_ends_early_is_named_by_its_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ends before step 3"):
        Run(tmp_path).train(batches=lambda start: iter(list(next_batches(3))))


def next_batches(count: int) -> Iterator[Any]:
    for _, batch in zip(range(count), train_batches(0), strict=False):
        yield batch


def test_a_batch_that_the_task_refuses_reaches_no_device(tmp_path: Path) -> None:
    def batches(start: int, bad: int, size: int = 1) -> Iterator[dict[str, np.ndarray]]:
        for step in range(start, 5):
            x = np.full((size, 3), -np.inf if step == bad else 1.0)
            yield {"x": x, "weights": np.ones(size)}

    seen: list[int] = []
    run = Run(tmp_path / "train")
    with pytest.raises(ValueError, match=r"^input\.batch\(3\): x is too large"):
        run.train(batches=functools.partial(batches, bad=3), program=FakeProgram(3, seen.append))
    assert seen == [0, 1, 2]
    run = Run(tmp_path / "eval")
    with pytest.raises(ValueError, match=r"^eval_inputs\.dev\.batch\(1\): x is too large"):
        run.train(evaluations={"dev": functools.partial(batches, bad=1)})


def test_an_empty_evaluation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"eval_inputs.dev has no example"):
        Run(tmp_path).train(evaluations={"dev": lambda start: iter(())})


def test_no_steps_evaluate_and_save_the_first_state(tmp_path: Path) -> None:
    run = Run(tmp_path)
    outcome = run.train(0)
    assert outcome.step == 0 and run.saved() == [0] and list(run.losses("dev")) == [0]


def test_lines_have_no_escape_codes_and_show_the_time_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(20, log_every=10)
    lines = run.output.getvalue().splitlines()
    assert all("\x1b" not in line and len(line) <= 100 for line in lines)
    assert lines[0].startswith("step  1/20") and "left" not in lines[0]
    (tenth,) = [line for line in lines if line.startswith("step 10/20")]
    assert "ex/s" in tenth and "left" in tenth and "wait" in tenth


def test_input_that_never_comes_ends_the_run_after_its_state_is_saved(tmp_path: Path) -> None:
    def stalled(start: int) -> Iterator[dict[str, np.ndarray]]:
        for step, batch in enumerate(train_batches(start), start):
            if step == 7:  # as the watchdog interrupts it
                raise watchdog.StalledError("waited too long for the batch")
            yield batch

    run, alone = Run(tmp_path / "stalled"), Run(tmp_path / "alone")
    with pytest.raises(watchdog.StalledError, match=r"waited too long.*step 7 is saved") as error:
        run.train(batches=stalled)
    assert error.value.exit_code == ExitCode.STALLED
    assert run.checkpoints.steps()[-1] == 7
    run.train()
    alone.train()
    np.testing.assert_array_equal(run.program.w, alone.program.w)


def test_a_later_compilation_is_reported_and_not_timed(tmp_path: Path) -> None:
    def batches(start: int) -> Iterator[dict[str, np.ndarray]]:
        for step in range(start, 8):
            yield {"x": np.ones((5 + step // 3, 3))}

    def slow(step: int) -> None:
        if step in (0, 3, 6):
            done = time.perf_counter() + 0.3
            while time.perf_counter() < done:
                pass

    run = Run(tmp_path)
    run.train(8, batches=batches, program=FakeProgram(at_step=slow))
    lines = [line for line in run.output.getvalue().splitlines() if "is the first with" in line]
    assert [line.split(":")[0].strip() for line in lines] == [
        "step 4 is the first with batches of 6 x 3",
        "step 7 is the first with batches of 7 x 3",
    ]
    assert all(float(line.split(":")[1].strip().removesuffix("s")) >= 0.3 for line in lines)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    speeds = {r["step"]: r.get("examples_per_second") for r in records if r["split"] == "train"}
    assert [step for step, speed in speeds.items() if speed is None] == [1, 4, 7]
