"""Searches by Optuna: the settings they choose, the values they report, resuming."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_sweeps import RATE, TINY, FakeOptuna, FakeTrainer

from tekso.framework.exit_codes import ExitCode
from tekso.framework.run.report import lines
from tekso.tools import sweep
from tekso.tools.sweeping import search, space
from tekso.tools.sweeping.trials import SweepTrial, Trainer


@pytest.mark.parametrize("kind", search.SEARCHES)
def test_optuna_searches_and_resumes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    fake = FakeTrainer(monkeypatch)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", f"--search={kind}", "--metric=dev/loss",
             f"--sweep={RATE}=1e-4:1e-2:log", "--sweep=run.log_every_steps=5,10"]  # fmt: skip
    assert sweep.main([*words, "--trials=3"]) == ExitCode.OK
    first = list(fake.trained)
    assert len(first) == len(set(first)) == 3
    fake.trained = []
    assert sweep.main([*words, "--trials=5"]) == ExitCode.OK
    assert len(fake.trained) == 2 and not set(first) & set(fake.trained)
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/optuna.db")
    best = min(100 * float(t.params[RATE]) for t in study.trials)
    assert len(study.trials) == 5 and study.best_value == pytest.approx(best)
    assert {t.params["run.log_every_steps"] for t in study.trials} <= {"5", "10"}
    output = capsys.readouterr().out
    assert "5 trials finished" in output
    rate = study.best_params[RATE]
    settings = f"{RATE}={rate!r}, run.log_every_steps={study.best_params['run.log_every_steps']}"
    value = lines.number(study.best_value)
    assert f"\nbest setting: {settings}\n  dev/loss {value} (smallest is best)\n" in output
    last = output.rstrip().split("\n")[-1]
    assert f"tekso-trainer {TINY} --set={RATE}={rate!r} --set=run.log_every_steps=" in last
    assert last.endswith(f" --logdir={tmp_path}/best")


@pytest.mark.parametrize("splits", [["dev"], ["train"]])
def test_another_metric_continues_a_search_until_a_trial_has_a_value(
    splits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    fake = FakeTrainer(monkeypatch)
    fake.splits = splits  # dev: the first trial is stopped; train: its end is judged
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=random", "--trials=2",
             f"--sweep={RATE}=1e-4:1e-2:log",
             "--set=eval_inputs.dev.changes={'source.files': 'a.txt'}"]  # fmt: skip
    metric = f"--metric={splits[0]}"
    assert sweep.main([*words, f"{metric}/nope", "--goal=max"]) == ExitCode.WRONG_USAGE
    assert f"--metric={splits[0]}/nope: " in capsys.readouterr().err
    (first,) = fake.trained
    assert sweep.main([*words, "--steps=9", f"{metric}/loss"]) == ExitCode.WRONG_USAGE
    assert sweep.main([*words, f"{metric}/loss", "--goal=max"]) == ExitCode.OK
    resumed = [first] if splits == ["dev"] else []
    assert fake.trained[: 1 + len(resumed)] == [first, *resumed]
    names = {name.name for name in (tmp_path / "trials").iterdir()}
    assert names == set(fake.trained) and len(names) == 2
    rates = [float(name.split("initial_value=")[1].split("_")[0]) for name in names]
    found = f"\n  {splits[0]}/loss {lines.number(100 * max(rates))} (largest is best)\n"
    assert found in capsys.readouterr().out
    assert sweep.main([*words, f"{metric}/nope", "--goal=max"]) == ExitCode.WRONG_USAGE
    assert f'(--metric was "{splits[0]}/loss")' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        (["--metric=dev/accuracy"], max),  # as Classification declares
        (["--metric=dev/accuracy", "--goal=min"], min),
        (["--metric=dev/loss"], min),
    ],
)
def test_the_task_declares_which_values_of_a_metric_are_best(
    flags: list[str], best: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    fake = FakeTrainer(monkeypatch)
    fake.metric = flags[0].rpartition("/")[2]
    words = ["tekso-sweep", "--model=image.digits.Mlp", f"--logdir={tmp_path}", "--search=random",
             "--trials=3", f"--sweep={RATE}=1e-3,2e-3,3e-3"]  # fmt: skip
    assert sweep.main([*words, *flags]) == ExitCode.OK
    output, which = capsys.readouterr().out, {min: "smallest", max: "largest"}[best]
    rate = best("1e-3", "3e-3")
    assert f"\nbest dev/{fake.metric} ({which})\n" in output
    value = lines.number(100 * float(rate))
    expected = f"best setting: {RATE}={rate}\n  dev/{fake.metric} {value} ({which} is best)\n"
    assert expected in output


@pytest.mark.parametrize(
    ("metric", "hint"), [("top_9", "better: --goal=min"), ("acuracy", "did you mean accuracy?")]
)
def test_a_search_by_a_metric_without_a_declared_goal_requires_one(
    metric: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    fake = FakeTrainer(monkeypatch)
    words = ["tekso-sweep", "--model=image.digits.Mlp", f"--logdir={tmp_path}/sweep",
             "--search=random", "--trials=2", f"--sweep={RATE}=1e-3,2e-3",
             f"--metric=train/{metric}"]  # fmt: skip
    assert sweep.main(words) == ExitCode.WRONG_USAGE
    expected = f"--metric=train/{metric}: ImageClassification does not declare whether larger or "
    error = capsys.readouterr().err
    assert expected in error and hint in error
    assert fake.trained == [] and not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("state", "is_removed"), [("COMPLETE", 0), ("PRUNED", 0), ("FAIL", 1)])
def test_a_study_of_judged_trials_is_not_removed(
    state: str, is_removed: bool, tmp_path: Path
) -> None:
    optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    path = tmp_path / "optuna.db"
    study = optuna.create_study(study_name="sweep", storage=f"sqlite:///{path}")
    trial = study.ask()
    trial.report(1.0, step=1)
    ended = optuna.trial.TrialState[state]
    study.tell(trial, 1.0 if state == "COMPLETE" else None, state=ended)
    assert search.begin_again(str(tmp_path)) == is_removed
    assert path.exists() != is_removed


def test_a_damaged_study_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    (tmp_path / "optuna.db").write_text("no database" * 100)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=random", "--metric=dev/loss",
             f"--sweep={RATE}=1e-4:1e-2:log", "--trials=3"]  # fmt: skip
    assert sweep.main(words) == ExitCode.WRONG_USAGE
    assert re.fullmatch(
        rf"tekso-sweep: {tmp_path}/optuna\.db cannot be read as a study of Optuna: .*file is not a "
        r"database\. Restore it from a copy, or give another --logdir\n",
        capsys.readouterr().err,
    )


def test_a_trial_that_diverges_before_its_first_evaluation_does_not_end_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optuna = FakeOptuna()
    monkeypatch.setattr(search, "check_installed", lambda: None)
    monkeypatch.setitem(sys.modules, "optuna", optuna)  # type: ignore[arg-type]
    fake, real = FakeTrainer(monkeypatch), Trainer.train

    def train(self: Trainer, trial: SweepTrial, *rest: Any) -> int:
        fake.evaluates = "seed=0" in trial.name and "000_" not in trial.name
        fake.codes[trial.name] = ExitCode.OK if fake.evaluates else ExitCode.NOT_FINITE
        return real(self, trial, *rest)

    monkeypatch.setattr(Trainer, "train", train)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=random", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3:1e-2", "--trials=2"]  # fmt: skip
    assert sweep.main(words) == ExitCode.OK
    assert [(t.state, t.value) for t in optuna.trials] == [
        ("complete", math.inf), ("complete", pytest.approx(0.2))
    ]  # fmt: skip
    assert len(fake.trained) == 2 and "diverged" in capsys.readouterr().out


def test_a_search_without_optuna_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search.importlib.util, "find_spec", lambda name: None)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}/sweep", "--search=tpe", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3,3e-3", "--trials=2"]  # fmt: skip
    assert sweep.main(words) == ExitCode.WRONG_USAGE
    assert "requires Optuna, which is not installed: pip install optuna" in capsys.readouterr().err


def test_a_search_asks_for_settings_reports_values_and_resumes_a_trial_that_was_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna = FakeOptuna()
    monkeypatch.setitem(sys.modules, "optuna", optuna)  # type: ignore[arg-type]
    varied = [space.parse("rate=0.5:4.0"), space.parse("size=2:9"), space.parse("kind=a,b")]
    seen: list[tuple[int, Mapping[str, str]]] = []

    def study() -> search.Study:
        return search.Study(str(tmp_path), "tpe", varied, goal="max", seed=0, steps=9)

    def train(number: int, settings: Mapping[str, str], trial: Any) -> float | None:
        if number == 1 and len(seen) == 1:
            raise RuntimeError("killed")
        seen.append((number, settings))
        return math.nan if number == 2 else float(settings["rate"])

    with pytest.raises(RuntimeError):
        study().run(3, train)
    seen.append((-1, {}))
    assert optuna.sampler == "tpe 1"
    study().run(3, train)
    assert optuna.sampler == "tpe 2"
    assert [number for number, _ in seen] == [0, -1, 1, 2]
    assert seen[2][1] == {"rate": "1.0", "size": "3", "kind": "b"}
    assert [(t.state, t.value) for t in optuna.trials] == [
        ("complete", 0.5), ("complete", 1.0), ("complete", -math.inf)
    ]  # fmt: skip
    assert optuna.settings["direction"] == "maximize" and optuna.settings["load_if_exists"]
    assert os.path.dirname(optuna.settings["storage"].removeprefix("sqlite:///")) == str(tmp_path)


@pytest.mark.parametrize("kind", search.SEARCHES)
def test_a_search_tries_no_settings_twice_and_ends_when_all_were_tried(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    fake = FakeTrainer(monkeypatch)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", f"--search={kind}", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3,2e-3,3e-3", "--sweep=run.log_every_steps=5:6"]  # fmt: skip
    assert sweep.main([*words, "--trials=4"]) == ExitCode.OK
    assert len(fake.trained) == 4
    assert sweep.main([*words, "--trials=9"]) == ExitCode.OK
    settings = {name.partition("_")[2] for name in fake.trained}
    assert len(fake.trained) == len(settings) == 6
    out = capsys.readouterr().out
    assert "trial 6/6: " in out and "all 6 settings of the search were tried" in out


def test_settings_that_were_tried_get_their_value_again_and_others_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna = FakeOptuna()
    monkeypatch.setitem(sys.modules, "optuna", optuna)  # type: ignore[arg-type]
    varied = [space.parse("kind=a,b"), space.parse("size=ab,cd")]  # proposes (a, ab) and (b, cd)
    seen: list[tuple[str, ...]] = []

    def train(number: int, settings: Mapping[str, str], trial: Any) -> float | None:
        seen.append(tuple(settings.values()))
        return {1: None, 2: math.nan}.get(len(seen) - 1, 5.0)

    search.Study(str(tmp_path), "tpe", varied, goal="min", seed=0, steps=9).run(7, train)
    assert sorted(seen) == [("a", "ab"), ("a", "cd"), ("b", "ab"), ("b", "cd")]
    results = {tuple(t.params.values()): (t.state, t.value) for t in optuna.trials}
    for trial in optuna.trials:
        assert (trial.state, trial.value) == results[tuple(trial.params.values())]
    assert results["a", "ab"] == ("complete", 5.0) and results["b", "cd"] == ("fail", None)
    assert results[seen[2]] == ("complete", math.inf)


def test_a_search_that_is_given_the_same_float_again_and_again_ends_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stuck(FakeOptuna):
        def ask(self) -> Any:
            trial = super().ask()
            trial.suggest_float = lambda path, low, high, log: trial.params.setdefault(path, low)
            return trial

    optuna = Stuck()
    monkeypatch.setattr(search, "check_installed", lambda: None)
    monkeypatch.setitem(sys.modules, "optuna", optuna)  # type: ignore[arg-type]
    fake = FakeTrainer(monkeypatch)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=tpe", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3:1e-2", "--trials=3"]  # fmt: skip
    assert sweep.main(words) == ExitCode.OK
    assert len(fake.trained) == 1 and len(optuna.trials) == 1 + search.MOST_REPEATED
    out = capsys.readouterr().out
    assert "the search ended after 1 setting: the last 100 that Optuna chose were tried" in out
    assert "1 trial finished" in out


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_a_search_that_is_killed_chooses_the_same_settings(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    varied = [space.parse("rate=0.5:4.0:log"), space.parse("size=2:9"), space.parse("kind=a,b")]

    def settings(folder: Path, killed: set[int]) -> list[Mapping[str, str]]:
        found: dict[int, Mapping[str, str]] = {}

        def train(number: int, settings: Mapping[str, str], trial: Any) -> float | None:
            if number in killed:
                killed.remove(number)
                raise RuntimeError("killed")
            assert number not in found
            found[number] = settings
            return None if number == 4 else float(settings["rate"]) + int(settings["size"])

        while len(found) < 14:  # the first 10 settings of TPE are random
            folder.mkdir(exist_ok=True)
            with contextlib.suppress(RuntimeError):
                study = search.Study(str(folder), kind, varied, goal="min", seed=0, steps=9)
                study.run(14, train)
        return [found[number] for number in range(14)]

    whole = settings(tmp_path / "whole", set())
    assert len({tuple(one.values()) for one in whole}) == 14
    assert settings(tmp_path / "killed", {0, 3, 12}) == whole


def test_trials_of_an_earlier_process_are_compared_in_order_and_a_failed_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optuna = FakeOptuna()
    monkeypatch.setattr(search, "check_installed", lambda: None)
    monkeypatch.setitem(sys.modules, "optuna", optuna)  # type: ignore[arg-type]
    fake = FakeTrainer(monkeypatch)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=random", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3:1e-2"]  # fmt: skip
    fake.codes["001_initial_value=0.002_seed=0"] = ExitCode.FAILED
    assert sweep.main([*words, "--trials=2"]) == ExitCode.FAILED
    capsys.readouterr()
    assert sweep.main([*words, "--trials=3"]) == ExitCode.FAILED  # as in one process
    out, err = capsys.readouterr()
    assert out.index("000_initial") < out.rindex("002_initial") and "2 trials finished" in out
    assert f"failed: {RATE}=0.002, seed 0: the last words" in err
