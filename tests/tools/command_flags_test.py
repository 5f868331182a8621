"""Every program of Tekso answers --help, and takes no flag for an argument."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tekso.framework.exit_codes import ExitCode

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PROGRAMS = sorted(p.stem for p in TOOLS.glob("*.py") if "\nif __name__ ==" in p.read_text())


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_answer_help_and_reject_unknown_flags(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"tekso.tools.{program}").main
    assert main([program, "--help"]) == ExitCode.OK
    output = capsys.readouterr()
    # The first line is the usage of a command, or the purpose of a program of the developers.
    assert len(output.out.splitlines()) > 3 and output.out.strip() and not output.err
    if output.out.startswith("usage: "):  # that line has to be one, to copy it
        assert max(map(len, output.out.splitlines()[1:])) <= 80
        assert "=text\n" not in output.out  # every flag says what it takes
        assert output.out.splitlines()[2][0].isupper()
    assert main([program, "--hlep"]) == ExitCode.WRONG_USAGE
    output = capsys.readouterr()
    assert not output.out and "there is no flag --hlep; " in output.err


def test_all_programs_are_tested() -> None:
    assert {"trainer", "pipeline_memory", "plan_accuracy", "catalogue"} <= {*PROGRAMS}


@pytest.mark.parametrize("program", ["trainer", "benchmark"])
def test_a_value_in_the_place_of_a_flag_names_the_flag(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"tekso.tools.{program}").main
    assert main([program, "--json"]) == ExitCode.WRONG_USAGE
    assert "there is no flag --json; did you mean --format=json?" in capsys.readouterr().err
