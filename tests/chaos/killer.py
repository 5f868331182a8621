"""Kills training at random moments, damages its files in between, and compares with a whole run.

For each way to execute, a run that nothing interrupts comes first. Then a run is started again and
again, as a scheduler would, until it is finished: each of its lives ends at a random moment of a
random phase (victim.py), and a file may be damaged before the next one. A finished run must have
the figures of every step, the decoded text and the last checkpoint of the whole run, to the last
bit, and no life may end in another way than by its kill, by success, or by the documented exit code
for a lost process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import clusters
import numpy as np
import processes

from tekso.framework.exit_codes import ExitCode
from tekso.framework.run.opened import open_run

KILLED = -signal.SIGPROF
HERE = Path(__file__).resolve().parent
SMALL, POISONED = "small_runs.experiments.Small", "small_runs.experiments.Poisoned"
LIVES_OF_A_RUN = 40
DEADLINE_S = 300.0
DAMAGED_PART = 0.3
"""Share of the kills after which a file is damaged."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to execute a run."""

    flags: tuple[str, ...] = ()
    processes: int = 1
    model: str = SMALL
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _set(execution: str, *settings: str) -> tuple[str, ...]:
    return f"--execution={execution}", *(f"--set=execution.{s}" for s in settings)


NO_EVALUATION = ("--set=eval_inputs={}", "--set=run.keep_best.eval_input=None")
"""Flags that leave the evaluations out, which are traced too."""

# TensorFlow's graph optimizer takes an eighth to a third of the CPU time of pipelines in one
# process. The other forms run with it.
FORMS = {
    "one_device": Form(_set("data_parallel", "xla=none", "towers=1")),
    "two_devices": Form((*_set("data_parallel", "xla=none"), "--cpu_devices=2")),
    "mesh": Form(_set("mesh_sharded", "mesh=data:2;model:2", "rules=2d", "xla=none")),
    "pipeline": Form(
        _set("pipelined", "num_stages=2", "num_micro_batches=2"),
        environment=processes.GRAPH_OPTIMIZER_OFF,
    ),
    "spmd_pipeline": Form(
        _set("spmd_pipelined", "num_stages=2", "num_micro_batches=2"),
        environment=processes.GRAPH_OPTIMIZER_OFF,
    ),
    "two_processes": Form(_set("data_parallel", "xla=none"), processes=2),
    "mesh_of_two_processes": Form(
        _set("mesh_sharded", "mesh=data:2", "rules=data", "xla=none"), processes=2
    ),
    "four_processes": Form(_set("data_parallel", "xla=none"), processes=4),
    "mesh_of_four_processes": Form(
        _set("mesh_sharded", "mesh=data:2;model:2", "rules=2d", "xla=none"), processes=4
    ),
    "spmd_pipeline_of_four_processes": Form(
        (*_set("spmd_pipelined", "num_stages=4", "num_micro_batches=2"), "--set=*.num_layers=4"),
        processes=4,
    ),
}


@dataclasses.dataclass(frozen=True)
class Life:
    """One start of a run: where it was to end, and how it ended."""

    plan: dict[str, Any]
    codes: tuple[int, ...]
    newest: int
    damaged: str = ""

    @property
    def is_killed(self) -> bool:
        return KILLED in self.codes

    def __str__(self) -> str:
        where = f"{self.plan['phase']} {self.plan['call']} after {self.plan['cpu_s']:.4f} s"
        damage = f", then damaged {self.damaged}" if self.damaged else ""
        return f"{where}: codes {self.codes}, newest checkpoint {self.newest}{damage}"


class ChaosError(AssertionError):
    """A run is not what it would have been without kills, or ended in a way that is not allowed."""


class Killer:
    """Runs one form with kills, and compares it with a run without.

    Args:
      form: how to execute.
      folder: a folder for logdirs.
      seed: chooses all moments and all damage.
      damaged_part: share of the kills after which a file is damaged.
      phases: the phases in which runs are killed; empty: all.
    """

    def __init__(
        self,
        form: Form,
        folder: Path,
        *,
        seed: int,
        damaged_part: float = DAMAGED_PART,
        phases: tuple[str, ...] = (),
    ) -> None:
        self._form, self._folder = form, folder
        self._random, self._damaged_part = random.Random(seed), damaged_part
        self._whole = folder / "whole"
        self.lives: list[Life] = []
        seconds = self._record()
        self._seconds = {phase: seconds[phase] for phase in phases or seconds}

    @property
    def kills(self) -> int:
        return sum(life.is_killed for life in self.lives)

    def run(self, kills: int) -> None:
        """Kills one run after the other until there were so many kills.

        Raises:
          ChaosError: a run differs from the one without kills.
        """
        number = 0
        while self.kills < kills:
            number += 1
            self._run_to_its_end(self._folder / f"killed_{number}", kills)

    def _run_to_its_end(self, logdir: Path, kills: int) -> None:
        """Starts a run until it is finished."""
        broken: set[str] = set()  # checkpoints that were damaged
        for _ in range(LIVES_OF_A_RUN):
            plan = self._plan() if self.kills < kills else None
            codes = self._live(logdir, plan)
            if plan is not None:
                hurt = self._hurt(logdir, broken) if KILLED in codes else ""
                self.lives.append(Life(plan, codes, newest(logdir), hurt))
            if not any(codes):
                differences = list(compare(self._whole, logdir))
                if differences:
                    raise ChaosError("\n".join([*differences, *map(str, self.lives)]))
                return
        raise ChaosError(f"{LIVES_OF_A_RUN} lives did not finish a run of {self._form.model}")

    def _plan(self) -> dict[str, Any]:
        phase = self._random.choice(list(self._seconds))
        calls = self._seconds[phase]
        call = self._random.randint(1, len(calls))
        return {
            "phase": phase,
            "call": call,
            "cpu_s": self._random.uniform(0, 1.1 * calls[call - 1]),
        }

    def _record(self) -> dict[str, list[float]]:
        """Runs to the end; returns the CPU seconds of all phases."""
        path = self._folder / "seconds.json"
        codes = self._start(self._whole, [{"record": str(path)}] + [None] * 3)
        if any(codes):
            raise ChaosError(f"the run without kills ended with {codes}")
        seconds: dict[str, list[float]] = json.loads(path.read_text())
        return seconds

    def _live(self, logdir: Path, plan: dict[str, Any] | None) -> tuple[int, ...]:
        """Starts the run; its end is planned in one process or in all of them."""
        plans: list[dict[str, Any] | None] = [None] * self._form.processes
        # Before the rendezvous, the others would wait until their limit of time.
        if plan is not None and (plan["phase"] == "start" or self._random.random() < 0.3):
            plans = [plan] * self._form.processes
        else:
            plans[self._random.randrange(len(plans))] = plan
        return self._start(logdir, plans)

    def _start(self, logdir: Path, plans: list[dict[str, Any] | None]) -> tuple[int, ...]:
        args = [
            f"--model={self._form.model}",
            f"--logdir={logdir}",
            "--import=small_runs",
            "--set=run.checkpoint_buffer_mb=0",  # steps wait for a save, as those of a large state
            *self._form.flags,
        ]
        count, started = self._form.processes, []
        addresses = ",".join(clusters.free_addresses(count)) if count > 1 else ""
        for process, plan in enumerate(plans[:count]):
            cluster = [f"--cluster={addresses}", f"--process={process}"] if count > 1 else []
            # Without a plan, a phase that does not exist: the process lives on.
            words = json.dumps(plan or {"phase": "", "call": 0, "cpu_s": 0.0})
            command = [str(HERE / "victim.py"), *args, *cluster]
            env = {**os.environ, **self._form.environment, "VICTIM": words}
            started.append(processes.start(command, cwd=HERE, env=env))
        end, codes = time.monotonic() + DEADLINE_S, []
        for process in started:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
            code = process.returncode
            assert code is not None
            codes.append(code)
            lost = code == ExitCode.PROCESS_LOST and count > 1
            if code not in (0, KILLED) and not lost:
                raise ChaosError(
                    f"a process ended with {code}: {plans}\n{out[-2000:]}{err[-4000:]}"
                )
            if "Traceback" in err:
                raise ChaosError(f"a traceback in the output: {plans}\n{err[-4000:]}")
        return tuple(codes)

    def _hurt(self, logdir: Path, broken: set[str]) -> str:
        """Damages a file, or none; returns its name. One checkpoint always stays good."""
        if self._random.random() >= self._damaged_part:
            return ""
        good = [path for path in checkpoints_in(logdir) if str(path) not in broken]
        candidates = [*sorted((logdir / "events").rglob("events*")), logdir / "metrics.jsonl"]
        if len(good) > 1:
            candidates += sorted(good[-1].iterdir()) * 2
        candidates = [path for path in candidates if path.is_file() and path.stat().st_size]
        if not candidates:
            return ""
        path = self._random.choice(candidates)
        data = bytearray(path.read_bytes())
        if path.name == "metrics.jsonl":  # a torn line at its end, as a crash of the machine leaves
            path.write_bytes(bytes(data) + b'{"step": 3, "spl')
        elif self._random.random() < 0.5:
            path.write_bytes(bytes(data[: self._random.randrange(len(data))]))
        else:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            path.write_bytes(bytes(data))
        if path.parent in good:
            broken.add(str(path.parent))
        return str(path.relative_to(logdir))


def checkpoints_in(logdir: Path) -> list[Path]:
    """Returns the complete checkpoints, the oldest first."""
    return sorted(path for path in (logdir / "checkpoints").glob("step_????????") if path.is_dir())


def newest(logdir: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in checkpoints_in(logdir)), default=0)


def figures(logdir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Returns {(split, step): figures} without those of the clock.

    Raises:
      ChaosError: a step is there twice.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for record in map(json.loads, (logdir / "metrics.jsonl").read_text().splitlines()):
        key = record.pop("split"), record.pop("step")
        if key in found:
            raise ChaosError(f"{key} is there twice in {logdir}/metrics.jsonl")
        of_clock = ("second", "wait", "machine")
        found[key] = {n: v for n, v in record.items() if not any(word in n for word in of_clock)}
    return found


def compare(whole: Path, killed: Path) -> Iterator[str]:
    """Yields every difference of two finished runs."""
    want, have = figures(whole), figures(killed)
    for key in sorted(want.keys() | have.keys()):
        if want.get(key) != have.get(key):
            yield f"figures of {key}: {have.get(key)}, without kills {want.get(key)}"
    texts = [(logdir / "samples.txt").read_text() for logdir in (whole, killed)]
    if texts[0] != texts[1]:
        yield f"decoded {texts[1]!r}, without kills {texts[0]!r}"
    first, second = (open_run(str(logdir)).checkpoint for logdir in (whole, killed))
    if first.step != second.step or first.keys != second.keys:
        yield f"checkpoint of step {second.step}, without kills {first.step}; or other tensors"
        return
    for key in sorted(first.keys):
        if not np.array_equal(first.read(key), second.read(key), equal_nan=True):
            yield f"{key} differs"
