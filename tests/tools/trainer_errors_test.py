"""Tests of tekso-trainer with what is wrong: flags, settings, experiments, clusters."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_experiments import EXPERIMENTS, LINE, main

from tekso.tools import trainer

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
    ([LINE, "--profile_steps=5-3"], "--profile_steps=5-3: expected the first and the last step"),
    ([LINE, f"--profile_steps=1-{'9' * 19}"], "9: expected the first and the last step, count"),
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
    (["--import=lines/experiments.py", LINE], "as in Python: --import=lines.experiments"),
    (["--import=./lines/experiments", LINE], "as in Python: --import=lines.experiments"),
    (["--import=.", LINE], "--import=.: not the name of a package, as in --import=my_lab"),
    (["--list=nothing.*"], "no experiment matches; --list without a pattern shows all; --import=…"),
    (["--list=experiments.line"], "did you mean lines.experiments.Line?"),
    (["--list=gpt.m12"], "no experiment matches; did you mean lm.gpt.M124?"),
    (["--list=lm.python_sourse.Tiny"], "did you mean lm.python_source.Tiny or "),
    (["--list=*SOURCE.small"], "did you mean lm.python_source.Small?"),
]


@pytest.mark.parametrize(("args", "expected"), WRONG, ids=[" ".join(args) for args, _ in WRONG])
def test_what_is_typed_wrong_is_one_message_and_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    assert main(*args) == 2
    output = capsys.readouterr()
    assert output.out == "" and expected in output.err
    assert output.err.startswith("tekso-trainer: ") and len(output.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--steps=-3"], "run.steps is -3, but must be at least 0"),
        ([f"--steps={10**19}"], f"run.steps is {10**19}, but must be below 2**63"),
        (["--mode=inspect_model", "--set=run.steps=-3"], "run.steps is -3, but must be at least 0"),
    ],
)
def test_a_setting_that_is_out_of_range_is_one_message_and_code_1(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    assert main(LINE, *args) == 1
    output = capsys.readouterr()
    assert output.out == "" and expected in output.err
    assert output.err.startswith("tekso-trainer: ") and len(output.err.splitlines()) == 1


def test_a_package_that_was_not_imported_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer.main(["tekso-trainer", "--model=lines.other.Own"]) == 2
    assert "lines.other.Own: lines is your own package: add --import=lines" in (
        capsys.readouterr().err
    )


def test_a_mistake_in_an_experiment_is_reported_with_its_line(
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
    message = capsys.readouterr().err
    assert "Pipelined runs in one process, but --cluster defines 2" in message
    assert "--execution=data_parallel or mesh_sharded" in message and "--cluster=none" in message


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


@pytest.mark.parametrize("mode", ["train", "plan", "inspect_params"])
def test_a_logdir_that_names_no_experiment_without_model_is_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert main(f"--logdir={tmp_path}", f"--mode={mode}") == 2
    assert "params.txt does not exist: name the experiment with --model" in capsys.readouterr().err


def test_an_empty_warm_start_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tekso-trainer", "--model=image.digits.Mlp", "--logdir=none", "--warm_start="]
    assert trainer.main(words) == 2
    assert "--warm_start is empty: give the folder of a run" in capsys.readouterr().err
