"""Trains random models under random executions, and compares each with one device.

    python tests/fuzz_executions.py --cases=100 --seed=0
    python tests/fuzz_executions.py --case=0:17
    python tests/fuzz_executions.py --case=0:17 --change='{"accumulation": 1}'

The first form runs each case in a process of its own and prints a line for each, and a summary. The
second repeats one case in this process and prints everything about it; `--change` replaces some of
its choices, to find the smallest case that fails. A case is a pure function of seed and index.

| outcome | meaning |
|---|---|
| equal | losses and weights match one device, with the same type of activations |
| refused | an error of Tekso before the first step, which says what is not supported |
| DIFFERENT | losses or weights do not match: a bug |
| CRASH | any other error, or the process ended: a bug |

In bfloat16 and float16, losses and weights may differ by a few times as much as those of one device
differ between this type and float32.

The exit status is 1 if a case is DIFFERENT or a CRASH.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fuzz_choices
import numpy as np

FILE = Path(__file__).resolve()
STEPS, SEED, TIMEOUT_S = 2, 2**40 + 3, 1200
LOSS_TOLERANCE = 1e-4
"""Relative. Steps multiply the rounding of sums in another order by up to a hundred."""
WEIGHT_TOLERANCE = 5e-3
"""Relative to the norm of the change of a weight in all steps."""

TYPE_TOLERANCE = {"float32": 0.0, "bfloat16": 2e-2, "float16": 5e-3}
"""{type of the activations: what is added to the relative tolerances}."""
TIMES_ROUNDING = 3.0
"""How often the error of a 16-bit type on one device may be added to the difference."""
TIMES_ROUNDING_ALONE = 10.0
"""The same for a weight that moves by rounding alone, as a bias before BatchNorm does:
two such moves are independent of each other, and one device has a sample of few numbers."""

EQUAL, REFUSED, DIFFERENT, CRASH = "equal", "refused", "DIFFERENT", "CRASH"
BUGS = (DIFFERENT, CRASH)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a case: one of the four outcomes, and its reason."""

    kind: str
    reason: str = ""


# --- one case, in a process of its own ---


def run_case(choices: dict[str, Any]) -> Outcome:
    """Trains the model of a case on one device and under its execution, and compares them."""
    import fuzz_models
    from traced_calls import op_by_op

    from tekso.framework.execution import DataParallel, ExecutionError

    batches = [fuzz_models.batch(choices, step) for step in range(STEPS)]
    try:
        execution, devices = execution_of(choices["execution"])
        execution.setup_devices(cpu_devices=devices)
    except ExecutionError as error:
        return Outcome(REFUSED, str(error))
    try:
        check_task(choices, batches[0])
    except ValueError as error:
        return Outcome(REFUSED, f"no execution: {error}")
    try:
        program = built(execution, choices, batches[0], choices["accumulation"])
    except ExecutionError as error:
        return Outcome(REFUSED, str(error))
    alone = DataParallel.Params(towers=1, xla="none").instantiate()
    parts, dtype = statistics_parts(choices), choices["activation_dtype"]
    with op_by_op():
        whole = steps(built(alone, choices, batches[0], parts), batches)
        full = whole
        if dtype != "float32":
            in_full = {**choices, "activation_dtype": "float32"}
            full = steps(built(alone, in_full, batches[0], parts), batches)
    return compared(whole, steps(program, batches), full, dtype)


def check_task(choices: dict[str, Any], batch: dict[str, Any]) -> None:
    """Builds the task of a case; of images also the graph of its loss, without an execution.

    Raises:
      ValueError: no execution can train this model: its Params are invalid, or a window is larger
        than its image.
    """
    import fuzz_models
    import tensorflow as tf

    from tekso.framework.context import StepContext

    task = fuzz_models.task(choices).instantiate()
    if choices["task"] != "images":
        return
    weights = {path: tf.TensorSpec(s.shape, s.dtype) for path, s in task.specs().items()}
    arrays = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}

    def loss(weights: Any, batch: Any) -> tf.Tensor:
        ctx = StepContext(mode="train", seed=0, step=0, num_examples=choices["batch"])
        return task.loss(task.theta(weights), batch, ctx).loss_sum

    try:
        tf.function(loss, autograph=False).get_concrete_function(weights, arrays)
    except ValueError as error:
        if "padding VALID" in str(error):
            raise
        # Any other error may be a bug: it is found again below, and reported as one.


def execution_of(choices: dict[str, Any]) -> tuple[Any, int | None]:
    """Returns an execution, and the number of logical devices to create; None: as it needs."""
    from tekso.framework.execution import DataParallel, MeshSharded, Pipelined, SpmdPipelined
    from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh

    fields = dict(choices)
    kind = fields.pop("kind")
    if kind == "replicas":
        return DataParallel.Params(xla=fields["xla"]).instantiate(), fields["devices"]
    if kind == "towers":
        return DataParallel.Params().set(fields).instantiate(), None
    if kind == "mesh":
        return MeshSharded.Params().set({"xla": "none", **fields}).instantiate(), None
    if kind == "spmd":
        return SpmdPipelined.Params().set(**fields).instantiate(), None
    if on := fields.pop("stages_on", None):
        fields["stages_on"] = StagesOnMesh.Params().set(on)
    return Pipelined.Params().set(fields).instantiate(), None


def statistics_parts(choices: dict[str, Any]) -> int:
    """Returns the accumulation steps with which one device has the same batch statistics."""
    parts: int = choices["accumulation"]
    if any(block["norm"] for block in choices.get("blocks", ())):
        execution = choices["execution"]
        replicas = execution.get("num_replicas", 1) if "stages_on" not in execution else 1
        return parts * execution.get("num_micro_batches", 1) * replicas
    return parts


def built(execution: Any, choices: dict[str, Any], batch: Any, accumulation: int) -> Any:
    """Returns the program of a case."""
    import fuzz_models

    from tekso.framework.execution.base import signature_of

    task = fuzz_models.task(choices).instantiate()
    learner = learner_of(choices, task, accumulation).instantiate()
    dtype = choices["activation_dtype"]
    return execution.build(task, learner, seed=SEED, batch=signature_of(batch), dtype=dtype)


def steps(program: Any, batches: Sequence[Any]) -> dict[str, Any]:
    """Returns the metrics of all steps, an evaluation, and the state before and after them."""
    program.initialize()
    before = program.state()
    metrics = [program.train_step(batch, i) for i, batch in enumerate(batches)]
    evaluation = program.eval_step(batches[0])
    return {
        "steps": [{name: float(value) for name, value in each.items()} for each in metrics],
        "evaluation": {name: [float(x) for x in pair] for name, pair in evaluation.items()},
        "before": before,
        "after": program.state(),
    }


def learner_of(choices: dict[str, Any], task: Any, accumulation: int) -> Any:
    """Returns the Params of a learner: one, or several by weight."""
    from tekso.framework import optimizers, schedules
    from tekso.framework.learner import Learner, MultiLearner
    from tekso.framework.loss_scale import LossScale

    # A gradient that is zero but for rounding, as of the bias of keys, has no direction: large
    # epsilons keep an optimizer from scaling it up.
    decay = {"weight_decay": choices["weight_decay"]}
    known = {
        "adam": optimizers.Adam.Params(epsilon=1e-2, **decay),
        "adamw": optimizers.AdamW.Params(epsilon=1e-2, **decay),
        "adafactor": optimizers.Adafactor.Params(gradient_epsilon=1e-4, min_dim_to_factor=8),
        "lamb": optimizers.LAMB.Params(epsilon=1e-2, **decay),
        "lars": optimizers.LARS.Params(trust_coefficient=0.1, weight_decay=0.1),
        "sgd": optimizers.SGD.Params(**decay),
        "momentum": optimizers.Momentum.Params(**decay),
        "nesterov": optimizers.Nesterov.Params(**decay),
        "rmsprop": optimizers.RMSProp.Params(epsilon=1e-2),
        "adagrad": optimizers.Adagrad.Params(initial_sum_of_squares=0.1),
    }
    rate = schedules.Constant.Params(value=0.05)
    fields = ("clip_global_norm", "clip_tensor_norm", "ema_decay")
    several = [
        Learner.Params(optimizer=known[name], schedule=rate).set({f: choices[f] for f in fields})
        for name in choices["optimizers"]
    ]
    paths = [path for path, spec in task.specs().items() if spec.trainable]
    together: dict[str, Any] = {"accumulation_steps": accumulation}
    if choices["activation_dtype"] == "float16":
        together["loss_scale"] = LossScale.Params(initial=1024.0)
    if choices["frozen"] and len(paths) > len(several):
        together["frozen"] = [paths.pop(len(paths) // 2)]
    if len(several) == 1 or len(paths) < len(several):
        return several[0].set(together)
    parts = {str(i): paths[i :: len(several)] for i in range(len(several))}
    patterns = {name: "|".join(part) for name, part in parts.items()}
    learners = {str(i): learner for i, learner in enumerate(several)}
    return MultiLearner.Params(patterns=patterns, learners=learners).set(together)


def compared(
    whole: dict[str, Any],
    other: dict[str, Any],
    full: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> Outcome:
    """Compares losses, gradient norms, an evaluation and the state with those of one device.

    Args:
      whole: the results of one device.
      other: those of an execution.
      full: those of one device in float32; None: they are `whole`.
      dtype: type of the activations. In 16 bits, the other metrics of the task are not compared,
        as rounding may change the best class of an example.
    """
    full, found, more = full or whole, [], TYPE_TOLERANCE[dtype]

    def differs(a: Any, b: Any, in_full: Any, rtol: float, atol: float) -> bool:
        if np.array_equal(a, b):
            return False  # also if both overflow
        rounding = TIMES_ROUNDING * np.abs(np.subtract(a, in_full))
        return not np.all(np.abs(np.subtract(b, a)) <= atol + (rtol + more) * np.abs(a) + rounding)

    def is_compared(name: str) -> bool:
        return dtype == "float32" or name in ("loss", "total_loss", "gradient_norm")

    for i, (one, two) in enumerate(zip(whole["steps"], other["steps"], strict=True)):
        if set(one) != set(two):
            found.append(f"step {i} reports {sorted(set(one) ^ set(two))} in one execution only")
        for name in filter(is_compared, sorted(set(one) & set(two))):
            in_full = full["steps"][i].get(name, one[name])
            if differs(one[name], two[name], in_full, _tolerance(i, name), 1e-6):
                found.append(f"step {i} {name} {one[name]:.7g} is {two[name]:.7g}")
    for name, pair in whole["evaluation"].items():
        of_other, in_full = other["evaluation"][name], full["evaluation"][name]
        if is_compared(name) and differs(pair, of_other, in_full, 1e-3, 1e-5):
            found.append(f"evaluation {name} {pair} is {of_other}")
    for key, start in whole["before"].items():
        if not np.array_equal(other["before"][key], start):
            found.append(f"{key} starts differently")
    for key, end in whole["after"].items():
        moved = np.linalg.norm(np.float64(end) - whole["before"][key])
        apart = np.linalg.norm(np.float64(other["after"][key]) - end)
        rounding = np.linalg.norm(np.float64(full["after"].get(key, end)) - end)
        moved_in_full = np.linalg.norm(np.float64(full["after"].get(key, end)) - start)
        times = TIMES_ROUNDING_ALONE if moved_in_full < 0.1 * moved else TIMES_ROUNDING
        most = (WEIGHT_TOLERANCE + more) * moved + times * rounding
        if not apart <= most + 1e-5 * (1 + np.linalg.norm(end)):
            found.append(f"{key} moved by {moved:.3g}, and is {apart:.3g} apart")
    if not all(np.isfinite(step["loss"]) for step in whole["steps"]):
        return Outcome(CRASH, f"a loss of one device is not finite: {whole['steps']}")
    return Outcome(DIFFERENT, "; ".join(found[:6])) if found else Outcome(EQUAL)


def _tolerance(step: int, name: str) -> float:
    return LOSS_TOLERANCE * (10 if step and name.startswith("gradient_norm") else 1)


def repeat(choices: dict[str, Any]) -> Outcome:
    """Runs one case in this process."""
    try:
        return run_case(choices)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        where = traceback.extract_tb(error.__traceback__)
        own = [
            f"{Path(f.filename).name}:{f.lineno}"
            for f in where
            if "site-packages" not in f.filename
        ]
        traceback.print_exc()
        return Outcome(
            CRASH, f"{type(error).__name__}: {' '.join(lines)[:600]} at {' '.join(own[-4:])}"
        )


# --- many cases ---


def run_all(seed: int, indices: Sequence[int]) -> dict[str, Outcome]:
    """Returns {case: outcome}, each from a process of its own; prints a line for each."""
    found = {}
    for index in indices:
        outcome = in_process(fuzz_choices.draw(seed, index))
        found[f"{seed}:{index}"] = outcome
        reason = f"  {outcome.reason[:230]}" if outcome.reason else ""
        print(f"{seed}:{index}  {outcome.kind}{reason}", flush=True)
    return found


def in_process(choices: dict[str, Any]) -> Outcome:
    """Runs a case in a process of its own."""
    import processes

    try:
        done = processes.run([FILE, f"--choices={json.dumps(choices)}"], timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Outcome(CRASH, f"it did not end within {TIMEOUT_S} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not lines:
        return Outcome(CRASH, f"the process ended with status {done.returncode}")
    return Outcome(**json.loads(lines[-1]))


def main() -> int:
    """Runs one case or many, and returns the exit status."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles sooner
    sys.path.insert(0, str(FILE.parents[1]))
    importlib.import_module("conftest")  # of the root: it registers this checkout
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--case", metavar="SEED:INDEX", help="runs this case alone, in this process"
    )
    parser.add_argument("--change", default="{}", help="JSON: choices of the case to replace")
    parser.add_argument("--choices", help="JSON: all choices of a case; prints its outcome as JSON")
    options = parser.parse_args()
    if options.choices:
        outcome = repeat(json.loads(options.choices))
        print(json.dumps(dataclasses.asdict(outcome)))
        return int(outcome.kind in BUGS)
    if options.case:
        seed, index = map(int, options.case.split(":"))
        choices = {**fuzz_choices.draw(seed, index), **json.loads(options.change)}
        print(json.dumps(choices, indent=1))
        outcome = repeat(choices)
        print(f"{outcome.kind}: {outcome.reason}")
        return int(outcome.kind in BUGS)
    start = time.monotonic()
    found = run_all(options.seed, range(options.first, options.first + options.cases))
    counts = collections.Counter(outcome.kind for outcome in found.values())
    print(f"{len(found)} cases in {time.monotonic() - start:.0f} s: {dict(counts)}")
    bugs = [case for case, outcome in found.items() if outcome.kind in BUGS]
    for case in bugs:
        print(f"repeat it: python tests/fuzz_executions.py --case={case}")
    return int(bool(bugs))


if __name__ == "__main__":
    sys.exit(main())
