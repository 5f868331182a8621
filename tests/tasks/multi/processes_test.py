"""Several tasks over several processes: data-parallel and with a parameter server, as in one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clusters
import processes
import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[2]
TURNS = ["--set=input.mixing=ByWeight", "--set=input.mixing.weights={'kind': 2.0}"]
PC_GRAD = [
    "--set=input.unit=all_tasks",
    "--set=task.gradients=tekso.framework.gradient_combination:PCGrad",
]


def trainer(logdir: Path, *flags: str, op_by_op: bool = False) -> processes.Process:
    """Starts 12 steps with an evaluation of both tasks."""
    return processes.start(
        [
            *("-m", "tekso.tools.trainer", "--import=small_tasks", "--model=small_tasks.Iris"),
            *(f"--logdir={logdir}", "--deterministic", "--execution=data_parallel"),
            *("--set=run.steps=12", "--set=run.log_every_steps=1", "--set=run.eval_every_steps=6"),
            *("--set=execution.xla=none", "--set=execution.towers=1"),
            *flags,
        ],
        cwd=TESTS,
        optimized=False,
        op_by_op=op_by_op,
    )


def figures(logdir: Path) -> dict[tuple[int, str], dict[str, float]]:
    """Returns losses and metrics of the tasks by step and split."""
    records = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    return {
        (one["step"], one["split"]): {
            name: value
            for name, value in one.items()
            if name == "loss" or name.startswith(("kind/", "virginica/"))
        }
        for one in records
        if "loss" in one
    }


@pytest.fixture(scope="module", params=[TURNS, PC_GRAD], ids=["turns", "pc_grad"])
def alone(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The logdir of one process, and its settings."""
    logdir = tmp_path_factory.mktemp("alone")
    clusters.wait_for(trainer(logdir, *request.param, op_by_op=True))
    return logdir, request.param


def assert_equal(logdir: Path, alone: Path, tolerance: float) -> None:
    found, expected = figures(logdir), figures(alone)
    assert found.keys() == expected.keys()
    assert {split for _, split in found} == {"train", "kind_dev", "virginica_dev"}
    for key, own in expected.items():
        assert found[key] == pytest.approx(own, rel=tolerance), key


def test_two_processes_compute_what_one_does(alone: tuple[Path, list[str]], tmp_path: Path) -> None:
    logdir, settings = alone
    cluster = f"--cluster={','.join(clusters.free_addresses(2))}"
    clusters.wait_for(*(trainer(tmp_path, *settings, cluster, f"--process={i}") for i in range(2)))
    assert_equal(tmp_path, logdir, 1e-5)  # sums over processes have another order


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    """The addresses of two workers."""
    found = clusters.free_addresses(2)
    started = [
        processes.start(["-m", "tekso.tools.worker", f"--address={a}"], optimized=False)
        for a in found
    ]
    yield found
    for process in started:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize(
    "alone",
    # A worker combines gradients as one process does.
    [TURNS, pytest.param(PC_GRAD, marks=pytest.mark.matrix)],
    ids=["turns", "pc_grad"],
    indirect=True,
)
def test_a_parameter_server_and_one_worker_compute_what_one_process_does(
    alone: tuple[Path, list[str]], addresses: list[str], tmp_path: Path
) -> None:
    logdir, settings = alone
    server, worker = addresses
    updates = [
        "--set=execution.updates=Asynchronous",
        f"--set=execution.updates.workers=['{worker}']",
        f"--set=execution.updates.parameter_servers=['{server}']",
    ]
    clusters.wait_for(trainer(tmp_path, *settings, *updates))
    assert_equal(tmp_path, logdir, 1e-6)
