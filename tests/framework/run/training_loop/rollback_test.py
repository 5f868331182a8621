"""Runs of the training loop that are rolled back because of steps that are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_runs import FakeProgram, Run, train_batches

from tekso.framework.execution.shards import Shard, of_arrays
from tekso.framework.execution.state import Stored
from tekso.framework.learner import NonFiniteStepsError
from tekso.framework.run import rollback, run_messages
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.training_loop import Outcome
from tekso.framework.weight_spec import WeightSpec


def poisoned_batches(*bad: int) -> Any:
    def batches(start: int) -> Iterator[Any]:
        for number, batch in enumerate(train_batches(start), start):
            yield {"x": np.full((5, 3), np.inf)} if number in bad else batch

    return batches


class CountingProgram(FakeProgram):
    """Skips steps that are not finite and counts them, as a learner does."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        super().__init__(at_step=at_step)
        self.skipped = 0.0

    def specs(self) -> dict[str, WeightSpec]:
        return {**super().specs(), "learner/n": WeightSpec("n", (1,), (None,), init=None)}  # type: ignore[arg-type]

    def initialize(self) -> None:
        super().initialize()
        self.skipped = 0.0

    def shards(self) -> Iterator[Shard]:
        return of_arrays({"weights/w": self.w.copy(), "learner/n": np.array([self.skipped])})

    def restore(self, read: Callable[[str], Stored], keys: Any) -> None:
        super().restore(read, keys)
        self.skipped = float(read("learner/n")[(slice(0, 1),)][0])

    def train_step(self, batch: Any, step: int) -> dict[str, Any]:
        before = self.w
        metrics = super().train_step(batch, step)
        is_bad = not np.isfinite(metrics["loss"])
        if is_bad:
            self.w = before
        self.skipped = self.skipped + 1 if is_bad else 0.0
        return {**metrics, "nonfinite_consecutive": self.skipped, "nonfinite_total": 0}


class CountingLearner:
    def check(self, metrics: Any) -> None:
        if metrics["nonfinite_consecutive"] >= 3:
            raise NonFiniteStepsError("3 steps were not finite.")


def rolled_back(run: Run, bad: Sequence[int], **options: Any) -> Outcome:
    options = {"program": CountingProgram(), "learner": CountingLearner(), **options}
    return run.train(batches=poisoned_batches(*bad), max_rollbacks=2, **options)


def expected_weights(batches: Sequence[int]) -> np.ndarray:
    """Returns the weights after training on batches by number."""
    program = FakeProgram()
    program.initialize()
    for step, number in enumerate(batches):
        program.train_step(next(train_batches(number)), step)
    return program.w


@pytest.mark.parametrize("first", [8, 10])  # right after a checkpoint, and later
def test_a_run_is_rolled_back_and_skips_the_batches_of_a_series(tmp_path: Path, first: int) -> None:
    run = Run(tmp_path)
    bad = range(first, first + 3)
    assert rolled_back(run, bad).step == 20
    np.testing.assert_array_equal(
        run.program.w, expected_weights([*range(first), *range(first + 3, 23)])
    )
    assert list(run.losses()) == list(range(1, 21)) and run.saved() == [4, 8, 12, 16, 20]
    described = run.checkpoints.open("20").description.input
    assert described == {
        "seed": 3,
        "eval_data": {"dev": "a"},
        "position": 23,
        "skipped_batches": [[first, first, first + 3]],
        "rollbacks": 1,
    }
    assert f"rolled back to step 8 (rollback 1); from step {first + 1} on" in run.output.getvalue()


def test_a_run_whose_first_steps_are_all_skipped_is_not_told_to_change_the_learning_rate(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    said = r"all 3 steps so far had a loss .* they are the initial ones\. Look for a logarithm"
    with pytest.raises(NonFiniteStepsError, match=said):
        rolled_back(run, range(20))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_which_no_step_was_finite_fails_and_saves_nothing_at_its_end(
    tmp_path: Path, steps: int
) -> None:
    run = Run(tmp_path)
    for _ in range(2):  # repeating the command does not make it a success
        with pytest.raises(NonFiniteStepsError, match=r"no step changed the weights") as error:
            rolled_back(run, range(steps), steps=steps, eval_every=1, checkpoint_every=1)
        assert ("all 2 steps" in str(error.value)) == (steps == 2)
        assert run.saved() == list(range(1, steps))


def test_steps_that_only_needed_a_smaller_loss_scale_do_not_make_a_run_fail(tmp_path: Path) -> None:
    class Scaled(CountingProgram):
        def train_step(self, batch: Any, step: int) -> dict[str, Any]:
            return {**super().train_step(batch, step), "nonfinite_counted": 0}

    assert rolled_back(Run(tmp_path), range(2), steps=2, program=Scaled()).step == 2


@pytest.mark.parametrize("total", [0, 2])
def test_the_end_of_a_run_has_the_number_of_steps_that_were_not_finite(
    tmp_path: Path, total: int
) -> None:
    class Totalled(CountingProgram):
        def train_step(self, batch: Any, step: int) -> dict[str, Any]:
            return {**super().train_step(batch, step), "nonfinite_total": total}

    outcome = rolled_back(Run(tmp_path), [1, 3][:total], steps=5, program=Totalled())
    line = "steps that were not finite and changed no weight: 2; see runs/a/incidents"
    assert run_messages.skipped_steps(outcome, "runs/a/incidents") == (line if total else "")


def test_a_single_step_that_is_not_finite_is_no_reason_to_roll_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert rolled_back(run, [5, 6, 9]).step == 20
    assert run.checkpoints.open("20").description.input == {
        "seed": 3,
        "position": 20,
        "eval_data": {"dev": "a"},
    }


class FakeIncidents:
    """Takes incidents: the steps before each, and whether the state before it is still there."""

    last, imports = None, ()

    def __init__(self) -> None:
        self.found: list[tuple[int, bool]] = []

    def record(self, step: int, metrics: Any, description: Any, program: Any) -> None:
        assert not np.isfinite(metrics["loss"]) and description.input["seed"] == 3
        self.found.append((step, program is not None))


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_the_first_step_of_every_series_is_an_incident(tmp_path: Path, steps_per_call: int) -> None:
    incidents = FakeIncidents()
    options = {"incidents": incidents, "steps_per_call": steps_per_call, "eval_every": 0}
    rolled_back(Run(tmp_path), [2, 5, 6, 15], **options)
    # Step 3 was applied before 2 was checked; 15 is checked before its checkpoint is saved.
    assert incidents.found == [(2, False), (5, True), (15, True)]


def test_when_new_batches_are_not_finite_either_the_run_goes_back_further(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert rolled_back(run, range(10, 16)).step == 20  # the second series is the same step again
    described = run.checkpoints.open("20").description.input
    assert described["skipped_batches"] == [[8, 8, 16]] and described["rollbacks"] == 2
    np.testing.assert_array_equal(run.program.w, expected_weights([*range(8), *range(16, 28)]))


def test_after_the_last_rollback_the_run_ends_with_its_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(NonFiniteStepsError, match=r"rolled back 2 times, .*max_rollbacks"):
        rolled_back(run, range(10, 99))
    with pytest.raises(NonFiniteStepsError, match="No checkpoint was saved before"):
        rolled_back(Run(tmp_path / "new"), [1, 2, 3])


@pytest.mark.parametrize("moment", ["renamed", "recorded", 8, 9, 11, 13, 20])
def test_a_run_that_is_killed_around_a_rollback_continues_as_if_it_had_not_been(
    tmp_path: Path, moment: str | int
) -> None:
    whole, run = Run(tmp_path / "whole"), Run(tmp_path / "killed")
    bad = [10, 11, 12, 15, 16, 17]
    rolled_back(whole, bad)
    wanted = whole.program.w

    class Killed(BaseException):
        pass

    calls: list[int] = []

    def kill(*args: Any, **options: Any) -> None:
        raise Killed

    def kill_in_step(step: int) -> None:
        calls.append(step)
        if step == moment and calls.count(step) == (2 if step < 12 else 1):
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        if moment == "renamed":
            patch.setattr(rollback, "_record", kill)
        if moment == "recorded":
            patch.setattr(Checkpoints, "resume", _second_time(Checkpoints.resume, kill))
        with contextlib.suppress(Killed):
            rolled_back(run, bad, program=CountingProgram(at_step=kill_in_step))
    rolled_back(run, bad)
    np.testing.assert_array_equal(run.program.w, wanted)
    assert run.losses() == whole.losses() and run.saved() == whole.saved()
    found, expected = (r.checkpoints.open("20").description.input for r in (run, whole))
    assert found == expected


def _second_time(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[int] = []

    def call(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return first(*args, **options) if len(calls) == 1 else then()

    return call
