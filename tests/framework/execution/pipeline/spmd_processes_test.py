"""A pipeline that is one program trains over two processes as in one."""

from __future__ import annotations

import time
from pathlib import Path

import processes
import pytest
from clusters import DEADLINE_S, Trainer, losses, start_together, write_package

MODEL = "--model=ending.experiments.Repeated"


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    package = write_package(tmp_path)
    together, alone = tmp_path / "together", tmp_path / "alone"
    deadline = time.monotonic() + DEADLINE_S
    args = [MODEL, f"--logdir={together}", "--cpu_devices=1"]
    for process in start_together(2, package, args):
        code, _, error = process.end(deadline)
        assert code == 0, error
    plain = [MODEL, f"--logdir={alone}", "--execution=data_parallel", "--cpu_devices=1"]
    plain += ["--set=execution.towers=1", "--set=execution.xla=none"]
    code, _, error = Trainer(package, *plain, **processes.OP_BY_OP).end(deadline)
    assert code == 0, error
    assert len(losses(alone)) == 4
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
