"""Tests that a mode rejects every flag of tekso-trainer that it does not use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tekso.tools import trainer, trainer_flags
from tekso.tools.command_errors import UsageError
from tekso.tools.flag_modes import LIST, MODES, USED_IN
from tekso.tools.trainer_flags import FLAGS

SWITCHES = ("auto", "trace_pipeline", "deterministic", "traceback", "help")
VALUES = {"mode": "train", "format": "json", "list": "*", "litert": "int8"}


def word(name: str) -> str:
    value = VALUES.get(name, "1")
    return f"--{name}" if name in SWITCHES else f"--{name}={value}"


def test_table_has_every_flag_and_modes_that_exist() -> None:
    assert set(USED_IN) == {FLAGS[name].name for name in FLAGS}
    for modes in USED_IN.values():
        assert modes and set(modes) <= {*MODES, LIST}


@pytest.mark.parametrize("mode", MODES)
def test_flags_that_a_mode_does_not_use_are_refused_by_name(mode: str) -> None:
    for name in set(USED_IN) - {"mode", "list", "devices", "device", "restarts"}:
        words = ["tekso-trainer", f"--mode={mode}", word(name)]
        if mode in USED_IN[name]:
            trainer_flags.parse(words)
            continue
        with pytest.raises(UsageError) as error:
            trainer_flags.parse(words)
        assert f"--{name} works only with --mode={USED_IN[name][0]}" in str(error.value)
        assert f"not with {mode}" in str(error.value)


def test_list_refuses_what_it_does_not_use() -> None:
    for name in set(USED_IN) - {"list"}:
        words = ["tekso-trainer", "--list", word(name)]
        if LIST in USED_IN[name]:
            trainer_flags.parse(words)
            continue
        with pytest.raises(UsageError, match=f"--list .* does not use --{name}"):
            trainer_flags.parse(words)


def test_a_switch_that_is_off_asks_for_nothing() -> None:
    trainer_flags.parse(["tekso-trainer", "--noauto", "--notrace_pipeline", "--mode=eval"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices=4"], "--devices requires --auto"),
        (["--device=a100"], "--device requires --auto"),
        (["--auto", "--cpu_devices=4"], "--cpu_devices does not work with --auto: use --devices"),
    ],
)
def test_inspect_sharding_refuses_what_goes_with_auto_or_without_it(
    words: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trainer_flags.parse(["tekso-trainer", "--mode=inspect_sharding", *words])


def test_inspect_params_shows_an_experiment_or_a_run() -> None:
    with pytest.raises(UsageError, match="or a run"):
        trainer_flags.parse(
            ["tekso-trainer", "--mode=inspect_params", "--model=a.b.C", "--logdir=runs/c"]
        )


def test_training_with_checkpoint_says_how_to_start_from_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model=lm.python_source.Tiny", f"--logdir={tmp_path / 'run'}"]
    assert trainer.main(["tekso-trainer", *words, "--checkpoint=/does/not/exist"]) == 2
    message = capsys.readouterr().err
    assert "--checkpoint works only with --mode=eval, decode or export, not with train" in message
    assert "--warm_start" in message and "NEW/checkpoints/" in message
    assert not (tmp_path / "run").exists()


def test_a_replay_of_a_logdir_names_the_flag_of_the_incident() -> None:
    with pytest.raises(UsageError, match=r"not with replay: use --incident=runs/a/incidents/step_"):
        trainer_flags.parse(["tekso-trainer", "--mode=replay", "--logdir=runs/a"])


def test_a_plan_names_the_flag_for_its_number_of_devices() -> None:
    with pytest.raises(UsageError, match=r"not with plan: use --devices=2$"):
        trainer_flags.parse(["tekso-trainer", "--mode=plan", "--cpu_devices=2"])
