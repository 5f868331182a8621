"""The tables of tekso-compare: results with notes, and the cost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compared_runs import two_groups, write

from tekso.tools.comparison import runs, tables


def test_a_decided_difference_is_distinguished_from_one_that_the_spread_may_explain(
    tmp_path: Path,
) -> None:
    close, far = tmp_path / "close", tmp_path / "far"
    close.mkdir(), far.mkdir()
    outcomes = {}
    for folder, second in ((close, [1.25, 1.45]), (far, [3.0, 3.1])):
        found = [runs.read(path) for path in two_groups(folder, [1.0, 1.2], second)]
        outcomes[folder] = tables.results(runs.groups(found), "dev/loss")
    assert "the spread may explain the difference" in outcomes[close].notes[0]
    decided = r"A difference of this size would be decided by about \d+ seeds each \(with 80 % "
    assert re.search(decided, outcomes[close].notes[0])
    assert "exceeds the spread (p = 0.0111)" in outcomes[far].notes[0]
    assert outcomes[far].rows[0][:4] == ["initial_value=0.1", "2", "1.1000", "0.1414"]
    assert outcomes[far].rows[1][4] == "+1.95"


def test_a_difference_that_is_less_than_its_error_may_be_none(tmp_path: Path) -> None:
    found = [runs.read(path) for path in two_groups(tmp_path, [1.0, 1.2], [1.01, 1.22])]
    # The difference is 0.015; its standard error is the root of (0.02 + 0.02205) / 2, 0.145.
    note = tables.results(runs.groups(found), "dev/loss").notes[0]
    assert "the difference is less than its standard error (p = 0.927)" in note
    assert "so there may be none. A difference of this size would be decided by about " in note
    (tmp_path / "same").mkdir()
    found = [runs.read(path) for path in two_groups(tmp_path / "same", [1.0, 1.2], [1.0, 1.2])]
    note = tables.results(runs.groups(found), "dev/loss").notes[0]
    assert note.endswith(": there is no difference (p = 1).")


def test_runs_of_other_seeds_with_equal_values_are_a_warning(tmp_path: Path) -> None:
    found = [runs.read(path) for path in two_groups(tmp_path, [1.0, 1.0], [1.5, 1.6])]
    notes = [n for n in tables.results(runs.groups(found), "dev/loss").notes if "same dev/" in n]
    assert notes == [
        "All runs of initial_value=0.1 have the same dev/loss, although their seeds differ, so its "
        "spread of 0 and p say nothing: does the seed change anything?"
    ]


def test_the_best_values_of_a_search_are_compared_up_to_the_step_at_which_it_ended_a_run(
    tmp_path: Path,
) -> None:
    groups = runs.groups([runs.read(path) for path in two_groups(tmp_path, [1.0], [5.0])])
    for goal, which, ends, means in (
        ("min", "smallest", {}, ["1.0000", "5.0000"]),
        ("max", "largest", {}, ["3.0000", "7.0000"]),  # at step 2, of 4
        ("min", "smallest", {"a0": 3, "other": 1}, ["3.0000", "5.0000"]),
    ):
        found = tables.results(groups, "dev/loss", runs.Best(goal, ends))
        assert found.title == f"best dev/loss ({which})"
        assert [row[2] for row in found.rows] == means
    assert tables.results(groups, "dev/loss").title == "dev/loss at step 4"


def test_a_table_has_the_cost_of_each_run(tmp_path: Path) -> None:
    paths = two_groups(tmp_path, [1.0], [2.0])
    (tmp_path / "b0" / "metrics.jsonl").unlink()
    found = tables.cost(runs.groups([runs.read(path) for path in paths]))
    # Without the activities that no run spent time on, so that it fits a terminal.
    assert list(found.header) == ["run", "seed", "steps", "tokens", "time", "start", "step"]
    assert found.rows[0] == [paths[0], "0", "4", "40", "9.0s", "11%", "89%"]  # 1 and 8 seconds
    assert found.rows[1] == [paths[1], "0", *["-"] * 5]


def test_a_first_group_without_values_is_no_error(tmp_path: Path) -> None:
    paths = two_groups(tmp_path, [1.0], [1.5])
    (tmp_path / "a0" / "metrics.jsonl").unlink()
    found = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss")
    assert [row[1:] for row in found.rows] == [
        ["0", "-", "-", "", "", ""],
        ["1", "1.5000", "-", "", "", ""],
    ]


def test_runs_with_one_seed_are_reported_to_be_no_sample(tmp_path: Path) -> None:
    paths = two_groups(tmp_path, [1.0, 1.2], [2.0])
    paths.append(write(tmp_path / "again", loss=2.0, seed=0, rate=0.3))
    notes = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss").notes
    lines = [note for note in notes if "independent" in note]
    assert len(lines) == 1 and "initial_value=0.3" in lines[0] and "the same seed (0)" in lines[0]


def test_runs_without_the_metric_and_runs_with_one_seed_are_pointed_out(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0, seed=0) for name in ("a", "b", "c")]
    (tmp_path / "c" / "metrics.jsonl").unlink()
    found = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss")
    left_out, missing, seeds, _ = found.notes
    assert missing == f"{paths[2]}/metrics.jsonl is missing."
    assert left_out == f"{paths[2]} has no dev/loss, and is left out."
    assert "have the same seed (0). They are not independent" in seeds


def test_a_run_without_a_value_is_no_second_run_of_its_seed(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "ab"]
    (tmp_path / "b" / "metrics.jsonl").unlink()
    notes = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss").notes
    assert not any("the same seed" in note for note in notes)


def test_the_cost_of_a_run_counts_steps_after_the_last_logged_one(tmp_path: Path) -> None:
    """A search ends a run at an evaluation, between two log lines."""
    path = write(tmp_path / "a", loss=1.0)
    with Path(path, "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "split": "dev", "loss": 0.5}\n')
    ((_, _, steps, seen, *_),) = tables.cost(runs.groups([runs.read(path)])).rows
    assert (steps, seen) == ("7", "70")  # 10 tokens a step


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty."),
        (b"\x93\xff\x00\n", "is damaged in line 1, which is left out."),
        (b'{"step": 2, "split": "dev", "loss": 2.0}\n{"step": 4, "sp', "in line 2, which is left"),
        (b'a\nb\n{"step": 2, "split": "dev", "loss": 2.0}\nc\nd\n', "in 4 lines: 1, 2, 4, …, whi"),
    ],
)
def test_damaged_figures_are_named_with_their_file_and_lines(
    content: bytes, said: str, tmp_path: Path
) -> None:
    paths = [write(tmp_path / name, loss=1.0, seed=n) for n, name in enumerate("ab")]
    assert not runs.read(paths[1]).damage
    (tmp_path / "b" / "metrics.jsonl").write_bytes(content)
    found = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss")
    (note,) = [note for note in found.notes if "metrics.jsonl" in note]
    assert note.startswith(f"{paths[1]}/metrics.jsonl is ") and said in note


def test_many_groups_of_one_run_have_one_sentence(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"r{n}", loss=1.0, rate=0.1 * n) for n in (1, 2, 3)]
    found = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss")
    (note,) = [note for note in found.notes if "does not show a spread" in note]
    assert note.startswith("2 groups against ") and note.endswith("to test the differences.")
