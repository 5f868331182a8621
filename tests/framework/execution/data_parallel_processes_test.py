"""Data-parallel runs of several processes: equal to one device, stopped, lost and resumed."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import processes
import pytest
from clusters import (
    AN_END_S,
    DEADLINE_S,
    LOST,
    Trainer,
    built,
    losses,
    start_together,
    write_package,
)

from tekso.framework.exit_codes import ExitCode

pytestmark = pytest.mark.slow

# 60 tokens make 9 examples of 6: the pass has three batches of 3. 3 does not divide over 2
# processes, and of 4, one has no example.
SETTINGS = [
    "--set=eval_inputs.dev.batch_size=3",
    "--set=execution.xla=none",
    "--set=task.model.stack.num_layers=1",
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("outside"))


def arguments(logdir: Path) -> list[str]:
    return [
        "--model=ending.experiments.Small",
        f"--logdir={logdir}",
        "--execution=data_parallel",
        *SETTINGS,
        "--deterministic",
    ]


@pytest.fixture(scope="module")
def alone(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logdir of one process, which traces nothing, as no other process without peers does."""
    logdir = tmp_path_factory.mktemp("alone")
    process = Trainer(package, *arguments(logdir), **processes.OP_BY_OP)
    code, _, err = process.end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    return logdir


def assert_equal_runs(logdir: Path, alone: Path) -> None:
    for split in ("train", "dev"):
        found, expected = losses(logdir, split), losses(alone, split)
        assert list(found) == list(expected)
        # Sums over processes are taken in another order than in one process.
        assert found == pytest.approx(expected, rel=1e-6), split


def test_lost_process_is_named_and_the_same_command_resumes(
    package: Path, alone: Path, tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    started = start_together(2, package, args, ending=(1, 14, signal.SIGKILL))
    assert started[1].end(time.monotonic() + DEADLINE_S)[0] == -signal.SIGKILL
    code, _, err = started[0].end(time.monotonic() + AN_END_S)
    lost = LOST.match(err)
    assert code == ExitCode.PROCESS_LOST and lost and int(lost[1]) == 1, err
    before = losses(tmp_path)
    assert max(before) >= 10

    deadline = time.monotonic() + DEADLINE_S
    log = tmp_path / "built"
    ends = [trainer.end(deadline) for trainer in start_together(2, package, args, BUILT=str(log))]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert f"resuming from {tmp_path}/checkpoints/step_{int(lost[3]):08d}" in ends[0][1]
    assert [built(log, process)[19] for process in range(2)] == [{"0-2"}, {"2-4"}]
    assert "loss" not in ends[1][1], "one process reports the run"
    found = losses(tmp_path)
    assert {step: found[step] for step in before} == before  # to the last bit
    assert_equal_runs(tmp_path, alone)


def test_supervisor_restarts_a_run_that_is_killed_again_and_again(
    package: Path, alone: Path, tmp_path: Path
) -> None:
    # Checkpoints of steps 4, 8, 10 (the best so far), 12, 16 and 20. A process is killed before it
    # writes its third one.
    args = [*arguments(tmp_path), "--supervise", "--restarts=1"]
    process = Trainer(package, *args, END_AT_FILE="3", **processes.OP_BY_OP)
    code, out, err = process.end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    assert err.count("the trainer was ended by SIGKILL; restart 1 of 1 in 1 s") == 2, err
    assert f"resuming from {tmp_path}/checkpoints/step_00000012" in out
    for split in ("train", "dev"):
        assert losses(tmp_path, split) == losses(alone, split)


def test_supervised_processes_of_which_one_is_killed_continue_by_themselves(
    package: Path, alone: Path, tmp_path: Path
) -> None:
    logdir, once = tmp_path / "run", str(tmp_path / "ended")
    args = [*arguments(logdir), "--supervise", "--restarts=3"]
    started = start_together(2, package, args, ending=(1, 14, signal.SIGKILL), END_ONCE=once)
    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in started]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "the trainer ended with exit code 8 (PROCESS_LOST); restart 1 of 3" in ends[0][2]
    assert "the trainer was ended by SIGKILL; restart 1 of 3" in ends[1][2]
    assert_equal_runs(logdir, alone)


def test_repeated_signal_ends_a_process_that_waits_for_a_frozen_one(
    package: Path, tmp_path: Path
) -> None:
    first, frozen = start_together(2, package, arguments(tmp_path), ending=(1, 14, signal.SIGSTOP))
    stat = Path(f"/proc/{frozen.process.pid}/stat")
    deadline = time.monotonic() + DEADLINE_S
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        assert first.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    begin = time.monotonic()
    while first.process.poll() is None and time.monotonic() < deadline:
        first.process.terminate()
        time.sleep(0.3)
    # TensorFlow needs 13 s to notice. 143: the main thread was not inside TensorFlow.
    assert time.monotonic() - begin < 10.0
    frozen.process.kill()
    frozen.end(deadline)
    code, _, err = first.end(deadline)
    assert code in (ExitCode.STALLED, ExitCode.TERMINATED), err
    if code == ExitCode.STALLED:
        assert "SIGTERM was repeated" in err
        assert "training_loop.py" in (tmp_path / "stalled.txt").read_text()


def test_signal_to_one_of_four_processes_stops_all_and_one_device_resumes(
    package: Path, alone: Path, tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    started = start_together(4, package, args, ending=(1, 9, signal.SIGTERM))
    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in started]
    assert [code for code, _, _ in ends] == [143] * 4, ends
    stopped = re.search(r"stopped by SIGTERM after step (\d+) of 20", ends[0][1])
    assert stopped and int(stopped[1]) == max(losses(tmp_path)) < 12, ends[0]
    newest = max((tmp_path / "checkpoints").glob("step_*"))
    assert newest.name == f"step_{int(stopped[1]):08d}"

    process = Trainer(package, *args, **processes.OP_BY_OP)
    code, _, err = process.end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    assert_equal_runs(tmp_path, alone)
