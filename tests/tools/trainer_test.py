"""Tests of tekso-trainer as a user runs it: typos, kill -9, signals, a full disk, foreign logdirs.

All tests use an experiment of a package outside of the repository. Its model is so small that a
process spends most of its time on starting.
"""

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
from sampling import sample

from tekso.framework import commands, registry
from tekso.framework.run import missing_run
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.opened import open_run
from tekso.tools import trainer

EXPERIMENTS = '''
"""Experiments of a package of its own."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tekso.framework import ops, schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.initializers import Normal
from tekso.framework.input.input import ExampleInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.registry import register
from tekso.framework.task import Decoded, LossSums, Task


class Points(ExampleInput):
    class Params(ExampleInput.Params):
        dim: int = param("Size of x.", default=3)

    @property
    def num_examples(self):
        return 50

    def examples(self, index, epoch):
        x = np.random.default_rng(5).normal(size=(50, self.params.dim)).astype(np.float32)[index]
        return {"x": x, "y": 2 * x[:, 0] - 1, "weights": np.ones(len(index), np.float32)}


class Regression(Task):
    class Params(Task.Params):
        dim: int = param("Size of x.", default=3)
        dropout: float = param("Rate of dropout on x.", default=0.1)

    def __init__(self, params):
        super().__init__(params)
        self.weight("w", [self.params.dim], dims=("embed",), init=Normal.Params())

    def loss_weight(self, batch):
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta, batch, ctx):
        x = ops.dropout(ctx, batch["x"], self.params.dropout, self)
        error = tf.square(tf.linalg.matvec(x, theta.w) - batch["y"])
        return LossSums(tf.reduce_sum(batch["weights"] * error))

    def decode(self, program, input):
        w = program.call(read_w).numpy()
        return Decoded(f"w is {w[0]:.3f}", [{"w": w.tolist()}])


def read_w(theta, ctx):
    return theta.w


@register
class Line(Experiment):
    """Fits a line."""

    def task(self):
        return Regression.Params()

    def input(self):
        return Points.Params(batch_size=10)

    def eval_inputs(self):
        return {"dev": Points.Params(batch_size=20, order="once")}

    def learner(self):
        return Learner.Params(
            optimizer=Adam.Params(), schedule=schedules.Cosine.Params(initial_value=0.05)
        )

    def run(self):
        return Run.Params(
            steps=40, log_every_steps=10, eval_every_steps=15, checkpoint_every_steps=8
        )


@register
class Other(Line):
    """Fits a line under another name."""


@register
class Misspelt(Line):
    """Sets what is not there."""

    def run(self):
        return super().run().set(stepz=3)


@register
class Faulty(Line):
    """Has a fault that no message explains."""

    def run(self):
        return 1 / 0
'''
LINE = "--model=lines.experiments.Line"


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `lines`."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "lines").mkdir()
    (folder / "lines" / "__init__.py").write_text("")
    (folder / "lines" / "experiments.py").write_text(EXPERIMENTS)
    return folder


@pytest.fixture
def here(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder as working directory, as somebody has it who types commands."""
    monkeypatch.chdir(package)
    return package


def main(*args: str) -> int:
    """Runs the trainer in this process; for what ends before TensorFlow's devices are set up."""
    return trainer.main(["tekso-trainer", "--import=lines", *args])


def command(*args: str) -> list[str]:
    return ["-m", "tekso.tools.trainer", "--import=lines", *args]


def run(package: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return processes.run(command(*args), cwd=package, timeout=120)


def start_and_stop(
    package: Path, logdir: Path, *, after_step: int, number: signal.Signals
) -> tuple[int, str, str]:
    """Sends a signal to a training process once it has told a step; returns code and output."""
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
def test_a_signal_saves_and_the_same_command_goes_on(
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
    assert "w is [3] in" in other.stderr and "and w is [5]: to keep its initial" in other.stderr
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


# --- what is typed wrong ---


WRONG = [
    ([], "--model is missing"),
    (["--modle=x"], "no flag --modle; did you mean --mode or --model?"),
    (["--mode=trian", LINE], "--mode=trian"),
    (["lines.experiments.Line"], "did you mean --model=lines.experiments.Line?"),
    (["--model=lines.experiments.Lin"], "did you mean lines.experiments.Line?"),
    (["--model=lines.experiment.Line"], "did you mean lines.experiments.Line?"),
    ([LINE, "--set=run.stepz=5"], "did you mean run.steps?"),
    (
        [LINE, "--set=batch_size=8"],
        "did you mean input.batch_size or eval_inputs.dev.batch_size, or *.batch_size for all 2?",
    ),
    ([LINE, "--set=lerner.schedule=5"], "did you mean learner?"),
    ([LINE, "--set=run.steps=five"], "run.steps: must be int, given 'five'"),
    ([LINE, "--set=run.deterministic=maybe"], "run.deterministic"),
    ([LINE, "--set=*.dropot=0.5"], "did you mean task.dropout?"),
    ([LINE, "--set=run.steps"], "expected path=value"),
    ([LINE, "--format=json"], "writes its figures as JSON to metrics.jsonl"),
    ([LINE, "--batch_size=4"], "; settings of the experiment are set by --set, as in "),
    ([LINE, "--learning_rate=4"], "the learning rate is a field of learner.schedule"),
    ([LINE, "--learning-rate=4"], "the learning rate is a field of learner.schedule"),
    ([LINE, "--epochs=3"], "no flag --epochs; training is measured in steps: set --steps to "),
    ([LINE, "--max-steps=3"], "; the number of training steps is set by --steps"),
    ([LINE, "--checkpoint_dir=x"], "; --logdir names the folder of a run"),
    ([LINE, "--resume"], "repeat its command with the same --logdir"),
    ([LINE, "--set=run.num_epochs=3"], "; training is measured in steps: set --steps to "),
    ([LINE, "--set=learning_rate=4"], "the learning rate is set by learner.schedule"),
    ([LINE, "--set=*.drpoout_rate=4"], "did you mean task.dropout?"),
    ([LINE, "--logdir="], "--logdir is empty"),
    ([LINE, "--steps=many"], "--steps=many: expected a whole number; --help"),
    ([LINE, "--steps="], "--steps=: expected a whole number; --help"),
    ([LINE, "--execution=pipelind"], "data_parallel, mesh_sharded, pipelined, spmd_pipelined"),
    (
        [LINE, "--set=execution.num_stages=2"],
        "; --execution=pipelined has it; --execution=spmd_pipelined has it",
    ),
    (
        [LINE, "--execution=pipelined", "--set=execution.form=spmd"],
        "(form=spmd) is --execution=spmd_pipelined",
    ),
    (
        [LINE, "--execution=spmd_pipelined", "--set=execution.schedule=1f1b"],
        "as in gpipe; --execution=pipelined has it",
    ),
    (["--import=linse", LINE], "no package 'linse'"),
    (["--list=nothing.*"], "--list=nothing.*: no experiment matches; --list without"),
    (["--list=experiments.line"], "did you mean lines.experiments.Line?"),
    (["--list=gpt.m12"], "no experiment matches; did you mean lm.gpt.M124?"),
    (["--list=lm.python_sourse.Tiny"], "did you mean lm.python_source.Tiny or "),
    (["--list=*SOURCE.small"], "did you mean lm.python_source.Small?"),
]


@pytest.mark.parametrize(("args", "told"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_what_is_typed_wrong_is_one_message_and_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], told: str
) -> None:
    assert main(*args) == 2
    output = capsys.readouterr()
    assert output.out == "" and told in output.err
    assert output.err.startswith("tekso-trainer: ") and len(output.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--steps=-3"], "run.steps is -3, but must be at least 0"),
        (["--mode=inspect_model", "--set=run.steps=-3"], "run.steps is -3, but must be at least 0"),
    ],
)
def test_a_setting_that_is_out_of_range_is_one_message_and_code_1(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], told: str
) -> None:
    assert main(LINE, *args) == 1
    output = capsys.readouterr()
    assert output.out == "" and told in output.err
    assert output.err.startswith("tekso-trainer: ") and len(output.err.splitlines()) == 1


def test_a_package_that_was_not_imported_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer.main(["tekso-trainer", "--model=lines.other.Own"]) == 2
    assert "lines.other.Own: lines is your own package: add --import=lines" in (
        capsys.readouterr().err
    )


def test_a_mistake_in_an_experiment_is_told_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--model=lines.experiments.Misspelt", "--mode=inspect_params") == 1
    error = capsys.readouterr().err
    assert "did you mean steps?" in error and "Traceback" not in error
    line = EXPERIMENTS[: EXPERIMENTS.index("stepz")].count("\n") + 1
    assert f"lines/experiments.py:{line}, in run" in error


def test_a_fault_in_the_code_of_a_user_is_shown_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = ("--model=lines.experiments.Faulty", "--mode=inspect_params")
    assert main(*faulty) == 1
    first, place, code, hint = capsys.readouterr().err.splitlines()
    line = EXPERIMENTS[: EXPERIMENTS.index("1 / 0")].count("\n") + 1
    assert first == "tekso-trainer: ZeroDivisionError: division by zero"
    assert place.endswith(f"lines/experiments.py:{line}, in run)")
    assert code.strip() == "return 1 / 0" and "--traceback" in hint
    for command in (faulty, ("--model=lines.experiments.Misspelt",)):
        assert main(*command, "--traceback") == 1
        assert "Traceback" in capsys.readouterr().err


def test_an_execution_for_one_process_is_refused_before_others_are_waited_for(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cluster=localhost:1,localhost:2", "--process=0", f"--logdir={tmp_path}"]
    assert main(LINE, *flags, "--execution=pipelined") == 1
    told = capsys.readouterr().err
    assert "Pipelined runs in one process, but --cluster defines 2" in told
    assert "--execution=data_parallel or mesh_sharded" in told and "--cluster=none" in told


@pytest.mark.parametrize("mode", ["inspect_model", "inspect_sharding", "inspect_pipeline"])
def test_a_logdir_without_a_run_shows_nothing(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    assert main(LINE, f"--mode={mode}", f"--logdir={tmp_path}/none") == 2
    assert (
        "/none: there is no run; to show an experiment, give only --model"
        in capsys.readouterr().err
    )


def test_a_timeout_of_a_cluster_without_one_is_a_wrong_command_line(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(LINE, "--cluster_timeout_s=5", f"--logdir={tmp_path}") == 2
    assert "--cluster_timeout_s requires several processes" in capsys.readouterr().err


def test_a_cluster_that_makes_no_sense_is_a_wrong_command_line(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(LINE, "--cluster=localhost:1,localhost", "--process=0", f"--logdir={tmp_path}") == 2
    assert "'localhost' is not an address; expected host:port" in capsys.readouterr().err


def test_evaluating_without_a_checkpoint_says_what_to_do(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(LINE, f"--logdir={tmp_path}", "--mode=eval") == 1
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert main(f"--logdir={tmp_path}") == 1
    assert "name the experiment with --model" in capsys.readouterr().err


# --- what is shown ---


def test_help_shows_our_flags_in_lines_that_fit(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--help") == 0
    text = capsys.readouterr().out
    flags = "model logdir mode set steps seed deterministic execution cpu_devices tpu import list"
    for flag in [*flags.split(), "format", "log_every", "checkpoint"]:
        assert f"  --{flag}" in text
    usage = commands.typed("tekso-trainer")  # as long as the path to it
    assert all(len(line) <= 100 for line in text.splitlines() if usage not in line)
    assert "showprefixforinfo" not in text


def test_list_shows_key_task_count_summary_and_place(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--list=lines.*Line") == 0
    lines = capsys.readouterr().out.splitlines()
    number = EXPERIMENTS[: EXPERIMENTS.index("@register")].count("\n") + 1
    assert lines[0] == "lines.experiments.Line  (Regression, 3 weights)"
    assert lines[1].strip() == "Fits a line."
    assert lines[2].strip() in (f"lines/experiments.py:{number + i}" for i in (0, 1))
    assert main("--list", "--format=json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert all("ValueError" not in row.get("problem", "") for row in rows)
    broken = {row["key"]: row.get("problem", "") for row in rows}
    assert "ZeroDivisionError" in broken["lines.experiments.Faulty"]


def test_a_list_has_a_dash_and_the_reason_where_weights_cannot_be_counted(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--list=lm.text_files.Char") == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "lm.text_files.Char  (LanguageModel, - weights: task.model.vocab_size is not set)"
    )
    assert len(rest) == 2
    assert main("--list=lines.*Faulty") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("(-, - weights: ZeroDivisionError: division by zero)")


def test_inspect_params_shows_values_docs_and_origins(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [LINE, "--mode=inspect_params", "--set=task.dropout=0.25", "--steps=7"]
    assert main(*flags) == 0
    text = capsys.readouterr().out
    assert re.search(r"dropout = 0.25 +# \[--set\] Rate of dropout on x.", text)
    assert re.search(r"steps += 7 +# \[--steps\] Number of training steps.", text)
    assert "task  (lines.experiments:Regression)" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert main(*flags, "--format=json") == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)["params"]}
    assert rows["task.dropout"]["value"] == "0.25" and rows["task.dropout"]["origin"] == "--set"
    assert rows["input.batch_size"]["origin"].startswith("lines/experiments.py:")
    assert rows["eval_inputs.dev.batch_size"]["type"] == "int"


def test_inspect_model_counts_without_allocating(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [LINE, "--mode=inspect_model", "--set=task.dim=1_000_000_000_000"]
    assert main(*flags, "--format=json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["total_weights"] == 10**12 and table["total_bytes"] == 4 * 10**12
    (weight,) = table["weights"]
    assert weight == {
        "path": "w", "shape": [10**12], "dims": ["embed"], "size": 10**12, "dtype": "float32",
        "trainable": True,
    }  # fmt: skip
    assert main(*flags) == 0
    assert "total: 1,000,000,000,000 weights in 1 tensors, 4.0 TB" in capsys.readouterr().out


def inspect_sharding(package: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it compiles for devices that are not there."""
    return processes.run(command("--mode=inspect_sharding", *args), cwd=package)


@pytest.mark.slow
def test_inspect_sharding_of_4_9_billion_weights_on_512_devices(package: Path) -> None:
    done = inspect_sharding(
        package, "--model=lm.one_billion_words.Dff262144", "--execution=mesh_sharded",
        "--set=execution.mesh=batch:16;model:32", "--format=json",
        "--set=execution.rules=batch:batch;vocab:model;mlp:model;heads:model",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    layers, dim, heads, head_dim, d_ff, vocab, over = 6, 1024, 256, 256, 262_144, 32_768, 32
    split = layers * (4 * dim * heads * head_dim + 2 * dim * d_ff) + 2 * vocab * dim
    scales = (2 * layers + 1) * dim
    assert record["num_devices"] == 512 and record["axes"] == {"batch": 16, "model": over}
    assert record["weight_bytes_per_device"] == 4 * (split // over + scales)
    assert record["weight_bytes_per_device"] // 10**6 == 612
    weights = {weight["path"]: weight for weight in record["weights"]}
    hidden = weights["model/stack/layers/5/feed_forward/hidden/w"]
    assert hidden["dims"] == ["embed", "mlp"] and hidden["layout"] == [None, "model"]
    assert hidden["shard_shape"] == [dim, d_ff // over]
    assert hidden["bytes_per_device"] == 4 * dim * d_ff // over
    # Adafactor keeps rows, which are whole, and columns, of which a device holds its part.
    assert hidden["optimizer_bytes_per_device"] == 4 * (dim + d_ff // over)
    by_axis = {row["axis"]: row for row in record["collectives"]}
    assert {row["kind"] for row in record["collectives"]} == {"all-reduce"}
    # Gradients are added up over "batch", each of the size of its part; and three scalars.
    assert by_axis["batch"]["bytes"] == pytest.approx(record["weight_bytes_per_device"], abs=99)
    # A block costs one all-reduce forward and one backward, as do the two ends of the model.
    tokens = 256 * 256 // 16
    wholes = 2 * 2 * layers + 2
    assert by_axis["model"]["bytes"] == pytest.approx(4 * tokens * dim * wholes, rel=0.02)


def test_inspect_sharding_prints_lines_that_fit(package: Path) -> None:
    flags = [LINE, "--execution=mesh_sharded", "--set=execution.mesh=rows:2;columns:3"]
    rules = "--set=execution.rules=batch:rows;embed:columns"
    done = inspect_sharding(package, *flags, rules)
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    assert "rows ↓ │ columns →  0  1  2" in done.stdout
    assert "embed:columns  shards 1 weight: 3 into 1 per device" in done.stdout
    assert re.search(r"^w +1 +4 B +8 B$", done.stdout, re.MULTILINE)
    assert re.search(r"^  all-reduce +rows +3 ", done.stdout, re.MULTILINE)
    wrong = inspect_sharding(package, *flags, "--set=execution.rules=batch:rows;embedd:columns")
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert "rule embedd:columns: no tensor of the model has a dim embedd; did you mean embed?" in (
        wrong.stderr
    )


def test_inspect_sharding_without_a_mesh_says_how_to_give_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(LINE, "--mode=inspect_sharding") == 1
    message = capsys.readouterr().err
    assert "DataParallel, which does not use a mesh" in message
    assert "--execution=mesh_sharded --set execution.mesh=" in message


def test_inspect_model_of_a_run_knows_the_vocabulary_that_it_has_learned(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("abcdef" * 20)
    tree = registry.get("lm.text_files.Char")().tree()
    tree.set({"input.files": str(tmp_path / "a.txt"), "input.length": 5})
    logdir = Logdir(str(tmp_path / "run"))
    logdir.write_params("lm.text_files.Char", tree, tree)
    flags = [f"--logdir={logdir.path}", "--mode=inspect_model"]
    assert main(*flags) == 1  # nothing was learned yet
    assert "task.model.vocab_size is not set" in capsys.readouterr().err
    tree.input.instantiate(assets_dir=logdir.assets)
    assert main(*flags, "--format=json") == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert {w["path"]: w["shape"] for w in weights}["model/embedding/table"] == [6 + 2, 128]
    assert main("--model=lm.text_files.Char", *flags) == 0
    assert "8 × 128" in capsys.readouterr().out
    assert main("--model=lm.text_files.Bytes", *flags) == 1
    assert "is the logdir of lm.text_files.Char" in capsys.readouterr().err


@pytest.mark.slow
def test_every_registered_model_of_this_repository_is_counted_or_says_why(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--list=lm.*", "--format=json") == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["total_weights"] or "--set task.model.vocab_size=" in row["problem"]
        assert row["summary"] and row["task"]


@pytest.mark.slow
def test_the_default_experiment_trains_evaluates_samples_and_goes_on(
    package: Path, tmp_path: Path
) -> None:
    flags = ["--model=lm.python_source.Tiny", f"--logdir={tmp_path}", "--log_every=5"]
    small = ["--set=eval_inputs.dev.max_batches=2", "--set=task.decode.max_new_tokens=20"]
    first = run(package, *flags, *small, "--steps=10")
    assert first.returncode == 0, first.stderr
    assert "bits/byte" in first.stdout and "gzip" in first.stdout and "after 'def '" in first.stdout
    assert losses(tmp_path)[10] < losses(tmp_path)[1]
    on = run(package, f"--logdir={tmp_path}", "--steps=15")
    assert on.returncode == 0, on.stderr
    assert list(losses(tmp_path)) == [1, 5, 10, 15]


def test_an_empty_warm_start_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tekso-trainer", "--model=image.digits.Mlp", "--logdir=none", "--warm_start="]
    assert trainer.main(words) == 2
    assert "--warm_start is empty: give the folder of a run" in capsys.readouterr().err
