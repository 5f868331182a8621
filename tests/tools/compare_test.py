"""Tests of tekso-compare on logdirs of a few lines."""

from __future__ import annotations

import csv
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from compared_runs import PARAMS, SCRIPT, two_groups, write

from tekso.framework.exit_codes import ExitCode
from tekso.tools import compare
from tekso.tools.comparison import runs


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
        (["{a}", "--output={a}/../page.html"], "that ends with .html, but this is a folder"),
        (["{a}/params.txt"], "/params.txt is a file, but a run is a folder"),
        (["{a}", ""], "an argument is empty: give the folder of a run"),
    ],
)
def test_what_is_typed_wrong_is_one_message(
    args: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "a", loss=1.0)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "b", loss=1.0)
    (tmp_path / "trials").mkdir()
    (tmp_path / "page.html").mkdir()
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


def test_the_name_of_a_folder_may_be_no_text(tmp_path: Path) -> None:
    run = write(tmp_path / os.fsdecode(b"a\xff"), loss=1.0)
    output = tmp_path / "out.html"
    assert compare.compare([run], output=str(output)) == ExitCode.OK
    assert "a\\udcff" in output.read_text() and "a\\udcff" in (tmp_path / "out.csv").read_text()


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
