"""Trains with parameter servers in a process of its own, and prints what came out, as JSON.

Argument: JSON with "workers", "server" (addresses), "groups", "steps" (of each call), "kill" (ids
of processes or None, killed before each call), and optionally "optimizer" and "poison" (a step
whose loss is not finite). Prints "lost: WORKERS" when it begins to wait for one to come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.insert(0, str(Path(__file__).resolve().parent))

import steps_program as steps

from tekso.framework import watchdog
from tekso.framework.execution import DataParallel, ExecutionError, Hybrid, devices
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.schedules import Constant

FIRST = 5


def learner(job: dict[str, Any]) -> Any:
    optimizer = {"sgd": SGD.Params(), "adam": Adam.Params()}[job.get("optimizer", "sgd")]
    schedule = Constant.Params(value=0.02)
    return Learner.Params(optimizer=optimizer, schedule=schedule).instantiate()


def built(execution: Any, job: dict[str, Any]) -> Any:
    task = steps.ToyTask.Params().instantiate()
    return execution.build(task, learner(job), seed=7, batch=signature_of(steps.batch(0)))


@contextlib.contextmanager
def announced(name: str, **_: Any) -> Iterator[None]:
    print(f"lost: {name}", flush=True)
    yield


def main() -> None:
    """Trains, loses processes if requested, and compares with one device."""
    job = json.loads(sys.argv[1])
    devices.set_determinism(True)
    watchdog.waiting = announced
    updates = Hybrid.Params(
        workers=job["workers"], parameter_servers=[job["server"]], num_groups=job["groups"]
    )
    execution = DataParallel.Params(updates=updates, towers=1).instantiate()
    execution.setup_devices()
    program = built(execution, job)
    program.initialize()
    outputs: list[dict[str, Any]] = []
    for count, pid in zip(job["steps"], job["kill"], strict=True):
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        first = FIRST + len(outputs)
        outputs += program.train_steps([batch_of(job, first + i) for i in range(count)], first)
    state, summary = program.state(), program.summary()
    one = built(DataParallel.Params(towers=1).instantiate(), job)
    one.initialize()
    own = [one.train_step(batch_of(job, FIRST + i), FIRST + i) for i in range(len(outputs))]
    alone = one.state()
    one.restore(state.__getitem__, set(state))
    later = batch_of(job, 100)
    result: dict[str, Any] = {
        "steps": steps._floats(outputs),
        "one": steps._floats(own),
        "differ": [key for key in alone if (alone[key] != state[key]).any()],
        "most": max(float(abs(alone[key] - state[key]).max()) for key in alone),
        "applied": int(state["learner/updates/applied"]),
        "skipped": int(state["learner/nonfinite/total"]),
        "summary": summary,
    }
    if "server_pid" in job:
        result["eval"] = [float(p.eval_step(later)["loss"][0]) for p in (program, one)]
        result["continues"] = [float(p.train_step(later, 100)["loss"]) for p in (program, one)]
        os.kill(job["server_pid"], signal.SIGKILL)
        try:
            program.train_steps([later] * 3, 101)
            result["lost"] = ["no error", 0]
        except ExecutionError as error:
            result["lost"] = [f"{type(error).__name__}: {error}", error.exit_code]
    print(json.dumps(result), flush=True)
    os._exit(0)  # TensorFlow would wait for a lost worker


def batch_of(job: dict[str, Any], step: int) -> dict[str, Any]:
    batch = steps.batch(step)
    if step == job.get("poison"):
        batch["weights"] = batch["weights"] * float("nan")
    return batch


if __name__ == "__main__":
    main()
