"""Records what small models train to under every execution, and compares with it to the last bit.

    python tests/framework/execution/golden_losses.py record FILE
    python tests/framework/execution/golden_losses.py compare FILE [--only=dense,mesh]

For changes of the executions that are meant to change no number: record before the first one, and
compare after each. The bits depend on the machine, so the file is not part of the checkout; on one
machine with one TensorFlow they are the same in every run. Every case is a process of its own, with
deterministic ops: some steps of training, an evaluation of a batch of another size, and the state
that is left. A case that an execution refuses has the message as its result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = Path(__file__).resolve()
ROOT = HERE.parents[3]
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
# Record this checkout, also if another one is installed (see the root conftest.py).
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / ".typing"), os.environ.get("PYTHONPATH", "")]
)

STEPS = 20
SIDE_BY_SIDE = 2

EXECUTIONS: dict[str, dict[str, Any]] = {
    "one_device": {"kind": "DataParallel", "towers": 1, "xla": "none"},
    "accumulated": {"kind": "DataParallel", "towers": 1, "xla": "none", "accumulation": 2},
    "compiled_towers": {"kind": "DataParallel", "towers": 2, "xla": "clusters"},
    "compiled_step": {"kind": "DataParallel", "towers": 1, "xla": "step"},
    "replicas": {"kind": "DataParallel", "xla": "none", "cpu_devices": 2},
    "mesh": {"kind": "MeshSharded", "mesh": "data:2;model:2", "rules": "2d", "xla": "none"},
    "mesh_accumulated": {
        "kind": "MeshSharded",
        "mesh": "data:2",
        "slots_axis": "data",
        "xla": "clusters",
        "accumulation": 2,
    },
    "fsdp": {"kind": "MeshSharded", "mesh": "data:2", "rules": "fsdp", "xla": "none"},
    "bfloat16_mesh": {"kind": "MeshSharded", "mesh": "model:2", "rules": "tensor"}
    | {"activation_dtype": "bfloat16", "xla": "none"},
    "pipeline": {"kind": "Pipelined", "num_stages": 3, "rematerialize": "except_last"},
    "compiled_gpipe": {"kind": "Pipelined", "schedule": "gpipe", "xla": "clusters"},
    "zero_bubble": {"kind": "Pipelined", "schedule": "zero_bubble_h1", "accumulation": 2},
    "interleaved": {"kind": "Pipelined", "schedule": "interleaved_1f1b", "num_replicas": 2},
    "mesh_stages": {
        "kind": "Pipelined",
        "rematerialize": "all",
        "stages_on": {"mesh": "model:2", "rules": "tensor"},
    },
    "spmd": {"kind": "SpmdPipelined", "rematerialize": "all", "num_stages": 3},
}

MODELS = (
    "dense",
    "remat",
    "repeated_remat",
    "untied",
    "gated",
    "sampled",
    "moe2",
    "lstm",
    "gru",
    "images",
    "translation",
    "repeated_translation",
    "prefix",
)
"""Of small_models.MODELS."""


def run(model: str, execution: str) -> dict[str, Any]:
    """Trains a model under an execution of the tables; for a process of its own."""
    import small_models
    import tensorflow as tf

    from tekso.framework import execution as executions
    from tekso.framework.execution.base import signature_of
    from tekso.framework.execution.errors import ExecutionError
    from tekso.framework.learner import Learner
    from tekso.framework.optimizers.adam import Adam
    from tekso.framework.schedules import Constant

    tf.config.experimental.enable_op_determinism()
    fields = dict(EXECUTIONS[execution])
    params = getattr(executions, fields.pop("kind")).Params()
    accumulation, cpu_devices = fields.pop("accumulation", 1), fields.pop("cpu_devices", None)
    if stages_on := fields.pop("stages_on", None):
        params.stages_on = executions.StagesOnMesh.Params().set(stages_on)
    learner = Learner.Params(
        optimizer=Adam.Params(weight_decay=0.01),
        schedule=Constant.Params(value=0.01),
        clip_global_norm=1.0,
        ema_decay=0.9,
        accumulation_steps=accumulation,
    )
    try:
        built = params.set(fields).instantiate()
        built.setup_devices(cpu_devices=cpu_devices)
        batches = [small_models.batch(model, i, size=16) for i in range(STEPS)]
        task = small_models.MODELS[model]().instantiate()
        signature = signature_of(batches[0])
        program = built.build(task, learner.instantiate(), seed=7, batch=signature)
        program.initialize()
        outputs = [program.train_step(batch, i) for i, batch in enumerate(batches)]
    except ExecutionError as error:
        return {"refused": str(error)}
    except (tf.errors.UnimplementedError, TypeError) as error:
        # XLA has no deterministic gradient of MaxPool; some models do not mix types.
        return {"refused": type(error).__name__}
    evaluation = program.eval_step({name: a[:13] for name, a in batches[0].items()})
    digest = hashlib.sha256()
    for key, value in sorted(program.state().items()):
        digest.update(f"{key} {value.dtype} {value.shape}".encode() + value.tobytes())
    return {
        "steps": [_hexadecimal(metrics) for metrics in outputs],
        "evaluation": {name: [float(x).hex() for x in pair] for name, pair in evaluation.items()},
        "state": digest.hexdigest(),
    }


def _hexadecimal(metrics: dict[str, Any]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in sorted(metrics.items())}


def cases(only: list[str]) -> list[str]:
    """Returns "model/execution" of all cases, or of those that hold one of the words."""
    found = [f"{model}/{execution}" for model in MODELS for execution in EXECUTIONS]
    return [case for case in found if not only or set(only) & set(case.split("/"))]


def results(only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every case with its result, each from a process of its own."""
    import processes

    waiting, running = cases(only), []
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE:
            case = waiting.pop(0)
            running.append((case, processes.start([HERE, "run", *case.split("/")])))
        case, process = running.pop(0)
        output, errors = process.communicate(timeout=300)
        if process.returncode:
            raise SystemExit(f"{case} ended with {process.returncode}:\n{errors[-3000:]}")
        yield case, json.loads(output.splitlines()[-1])


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns where two results of a case first differ, or ""."""
    if ("refused" in before) != ("refused" in now) or "refused" in now:
        old, new = (result.get("refused", "it trains") for result in (before, now))
        return "" if old == new else f"was: {old}\n    now: {new}"
    for step, (old, new) in enumerate(zip(before["steps"], now["steps"], strict=True)):
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                return f"step {step}, {name}: {_number(old.get(name))} != {_number(new.get(name))}"
    for part in ("evaluation", "state"):
        if before[part] != now[part]:
            return f"{part}: {before[part]} != {now[part]}"
    return ""


def _number(text: str | None) -> str:
    return "missing" if text is None else repr(float.fromhex(text))


def main() -> int:
    """Records, compares, or runs a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["record", "compare", "run"])
    parser.add_argument("where", nargs="+", help="the file; for run: model and execution")
    parser.add_argument("--only", default="", help="words of cases, with commas between")
    arguments = parser.parse_args()
    if arguments.what == "run":
        print(json.dumps(run(*arguments.where)))
        return 0
    file, only = Path(arguments.where[0]), [w for w in arguments.only.split(",") if w]
    before = {} if arguments.what == "record" else json.loads(file.read_text())
    found, differing = {}, 0
    for case, result in results(only):
        found[case] = result
        text = "refused" if "refused" in result else "recorded"
        if arguments.what == "compare":
            text = difference(before[case], result) if case in before else "not in the file"
            differing += bool(text)
        else:
            file.write_text(json.dumps(found, indent=1))
        print(f"{case:<40} {text or 'the same'}", flush=True)
    print(f"{len(found)} cases, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
