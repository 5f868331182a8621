"""Tests of tekso-trainer as a user runs it: kill -9, signals, a full disk, foreign logdirs."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from line_experiments import LINE, command, main, run
from sampling import sample

from tekso.framework import commands
from tekso.framework.run import missing_run
from tekso.framework.run.opened import open_run


def start_and_stop(
    package: Path, logdir: Path, *, after_step: int, number: signal.Signals
) -> tuple[int, str, str]:
    """Sends a signal to a training process once it has reported a step; returns code and output."""
    words = command(LINE, f"--logdir={logdir}", *DETERMINISTIC)
    process = processes.start(words, cwd=package, live=True)
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith(f"step {after_step}/"):
            process.send_signal(number)
            break
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode is not None
    return process.returncode, seen + stdout, stderr


def losses(logdir: Path, split: str = "train") -> dict[int, float]:
    records = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    found = [(record["step"], record["loss"]) for record in records if record["split"] == split]
    assert len(dict(found)) == len(found), "a step is there twice"
    return dict(found)


DETERMINISTIC = ("--deterministic", "--log_every=1")


@pytest.fixture(scope="module")
def whole(package: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that nothing interrupts, and what it printed."""
    logdir = package / "whole"
    done = run(package, LINE, f"--logdir={logdir}", *DETERMINISTIC)
    assert done.returncode == 0, done.stderr
    return logdir, done


# --- a run ---


def test_a_run_leaves_all_that_is_promised(whole: Any) -> None:
    logdir, _ = whole
    names = {path.name for path in logdir.iterdir()}
    assert names >= {
        "params.txt", "params.diff.txt", "command.txt", "checkpoints", "events", "metrics.jsonl",
        "curves.png", "samples.txt",
    }  # fmt: skip
    assert list(losses(logdir)) == list(range(1, 41))
    assert list(losses(logdir, "dev")) == [15, 30, 40]
    assert (
        "run.deterministic : False -> True  # --deterministic"
        in (logdir / "params.diff.txt").read_text()
    )
    assert "--log_every=1" in (logdir / "command.txt").read_text()
    assert (logdir / "samples.txt").read_text().startswith("w is ")
    assert {path.name for path in (logdir / "events").iterdir()} == {"train", "dev"}


def test_a_profile_and_figures_of_weights_are_written(package: Path, tmp_path: Path) -> None:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    every = "--set=run.weight_figures_every_steps=4"
    flags = [LINE, f"--logdir={tmp_path}", "--steps=9", "--profile_steps=3-5", every]
    done = run(package, *flags)
    assert done.returncode == 0, done.stderr
    assert f"profile of steps 3-5: {tmp_path}/profile" in done.stdout
    assert re.search(r"(?s)time of the run: .*compile ", done.stdout), done.stdout
    (path,) = tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    names = [m.name for plane in space.planes for m in plane.event_metadata.values()]
    assert any(name.startswith("train") for name in names)
    rows = [json.loads(line) for line in (tmp_path / "weights.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8]
    assert all(0 < row["update_ratio/w"] < 1 < 10 * row["norm/w"] for row in rows)
    events = [path.read_bytes() for path in tmp_path.glob("events/weights/events.*")]
    assert len(events) == 1 and b"update_ratio/w" in events[0]


UNDECODED = """
from lines import experiments
from tekso.framework.registry import register


class Undecoded(experiments.Regression):
    calls = 0

    def decode(self, program, input):
        self.calls += 1
        return None if self.calls == 1 else [].wrong  # the first call tries it


@register
class Line(experiments.Line):
    def task(self):
        return Undecoded.Params()
"""


def test_an_error_of_decoding_at_the_end_follows_the_report_of_the_run(
    package: Path, tmp_path: Path
) -> None:
    (package / "undecoded.py").write_text(UNDECODED)
    words = ["--import=undecoded", "--model=undecoded.Line", f"--logdir={tmp_path}", "--steps=3"]
    done = processes.run(["-m", "tekso.tools.trainer", *words], cwd=package, timeout=120)
    assert done.returncode == 1
    assert "done: 3 steps" in done.stdout and "files of this run" in done.stdout
    assert "--mode=eval" in done.stdout and "--mode=decode" not in done.stdout
    assert "'list' object has no attribute 'wrong'" in done.stderr


def test_output_to_a_pipe_is_plain_lines_and_nothing_of_others(whole: Any) -> None:
    _, done = whole
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 40 and all(len(line) <= 80 for line in steps)
    assert re.match(
        r"step 20/40 +loss \d\.\d+ +grad .* +lr .* ex/s +wait +\d+% .* left$", steps[19]
    )
    assert any("next commands" in line for line in lines)


def test_what_to_type_next_works(package: Path, whole: Any) -> None:
    logdir, done = whole
    program = f"  {commands.typed('tekso-trainer', folder=str(package))} --import=lines "
    lines = [line.removeprefix(program) for line in done.stdout.splitlines() if program in line]
    typed = [shlex.split(line) for line in lines]
    (evaluate,) = [words for words in typed if "--mode=eval" in words]
    evaluated = run(package, *evaluate, "--format=json")
    assert evaluated.returncode == 0, evaluated.stderr
    figures = json.loads(evaluated.stdout)
    assert figures["step"] == 40
    assert figures["dev"]["loss"] == pytest.approx(losses(logdir, "dev")[40], rel=1e-6)
    (decode,) = [words for words in typed if "--mode=decode" in words]
    decoded = run(package, *decode)
    assert decoded.stdout == (logdir / "samples.txt").read_text(), decoded.stderr
    assert losses(logdir, "dev").keys() == {15, 30, 40}  # the log of the training is as it was


@pytest.mark.parametrize("torn", sample([False, True], quick=[True]))
def test_kill_9_and_the_same_command_give_the_same_run_to_the_last_bit(
    package: Path, tmp_path: Path, whole: Any, torn: bool
) -> None:
    code, seen, _ = start_and_stop(package, tmp_path, after_step=29, number=signal.SIGKILL)
    assert code == -signal.SIGKILL and "step 40/40" not in seen
    assert max(losses(tmp_path)) >= 29
    if torn:
        newest = max((tmp_path / "checkpoints").glob("step_*"))
        data = newest / "tensors.data-00000-of-00001"
        data.write_bytes(data.read_bytes()[:-7])
    again = run(package, LINE, f"--logdir={tmp_path}", *DETERMINISTIC)
    assert again.returncode == 0, again.stderr
    assert "resuming from" in again.stdout
    assert ("skipped the damaged checkpoint" in again.stdout) == torn
    assert losses(tmp_path) == losses(whole[0])
    assert losses(tmp_path, "dev") == losses(whole[0], "dev")


@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGINT], quick=[signal.SIGTERM]))
def test_a_signal_saves_and_the_same_command_continues(
    package: Path, tmp_path: Path, whole: Any, number: signal.Signals
) -> None:
    code, seen, stderr = start_and_stop(package, tmp_path, after_step=11, number=number)
    assert code == 128 + number
    assert "Traceback" not in stderr and f"{number.name}: saving and stopping" in stderr
    (stopped,) = [line for line in seen.splitlines() if line.startswith("stopped by")]
    if number == signal.SIGINT:
        return  # what was saved is the same
    step = int(re.findall(r"after step (\d+) of 40", stopped)[0])
    again = run(package, LINE, f"--logdir={tmp_path}", *DETERMINISTIC)
    assert f"step_{step:08d}: {40 - step} steps are left" in again.stdout, again.stderr
    assert "\n  the results equal those of an uninterrupted run to the last bit\n" in again.stdout
    assert losses(tmp_path) == losses(whole[0])


@pytest.mark.slow
def test_evaluation_batches_smaller_than_the_devices_have_the_losses_of_one_device(
    package: Path, whole: tuple[Path, Any], tmp_path: Path
) -> None:
    small = "--set=eval_inputs.dev.batch_size=4"
    done = run(package, LINE, f"--logdir={tmp_path}", "--cpu_devices=5", small, *DETERMINISTIC)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path, "dev")
    assert len(found) > 1 and found == pytest.approx(losses(whole[0], "dev"), rel=1e-5)


def test_follow_evaluates_every_checkpoint_beside_training_until_the_run_is_finished(
    package: Path, tmp_path: Path, whole: Any
) -> None:
    keep = "--set=run.keep_last_checkpoints=50"
    train = processes.start(
        command(LINE, f"--logdir={tmp_path}", *DETERMINISTIC, keep), cwd=package, live=True
    )
    assert train.stdout.readline()  # the logdir is claimed
    while not (tmp_path / "params.txt").exists() and train.poll() is None:
        train.stdout.readline()
    follow = run(package, f"--logdir={tmp_path}", "--mode=follow")
    train.communicate(timeout=120)
    assert train.returncode == 0 and follow.returncode == 0, follow.stderr
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    figures = {record["step"]: record["loss"] for record in map(json.loads, lines)}
    assert list(figures) == [8, 15, 16, 24, 30, 32, 40] and len(lines) == 7
    of_training = losses(tmp_path, "dev")
    assert of_training == losses(whole[0], "dev")
    for step in (15, 30, 40):
        assert figures[step] == pytest.approx(of_training[step], rel=1e-6)
    assert [path.name for path in (tmp_path / "events_followed").iterdir()] == ["dev"]
    again = run(package, f"--logdir={tmp_path}", "--mode=follow")
    assert (again.returncode, again.stdout) == (0, "")


def test_follow_waits_for_a_run(
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = []

    def begin_another_run(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            (tmp_path / "params.txt").write_text("# model: some.Other\n")

    monkeypatch.setattr(missing_run.time, "sleep", begin_another_run)
    assert main(LINE, f"--logdir={tmp_path}", "--mode=follow") == 1
    output = capsys.readouterr().err
    assert output.count(f"waiting for a run in {tmp_path} (Ctrl-C ends)") == 1 and len(waited) == 2
    assert "is the logdir of some.Other, but the model is" in output


# --- a logdir that does not fit ---


def test_a_logdir_of_another_experiment_is_refused(
    here: Path, whole: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--model=lines.experiments.Other", f"--logdir={whole[0]}") == 1
    error = capsys.readouterr().err
    assert "logdir of lines.experiments.Line, but the model is lines.experiments.Other" in error
    assert len(error.splitlines()) == 1


def test_another_shape_of_weights_is_an_error_that_names_them_and_what_changed(
    package: Path, whole: Any
) -> None:
    before = (whole[0] / "params.txt").read_bytes()
    done = run(package, LINE, f"--logdir={whole[0]}", "--set=task.dim=5", "--set=*.dim=5")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "weights/w is [3], must be [5]" in done.stderr
    assert "Undo the changes since it was saved, or train in another" in done.stderr
    assert "changed since then: task.dim : 3 -> 5  # --set" in done.stdout
    assert (whole[0] / "params.txt").read_bytes() == before


def test_a_warm_start_takes_weights_alone_and_is_done_once(
    package: Path, tmp_path: Path, whole: Any
) -> None:
    given = (LINE, f"--logdir={tmp_path}", f"--warm_start={whole[0]}", "--steps=1", *DETERMINISTIC)
    begun = run(package, *given, "--set=learner.schedule.initial_value=0.0")
    assert begun.returncode == 0, begun.stderr
    assert f"warm start from {whole[0]}/checkpoints/step_00000040 (step 40" in begun.stdout
    of_other, of_this = (open_run(str(path)).checkpoint for path in (whole[0], tmp_path))
    np.testing.assert_array_equal(of_this.read("weights/w"), of_other.read("weights/w"))
    assert of_this.step == of_this.read("learner/updates/applied") == 1
    resumed = run(package, *given)
    assert "run.warm_start is not used: the run resumes from its own step 1" in resumed.stdout
    other = run(
        package, LINE, f"--logdir={tmp_path}/b", f"--warm_start={whole[0]}", "--set=*.dim=5"
    )
    assert other.returncode == 1 and "Traceback" not in other.stderr
    assert "w is [3] in" in other.stderr
    assert "and w of the new model is [5]: to keep its initial" in other.stderr
    assert "as of a new head, add it to run.warm_start.main.ignore; to copy" in other.stderr
    assert not (tmp_path / "b" / "params.txt").exists()


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
from tekso.tools import trainer
sys.exit(trainer.main(["tekso-trainer", "--import=lines", *sys.argv[1:]]))
"""


def test_a_full_disk_is_an_error_that_says_what_is_needed(package: Path, tmp_path: Path) -> None:
    flags = [LINE, f"--logdir={tmp_path}", "--set=*.dim=5000", "--set=run.eval_every_steps=0"]
    done = processes.run(["-c", FULL_DISK, *flags], cwd=package, timeout=120)
    assert done.returncode == 5 and len(done.stderr.splitlines()) == 1
    assert re.search(
        r"cannot write the checkpoint .*step_0000\d+: the file exceeds the size limit of 30,000 b",
        done.stderr,
    )
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.slow
def test_the_default_experiment_trains_evaluates_samples_and_continues(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # LLVM takes longer to optimize than the steps take.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    flags = ["--model=lm.python_source.Tiny", f"--logdir={tmp_path}", "--log_every=5"]
    flags += ["--set=eval_inputs.dev.max_batches=2", "--set=task.decode.max_new_tokens=20"]
    first = run(package, *flags, "--set=*.num_layers=1", "--steps=10")
    assert first.returncode == 0, first.stderr
    assert "bits/byte" in first.stdout and "gzip" in first.stdout and "after 'def '" in first.stdout
    assert losses(tmp_path)[10] < losses(tmp_path)[1]
    # The first process has compiled; the other continues without.
    on = run(package, f"--logdir={tmp_path}", "--steps=15", "--set=execution.xla=none")
    assert on.returncode == 0, on.stderr
    assert list(losses(tmp_path)) == [1, 5, 10, 15]
