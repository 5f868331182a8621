"""Speeds of the machine are stored, and measured again when the machine shows that they are old."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tekso.framework.costs import reference_work, stored_speeds
from tekso.framework.costs.reference_work import Reference
from tekso.framework.costs.stored_speeds import Condition
from tekso.framework.execution.errors import ExecutionError

IDLE, BUSY, SLOW = Reference(1.0, 1.1), Reference(1.0, 2.0), Reference(2.0, 2.2)


class Machine:
    """A machine whose state is planted, and whose speed is the number of measurements so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.measured = 0
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(stored_speeds, "printed_by", self._print)

    def _print(self, module: str, *args: str) -> Any:
        self.measured += 1
        return {"speed": self.measured, "by": [module, *args]}

    def plan(self, *states: Reference) -> Condition:
        """Reads the speed as a new process does, in this state and those after the programs."""
        left: list[Reference] = list(states)
        self._monkeypatch.setattr(
            reference_work, "measure", lambda: left.pop(0) if len(left) > 1 else left[0]
        )
        self._monkeypatch.setattr(stored_speeds, "_read", {})
        stored_speeds._reference.cache_clear()
        try:
            self.speed = stored_speeds.stored(
                "some",
                lambda run: run("program", "x"),
                lambda r: stored_speeds.speed_of(r["speed"]),
                cost="1 s",
            )
        finally:
            stored_speeds._reference.cache_clear()
        return stored_speeds.condition()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_an_idle_machine_is_measured_once(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.plan(IDLE) == Condition(1.1)
    (path,) = tmp_path.glob("tekso/some_*.json")
    assert capsys.readouterr().err == (
        f"measuring the speed of this machine (1 s); the next plans read it from {path}\n"
    )
    for state in (IDLE, Reference(0.9, 1.0), Reference(1.2, 1.3)):
        assert machine.plan(state).text() == ""
    assert (machine.speed, machine.measured, capsys.readouterr().err) == (1.0, 1, "")
    assert json.loads(path.read_text())["speeds"]["by"] == ["program", "x"]


def test_a_machine_that_is_slow_now_is_not_measured_but_the_plan_says_so(machine: Machine) -> None:
    machine.plan(IDLE)
    for state in (BUSY, SLOW):
        condition = machine.plan(state)
        assert condition == Condition(state.seconds, is_slow=True)
        assert condition.text() == (
            f"this machine is {state.seconds:.1f} times as slow now as when it is idle; the plan "
            "is for the idle machine"
        )
    assert machine.measured == 1


def test_speeds_of_a_busy_machine_are_measured_again_once_it_is_idle(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was idle at the start of the measurement, and busy after its program."""
    condition = machine.plan(IDLE, BUSY)
    assert condition == Condition(2.0, is_slow=True, measured_busy=True)
    assert "other programs used this machine when its speed was measured" in condition.text()
    assert "2.0 times as slow now" in condition.text()
    assert machine.plan(BUSY).measured_busy and machine.measured == 1
    capsys.readouterr()
    assert machine.plan(IDLE).text() == "" and (machine.speed, machine.measured) == (2.0, 2)
    assert "measuring the speed of this machine again (1 s)" in (told := capsys.readouterr().err)
    assert "Why: other programs used it when its speed was measured" in told
    assert machine.plan(IDLE) == Condition(1.1) and machine.measured == 2


def test_a_faster_machine_is_measured_again(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.plan(SLOW)
    capsys.readouterr()
    machine.plan(IDLE)
    assert machine.measured == 2
    assert "it is 2.0 times as fast now as when its speed was measured" in capsys.readouterr().err
    assert machine.plan(SLOW).is_slow and machine.measured == 2


def record(*, cpu_s: str = "1.0", speed: str = "1.0") -> str:
    """Returns the text of a file."""
    reference = f'{{"cpu_s": {cpu_s}, "seconds": 1.1}}'
    return f'{{"reference": {reference}, "speeds": {{"speed": {speed}}}}}'


def test_a_file_is_read(machine: Machine, tmp_path: Path) -> None:
    machine.plan(IDLE)
    (path,) = tmp_path.glob("tekso/some_*.json")
    path.write_text(record(speed="5.0"))
    machine.plan(IDLE)
    assert (machine.measured, machine.speed) == (1, 5.0)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"speeds": {"speed": 1}}', '{"speed": 1}', record()[:-1],
        *(record(speed=speed) for speed in ("NaN", "Infinity", "0", "-1.0", "null")),
        *(record(cpu_s=cpu_s) for cpu_s in ("NaN", "0", "null")),
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_file_is_written_again(
    machine: Machine, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.plan(IDLE)
    (path,) = tmp_path.glob("tekso/some_*.json")
    path.write_text(text)
    capsys.readouterr()
    machine.plan(IDLE)
    machine.plan(IDLE)
    assert machine.measured == 2 and f"{path} is damaged" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_does_not_stop_a_plan(machine: Machine, tmp_path: Path) -> None:
    machine.plan(IDLE)
    (path,) = tmp_path.glob("tekso/some_*.json")
    path.unlink()
    path.mkdir()
    machine.plan(IDLE)
    assert machine.measured == 2


def test_a_speed_that_is_no_number_is_an_error_and_is_not_stored(
    machine: Machine, tmp_path: Path
) -> None:
    machine.measured = -1  # so the next speed is 0
    with pytest.raises(ExecutionError, match=r"could not be measured: 0 is no speed"):
        machine.plan(IDLE)
    assert not list(tmp_path.glob("tekso/some_*.json"))


def test_a_folder_that_cannot_be_written_does_not_stop_a_plan(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "tekso").write_text("not a folder")
    machine.plan(IDLE)
    machine.plan(IDLE)
    assert machine.measured == 2


def test_speeds_under_other_settings_of_tensorflow_are_other_speeds(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of XLA without optimization is up to 50 times slower."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    machine.plan(IDLE)
    for number, (name, value) in enumerate(
        (
            ("XLA_FLAGS", "--xla_backend_optimization_level=0"),
            ("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit"),
            ("TF_ENABLE_ONEDNN_OPTS", "0"),
            ("TF_NUM_INTRAOP_THREADS", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("ONEDNN_MAX_CPU_ISA", "SSE41"),
        )
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            machine.plan(IDLE)
        assert machine.measured == number + 2
    with monkeypatch.context() as patched:
        patched.setattr(stored_speeds, "num_cores", lambda: 1000)
        machine.plan(IDLE)
    assert machine.measured == 8
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    machine.plan(IDLE)
    assert (machine.speed, machine.measured) == (1.0, 8)


@pytest.mark.parametrize(
    "lines",
    [
        ("model name\t: EPYC", "flags\t\t: avx2", "cpu MHz\t\t: {}"),
        ("BogoMIPS\t: {}", "Features\t: asimd sve", "CPU part\t: 0xd40"),
    ],
)
def test_speeds_of_another_processor_are_other_speeds(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(stored_speeds, "_CPUINFO", path)

    def plan(*, frequency: str, one: str = "", other: str = "") -> int:
        """Returns the number of measurements so far."""
        first = "\n".join(lines).format(frequency).replace(one, other)
        path.write_text(f"processor\t: 0\n{first}\n\nprocessor\t: 1\n{first}\n")
        machine.plan(IDLE)
        return machine.measured

    assert plan(frequency="50.0") == plan(frequency="48.9") == 1
    for number, name in enumerate(("EPYC", "avx2") if "EPYC" in lines[0] else ("sve", "0xd40")):
        assert plan(frequency="50.0", one=name, other="other") == 2 + number


def test_an_import_of_scikit_learn_changes_no_speed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sets two variables of OpenMP, whose names are like those that do."""
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):
        monkeypatch.delenv(name, raising=False)
    machine.plan(IDLE)
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    machine.plan(IDLE)
    assert machine.measured == 1
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    machine.plan(IDLE)
    assert machine.measured == 2


def test_plans_at_the_same_time_measure_once(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.plan(IDLE)
    (path,) = tmp_path.glob("tekso/some_*.json")
    text = path.read_text()
    path.unlink()
    waiting = threading.Thread(target=machine.plan, args=(IDLE,))
    with path.with_suffix(".lock").open("w") as lock:  # another process measures
        fcntl.flock(lock, fcntl.LOCK_EX)
        says_so = threading.Event()

        def write(said: str) -> None:
            if "waiting for another process" in said:
                says_so.set()

        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
        waiting.start()
        assert says_so.wait(60.0)
        path.write_text(text)
    waiting.join()
    assert machine.measured == 1 and machine.speed == 1.0


def test_the_worst_condition_of_all_that_was_read_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    read = {"a": Condition(2.0, True, False), "b": Condition(1.0, False, True)}
    monkeypatch.setattr(stored_speeds, "_read", read)
    assert stored_speeds.condition() == Condition(2.0, True, True)
    monkeypatch.setattr(stored_speeds, "_read", {})
    assert stored_speeds.condition() == Condition()


def test_the_error_of_a_program_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(
            returncode=len(commands) - 1, stdout='a line\n{"a": 1}\n', stderr="no\nwhy\n"
        )

    monkeypatch.setattr(subprocess, "run", run)
    assert stored_speeds.printed_by("some.module", "x") == {"a": 1}
    assert commands[0][-1] == "from some.module import main; main(*('x',))"
    with pytest.raises(ExecutionError, match="could not be measured: why"):
        stored_speeds.printed_by("some.module")
    for code, how in ((-9, "was ended by SIGKILL"), (1, "ended with exit code 1")):
        done = SimpleNamespace(returncode=code, stdout="", stderr="")
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(ExecutionError, match=f"could not be measured: some.module {how}"):
            stored_speeds.printed_by("some.module")
