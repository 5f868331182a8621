"""Asynchronous and hybrid updates: equality, staleness, lost processes, and what is refused."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusters
import processes
import pytest
from wrong_losses import Squares

from tekso.framework.cluster import Cluster
from tekso.framework.execution import Asynchronous, DataParallel, ExecutionError, Hybrid
from tekso.framework.exit_codes import ExitCode
from tekso.framework.run import schedule_check

PROGRAM = Path(__file__).with_name("parameter_servers_program.py")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def start_worker(address: str) -> processes.Process:
    return processes.start(["-m", "tekso.tools.worker", f"--address={address}"], optimized=False)


@pytest.fixture
def servers() -> Iterator[dict[str, processes.Process]]:
    """Three workers by address; a test may replace one that it lost."""
    started = {address: start_worker(address) for address in (free_address() for _ in range(3))}
    yield started
    for process in started.values():
        process.kill()
        process.wait(60)


def job_of(servers: dict[str, processes.Process], workers: int, **job: Any) -> dict[str, Any]:
    server, *others = servers
    return {"server": server, "workers": others[:workers], "kill": [None], **job}


def run(job: dict[str, Any]) -> dict[str, Any]:
    done = processes.run([str(PROGRAM), json.dumps(job)], optimized=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def staleness(steps: list[dict[str, float]]) -> list[float]:
    return [step["staleness"] for step in steps]


@pytest.mark.slow
def test_one_worker_is_one_device_to_the_last_bit_also_in_a_skipped_step(
    servers: dict[str, processes.Process],
) -> None:
    found = run(job_of(servers, 1, groups=1, steps=[4], optimizer="adam", poison=7))
    assert found["differ"] == []
    assert (found["applied"], found["skipped"]) == (3, 1)
    for ours, own in zip(found["steps"], found["one"], strict=True):
        for name, value in own.items():
            assert ours[name] == pytest.approx(value, rel=0, abs=0, nan_ok=True), name
    assert staleness(found["steps"]) == [0] * 4


@pytest.mark.slow
def test_one_group_of_two_workers_is_synchronous(servers: dict[str, processes.Process]) -> None:
    found = run(job_of(servers, 2, groups=1, steps=[5]))
    assert found["most"] < 1e-6  # another order of sums
    assert staleness(found["steps"]) == [0] * 5
    for ours, own in zip(found["steps"], found["one"], strict=True):
        assert ours["loss"] == pytest.approx(own["loss"], rel=1e-6)


@pytest.mark.slow
def test_workers_are_lost_and_one_comes_back_and_a_lost_server_ends_the_run(
    servers: dict[str, processes.Process],
) -> None:
    """The first is lost, then the second too; the first comes back, and the second never."""
    server, first, second = servers
    pids = {address: process.pid for address, process in servers.items()}
    job = job_of(servers, 2, groups=2, steps=[5, 6, 6], server_pid=pids[server])
    job["kill"] = [None, pids[first], pids[second]]
    process = processes.start([str(PROGRAM), json.dumps(job)], live=True, optimized=False)
    line = process.stdout.readline().strip()
    assert line == f"lost: one of the lost workers to come back: {first}, {second}"
    servers[first].wait(60)
    servers[first] = start_worker(first)
    text, errors = process.communicate(timeout=300)
    assert text.strip(), errors[-3000:]
    found = json.loads(text.strip().splitlines()[-1])
    assert found["applied"] == 17  # every batch once
    # In every call of n steps, with two at a time: versions 0, 0, 1, …, n - 2 are read, and the
    # updates 0, 1, …, n - 1 are applied in any order, so the sum is n - 1.
    assert sum(staleness(found["steps"])) == 4 + 5 + 5
    assert found["summary"] == [
        f"staleness of 17 updates: mean {14 / 17:.2f}, maximum {max(staleness(found['steps'])):.0f}"
    ]
    assert found["continues"][0] == found["continues"][1]  # under one device, to the last bit
    assert found["eval"][0] == found["eval"][1]
    message, code = found["lost"]
    assert re.match(f"LostServerError: a parameter server was lost .*{server}", message)
    assert code == ExitCode.PROCESS_LOST


@pytest.mark.slow
def test_a_supervised_run_continues_by_itself_when_its_lost_server_is_back(
    servers: dict[str, processes.Process], tmp_path: Path
) -> None:
    server, worker, _ = servers
    package = tmp_path / "package"
    package.mkdir()
    args = ["--model=ending.experiments.Small", "--deterministic", "--set=execution.xla=none"]
    args += ["--set=execution.towers=1", "--set=task.model.stack.num_layers=1"]
    alone, logdir = tmp_path / "alone", tmp_path / "run"
    clusters.write_package(package)
    one = clusters.Trainer(package, *args, f"--logdir={alone}", **processes.OP_BY_OP)
    assert one.end(time.monotonic() + 200)[0] == 0
    updates = [f"workers=['{worker}']", f"parameter_servers=['{server}']"]
    trainer = clusters.Trainer(
        package,
        *args,
        f"--logdir={logdir}",
        "--supervise",
        "--set=execution.updates=Asynchronous",
        *(f"--set=execution.updates.{setting}" for setting in updates),
        END_AT="14",
        END_BY=str(int(signal.SIGKILL)),
        END_ONCE=str(tmp_path / "ended"),
        END_PID=str(servers[server].pid),
    )
    servers[server].wait(200)
    servers[server] = start_worker(server)
    code, out, err = trainer.end(time.monotonic() + 200)
    assert code == 0, err
    assert "the trainer ended with exit code 8 (PROCESS_LOST); restart 1 of" in err
    assert f"resuming from {logdir}/checkpoints/step_" in out
    found, expected = clusters.losses(logdir), clusters.losses(alone)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-6)  # the order of sums in a mean loss


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (Asynchronous.Params(parameter_servers=["a:1"]), r"updates\.workers is empty"),
        (Asynchronous.Params(workers=["a:1"]), r"updates\.parameter_servers is empty"),
        (Asynchronous.Params(workers=["a"], parameter_servers=["a:1"]), "expected host:port"),
        (Asynchronous.Params(workers=["a:1"], parameter_servers=["a:1"]), "lists a:1 twice"),
        (
            Hybrid.Params(workers=["a:1", "a:2", "a:3"], parameter_servers=["b:1"], num_groups=2),
            r"num_groups is 2, which does not divide the 3 workers",
        ),
    ],
)
def test_addresses_and_groups_that_do_not_fit_are_refused(params: Any, said: str) -> None:
    with pytest.raises(ExecutionError, match=said):
        DataParallel.Params(updates=params).instantiate()


def of_two() -> DataParallel:
    updates = Asynchronous.Params(workers=["a:1"], parameter_servers=["b:1"])
    return DataParallel.Params(updates=updates).instantiate()


def test_several_processes_are_refused() -> None:
    with pytest.raises(ExecutionError, match=r"updates is Asynchronous.*--cluster defines 2"):
        of_two().join(Cluster(("localhost:1", "localhost:2"), 0, "--cluster"))


def test_a_call_with_fewer_steps_than_are_computed_at_the_same_time_is_refused() -> None:
    schedule_check.check_steps_per_call(3, 3)
    with pytest.raises(
        ExecutionError, match=r"run\.steps_per_call is 2, .* at least 3; 60 is better$"
    ):
        schedule_check.check_steps_per_call(2, 3)


def test_a_batch_that_a_group_cannot_divide_is_refused() -> None:
    updates = Hybrid.Params(workers=["a:1", "a:2"], parameter_servers=["b:1"]).instantiate()
    task = Squares.Params().instantiate()
    updates.check_parts(task, 8, 2)
    with pytest.raises(ExecutionError, match=r"batch_size 6 .* 2 workers .* 2 accumulation steps"):
        updates.check_parts(task, 6, 2)


@pytest.mark.parametrize("devices", [{"tpu": "local"}, {"cpu_devices": 2}])
def test_several_devices_and_a_tpu_are_refused(devices: Any) -> None:
    with pytest.raises(ExecutionError, match=r"not work with execution\.updates=Asynchronous"):
        of_two().setup_devices(**devices)
