"""Tests of tekso-sweep: what it runs, what it does not run again, and a sweep that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import time
from pathlib import Path

import processes
import pytest
from fake_sweeps import RATE, TINY, FakeTrainer

from tekso.framework.exit_codes import ExitCode
from tekso.tools import sweep


def run(folder: Path, *flags: str) -> int:
    sweeps = [f"--sweep={RATE}=1e-3,3e-3", "--metric=dev/loss"]
    return sweep.main(["tekso-sweep", TINY, f"--logdir={folder}", "--seeds=2", *sweeps, *flags])


# Where a metric is wrong, an evaluation is traced, to list those that it reports.
ONE_LAYER = ["--set=*.num_layers=1"]
NAMES = [f"{i:03d}_initial_value={rate}_seed={seed}"
         for i, rate in enumerate(("1e-3", "3e-3")) for seed in (0, 1)]  # fmt: skip


def test_finished_trials_are_not_run_again_and_a_failed_one_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, folder = FakeTrainer(monkeypatch), tmp_path / "sweep"
    fake.codes = {NAMES[0]: ExitCode.NOT_FINITE, NAMES[2]: ExitCode.DISK_FULL}
    assert run(folder) == ExitCode.DISK_FULL
    assert fake.trained == NAMES[:3]
    output = capsys.readouterr()
    assert "diverged" in output.out and "ended with exit code 5: the last words" in output.err
    fake.codes, fake.trained = {}, []
    assert run(folder) == ExitCode.OK
    assert fake.trained == NAMES[2:]
    output = capsys.readouterr()
    assert "trial 1/4: learner.schedule.initial_value=1e-3, seed 0: finished before" in output.out
    assert "initial_value=3e-3" in output.out and (folder / "comparison.html").exists()
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


def test_settings_that_fail_are_recorded_and_the_sweep_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrainer(monkeypatch)
    fake.codes = {NAMES[0]: ExitCode.FAILED, NAMES[1]: ExitCode.FAILED}
    assert run(tmp_path) == ExitCode.FAILED
    assert fake.trained == NAMES
    output = capsys.readouterr()
    assert output.out.count("failed: the last words") == 2 and "2 trials finished" in output.out
    assert f"failed: {RATE}=1e-3, seed 0: the last words" in output.err
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


def test_another_sweep_in_the_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrainer(monkeypatch)
    assert run(tmp_path) == ExitCode.OK
    fake.trained = []
    assert run(tmp_path, "--steps=3") == ExitCode.WRONG_USAGE
    assert "has another sweep (--steps was null)" in capsys.readouterr().err
    # A grid uses the metric for its comparison only, so another one can be given.
    assert run(tmp_path, "--metric=dev/perplexity") == ExitCode.WRONG_USAGE
    assert "no run has the curve dev/perplexity; the runs have: dev/loss" in capsys.readouterr().err
    assert run(tmp_path, "--metric=dev/loss") == ExitCode.OK
    assert fake.trained == []


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is damaged (Expecting property name"), ("[1]", "is damaged: it should have the flags")],
)
def test_a_damaged_description_is_named(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake = FakeTrainer(monkeypatch)
    (tmp_path / "sweep.json").write_text(text)
    assert run(tmp_path) == ExitCode.WRONG_USAGE
    assert f"tekso-sweep: {tmp_path}/sweep.json {why}" in capsys.readouterr().err
    assert fake.trained == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--sweep=learner.schedul=1"], "tekso-sweep: --sweep learner.schedul=1: "),
        (["--sweep=learner.schedul=1"], "did you mean learner.schedule"),
        (["--sweep=run.log_every_steps=5,none"], "run.log_every_steps: must be int"),
        (["--sweep=learner.optimizer.beta1=0.9,1.5"], "beta1=1.5: AdamW: beta1 is 1.5"),
        (["--sweep=task.model.stack.layer.attention.num_heads=2,5"], "num_heads=5: "),
        (["--sweep=input.batch_size=4,0"], "batch_size=0: input.batch_size is 0, but must be at"),
        (["--sweep=run.seed=1,2"], "the seeds of a sweep are set by --seeds"),
        ([f"--sweep={RATE}=5"], "gives a path twice"),
        (
            ["--steps=40", "--set=run.steps=20"],
            "--set run.steps=20 and --steps=40 set the same field: leave out one of them",
        ),
        (
            ["--steps=40", "--sweep=run.steps=20,30"],
            "--sweep run.steps and --steps=40 set the same",
        ),
        ([f"--set={RATE}=1e-3"], f"--set {RATE}=1e-3 and --sweep {RATE} set the same field"),
        (["--set=*.initial_value=1e-3"], f"--set *.initial_value=1e-3 and --sweep {RATE} set the"),
        (
            ["--set=run.seed=0", "--set=task.model.stack.num_layers=1", "--sweep=*.num_layers=1,2"],
            "--set task.model.stack.num_layers=1 and --sweep *.num_layers set the same field",
        ),
        (
            ["--set=run.log_every_steps=1", "--set=run.log_every_steps=2"],
            "--set run.log_every_steps=1 and --set run.log_every_steps=2 set the same field",
        ),
        (["--trials=4"], "--trials requires --search="),
        (["--metric=dev/loss", "--goal=min"], "--goal requires --search=random, tpe or halving"),
        (["more"], "'more' is not a flag"),
        (["--metric=valid/loss"], "--metric=valid/loss: expected evaluation/metric, as in dev/l"),
        (["--metric=loss"], "the evaluations are dev, and train"),
        (
            [*ONE_LAYER, "--metric=dev/nope"],
            "--metric=dev/nope: an evaluation of dev reports bits_per_byte, l",
        ),
        (
            [*ONE_LAYER, "--metric=dev/perplexty", "--search=random", "--trials=2"],
            "mean perplexity?",
        ),
        (
            ["--model=mt.cldr.EnDeLstm", "--sweep=input.batch_size=8", "--metric=dev/nope"],
            "reports loss, perplexity, and with decoding bleu, chrf; if score() of Translation "
            "reports 'nope', declare it in its goals",
        ),
        (["--logdir=gs://bucket/sweep"], "requires a folder on a local file system"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(
    flags: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake = FakeTrainer(monkeypatch)
    assert run(tmp_path / "sweep", *flags) == ExitCode.WRONG_USAGE
    assert expected in capsys.readouterr().err
    assert fake.trained == [] and not (tmp_path / "sweep").exists()


CHANGED = "--set=eval_inputs.dev.changes={'source.files': 'a.txt'}"


@pytest.mark.parametrize(
    "flags",
    [
        ["--metric=dev/bits_per_byte"],
        ["--metric=dev/eval_seconds"],
        ["--metric=train/nope"],  # what training logs depends on its settings
        ["--metric=dev/nope", CHANGED],
        ["--model=image.digits.Mlp", "--metric=dev/crops/top_5_accuracy"],  # of score()
        ["--model=asr.prompts.Ctc", "--metric=dev/deletions"],
    ],
)
def test_metrics_that_evaluations_may_report_are_accepted_before_the_first_trial(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTrainer(monkeypatch)
    run(tmp_path, *flags)
    assert fake.trained[:1] == NAMES[:1]


@pytest.mark.parametrize(
    ("metric", "records", "expected"),
    [
        ("train/mt/loss", ["train"] * 3, ""),  # a step of another task may have it
        ("dev/nope", ["dev"], "an evaluation of dev reports loss\n"),
        ("dev/nope", ["train"], ""),
        ("dev/loss", ["dev"], ""),
        ("dev/lo_seconds", ["dev"], "an evaluation of dev reports loss\n"),
    ],
)
def test_a_metric_that_the_first_evaluation_lacks_stops_the_first_trial(
    metric: str, records: list[str], expected: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fake = FakeTrainer(monkeypatch)
    fake.splits = records
    code = run(tmp_path, f"--metric={metric}", CHANGED)
    assert (f"--metric={metric}: {expected}" if expected else "") in capsys.readouterr().err
    assert fake.ended == (NAMES[:1] if expected else []) and fake.trained[:1] == NAMES[:1]
    if expected:  # another metric resumes the trial that was stopped
        assert code == ExitCode.WRONG_USAGE
        assert run(tmp_path, f"--metric={records[0]}/loss", CHANGED) == ExitCode.OK
        assert fake.trained == [NAMES[0], *NAMES]


def test_a_metric_that_training_never_reports_ends_the_sweep_after_its_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrainer(monkeypatch)
    fake.splits = ["train", "train"]
    for _ in range(2):  # the second time, the trial has finished before
        assert run(tmp_path, "--metric=train/los") == ExitCode.WRONG_USAGE
        expected = "--metric=train/los: training reports loss; did you mean train/loss?"
        assert expected in capsys.readouterr().err
    assert fake.trained == NAMES[:1] and fake.ended == []


def test_a_first_trial_that_diverged_may_lack_the_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTrainer(monkeypatch)
    fake.splits, fake.codes[NAMES[0]] = ["train"], ExitCode.NOT_FINITE
    fake.codes[NAMES[1]] = -signal.SIGKILL
    for _ in range(2):
        assert run(tmp_path, "--metric=train/los") == 128 + signal.SIGKILL
    assert fake.trained == [*NAMES[:2], NAMES[1]]


def test_values_that_fit_each_other_only_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeTrainer(monkeypatch)
    layer = "task.model.stack.layer.attention.num_heads"
    assert run(tmp_path, f"--sweep={layer}=2,3", "--sweep=task.model.dim=128,96") == ExitCode.OK


@pytest.mark.slow
def test_a_sweep_that_is_killed_resumes_its_trial_and_runs_no_other_again(tmp_path: Path) -> None:
    python = processes.interpreter(tmp_path / "python")  # its trials are forks, too
    code = f"import sys; sys.executable = {python!r}; from tekso.tools import sweep; "
    words = [
        "-c", f"{code}sys.exit(sweep.main(sys.argv))",
        TINY, f"--logdir={tmp_path}/sweep", "--steps=16",
        f"--sweep={RATE}=1e-3", "--seeds=2", "--set=*.num_layers=1", "--set=execution.xla=none",
        "--set=execution.towers=1",
        "--set=run.decode_at_end=false", "--set=eval_inputs.dev.max_batches=1",
        "--set=run.log_every_steps=1", "--set=run.checkpoint_every_steps=2",
    ]  # fmt: skip
    first = tmp_path / "sweep" / "trials" / "000_initial_value=1e-3_seed=0"
    command = shlex.split(processes.forwarding(*words))
    process = subprocess.Popen(command, env={**os.environ, **processes.OP_BY_OP})
    end = time.monotonic() + 300
    while not list(first.glob("checkpoints/step_*4/checkpoint.json")):
        assert time.monotonic() < end
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(0.1) is None, "it ended before"
    trial = os.pidfd_open(int((first / ".lock").read_text()))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert select.select([trial], [], [], 120)[0], "the trial continues without its sweep"
    assert not (first / "trial.json").exists()
    steps = [
        json.loads(line)["step"] for line in (first / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(steps) < 16
    done = processes.run(words, op_by_op=True)
    assert done.returncode == 0, done.stderr
    assert "resuming from" in (first / "output.txt").read_text()
    assert "2 trials finished" in done.stdout
