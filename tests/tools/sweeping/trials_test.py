"""Trials of a sweep: their folders, best values and records."""

from __future__ import annotations

from pathlib import Path

from tekso.tools.sweeping.trials import SweepTrial, Trainer, best_of, exit_code_of, folder_name


def test_a_folder_has_the_settings_in_its_name() -> None:
    assert folder_name(3, 1, {"a.rate": "1e-3", "b": "[1, 2]"}) == "003_rate=1e-3_b=-1-2-_seed=1"
    assert folder_name(0, 0, {}) == "000_seed=0"
    assert best_of([(1, 3.0), (2, None), (3, 2.0)], "min") == 2.0
    assert best_of([(1, None)], "max") is None


def test_a_trial_without_a_result_is_not_finished(tmp_path: Path) -> None:
    trainer, trial = Trainer(str(tmp_path), []), SweepTrial("t", {}, 0)
    (tmp_path / "t").mkdir()
    for text in ("", "{", "[]", '{"exit_code": "x"}'):
        (tmp_path / "t" / "trial.json").write_text(text)
        assert trainer.code(trial) is None


def test_the_exit_code_of_a_run_is_that_of_a_trial_that_is_finished(tmp_path: Path) -> None:
    for text, code in (
        ('{"exit_code": 3}', 3),
        ('{"exit_code": 0}', 0),
        ('{"exit_code": 1}', None),
    ):
        (tmp_path / "trial.json").write_text(text)
        assert exit_code_of(str(tmp_path)) == exit_code_of(f"{tmp_path}/") == code
    assert exit_code_of(str(tmp_path / "other")) is None


def test_the_last_words_of_a_trial_are_its_error_and_not_its_place(tmp_path: Path) -> None:
    trainer, trial = Trainer(str(tmp_path), []), SweepTrial("t", {}, 0)
    (tmp_path / "t").mkdir()
    output = tmp_path / "t" / "output.txt"
    error = "tekso-trainer: ValueError: no\n  (at task.py:3, in loss)\n  --traceback prints it\n"
    output.write_text(f"step 1/2\n{error}")
    assert trainer.last_words(trial) == "tekso-trainer: ValueError: no"
    output.write_text(f"{error}step 1/2\n\n")
    assert trainer.last_words(trial) == "step 1/2"
    output.write_text(f"{error}files:\n  curves\n")
    assert trainer.last_words(trial) == "curves"
    output.write_text("")
    assert trainer.last_words(trial) == ""
