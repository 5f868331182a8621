"""A pipeline that is one program trains over two processes as in one."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import processes
import pytest

EXPERIMENTS = '''
"""A small language model whose layers are repeated."""

from __future__ import annotations

from tekso.framework.execution import SpmdPipelined
from tekso.framework.experiment import Run
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.stack import RepeatedStack
from tekso.params.lm.python_source import Tiny
from tekso.tasks.lm.synthetic import SyntheticTokens


@register
class Repeated(Tiny):
    """Random tokens, dropout, 2 layers of width 16."""

    def task(self) -> Params:
        params = super().task()
        layer = params.get("model.stack.layer")
        layer.set({"feed_forward.hidden_dim": 40, "feed_forward.dropout_rate": 0.1})
        return params.set(
            {
                "decode": None,
                "model.vocab_size": 24,
                "model.dim": 16,
                "model.stack": RepeatedStack.Params(num_layers=2, layer=layer),
            }
        )

    def input(self) -> Params:
        return SyntheticTokens.Params(vocab_size=24, length=6, batch_size=4)

    def eval_inputs(self) -> dict[str, Params]:
        return {}

    def execution(self) -> Params:
        return SpmdPipelined.Params(num_stages=2, num_micro_batches=2, rematerialize="all")

    def run(self) -> Params:
        return Run.Params(steps=4, log_every_steps=1, checkpoint_every_steps=4)
'''


def trainer(folder: Path, logdir: str, *args: str, op_by_op: bool = False) -> processes.Process:
    command = ["-m", "tekso.tools.trainer", "--import=outside"]
    command += ["--model=outside.experiments.Repeated", f"--logdir={logdir}", *args]
    return processes.start(command, cwd=folder, optimized=False, op_by_op=op_by_op)


def free_addresses(count: int) -> str:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ",".join(f"localhost:{port}" for port in ports)


def losses(logdir: Path) -> list[float]:
    records = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["split"] == "train"]


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "__init__.py").write_text("")
    (tmp_path / "outside" / "experiments.py").write_text(EXPERIMENTS)
    addresses = free_addresses(2)
    flags = [f"--cluster={addresses}", "--cpu_devices=1"]
    both = [trainer(tmp_path, "together", *flags, f"--process={i}") for i in range(2)]
    try:
        for process in both:
            error = process.communicate(timeout=500)[1]
            assert process.returncode == 0, error
    finally:
        for process in both:
            process.kill()
    plain = ["--execution=data_parallel", "--cpu_devices=1"]
    plain += ["--set=execution.towers=1", "--set=execution.xla=none"]
    alone = trainer(tmp_path, "alone", *plain, op_by_op=True)
    error = alone.communicate(timeout=500)[1]
    assert alone.returncode == 0, error
    assert len(losses(tmp_path / "alone")) == 4
    assert losses(tmp_path / "together") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
