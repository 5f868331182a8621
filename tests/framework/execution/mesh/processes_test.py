"""Several processes train together on loopback: equal to one process, also after one was lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import processes
import pytest

EXPERIMENTS = '''
"""A small language model; a process of it ends in the way that the environment says."""

from __future__ import annotations

import itertools
import os
import signal

from tekso.framework.experiment import Run
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.framework.run import tensor_files
from tekso.params.lm.python_source import Tiny
from tekso.tasks.lm.synthetic import SyntheticTokens


if "END_AT_FILE" in os.environ:  # of a checkpoint: the process is killed before it writes it
    write, calls = tensor_files.write, itertools.count(1)

    def write_or_end(prefix, part):
        if next(calls) == int(os.environ["END_AT_FILE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        write(prefix, part)

    tensor_files.write = write_or_end


class Tokens(SyntheticTokens):
    class Params(SyntheticTokens.Params):
        pass

    def batch(self, step):
        if step == int(os.environ.get("END_AT", -1)):
            os.kill(os.getpid(), int(os.environ["END_BY"]))
        return super().batch(step)


@register
class Small(Tiny):
    """Random tokens, dropout, 2 layers of width 16."""

    def task(self) -> Params:
        params = super().task()
        return params.set(
            {
                "decode": None,
                "model.vocab_size": 24,
                "model.dim": 16,
                "model.stack.num_layers": 2,
                "model.stack.layer.feed_forward.hidden_dim": 40,
                "model.stack.layer.feed_forward.dropout_rate": 0.1,
            }
        )

    def input(self) -> Params:
        return Tokens.Params(vocab_size=24, length=6, batch_size=4)

    def eval_inputs(self) -> dict[str, Params]:
        dev = SyntheticTokens.Params(
            vocab_size=24, length=6, batch_size=4, num_tokens=60, split="dev", order="once"
        )
        return {"dev": dev}

    def run(self) -> Params:
        return Run.Params(
            steps=20, log_every_steps=1, eval_every_steps=10, checkpoint_every_steps=4
        )
'''

DEADLINE_S = 200.0
AN_END_S = 60.0  # in which the others have to end when a process is lost
LOST = re.compile(
    r"^tekso-trainer: process (\d) \((localhost:\d+)\) was lost: .*; start all processes again "
    r"with the same command, which resumes from step (\d+)$"
)
LAYOUTS = {
    "data:2": ("batch:data", 1),
    "data:2;model:2": ("batch:data;mlp:model;heads:model;vocab:model", 2),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "ending").mkdir()
    (folder / "ending" / "__init__.py").write_text("")
    (folder / "ending" / "experiments.py").write_text(EXPERIMENTS)
    return folder


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return [f"localhost:{port}" for port in ports]


class Trainer:
    """A process of the trainer."""

    def __init__(self, package: Path, *args: str, **environment: str) -> None:
        command = ["-m", "tekso.tools.trainer", "--import=ending", *args]
        self.process = processes.start(command, cwd=package, env={**os.environ, **environment})

    def end(self, deadline: float) -> tuple[int, str, str]:
        """Returns code and output; a process that lasts longer than the deadline is killed."""
        out, err = self.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        assert self.process.returncode is not None
        return self.process.returncode, out, err


def arguments(logdir: Path, mesh: str, devices: int) -> list[str]:
    return [
        "--model=ending.experiments.Small",
        f"--logdir={logdir}",
        "--execution=mesh_sharded",
        f"--cpu_devices={devices}",
        f"--set=execution.mesh={mesh}",
        f"--set=execution.rules={LAYOUTS[mesh][0]}",
        "--deterministic",
    ]


def two_processes(
    package: Path, args: list[str], ending: tuple[int, int, signal.Signals] | None = None
) -> list[Trainer]:
    """Starts two processes; `ending`: which one, at which batch, by which signal."""
    addresses = free_addresses(2)
    made = []
    for process in range(2):
        environment = {}
        if ending is not None and process == ending[0]:
            environment = {"END_AT": str(ending[1]), "END_BY": str(int(ending[2]))}
        flags = [f"--cluster={','.join(addresses)}", f"--process={process}"]
        made.append(Trainer(package, *args, *flags, **environment))
    return made


def losses(logdir: Path, split: str = "train") -> dict[int, float]:
    records = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    found = [(record["step"], record["loss"]) for record in records if record["split"] == split]
    assert len(dict(found)) == len(found), "a step is there twice"
    return dict(found)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "victim"), [("data:2", 1), ("data:2;model:2", 0)])
def test_lost_process_is_named_and_the_same_command_goes_on(
    package: Path, tmp_path: Path, mesh: str, victim: int
) -> None:
    devices = LAYOUTS[mesh][1]
    alone = Trainer(package, *arguments(tmp_path / "alone", mesh, 2 * devices))
    code, _, err = alone.end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    expected = losses(tmp_path / "alone")
    assert list(expected) == list(range(1, 21))

    logdir = tmp_path / "together"
    args = arguments(logdir, mesh, devices)
    started = two_processes(package, args, ending=(victim, 14, signal.SIGKILL))
    deadline = time.monotonic() + DEADLINE_S
    assert started[victim].end(deadline)[0] == -signal.SIGKILL
    lost_at = time.monotonic()
    code, _, err = started[1 - victim].end(lost_at + AN_END_S)
    told = LOST.match(err)
    assert code == 1 and told and int(told[1]) == victim, err
    assert int(told[3]) in (4, 8, 10, 12)  # 10 is the best
    before = losses(logdir)
    assert max(before) >= 10

    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in two_processes(package, args)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert f"resuming from {logdir}/checkpoints/step_{int(told[3]):08d}" in ends[0][1]
    found = losses(logdir)
    assert list(found) == list(range(1, 21))
    assert {step: found[step] for step in before} == before  # to the last bit
    # Sums over devices are taken in another order than in one process.
    assert found == pytest.approx(expected, rel=1e-6)
    assert losses(logdir, "dev") == pytest.approx(losses(tmp_path / "alone", "dev"), rel=1e-6)
    assert "loss" not in ends[1][1], "one process reports the run"

    deadline = time.monotonic() + DEADLINE_S
    evaluating = [f"--logdir={logdir}", "--mode=eval", "--format=json", f"--cpu_devices={devices}"]
    ends = [trainer.end(deadline) for trainer in two_processes(package, evaluating)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert json.loads(ends[0][1])["dev"]["loss"] == pytest.approx(losses(logdir, "dev")[20])
    assert ends[1][1] == ""


@pytest.mark.slow
def test_process_killed_in_the_middle_of_a_sharded_write(package: Path, tmp_path: Path) -> None:
    mesh, addresses = "data:2;model:2", free_addresses(2)
    cluster = f"--cluster={','.join(addresses)}"
    args = [*arguments(tmp_path, mesh, 2), "--steps=10"]
    deadline = time.monotonic() + DEADLINE_S
    first = Trainer(package, *args, cluster, "--process=0")
    second = Trainer(package, *args, cluster, "--process=1", END_AT_FILE="2")
    assert second.end(deadline)[0] == -signal.SIGKILL
    code, _, err = first.end(time.monotonic() + AN_END_S)
    told = LOST.match(err)
    assert code == 1 and told and (told[1], told[3]) == ("1", "4"), err
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_00000004", ".unfinished_step_00000008"}
    before = losses(tmp_path)

    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in two_processes(package, args)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert f"resuming from {tmp_path}/checkpoints/step_00000004" in ends[0][1]
    found = losses(tmp_path)
    assert {step: found[step] for step in before} == before  # to the last bit
    last = tmp_path / "checkpoints" / "step_00000010"
    sizes = [path.stat().st_size for path in sorted(last.glob("tensors.data-*"))]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)  # a file of each process

    alone = [f"--logdir={tmp_path}", "--mode=eval", "--format=json", "--execution=data_parallel"]
    code, out, err = Trainer(package, *alone).end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    assert json.loads(out)["dev"]["loss"] == pytest.approx(losses(tmp_path, "dev")[10], rel=1e-6)


@pytest.mark.slow
def test_signal_to_one_process_stops_all_at_the_same_step(package: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, "data:2", 1)
    started = two_processes(package, args, ending=(1, 9, signal.SIGTERM))
    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in started]
    assert [code for code, _, _ in ends] == [143, 143], ends
    stopped = re.search(r"stopped by SIGTERM after step (\d+) of 20", ends[0][1])
    assert stopped, ends[0]
    assert int(stopped[1]) == max(losses(tmp_path)) < 12
    newest = max((tmp_path / "checkpoints").glob("step_*"))
    assert newest.name == f"step_{int(stopped[1]):08d}"


@pytest.mark.slow
def test_different_settings_are_told_to_all(package: Path, tmp_path: Path) -> None:
    addresses = ",".join(free_addresses(2))
    args = [*arguments(tmp_path, "data:2", 1), f"--cluster={addresses}"]
    deadline = time.monotonic() + DEADLINE_S
    started = [Trainer(package, *args, f"--process={p}", f"--seed={p}") for p in range(2)]
    for code, _, err in (trainer.end(deadline) for trainer in started):
        assert code == 1
        assert "was started with other settings than process 0: run.seed : 0 -> 1" in err
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_processes_draw_over_a_mesh_what_one_device_draws(package: Path, tmp_path: Path) -> None:
    train = ["--model=lm.python_source.Tiny", "--execution=mesh_sharded", "--cpu_devices=2"]
    layout = ["--set=execution.mesh=model:2", "--set=execution.rules=heads:model;vocab:model"]
    short = ["--steps=1", "--set=input.batch_size=4", "--set=task.decode.max_new_tokens=8"]
    short += ["--set=eval_inputs.dev.max_batches=1", "--set=task.model.stack.num_layers=1"]
    logdir = f"--logdir={tmp_path}"
    code, _, err = Trainer(package, logdir, *train, *layout, *short).end(
        time.monotonic() + DEADLINE_S
    )
    assert code == 0, err

    decode = [logdir, "--mode=decode", "--format=json"]
    code, alone, err = Trainer(package, *decode).end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    spread = [*decode, "--cpu_devices=1", "--set=execution.decode_on=mesh"]
    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in two_processes(package, spread)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert json.loads(ends[0][1])["records"] == json.loads(alone)["records"] != []
    assert ends[1][1] == ""
