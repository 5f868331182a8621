"""Starts the trainer in several processes, one of which may end in the middle of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import fork_server
import processes

EXPERIMENTS = '''
"""A small language model; a process of it ends in the way that the environment says."""

from __future__ import annotations

import itertools
import os
import signal
import sys

from tekso.framework.execution import SpmdPipelined
from tekso.framework.experiment import Run
from tekso.framework.params import Params, param
from tekso.framework.registry import register
from tekso.framework.run import tensor_files
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.params.lm.python_source import Tiny
from tekso.tasks.lm.synthetic import SyntheticTokens


if "END_AT_FILE" in os.environ:  # of a checkpoint: the process is killed before it writes it
    write, calls = tensor_files.write, itertools.count(1)

    def write_or_end(prefix, part):
        if next(calls) == int(os.environ["END_AT_FILE"]):
            os.kill(os.getpid(), signal.SIGKILL)
        write(prefix, part)

    tensor_files.write = write_or_end


def is_due(step):
    if step != int(os.environ.get("END_AT", -1)):
        return False
    if "END_ONCE" in os.environ:  # a file that is there after the first time
        try:
            open(os.environ["END_ONCE"], "x").close()
        except FileExistsError:
            return False
    return True


def report(text, split=""):
    if "BUILT" in os.environ:
        with open(f"{os.environ['BUILT']}.{split}{sys.argv[-1]}", "a") as file:
            print(text, file=file)


class Tokens(SyntheticTokens):
    class Params(SyntheticTokens.Params):
        short: bool = param("Whether batch 17 is shorter by an example.", default=False)

    def num_rows(self, step):
        return super().num_rows(step) - (self.params.short and step == 17)

    def batch(self, step):
        return self.batch_rows(step, 0, self.num_rows(step))

    def batch_rows(self, step, begin, end):
        if is_due(step):
            os.kill(int(os.environ.get("END_PID", os.getpid())), int(os.environ["END_BY"]))
        report(f"{step}:{begin}-{end}")
        return super().batch_rows(step, begin, end)


class Dev(SyntheticTokens):
    class Params(SyntheticTokens.Params):
        short: bool = param("Whether the last batch is shorter by an example.", default=False)

    def num_rows(self, step):
        return super().num_rows(step) - (self.params.short and step == 2)

    def batch(self, step):
        return self.batch_rows(step, 0, self.num_rows(step))

    def batch_rows(self, step, begin, end):
        report(f"{step}:{begin}-{end}", "dev.")
        return super().batch_rows(step, begin, end)


class Block(FeedForward):
    """x + feed_forward(x), without attention, which takes most of the time of a trace."""

    class Params(FeedForward.Params):
        pass

    def fprop(self, theta, x, ctx, *, mask=None, positions=None):
        return x + super().fprop(theta, x, ctx)


BLOCK = Block.Params(input_dim=16, hidden_dim=40, dropout_rate=0.1)


@register
class Small(Tiny):
    """Random tokens, dropout, 2 feed-forward layers of width 16."""

    def task(self) -> Params:
        params = super().task()
        return params.set(
            {
                "decode": None,
                "model.vocab_size": 24,
                "model.dim": 16,
                "model.stack": Stack.Params(num_layers=2, layer=BLOCK),
            }
        )

    def input(self) -> Params:
        return Tokens.Params(vocab_size=24, length=6, batch_size=4)

    def eval_inputs(self) -> dict[str, Params]:
        dev = Dev.Params(
            vocab_size=24, length=6, batch_size=4, num_tokens=60, split="dev", order="once"
        )
        return {"dev": dev}

    def run(self) -> Params:
        return Run.Params(
            steps=20, log_every_steps=1, eval_every_steps=10, checkpoint_every_steps=4
        )


@register
class Repeated(Small):
    """A pipeline that is one program, of repeated layers."""

    def task(self) -> Params:
        stack = RepeatedStack.Params(num_layers=2, layer=BLOCK)
        return super().task().set(**{"model.stack": stack})

    def eval_inputs(self) -> dict[str, Params]:
        return {}

    def execution(self) -> Params:
        return SpmdPipelined.Params(num_stages=2, num_micro_batches=2, rematerialize="all")

    def run(self) -> Params:
        return Run.Params(steps=4, log_every_steps=1, checkpoint_every_steps=4)
'''

DEADLINE_S = 200.0
AN_END_S = 60.0  # in which the others have to end when a process is lost
LOST = re.compile(
    r"^tekso-trainer: process (\d) \((localhost:\d+)\) was lost: .*; start all processes again "
    r"with the same command, which resumes from step (\d+)$"
)


def write_package(folder: Path) -> Path:
    """Writes the package `ending` with the experiments; returns the folder of the package."""
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


def wait_for(*started: processes.Process) -> None:
    """Waits until all processes have ended without an error."""
    deadline = time.monotonic() + DEADLINE_S
    for process in started:
        _, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        assert process.returncode == 0, errors[-3000:]


class Trainer:
    """A process of the trainer."""

    def __init__(self, package: Path, *args: str, **environment: str) -> None:
        command = ["-m", "tekso.tools.trainer", "--import=ending", *args]
        self.process = processes.start(
            command,
            cwd=package,
            env={**os.environ, **fork_server.UNCHECKED, **environment},
            optimized=False,
        )

    def end(self, deadline: float) -> tuple[int, str, str]:
        """Returns code and output; a process that lasts longer than the deadline is killed."""
        out, err = self.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        assert self.process.returncode is not None
        return self.process.returncode, out, err


def built(path: Path, process: int, split: str = "") -> dict[int, set[str]]:
    """Returns {number of a batch: the ranges of examples that a process built}.

    The split is "" for training, or "dev.".
    """
    found: dict[int, set[str]] = {}
    for line in Path(f"{path}.{split}--process={process}").read_text().splitlines():
        step, _, rows = line.partition(":")
        found.setdefault(int(step), set()).add(rows)
    return found


def start_together(
    count: int,
    package: Path,
    args: list[str],
    ending: tuple[int, int, signal.Signals] | None = None,
    **environment: str,
) -> list[Trainer]:
    """Starts processes; `ending`: which one ends, at which batch, by which signal."""
    addresses = free_addresses(count)
    made = []
    for process in range(count):
        ends = {}
        if ending is not None and process == ending[0]:
            ends = {"END_AT": str(ending[1]), "END_BY": str(int(ending[2]))}
        flags = [f"--cluster={','.join(addresses)}", f"--process={process}"]
        made.append(Trainer(package, *args, *flags, **environment, **ends))
    return made


def losses(logdir: Path, split: str = "train") -> dict[int, float]:
    records = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    found = [(record["step"], record["loss"]) for record in records if record["split"] == split]
    assert len(dict(found)) == len(found), "a step is there twice"
    return dict(found)
