"""A pipeline over other processes has the numbers of one process, and names the one it loses."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import clusters
import processes
import pytest

from tekso.framework.execution import ExecutionError, Pipelined
from tekso.framework.execution.pipeline import remote
from tekso.framework.exit_codes import ExitCode, exit_code_of

PROGRAM = Path(__file__).with_name("remote_program.py")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def start_worker(address: str) -> processes.Process:
    return processes.start(["-m", "tekso.tools.worker", f"--address={address}"], optimized=False)


@pytest.fixture
def workers() -> Iterator[tuple[list[str], list[int]]]:
    addresses = [free_address() for _ in range(2)]
    started = [start_worker(address) for address in addresses]
    yield addresses, [process.pid for process in started]
    for process in started:
        process.kill()
        process.wait(60)


@pytest.mark.slow
def test_two_workers_train_as_one_process_and_a_lost_one_is_named(
    workers: tuple[list[str], list[int]],
) -> None:
    done = processes.run([str(PROGRAM), json.dumps(workers)], optimized=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    own, piped, lost, elsewhere = json.loads(done.stdout.strip().splitlines()[-1])
    for one, other in zip(own["steps"], piped["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
    for path, weight in own["weights"].items():
        assert piped["weights"][path] == pytest.approx(weight, rel=1e-10, abs=1e-12), path
    assert not elsewhere
    assert "task:1" in lost["error"], lost
    assert lost["error"].startswith("StageError"), lost


@pytest.mark.slow
def test_a_supervised_pipeline_continues_by_itself_when_its_lost_worker_is_back(
    tmp_path: Path,
) -> None:
    addresses = [free_address() for _ in range(2)]
    started = [start_worker(address) for address in addresses]
    package, logdir = tmp_path / "package", tmp_path / "run"
    package.mkdir()
    clusters.write_package(package)
    trainer = clusters.Trainer(
        package,
        "--model=ending.experiments.Small",
        "--deterministic",
        f"--logdir={logdir}",
        "--supervise",
        "--execution=pipelined",
        "--set=execution.num_stages=2",
        f"--set=execution.workers={addresses}",
        END_AT="14",
        END_BY=str(int(signal.SIGKILL)),
        END_ONCE=str(tmp_path / "ended"),
        END_PID=str(started[1].pid),
    )
    try:
        started[1].wait(clusters.DEADLINE_S)
        started[1] = start_worker(addresses[1])
        code, out, err = trainer.end(time.monotonic() + clusters.DEADLINE_S)
    finally:
        for process in started:
            process.kill()
            process.wait(60)
    assert code == 0, err
    assert "the trainer ended with exit code 8 (PROCESS_LOST); restart 1 of" in err
    assert f"resuming from {logdir}/checkpoints/step_" in out
    assert list(clusters.losses(logdir)) == list(range(1, 21))


def test_a_worker_that_does_not_answer_is_named_with_what_to_start() -> None:
    address = free_address()
    with pytest.raises(ExecutionError, match=f"no worker answers at {address}.*worker"):
        remote.connect([address], timeout_s=0.3)


@pytest.mark.parametrize(
    ("answer", "said", "code", "timeout_s"),
    [
        # Perhaps a suspended worker: a supervisor tries again.
        (b"", "sends nothing: if it is a suspended tekso-worker", ExitCode.PROCESS_LOST, 0.3),
        (
            b"HTTP/1.1 400 Bad Request\r\n",
            r"is not a tekso-worker.*answers b'HTTP/1\.1 ';",
            ExitCode.FAILED,
            60.0,  # not waited for
        ),
    ],
)
def test_a_port_that_something_else_listens_on_is_named(
    answer: bytes, said: str, code: ExitCode, timeout_s: float
) -> None:
    with socket.create_server(("localhost", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"

        def reply() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(1000)
                is_over.wait(60)

        is_over = threading.Event()
        thread = threading.Thread(target=reply)
        thread.start()
        try:
            with pytest.raises(ExecutionError, match=rf"{address} .*{said}") as caught:
                remote.connect([address], timeout_s=timeout_s)
            assert exit_code_of(caught.value) == code
        finally:
            is_over.set()
            thread.join(60)


@pytest.mark.parametrize("address", ["localhost", "localhost:0", "localhost:x", ":7000"])
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ExecutionError, match="expected host:port"):
        Pipelined.Params(workers=[address]).instantiate()
