"""Tests of tekso-compare on logdirs of a few lines."""

from __future__ import annotations

import csv
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tekso.framework.exit_codes import ExitCode
from tekso.tools import compare
from tekso.tools.comparison import runs, statistics, tables

PARAMS = """# model: lm.some.Model
. : Params("tekso.framework.experiment:Tree")
task.prompt : "a  # b"  # params/lm/some.py:8
learner.schedule.initial_value : {rate}  # {origin}
run.steps : 4
run.seed : {seed}  # --seed
"""
SCRIPT = "<script>x</script>"


def write(folder: Path, *, loss: float, seed: int = 0, rate: float = 0.1, text: str = "") -> str:
    folder.mkdir()
    (folder / "params.txt").write_text(PARAMS.format(rate=rate, origin="--set", seed=seed))
    rows = []
    for step in (2, 4):
        spent = {"start": 1.0, "step": 2.0 * step}
        both = {"step": step, "seconds": spent, "elapsed_seconds": 9.0}
        rows.append({**both, "split": "train", "loss": 8.0 / step, "tokens_seen": 10.0 * step})
        rows.append({**both, "split": "dev", "loss": loss + (4 - step), "error": None})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if text:
        (folder / "samples.txt").write_text(text)
    return str(folder)


def two_groups(tmp_path: Path, first: list[float], second: list[float]) -> list[str]:
    return [
        write(tmp_path / f"{name}{seed}", loss=loss, seed=seed, rate=rate, text=SCRIPT)
        for name, rate, losses in (("a", 0.1, first), ("b", 0.3, second))
        for seed, loss in enumerate(losses)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1.0, 1.2, 1.1], [2.0, 2.3, 1.6, 2.2]),
        ([1.0, 1.5], [1.1, 1.2, 1.3]),
        ([5.0, 5.0, 5.1], [5.1, 5.3]),
    ],
)
def test_the_test_is_welchs_and_the_number_of_seeds_has_its_power(
    first: list[float], second: list[float]
) -> None:
    found = statistics.welch(first, second)
    wanted = stats.ttest_ind(second, first, equal_var=False)
    assert found.t == pytest.approx(wanted.statistic) and found.p == pytest.approx(wanted.pvalue)
    assert found.freedom == pytest.approx(wanted.df)
    assert found.seeds is not None

    def power(count: int) -> float:  # by the noncentral distribution
        a, b = stats.tvar(first), stats.tvar(second)
        freedom = (a + b) ** 2 * (count - 1) / (a**2 + b**2)
        shift = abs(found.difference) / math.sqrt((a + b) / count)
        return float(stats.nct.sf(stats.t.ppf(0.975, freedom), freedom, shift))

    assert power(found.seeds) > 0.77
    assert found.seeds == 2 or power(found.seeds - 1) < 0.83


# Student 1908, table 1: additional hours of sleep by two drugs.
SLEEP = (
    [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0],
    [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4],
)


@pytest.mark.parametrize(
    ("first", "second", "t", "freedom", "p"),
    [
        (*SLEEP, 1.8608, 17.776, 0.07939),
        ([*range(1, 11)], [*range(7, 21)], 5.4349, 21.982, 1.855e-5),
        ([*range(1, 11)], [*range(7, 21), 200], 1.6329, 14.165, 0.1245),
    ],
)
def test_the_test_gives_the_figures_of_the_examples_of_r(
    first: list[float], second: list[float], t: float, freedom: float, p: float
) -> None:
    """As printed by the examples of R's manual of t.test, to their last digit."""
    found = statistics.welch(first, second)
    assert found.t == pytest.approx(t, abs=5e-5)
    assert found.freedom == pytest.approx(freedom, abs=5e-4)
    assert found.p == pytest.approx(p, rel=5e-4)
    assert found.is_decided == (p < 0.05)
    assert statistics.welch(second, first).t == pytest.approx(-t, abs=5e-5)


@pytest.mark.parametrize(
    ("difference", "count"), [(0.4, 100), (0.5, 64), (0.6, 45), (0.8, 26), (1.0, 17), (1.2, 12)]
)
def test_the_number_of_seeds_is_that_of_cohens_table(difference: float, count: int) -> None:
    """Cohen 1988, table 2.4.1, for a power of 80 % and 5 %, two-sided."""
    assert statistics.seeds(difference, 1.0, 1.0) == count
    assert statistics.seeds(-10 * difference, 10.0, 10.0) == count


@pytest.mark.parametrize(("t", "is_decided"), [(4.302, False), (4.303, True), (-4.303, True)])
def test_a_difference_is_decided_from_the_critical_value_on(t: float, is_decided: bool) -> None:
    """Of Student's table: 4.3027 for two degrees of freedom and 5 %, two-sided."""
    shift = t * math.sqrt(2)  # each variance is 2, and each mean is of two values
    found = statistics.welch([-1.0, 1.0], [shift - 1, shift + 1])
    assert found.freedom == pytest.approx(2) and found.t == pytest.approx(t)
    assert found.is_decided is is_decided


@pytest.mark.parametrize("scale", [1e-200, 1e200, 1e307, 2.0**-1022])
def test_values_whose_squares_are_infinite_or_zero_are_compared(scale: float) -> None:
    first, second = [1.0, 1.2, 1.1], [2.0, 2.3, 1.6, 2.2]
    plain = statistics.welch(first, second)
    found = statistics.welch([scale * v for v in first], [scale * v for v in second])
    assert found.difference == pytest.approx(scale * plain.difference, rel=1e-9, abs=0.0)
    assert (found.t, found.p) == pytest.approx((plain.t, plain.p))
    assert found.freedom == pytest.approx(plain.freedom) and found.seeds == plain.seeds
    summary = statistics.summary([scale * v for v in second])
    assert summary.mean == pytest.approx(scale * np.mean(second), rel=1e-9, abs=0.0)
    assert summary.std == pytest.approx(scale * np.std(second, ddof=1), rel=1e-9, abs=0.0)


def test_single_and_constant_values_are_not_tested() -> None:
    one = statistics.welch([1.0], [2.0, 3.0])
    assert (one.difference, one.t, one.p, one.seeds) == (1.5, None, None, None)
    assert not one.is_decided
    same = statistics.welch([2.0, 2.0], [2.0, 2.0])
    assert (same.p, same.seeds) == (1.0, None)
    other = statistics.welch([2.0, 2.0], [3.0, 3.0])
    assert other.is_decided and (other.p, other.seeds) == (0.0, 2)
    # 2 * (1.96 + 0.84)**2 / difference**2 seeds: 9,810 and 12,262
    assert statistics.seeds(0.04, 1.0, 1.0) == pytest.approx(9_812, abs=5)
    assert statistics.seeds(0.03578, 1.0, 1.0) is None


@pytest.mark.parametrize(("value", "first", "second"), [(0.4936, 9, 4), (0.7, 10, 3), (0.1, 3, 7)])
def test_equal_values_do_not_differ_whatever_their_number(
    value: float, first: int, second: int
) -> None:
    # The sum of nine 0.4936, divided by nine, is not 0.4936.
    assert statistics.summary([value] * first) == statistics.Summary(value, 0.0, first)
    found = statistics.welch([value] * first, [value] * second)
    assert (found.difference, found.p, found.seeds) == (0.0, 1.0, None)


def test_a_spread_that_is_tiny_beside_the_other_values_is_compared() -> None:
    for scale in (1e-82, 1e-160):
        found = statistics.welch([scale, 2 * scale], [1.0, 1.0])
        assert (found.difference, found.freedom, found.seeds) == pytest.approx((1.0, 1.0, 2))
        assert found.is_decided


def test_runs_are_grouped_by_all_params_but_the_seed_and_named_by_what_differs(
    tmp_path: Path,
) -> None:
    found = [runs.read(path) for path in two_groups(tmp_path, [1.0, 1.2], [2.0])]
    groups = runs.groups(found)
    assert [(g.name, [r.seed for r in g.runs]) for g in groups] == [
        ("initial_value=0.1", ["0", "1"]), ("initial_value=0.3", ["0"])
    ]  # fmt: skip
    (seed, rate) = sorted(runs.differences(found), key=lambda one: one.path, reverse=True)
    assert seed.path == "run.seed" and rate.path == "learner.schedule.initial_value"
    assert rate.values[2] == runs.ParamValue("0.3", "--set")
    assert found[0].params["task.prompt"] == runs.ParamValue('"a  # b"', "params/lm/some.py:8")
    assert found[0].unit == "tokens" and runs.main_metric(found) == "dev/loss"
    assert found[1].curves["dev/loss"][-1] == runs.Point(4, 40.0, 9.0, 1.2)
    assert found[0].seconds == {"start": 1.0, "step": 8.0}


def test_a_decided_difference_is_distinguished_from_one_that_the_spread_may_explain(
    tmp_path: Path,
) -> None:
    close, far = tmp_path / "close", tmp_path / "far"
    close.mkdir(), far.mkdir()
    outcomes = {}
    for folder, second in ((close, [1.1, 1.3]), (far, [3.0, 3.1])):
        found = [runs.read(path) for path in two_groups(folder, [1.0, 1.2], second)]
        outcomes[folder] = tables.results(runs.groups(found), "dev/loss")
    assert "the spread may explain the difference" in outcomes[close].notes[0]
    assert re.search(r"; \d+ seeds each would decide it", outcomes[close].notes[0])
    assert "exceeds the spread (p = 0.0111)" in outcomes[far].notes[0]
    assert outcomes[far].rows[0][:4] == ["initial_value=0.1", "2", "1.1000", "0.1414"]
    assert outcomes[far].rows[1][4] == "+1.95"


def test_a_table_has_the_cost_of_each_run(tmp_path: Path) -> None:
    paths = two_groups(tmp_path, [1.0], [2.0])
    (tmp_path / "b0" / "metrics.jsonl").unlink()
    found = tables.cost(runs.groups([runs.read(path) for path in paths]))
    # Without the activities that no run spent time on, so that it fits a terminal.
    assert list(found.header) == ["run", "seed", "steps", "tokens", "time", "start", "step"]
    assert found.rows[0] == [paths[0], "0", "4", "40", "9.0s", "11%", "89%"]  # 1 and 8 seconds
    assert found.rows[1] == [paths[1], "0", *["-"] * 5]


def test_runs_that_end_at_different_steps_and_a_first_group_without_values_are_compared(
    tmp_path: Path,
) -> None:
    paths = two_groups(tmp_path, [1.0], [2.0])
    with (tmp_path / "b0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "dev", "loss": 1.5}\n')
    found = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss")
    assert "The runs end at different steps: 4, 6." in found.notes
    (tmp_path / "a0" / "metrics.jsonl").unlink()
    found = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss")
    assert [row[1:] for row in found.rows] == [
        ["0", "-", "-", "", "", ""],
        ["1", "1.5000", "-", "", "", ""],
    ]


def test_settings_of_what_is_recorded_make_no_groups(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0, seed=n) for n, name in enumerate("ab")]
    for path, value in zip(paths, (0, 5), strict=True):
        with Path(path, "params.txt").open("a") as file:
            file.write(f"run.weight_figures_every_steps : {value}\nrun.log_every_steps : {value}\n")
    (group,) = runs.groups([runs.read(path) for path in paths])
    assert len(group.runs) == 2


def test_samples_are_the_newest_text_of_each_evaluation_and_its_first_characters(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a", loss=1.0, text=5000 * "x")
    (tmp_path / "a" / "decoded" / "dev").mkdir(parents=True)
    for step in (3, 12, 9):
        file = tmp_path / "a" / "decoded" / "dev" / f"step_{step:09d}.txt"
        file.write_text(f"of step {step}")
    found = runs.read(path).samples
    assert found == {"samples.txt": 4000 * "x", "decoded/dev": "of step 12"}


def test_runs_with_one_seed_are_reported_to_be_no_sample(tmp_path: Path) -> None:
    paths = two_groups(tmp_path, [1.0, 1.2], [2.0])
    paths.append(write(tmp_path / "again", loss=2.0, seed=0, rate=0.3))
    notes = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss").notes
    lines = [note for note in notes if "independent" in note]
    assert len(lines) == 1 and "initial_value=0.3" in lines[0] and "the same seed (0)" in lines[0]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, "loads something"
        self.seen.append(tag)
        if tag not in ("br", "meta", "polyline", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("polyline", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_without_scripts_and_the_csv_has_all_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = two_groups(tmp_path, [1.0, 1.2], [2.0, 2.3])
    output = tmp_path / "out.html"
    assert compare.main(["tekso-compare", *paths, f"--output={output}"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "initial_value=0.3" in printed
    assert "Params that differ\n\nlearner.schedule.initial_value : 0.1 [--set] | 0.1 [" in printed
    page = Tags()
    page.feed(output.read_text())
    assert page.open == [] and "script" not in page.seen and "link" not in page.seen
    assert SCRIPT in page.text  # of a sample, escaped
    # Two curves of four runs, by step, tokens and seconds.
    assert page.seen.count("svg") == 6 and page.seen.count("polyline") == 24
    assert "tokens seen" in page.text and "--set" in page.text
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(rows) == 4 * 4
    (row,) = [
        r for r in rows if r["run"] == paths[3] and r["curve"] == "dev/loss" and r["step"] == "4"
    ]
    assert row["group"] == "initial_value=0.3" and float(row["value"]) == 2.3
    assert (row["seed"], float(row["seen"]), float(row["seconds"])) == ("1", 40.0, 9.0)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "a run is missing"),
        (["{a}/nothing"], "nothing has no run"),
        (["{a}/.."], "it is a sweep, whose runs are "),
        (["{a}_"], "a_ has no run: there is no folder "),
        (["{a}_"], "; did you mean "),
        (["{a}/../folder"], "folder has no run: "),
        (["{a}/../folder"], "folder contains runs: "),
        (
            ["{a}", "--metric=dev/los"],
            "no run has the curve dev/los; did you mean dev/loss? The runs have: train/loss, ",
        ),
        (["{a}", "--metric=x"], "no run has the curve x; the runs have: train/loss, "),
        (["{a}", "--output=x.pdf"], "expected a file that ends with .html"),
    ],
)
def test_what_is_typed_wrong_is_one_message(
    args: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "a", loss=1.0)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "b", loss=1.0)
    (tmp_path / "trials").mkdir()
    words = [word.format(a=run) for word in args]
    assert compare.main(["tekso-compare", *words]) == ExitCode.WRONG_USAGE
    assert expected in capsys.readouterr().err


WHOLE = PARAMS.format(rate=0.1, origin="--set", seed=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WHOLE[: WHOLE.index("  # --seed") - 1], "is incomplete: it ends within line 6, 'run.seed"),
        (WHOLE[: WHOLE.index("_value")], "is incomplete: it ends within line 4, 'learner.sched"),
        (WHOLE[: WHOLE.index("run.steps")], "incomplete: it has no run.seed; its last line is 4"),
        (WHOLE.replace(" : 4", ""), "is damaged in line 5, 'run.steps'"),
    ],
)
def test_a_params_file_that_was_cut_is_named(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path / name, loss=1.0, seed=n) for n, name in enumerate("abc")]
    (tmp_path / "b" / "params.txt").write_text(text)
    output = f"--output={tmp_path / 'page.html'}"
    assert compare.main(["tekso-compare", *paths, output]) == ExitCode.DAMAGED
    message = capsys.readouterr().err
    assert f"{tmp_path / 'b' / 'params.txt'} is " in message and expected in message
    assert not (tmp_path / "page.html").exists()


def test_a_key_with_spaces_is_a_path() -> None:
    line = 'eval_inputs["a b"].batch_size : 8  # --set'
    assert runs.params_of(line) == {'eval_inputs["a b"].batch_size': runs.ParamValue("8", "--set")}


def test_a_run_that_has_just_begun_and_an_older_one_are_compared(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", loss=1.0), write(tmp_path / "b", loss=2.0)]
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (tmp_path / "b" / "decoded" / "dev").mkdir(parents=True)
    (tmp_path / "b" / "decoded" / "dev" / "step_000000003.txt").write_text("decoded")
    (tmp_path / "b" / "decoded" / "notes").write_text("a file of the user")
    old = '{"step": 3, "split": "dev", "loss": 2.5, "elapsed_seconds": 4.0}\n{"step": 4, "sp'
    (tmp_path / "b" / "metrics.jsonl").write_text(old)
    output = tmp_path / "out.html"
    assert compare.compare(paths, output=str(output)) == ExitCode.OK
    assert runs.read(paths[1]).samples == {"decoded/dev": "decoded"}
    assert runs.read(paths[1]).curves["dev/loss"] == [runs.Point(3, None, None, 2.5)]


def test_a_diverged_run_and_runs_with_one_seed_are_pointed_out(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0, seed=0) for name in ("a", "b", "c", "d")]
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "dev", "loss": null}\n')
    (tmp_path / "c" / "metrics.jsonl").unlink()
    record = '{"step": 2, "split": "dev", "loss": null}\n'
    (tmp_path / "d" / "metrics.jsonl").write_text(record)
    found = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss")
    b, c, d, seeds, _ = found.notes
    assert b == f"The last dev/loss of {paths[1]} is not finite; the table has the value at step 4."
    assert c == f"{paths[2]} has no dev/loss, and is left out."
    assert d == f"{paths[3]} has no finite dev/loss, and is left out."
    assert "have the same seed (0). They are not independent" in seeds


def test_a_run_that_is_given_twice_is_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a", loss=1.0), write(tmp_path / "b", loss=2.0, seed=1)
    (tmp_path / "link").symlink_to(a)
    output = str(tmp_path / "out.html")
    compare.compare([a, f"{a}/", f"{b}/../a", str(tmp_path / "link"), b], output=output)
    printed = capsys.readouterr().out
    assert re.search(r"lm\.some\.Model +2 +1\.5000", printed) and "independent" not in printed


def test_runs_of_other_tasks_are_pointed_out_and_most_of_many_fields_are_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "ab"]
    for path, task, values in zip(paths, ("mt:Translation", "lm:LanguageModel"), "01", strict=True):
        with open(Path(path, "params.txt"), "a") as file:
            file.write(f'task : Params("tekso.tasks.{task}")\n')
            file.writelines(f"task.field{i} : {values}\n" for i in range(40))
    page = tmp_path / "c.html"
    assert compare.main(["tekso-compare", *paths, f"--output={page}"]) == ExitCode.OK
    out = capsys.readouterr().out
    said = (
        "The tasks differ (Translation, LanguageModel), so their dev/loss may not measure the same."
    )
    assert f"{said}\n\nCost\n" in out and said in page.read_text()
    assert "task.field20 : 0 | 1\n" in out and "field39" not in out
    assert f"… and 11 fields of Params that differ, in {page}\n" in out
    assert "task.field39" in page.read_text()


def test_curves_by_tokens_do_not_depend_on_how_often_training_is_logged() -> None:
    seen = {2: 20, 10: 100, 12: 132}
    records = [
        *({"step": i, "split": "train", "loss": 1.0, "tokens_seen": n} for i, n in seen.items()),
        *({"step": i, "split": "dev", "loss": 2.0} for i in (1, 5, 10, 11, 18)),
    ]
    points = runs.curves_of(records, "tokens")["dev/loss"]
    assert [(p.step, p.seen) for p in points] == [
        (1, 10.0), (5, 50.0), (10, 100.0), (11, 116.0), (18, 198.0)
    ]  # fmt: skip
    points = runs.curves_of(records[-5:], "")["dev/loss"]
    assert {point.seen for point in points} == {None}


def test_groups_of_another_class_are_named_by_the_class_without_its_own_fields(
    tmp_path: Path,
) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "abc"]
    for path, name, field in zip(paths, "ABB", ["", "mesh : 2", "mesh : 4"], strict=True):
        with open(f"{path}/params.txt", "a", encoding="utf-8") as file:
            file.write(f'execution : Params("some.module:{name}")\n')
            file.write(f"execution.{field}\n" if field else "")
    found = [runs.read(path) for path in paths]
    assert [g.name for g in runs.groups(found[:2])] == ["execution=A", "execution=B"]
    assert [g.name for g in runs.groups(found[1:])] == ["mesh=2", "mesh=4"]
    assert [g.name for g in runs.groups(found)] == [
        "execution=A",
        "execution=B, mesh=2",
        "execution=B, mesh=4",
    ]


def test_numbers_of_steps_are_groups_if_they_are_what_is_compared(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{steps}_{i}", loss=1.0, seed=i) for steps in (4, 8) for i in (0, 1)]
    for path in paths[2:]:
        file = Path(path, "params.txt")
        file.write_text(file.read_text().replace("run.steps : 4", "run.steps : 8"))
    found = [runs.read(path) for path in paths]
    assert [(g.name, len(g.runs)) for g in runs.groups(found)] == [("steps=4", 2), ("steps=8", 2)]
    # A longer run of another seed is one more run.
    assert [len(group.runs) for group in runs.groups([found[0], found[3]])] == [2]


def test_a_run_without_a_value_is_no_second_run_of_its_seed(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "ab"]
    (tmp_path / "b" / "metrics.jsonl").unlink()
    notes = tables.results(runs.groups([runs.read(path) for path in paths]), "dev/loss").notes
    assert not any("the same seed" in note for note in notes)


def test_the_default_metric_is_one_that_all_runs_have(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "ab"]
    assert runs.main_metric([runs.read(path) for path in paths]) == "dev/loss"
    for path in paths:
        with Path(path, "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "split": "dev", "bits_per_byte": 2.0}\n')
        wanted = "dev/loss" if path == paths[0] else "dev/bits_per_byte"
        assert runs.main_metric([runs.read(path) for path in paths]) == wanted


def test_the_cost_of_a_run_counts_steps_after_the_last_logged_one(tmp_path: Path) -> None:
    """A search ends a run at an evaluation, between two log lines."""
    path = write(tmp_path / "a", loss=1.0)
    with Path(path, "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "split": "dev", "loss": 0.5}\n')
    ((_, _, steps, seen, *_),) = tables.cost(runs.groups([runs.read(path)])).rows
    assert (steps, seen) == ("7", "70")  # 10 tokens a step


def test_the_time_of_a_run_includes_what_follows_its_last_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "a", loss=1.0)
    more = {"start": 1.0, "step": 8.0, "decoding": 3.0}
    for spent in (more, {"start": 1.0}, {"start": 0.1, "step": 0.1, "other": 0.1}):
        record = {"step": 4, "split": "train", "seconds": spent}
        Path(path, "progress.jsonl").write_text(f"{json.dumps(record)}\n")
        wanted = more if spent == more else {"start": 1.0, "step": 8.0}  # the longer time
        assert runs.read(path).seconds == wanted


def test_damaged_times_of_a_record_count_as_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a", loss=1.0)
    with Path(path, "metrics.jsonl").open("a") as file:
        for step, seconds in ((5, {"step": "x", "start": 3}), (6, 4)):
            record = {"step": step, "split": "dev", "loss": 1.0, "seconds": seconds}
            file.write(f"{json.dumps(record)}\n")
    run = runs.read(path)
    assert run.seconds == {"start": 3.0}
    assert [point.seconds for point in run.curves["dev/loss"]][-2:] == [3.0, None]
