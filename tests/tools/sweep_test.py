"""Tests of tekso-sweep: what it runs, what it does not run again, and a sweep that is killed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tekso.framework.exit_codes import ExitCode
from tekso.tools import sweep
from tekso.tools.command_errors import UsageError
from tekso.tools.sweeping import search, space
from tekso.tools.sweeping.trials import SweepTrial, Trainer, best_of, folder_name

RATE = "learner.schedule.initial_value"
TINY = "--model=lm.python_source.Tiny"
PARAMS = """# model: lm.python_source.Tiny
learner.schedule.initial_value : {rate}  # --set
run.seed : {seed}  # --seed
"""


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1e-3,3e-3", ["1e-3", "3e-3"]),
        ("a.b = 1 , 2,1", ["1", "2"]),
        ("a.b=[1,2],(3,[4,5])", ["[1,2]", "(3,[4,5])"]),
        ("a.b='x,y',\"z,\"", ["'x,y'", '"z,"']),
        ("a.b=data:2;model:4", ["data:2;model:4"]),
    ],
)
def test_commas_separate_values_but_not_inside_brackets_and_quotes(
    text: str, values: list[str]
) -> None:
    assert space.parse(text) == space.Varied("a.b", tuple(values))


def test_a_range_has_ends_of_one_kind() -> None:
    assert space.parse("x=1e-4:1e-2:log").range == space.Range(1e-4, 1e-2, True)
    whole = space.parse("x=2:8").range
    assert whole is not None and whole.is_whole
    assert space.parse("x=2:8.0").range == space.Range(2, 8.0, False)
    assert space.parse("x=2:8").examples == ("2", "8")


@pytest.mark.parametrize("text", ["x", "x=", "=1", "x=1,,2", "x=3:2", "x=0:1:log"])
def test_what_is_no_setting_is_an_error_that_repeats_it(text: str) -> None:
    with pytest.raises(UsageError, match=f"--sweep {text}: expected|a value is empty"):
        space.parse(text)


def test_a_grid_has_all_combinations() -> None:
    found = space.grid([space.parse("x=1,2"), space.parse("y=a,b")])
    assert [tuple(one.values()) for one in found] == [
        ("1", "a"),
        ("1", "b"),
        ("2", "a"),
        ("2", "b"),
    ]
    assert space.grid([]) == [{}]
    with pytest.raises(UsageError, match=r"--sweep x has a range: .* --search=random"):
        space.grid([space.parse("x=1:2")])


def test_a_folder_has_the_settings_in_its_name() -> None:
    assert folder_name(3, 1, {"a.rate": "1e-3", "b": "[1, 2]"}) == "003_rate=1e-3_b=-1-2-_seed=1"
    assert folder_name(0, 0, {}) == "000_seed=0"
    assert best_of([(1, 3.0), (2, None), (3, 2.0)], "min") == 2.0
    assert best_of([(1, None)], "max") is None


class FakeTrainer:
    """Stands for the process of a trial: writes what a run leaves; some end early."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[str] = []
        self.codes: dict[str, int] = {}
        self.evaluates = True

        real = subprocess.Popen

        def popen(words: list[str], **options: Any) -> Any:
            if "tekso.tools.trainer" not in words:  # another program, which a library calls
                return real(words, **options)
            flags = dict(word.removeprefix("--").split("=", 1) for word in words[3:])
            logdir = Path(flags["logdir"])
            self.trained.append(logdir.name)
            rate = next(w for w in words if w.startswith(f"--set={RATE}")).rpartition("=")[2]
            text = PARAMS.format(rate=rate, seed=flags["seed"])
            (logdir / "params.txt").write_text(text)
            record = {"step": 8, "split": "dev", "loss": 100 * float(rate) + int(flags["seed"])}
            if not self.evaluates:
                record = {"step": 8, "split": "train", "loss": None}
            (logdir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            code = self.codes.get(logdir.name, 0)
            options["stdout"].write(b"the last words\n")
            return SimpleNamespace(wait=lambda _: code, send_signal=None, terminate=None)

        monkeypatch.setattr(subprocess, "Popen", popen)


def run(folder: Path, *flags: str) -> int:
    sweeps = [f"--sweep={RATE}=1e-3,3e-3", "--metric=dev/loss"]
    return sweep.main(["tekso-sweep", TINY, f"--logdir={folder}", "--seeds=2", *sweeps, *flags])


NAMES = [f"{i:03d}_initial_value={rate}_seed={seed}"
         for i, rate in enumerate(("1e-3", "3e-3")) for seed in (0, 1)]  # fmt: skip


def test_finished_trials_are_not_run_again_and_a_failed_one_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, folder = FakeTrainer(monkeypatch), tmp_path / "sweep"
    fake.codes = {NAMES[0]: ExitCode.NOT_FINITE, NAMES[2]: ExitCode.DISK_FULL}
    assert run(folder) == ExitCode.DISK_FULL
    assert fake.trained == NAMES[:3]
    told = capsys.readouterr()
    assert "diverged" in told.out and "ended with exit code 5: the last words" in told.err
    fake.codes, fake.trained = {}, []
    assert run(folder) == ExitCode.OK
    assert fake.trained == NAMES[2:]
    told = capsys.readouterr()
    assert "trial 1/4: learner.schedule.initial_value=1e-3, seed 0: finished before" in told.out
    assert "initial_value=3e-3" in told.out and (folder / "comparison.html").exists()
    assert run(folder, "--seeds=3") == ExitCode.OK  # more seeds continue a sweep
    assert len(fake.trained) == 4


@pytest.mark.parametrize(
    ("number", "ending"),
    [
        (signal.SIGKILL, "was killed by SIGKILL, for example because the memory ran out"),
        (signal.SIGSEGV, "was ended by SIGSEGV"),
    ],
)
def test_a_trial_that_a_signal_ends_ends_the_sweep_with_its_code_and_is_resumed(
    number: signal.Signals, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake = FakeTrainer(monkeypatch)
    fake.codes = {NAMES[1]: -number}
    assert run(tmp_path) == 128 + number
    folder = tmp_path / "trials" / NAMES[1]
    assert capsys.readouterr().err.splitlines() == [
        f"tekso-sweep: trial 2/4 ({RATE}=1e-3, seed 1; {folder}) {ending}",
        "to continue, repeat the command: it resumes the sweep",
    ]
    fake.codes, fake.trained = {}, []
    assert run(tmp_path) == ExitCode.OK
    assert fake.trained == NAMES[1:]


def test_settings_that_fail_are_recorded_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrainer(monkeypatch)
    fake.codes = {NAMES[0]: ExitCode.FAILED, NAMES[1]: ExitCode.FAILED}
    assert run(tmp_path) == ExitCode.FAILED
    assert fake.trained == NAMES
    told = capsys.readouterr()
    assert told.out.count("failed: the last words") == 2 and "2 trials finished" in told.out
    assert f"failed: {RATE}=1e-3, seed 0: the last words" in told.err
    record = json.loads((tmp_path / "trials" / NAMES[0] / "trial.json").read_text())
    assert (record["exit_code"], record["error"]) == (1, "the last words")
    fake.codes, fake.trained = dict.fromkeys(NAMES[:1], ExitCode.FAILED), []
    assert run(tmp_path) == ExitCode.FAILED  # tries again what failed, and nothing else
    assert fake.trained == NAMES[:2]


def test_a_sweep_in_which_everything_fails_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrainer(monkeypatch)
    fake.codes = dict.fromkeys(NAMES, ExitCode.FAILED)
    assert run(tmp_path) == ExitCode.FAILED
    assert "no trial finished: all of them failed" in capsys.readouterr().err


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
    assert "5 trials finished" in capsys.readouterr().out


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


def test_another_sweep_in_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrainer(monkeypatch)
    assert run(tmp_path) == ExitCode.OK
    fake.trained = []
    assert run(tmp_path, "--steps=3") == ExitCode.WRONG_USAGE
    assert "has another sweep (--steps was null)" in capsys.readouterr().err
    # A grid uses the metric for its comparison only, so a wrong one can be corrected.
    assert run(tmp_path, "--metric=dev/los") == ExitCode.WRONG_USAGE
    assert "no run has the curve dev/los; the runs have: dev/loss" in capsys.readouterr().err
    assert run(tmp_path, "--metric=dev/loss") == ExitCode.OK
    assert fake.trained == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sweep=learner.schedul=1"], "tekso-sweep: --sweep learner.schedul=1: "),
        (["--sweep=learner.schedul=1"], "did you mean learner.schedule"),
        (["--sweep=run.log_every_steps=5,none"], "run.log_every_steps: must be int"),
        (["--sweep=learner.optimizer.beta1=0.9,1.5"], "beta1=1.5: AdamW: beta1 is 1.5"),
        (["--sweep=task.model.stack.layer.attention.num_heads=2,5"], "num_heads=5: "),
        (["--sweep=input.batch_size=4,0"], "batch_size=0: input.batch_size is 0, but must be at"),
        (["--sweep=run.seed=1,2"], "the seeds of a sweep are set by --seeds"),
        ([f"--sweep={RATE}=5"], "gives a path twice"),
        (["--trials=4"], "--trials requires --search="),
        (["more"], "'more' is not a flag"),
        (["--metric=valid/loss"], "--metric=valid/loss: expected evaluation/metric, as in dev/l"),
        (["--metric=loss"], "the evaluations are dev, and train"),
        (["--logdir=gs://bucket/sweep"], "requires a folder on a local file system"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(
    flags: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake = FakeTrainer(monkeypatch)
    assert run(tmp_path / "sweep", *flags) == ExitCode.WRONG_USAGE
    assert told in capsys.readouterr().err
    assert fake.trained == [] and not (tmp_path / "sweep").exists()


def test_values_that_fit_each_other_only_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeTrainer(monkeypatch)
    layer = "task.model.stack.layer.attention.num_heads"
    assert run(tmp_path, f"--sweep={layer}=2,3", "--sweep=task.model.dim=128,96") == ExitCode.OK


def test_a_search_without_optuna_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search.importlib.util, "find_spec", lambda name: None)
    assert run(tmp_path / "sweep", "--search=tpe", "--trials=2") == ExitCode.WRONG_USAGE
    assert "requires Optuna, which is not installed: pip install optuna" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_that_is_killed_resumes_its_trial_and_runs_no_other_again(tmp_path: Path) -> None:
    words = [
        "-m", "tekso.tools.sweep", TINY, f"--logdir={tmp_path}/sweep", "--steps=16",
        f"--sweep={RATE}=1e-3", "--seeds=2", "--set=*.num_layers=1", "--set=execution.xla=none",
        "--set=run.decode_at_end=false", "--set=eval_inputs.dev.max_batches=1",
        "--set=run.log_every_steps=1", "--set=run.checkpoint_every_steps=2",
    ]  # fmt: skip
    first = tmp_path / "sweep" / "trials" / "000_initial_value=1e-3_seed=0"
    process = subprocess.Popen([sys.executable, *words])
    end = time.monotonic() + 300
    while not list(first.glob("checkpoints/step_*4/checkpoint.json")):
        assert time.monotonic() < end
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(0.1) is None, "it ended before"
    trial = os.pidfd_open(int((first / ".lock").read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert select.select([trial], [], [], 120)[0], "the trial goes on without its sweep"
    assert not (first / "trial.json").exists()
    steps = [
        json.loads(line)["step"] for line in (first / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(steps) < 16
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from" in (first / "output.txt").read_text()
    assert "2 trials finished" in done.stdout


class FakeOptuna:
    """The part of Optuna's interface that a search uses, with a study in memory."""

    def __init__(self) -> None:
        self.trials: list[Any] = []
        self.sampler = ""
        states = SimpleNamespace(
            RUNNING="running", FAIL="fail", COMPLETE="complete", WAITING="waiting"
        )
        self.queue: list[dict[str, Any]] = []
        self.trial = SimpleNamespace(TrialState=states, Trial=lambda study, id: self.trials[id])
        self.logging = SimpleNamespace(set_verbosity=lambda level: None, WARNING=30)
        self.samplers = SimpleNamespace(
            TPESampler=lambda seed: f"tpe {seed}", RandomSampler=lambda seed: f"random {seed}"
        )
        self.pruners = SimpleNamespace(SuccessiveHalvingPruner=object, NopPruner=object)

    def create_study(self, **settings: Any) -> Any:
        self.settings = settings
        return self

    def get_trials(self, states: Any = None, deepcopy: bool = True) -> list[Any]:
        return [t for t in self.trials if states is None or t.state in states]

    def ask(self) -> Any:
        number = len(self.trials)
        fixed, params = self.queue.pop() if self.queue else {}, {}

        def chosen(path: str, value: Any) -> Any:
            return params.setdefault(path, fixed.get(path, value))

        trial = SimpleNamespace(
            number=number, _trial_id=number, state="running", value=None, params=params,
            suggest_float=lambda path, low, high, log: chosen(path, low * (number + 1)),
            suggest_int=lambda path, low, high, log: chosen(path, low + number),
            suggest_categorical=lambda path, values: chosen(path, values[number % len(values)]),
        )  # fmt: skip
        self.trials.append(trial)
        return trial

    def enqueue_trial(self, params: dict[str, Any]) -> None:
        self.queue.append(params)

    def tell(self, trial: Any, value: float | None = None, state: str = "complete") -> None:
        trial.value, trial.state = value, state


def test_a_search_asks_for_settings_tells_values_and_resumes_a_trial_that_was_running(
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


@pytest.mark.parametrize(
    ("steps", "killed"),
    [
        (200, ()),
        (200, ("002_", "004_")),
        (200, ("late",)),
        (200, ("unseen",)),  # ended before the sweep looked at its evaluations
        (20000, ()),  # 1 % of the steps are 200: nothing is compared before
    ],
)
def test_halving_ends_the_same_trials_when_it_is_killed_or_late(
    steps: int, killed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    fake, left = FakeTrainer(monkeypatch), list(killed)

    def train(self: Trainer, trial: SweepTrial, stops: Any) -> int:
        number, log = int(trial.name[:3]), Path(self.logdir(trial), "metrics.jsonl")
        log.parent.mkdir(parents=True, exist_ok=True)
        losses = [(number * 7) % 5 + step / 1000 for step in range(20, 220, 20)]
        # A run that is resumed may have lost its last evaluations.
        for count in range(3 if killed == ("late",) else 0, len(losses) + 1):
            lines = [
                {"step": 20 * (i + 1), "split": "dev", "loss": losses[i]} for i in range(count)
            ]
            log.write_text("".join(json.dumps(line) + "\n" for line in lines))
            if killed != ("unseen",) and stops():
                if trial.name[:4] in left:  # after the decision, before the trial has ended
                    left.remove(trial.name[:4])
                    raise KeyboardInterrupt
                break
        fake.trained.append(trial.name)
        record = {"exit_code": 0, "settings": dict(trial.settings), "seed": 0}
        (log.parent / "trial.json").write_text(json.dumps(record))
        (log.parent / "params.txt").write_text(PARAMS.format(rate=1e-3, seed=0))
        return ExitCode.OK

    monkeypatch.setattr(Trainer, "train", train)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=halving", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3:1e-2", "--trials=6", f"--steps={steps}"]  # fmt: skip
    assert ExitCode.OK in (sweep.main(words) for _ in range(3))  # it is killed at most twice
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/optuna.db")
    ends = [trial.user_attrs.get("ended_at") for trial in study.trials]
    first = 20 if steps == 200 else 200
    assert ends == [None, first, first, first, first, None]  # trials 0 and 5 are equally good
    assert [t.value for t in study.trials] == [
        pytest.approx((number * 7) % 5 + 0.02) for number in range(6)
    ]
    assert left in ([], ["late"], ["unseen"]) and sorted(fake.trained) == sorted(set(fake.trained))


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


def test_a_trial_without_a_result_is_not_finished(tmp_path: Path) -> None:
    trainer, trial = Trainer(str(tmp_path), []), SweepTrial("t", {}, 0)
    (tmp_path / "t").mkdir()
    for text in ("", "{", "[]", '{"exit_code": "x"}'):
        (tmp_path / "t" / "trial.json").write_text(text)
        assert trainer.code(trial) is None
