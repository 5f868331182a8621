"""Which values of runs are compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from compared_runs import PARAMS

from tekso.framework.exit_codes import ExitCode
from tekso.tools import compare
from tekso.tools.command_errors import UsageError
from tekso.tools.comparison import alignment, runs, tables

Curve = Mapping[int, float | None]
DEV = 'eval_inputs : {"dev": Params("lm.some:Dev")}  # params/lm/some.py:9\n'


def write(
    folder: Path,
    curve: Curve,
    *,
    steps: int = 100,
    seed: int = 0,
    rate: float = 0.1,
    tokens: int = 8,
    more: str = "",
    metric: str = "loss",
) -> runs.ComparedRun:
    """Writes a run with a curve of dev, and reads it; a step has `tokens`, and takes a second."""
    folder.mkdir()
    text = PARAMS.format(rate=rate, origin="--set", seed=seed) + DEV + more
    (folder / "params.txt").write_text(text.replace("run.steps : 4", f"run.steps : {steps}"))
    rows = []
    for step, value in curve.items():
        both = {"step": step, "seconds": {"step": float(step)}}
        rows.append({**both, "split": "train", "tokens_seen": tokens * step})
        rows.append({**both, "split": "dev", metric: value})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return runs.read(str(folder))


def group(
    tmp_path: Path, name: str, rate: float, curves: Sequence[Curve]
) -> list[runs.ComparedRun]:
    return [
        write(tmp_path / f"{name}{seed}", curve, seed=seed, rate=rate)
        for seed, curve in enumerate(curves)
    ]


A = [{40: 3.0, 80: 2.0, 100: 1.0}, {40: 3.1, 80: 2.1, 100: 1.1}]


def test_a_run_that_died_is_named_and_is_in_no_mean(tmp_path: Path) -> None:
    found = [
        *group(tmp_path, "a", 0.1, A),
        *group(tmp_path, "b", 0.3, [{40: 3.0, 100: 1.3}, {40: 3.0, 100: 1.5}, {40: 3.2, 60: 2.5}]),
    ]
    table = tables.results(runs.groups(found), "dev/loss")
    assert table.title == "dev/loss at step 100"
    assert [row[1:4] for row in table.rows] == [
        ["2", "1.0500", "0.0707"],
        ["2", "1.4000", "0.1414"],
    ]
    died = f"{found[4].path} (initial_value=0.3) ended at step 60 of 100 and has no dev/loss"
    assert f"{died} at step 100: left out." in table.notes


def test_a_shorter_run_makes_the_step_at_which_all_are_compared(tmp_path: Path) -> None:
    found = group(tmp_path, "a", 0.1, A)
    found.append(write(tmp_path / "short", {20: 4.0, 40: 3.3}, steps=40, seed=7))
    found += group(tmp_path, "b", 0.3, [{40: 3.5, 100: 1.0}, {40: 3.7, 100: 1.0}])
    table = tables.results(runs.groups(found), "dev/loss")
    assert table.title == "dev/loss at step 40"
    assert [row[1:3] for row in table.rows] == [["3", "3.1333"], ["2", "3.6000"]]
    assert (
        "The runs are compared at step 40, although some go on: "
        f"{found[2].path} (initial_value=0.1) ends there."
    ) in table.notes


@pytest.mark.parametrize(
    ("goal", "is_complete"), [("None", True), ('"min"', True), ('"max"', False)]
)
def test_early_stopping_ended_a_run_only_after_evaluations_without_improvement(
    tmp_path: Path, goal: str, is_complete: bool
) -> None:
    patience = "run.early_stopping.patience : 2  # --set\n"
    curves = [{20: 3.0, 40: 2.0}, {20: 3.0, 40: 3.1, 60: 3.2}]  # the first run died
    died, ended = (
        write(
            tmp_path / f"{i}", curve, rate=i, more=f"{patience}run.early_stopping.goal : {goal}\n"
        )
        for i, curve in enumerate(curves)
    )
    others = [write(tmp_path / f"{rate}", A[0], rate=rate) for rate in (0.3, 0.5)]
    table = tables.results(runs.groups([died, *others]), "dev/loss")
    assert table.title == "dev/loss at step 100"
    note = f"{died.path} (initial_value=0) ended at step 40 of 100 and has no dev/loss at step 100"
    assert f"{note}: left out." in table.notes
    found = tables.results(runs.groups([ended, *others]), "dev/loss").title
    assert found == f"dev/loss at step {60 if is_complete else 100}"


@pytest.mark.parametrize(
    ("curve", "stored_goal", "step"),
    [
        ({10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}, "", 100),  # it died
        ({10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}, "max", 100),
        ({10: 0.4, 20: 0.5, 30: 0.4, 40: 0.3}, "", 100),  # if small values are better, it died
        ({10: 0.4, 20: 0.5, 30: 0.4, 40: 0.3}, "max", 40),
        ({20: 0.4, 30: 0.4, 40: 0.4}, "", 40),  # an early end, whatever is better
    ],
)
def test_the_goal_of_early_stopping_is_that_of_the_checkpoints_or_unknown(
    tmp_path: Path, curve: Curve, stored_goal: str, step: int
) -> None:
    rules = "".join(f'run.{rule}.metric : "bleu"\n' for rule in ("early_stopping", "keep_best"))
    more = f"{rules}run.early_stopping.patience : 2\n"
    folder = tmp_path / "early" / "checkpoints" / "step_00000040"
    run = write(tmp_path / "early", curve, metric="bleu", rate=3, more=more)
    if stored_goal:
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(json.dumps({"goal": stored_goal}))
        run = runs.read(run.path)
    others = [
        write(tmp_path / f"{rate}", {40: 0.3, 100: 0.5}, metric="bleu", rate=rate)
        for rate in (0.3, 0.5)
    ]
    found = alignment.equal_positions(runs.groups([run, *others]), "dev/bleu")
    assert found.title == f"dev/bleu at step {step}"


def test_a_group_with_a_diverged_run_has_no_mean(tmp_path: Path) -> None:
    found = [
        *group(tmp_path, "a", 0.1, [{80: 2.0, 100: 1.0}, {80: 2.0, 100: 1.1}]),
        *group(tmp_path, "b", 0.3, [{80: 0.9, 100: None}, {80: 2.0, 100: 1.2}]),
        write(tmp_path / "all", {80: None, 100: None}, rate=0.5),
    ]
    table = tables.results(runs.groups(found), "dev/loss")
    assert [row[1:] for row in table.rows] == [
        ["2", "1.0500", "0.0707", "", "", ""],
        ["1", "diverged (1 of 2)", "-", "", "", ""],
        ["0", "diverged (1 of 1)", "-", "", "", ""],
    ]
    why = f"{found[2].path} (initial_value=0.3) diverged: its last dev/loss is not finite."
    assert why in table.notes
    assert (
        "initial_value=0.3 is not compared, because runs diverged; the other run has 1.2000 at "
        "step 100."
    ) in table.notes
    none = f"{found[4].path} (initial_value=0.5) diverged: no dev/loss of it is finite."
    assert none in table.notes


def test_a_trial_that_ended_because_steps_were_not_finite_diverged(tmp_path: Path) -> None:
    kept = write(tmp_path / "kept", A[0])
    write(tmp_path / "gone", {20: 0.1}, rate=0.3)
    record = {"exit_code": ExitCode.NOT_FINITE}
    (tmp_path / "gone" / "trial.json").write_text(json.dumps(record))
    gone = runs.read(str(tmp_path / "gone"))
    table = tables.results(runs.groups([kept, gone]), "dev/loss")
    assert (table.title, table.rows[1][2]) == ("dev/loss at step 100", "diverged (1 of 1)")


def test_runs_that_are_still_training_are_compared_up_to_now_unless_two_groups_are_complete(
    tmp_path: Path,
) -> None:
    found = [
        write(tmp_path / "a", A[0]),
        write(tmp_path / "b", {40: 2.5}, rate=0.3),
        write(tmp_path / "c", {40: 3.5, 100: 1.5}, rate=0.5),
    ]
    two = alignment.equal_positions(runs.groups(found[:2]), "dev/loss")
    assert two.title == "dev/loss at step 40"
    assert [one.tested for one in two.groups] == [[3.0], [2.5]]
    three = alignment.equal_positions(runs.groups(found), "dev/loss")
    assert three.title == "dev/loss at step 100"
    assert [one.tested for one in three.groups] == [[1.0], [], [1.5]]


def test_runs_that_were_evaluated_at_other_steps_are_compared_at_a_common_one(
    tmp_path: Path,
) -> None:
    found = [
        write(tmp_path / "a", {30: 3.0, 60: 2.0, 90: 1.0}, steps=100),
        write(tmp_path / "b", {20: 3.0, 60: 2.5, 65: 1.5}, steps=100, rate=0.3),
    ]
    table = tables.results(runs.groups(found), "dev/loss")
    assert (table.title, [row[2] for row in table.rows]) == (
        "dev/loss at step 60", ["2.0000", "2.5000"]
    )  # fmt: skip
    other = write(tmp_path / "c", {40: 4.0, 70: 1.0}, steps=70, rate=0.3)
    found = [found[0], other]
    table = tables.results(runs.groups(found), "dev/loss")
    # The line of a from 2 at step 60 to 1 at step 90.
    assert (table.title, [row[2] for row in table.rows]) == (
        "dev/loss at step 70", ["1.6667", "1.0000"]
    )  # fmt: skip
    assert f"{found[0].path} (initial_value=0.1) has no dev/loss at step 70: interpolated." in (
        table.notes
    )


def test_a_common_step_long_before_the_ends_is_not_where_runs_are_compared(tmp_path: Path) -> None:
    a = {step: 6000.0 - step for step in range(1000, 5001, 1000)}
    b = {step: 1.0 for step in range(300, 4501, 300)}
    found = [
        write(tmp_path / "a", a, steps=5000),
        write(tmp_path / "b", b, steps=4500, rate=0.3),
    ]
    table = tables.results(runs.groups(found), "dev/loss")  # both have step 3000
    assert (table.title, [row[2] for row in table.rows]) == (
        "dev/loss at step 4500", ["1500.0", "1.0000"]
    )  # fmt: skip
    note = f"{found[0].path} (initial_value=0.1) has no dev/loss at step 4500: interpolated."
    assert note in table.notes


def test_numbers_of_steps_that_are_compared_are_compared_at_their_ends(tmp_path: Path) -> None:
    found = [
        write(tmp_path / f"{steps}_{seed}", {40: 3.0, steps: 1.0 + seed}, steps=steps, seed=seed)
        for steps in (60, 100)
        for seed in (0, 1)
    ]
    table = tables.results(runs.groups(found), "dev/loss")
    assert (table.title, [row[2] for row in table.rows]) == (
        "dev/loss at the end", ["1.5000", "1.5000"]
    )  # fmt: skip
    assert {"steps=60: dev/loss at step 60.", "steps=100: dev/loss at step 100."} < {*table.notes}
    at = tables.results(runs.groups(found), "dev/loss", axis="step")
    # The lines from 3 at step 40 to 1 and 2 at step 100.
    assert (at.title, [row[2] for row in at.rows]) == ("dev/loss at step 60", ["1.5000", "2.5000"])


def test_runs_are_compared_at_equal_tokens_or_times(tmp_path: Path) -> None:
    found = [
        write(tmp_path / "a", {50: 2.0, 100: 1.0}, steps=100),
        write(tmp_path / "b", {20: 3.0, 40: 1.0, 80: 0.5}, steps=80, rate=0.3, tokens=20),
    ]
    groups = runs.groups(found)
    seen = alignment.equal_positions(groups, "dev/loss", "seen")
    # 800 tokens: step 100 of a, step 40 of b.
    assert seen.title == "dev/loss at 800 tokens"
    assert [one.tested for one in seen.groups] == [[1.0], [1.0]]
    seconds = alignment.equal_positions(groups, "dev/loss", "seconds")
    assert [one.tested for one in seconds.groups] == [[pytest.approx(1.4)], [0.5]]
    assert "interpolated linearly" in " ".join(seconds.notes)
    with pytest.raises(UsageError, match=r"--axis=seen does not fit .*: no run counts tokens"):
        bare = [dataclasses.replace(run, unit="") for run in found]
        alignment.equal_positions(runs.groups(bare), "dev/loss", "seen")


def test_a_metric_that_is_never_finite_is_no_unknown_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "a", {50: None, 100: None})
    output = f"--output={tmp_path / 'c.html'}"
    assert compare.main(["tekso-compare", run.path, "--metric=dev/loss", output]) == ExitCode.OK
    assert "diverged (1 of 1)" in capsys.readouterr().out
    assert "no dev/loss of it is finite" in (tmp_path / "c.html").read_text()


COSINE = 'learner.schedule : Params("s:Cosine")\nlearner.schedule.total_steps : {}\n'


def with_longer(tmp_path: Path, total: str, other_rate: float) -> list[runs.ComparedRun]:
    """Returns two runs of 100 steps, and one of 200 with another seed."""
    more = COSINE.format(total)
    curves = [*A, {100: 0.5, 200: 0.2}]
    return [
        write(
            tmp_path / str(i), curve, seed=i, steps=200 if i == 2 else 100,
            rate=other_rate if i == 2 else 0.1, more=more,
        )
        for i, curve in enumerate(curves)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        ("REQUIRED", [("steps=100", [1.0, 1.1]), ("steps=200", [0.2])]),
        ("200", [("some", [1.0, 1.1, 0.5])]),
    ],
)
def test_a_schedule_that_ends_with_the_run_divides_a_group_by_its_steps(
    tmp_path: Path, total: str, expected: list[tuple[str, list[float]]]
) -> None:
    groups = runs.groups(with_longer(tmp_path, total, 0.1))
    found = alignment.equal_positions(groups, "dev/loss")
    compared = [[value for _, value in one.values] for one in found.groups]
    names = [name for name, _ in expected]
    assert [g.name for g in groups][: len(names)] == names or len(groups) == 1
    assert compared == [values for _, values in expected]


@pytest.mark.parametrize(("total", "is_warned"), [("REQUIRED", True), ("200", False)])
def test_groups_of_other_schedules_at_a_step_are_a_warning(
    tmp_path: Path, total: str, is_warned: bool
) -> None:
    groups = runs.groups(with_longer(tmp_path, total, 0.3))
    found = alignment.equal_positions(groups, "dev/loss")
    assert found.title == "dev/loss at step 100"
    expected = "The runs have run.steps=100, 200, with which their schedules end, so at step 100 "
    assert any(note.startswith(expected) for note in found.notes) == is_warned


@pytest.mark.parametrize(
    ("late", "axis", "advice"),
    [
        ({70: 1.0, 100: 0.5}, "seconds", "--axis=step compares all of them."),
        ({150: 0.5}, "step", "--metric=train/loss compares all of them."),
    ],
)
def test_a_run_that_begins_after_the_place_is_said_to(
    tmp_path: Path, late: Curve, axis: str, advice: str
) -> None:
    found = [*group(tmp_path, "a", 0.1, A), write(tmp_path / "late", late, steps=max(late), rate=1)]
    for run in found:
        file = Path(run.path, "metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        slow = 3 if run is found[-1] else 1
        for row in rows:
            row["seconds"]["step"] *= slow
        first = {"step": 1, "seconds": {"step": 1.0 * slow}, "split": "train", "loss": 1.0}
        last = {**rows[-1], "split": "train", "loss": 1.0}
        file.write_text("".join(f"{json.dumps(row)}\n" for row in (first, *rows, last)))
    found = [runs.read(run.path) for run in found]
    notes = alignment.equal_positions(runs.groups(found), "dev/loss", axis).notes
    where = "3m30s" if axis == "seconds" else "step 150"
    left_out = f"{found[-1].path} (initial_value=1) has its first dev/loss at {where}: left out."
    assert left_out in notes and advice in notes
