"""The training loop ends early, also after it was resumed, and evaluates on other data."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loop_runs import Run

from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.early_stopping_rule import EarlyStoppingRule
from tekso.framework.run.training_loop import Outcome
from tekso.framework.task import Scored

WORSE = {3: 5.0, 6: 4.0, 9: 4.5, 12: 4.0, 15: 4.2, 18: 1.0}
"""A metric by step; with a patience of 3, training ends after step 15."""
RULE = EarlyStoppingRule("dev/quality", "min", patience=3)


def train_with_quality(
    run: Run,
    steps: int = 21,
    rule: EarlyStoppingRule = RULE,
    values: Mapping[int, float] = WORSE,
    **options: Any,
) -> Outcome:
    """Trains with evaluations that report values by step."""

    def score(name: str, is_last: bool, stopped: Any) -> Scored:
        return Scored({"quality": values[len(run.records("dev")) * 3 + 3]}, "", {})

    return run.train(
        steps, eval_every=3, checkpoint_every=4, score=score, early_stopping=rule, **options
    )


def test_training_ends_early_and_saves_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    outcome = train_with_quality(run)
    assert (outcome.step, outcome.stopped_by) == (15, None)
    assert outcome.ended_early == (
        "none of the last 3 evaluations of dev/quality improved the best 4.0000 at step 6"
    )
    assert run.saved() == [4, 8, 12, 15] and list(run.losses("dev")) == [3, 6, 9, 12, 15]
    again = train_with_quality(run)  # a finished run does not continue
    assert (again.first_step, again.step, again.ended_early) == (15, 15, outcome.ended_early)
    longer = EarlyStoppingRule("dev/quality", "min", patience=4)
    assert train_with_quality(run, steps=18, rule=longer).step == 18


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    train_with_quality(run, steps=12)
    for step in (9, 12):  # as if it had been killed after step 8 was saved
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}", ignore_errors=True)
    assert (outcome := train_with_quality(run)).step == 15 and outcome.first_step == 8


def test_evaluations_on_other_data_neither_end_the_run_nor_are_the_best(tmp_path: Path) -> None:
    run, values = Run(tmp_path), {3: 0.5, 6: 0.1, 9: 4.5, 12: 4.0, 15: 4.2, 18: 4.1, 21: 4.3}
    (tmp_path / "metrics.jsonl").touch()
    options = {"values": values, "keep_last": 1, "keep_best": 1, "metric": "dev/quality"}
    train_with_quality(run, 6, **options)
    assert run.checkpoints.best_step() == 6 and "warning" not in run.output.getvalue()
    outcome = train_with_quality(run, 16, **options, eval_data="b")
    assert (outcome.step, outcome.ended_early) == (16, "")
    assert run.saved() == [6, 12, 16]  # the best of each data
    assert run.output.getvalue().count("warning: the data of dev changed after step 6: ") == 1
    # A later process, and one that only reads, know it from the checkpoints.
    outcome = train_with_quality(run, **options, eval_data="b")
    assert outcome.ended_early.endswith("improved the best 4.0000 at step 12")
    assert run.checkpoints.best_step() == 12 and outcome.step == 18
    assert Checkpoints(run.checkpoints.directory).best("dev/quality", "min").step == 12
    assert run.output.getvalue().count("changed after step 6") == 1


def test_a_metric_that_no_evaluation_reports_is_refused_after_the_step_is_saved(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    rule = EarlyStoppingRule("dev/acuracy", "max", patience=3)
    with pytest.raises(ValueError, match=r"metric is 'acuracy', .* only dev/loss, dev/error"):
        run.train(eval_every=3, checkpoint_every=0, early_stopping=rule)
    assert run.saved() == [3]
