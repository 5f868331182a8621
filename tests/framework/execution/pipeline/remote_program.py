"""Trains in a pipeline over the devices of two other processes, and prints what came out.

Arguments: addresses and process ids of two workers, as JSON. At the end it kills the second worker
and prints how the next step ends.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

sys.path.insert(0, str(Path(__file__).resolve().parent))

import equality_program as equality
import tensorflow as tf

from tekso.framework.execution import Pipelined
from tekso.framework.execution.base import signature_of


def main() -> None:
    """Compares two steps with those of this process alone, then loses a worker."""
    addresses, pids = json.loads(sys.argv[1])
    params = Pipelined.Params(num_stages=2, num_micro_batches=4, workers=addresses)
    execution = params.instantiate()
    execution.setup_devices()
    own = Pipelined.Params(num_stages=1, num_micro_batches=4).instantiate()
    job = {"model": "skipping"}
    results = [equality.run(own, job), equality.run(execution, job)]
    batch = equality.batch_of("skipping", 0, 8)
    learner = equality.learner("skipping")
    program = execution.build(
        equality.task_of("skipping"), learner, seed=7, batch=signature_of(batch)
    )
    program.initialize()
    elsewhere = _inputs_elsewhere(program)
    program.train_step(batch, 0)
    os.kill(pids[1], signal.SIGKILL)
    try:
        float(program.train_step(batch, 1)["loss"])
        error = "no error"
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    lost = {"error": error}
    print(json.dumps([*results, lost, elsewhere]), flush=True)
    os._exit(0)  # TensorFlow would wait for the lost worker


def _inputs_elsewhere(program: Any) -> list[str]:
    """Will hold the inputs of functions that are not on their device.

    Before a function runs, TensorFlow would ask another worker for them, and may free them there.
    """
    found: list[str] = []
    for place in program._backends[0]:
        place.call = functools.partial(_watched, found, place, place.call)
    return found


def _watched(found: list[str], place: Any, call: Any, function: Any, *args: Any) -> Any:
    found.extend(
        f"{value.device} for {place.name}"
        for value in tf.nest.flatten(args)
        if value is not None and value.device != place.name
    )
    return call(function, *args)


if __name__ == "__main__":
    main()
