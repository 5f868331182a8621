"""Trains a shrunk experiment on meshes that shard one dim, or a few; compares with one device.

    python tests/dims_program.py image.unet.Digits
    python tests/dims_program.py lm.gpt.B18 dims "batch:a;heads:b;vocab:b"
    python tests/dims_program.py --decode asr.prompts.Las vocab

Arguments after the experiment are dims or rules; `dims`, the default, is every dim that a tensor of
the model has. Each axis has two devices. A line for each layout:

| outcome | meaning |
|---|---|
| equal | the losses of two steps, an evaluation, and the state after a step match one device |
| refused | an error of Tekso before the first step |
| DIFFERS | a number is another one: a bug |
| CRASH | any other error: a bug |

Of a weight that is learned, the moments of the optimizer are compared, which show its gradient; of
another one, such as a moving mean, its value. With
`--decode`, texts, boxes or classes that are decoded on the mesh are compared too. The exit status
is 1 if a layout DIFFERS or is a CRASH.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import shrunk_program
from shrunk_program import ALONE, EXECUTIONS, METRICS, STEPS, Shrunk

from tekso.framework.execution import ExecutionError, MeshSharded, devices
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.mesh import activations
from tekso.framework.execution.mesh.layouts import Activations, MeshLayout
from tekso.framework.execution.mesh.rules import MeshShape, Rules

RELATIVE = 2e-4
"""Largest relative difference of a sum: float32 sums in another order, in two steps."""
OF_A_TENSOR = 5e-3
"""Largest relative difference of the change of a tensor of the state, by their norms."""
ROUNDING = 1e-5
"""Change of a tensor that is rounding, relative to the largest change of such a tensor: as of the
bias of keys, whose gradient is zero."""
PARTS = ("sum", "weight")
BUGS = ("DIFFERS", "CRASH")


class Model:
    """A shrunk experiment, and what one device computes of it.

    Args:
      key: key of the experiment.
      decode: whether to compare what it decodes.
    """

    def __init__(self, key: str, *, decode: bool = False) -> None:
        self._shrunk, self._decode = Shrunk(key, "float32", 10), decode
        task = self._shrunk.task()
        self._specs = task.specs()
        signature = signature_of(self._shrunk.two_batches[0])
        self._activations: Activations = activations.of_task(task, signature)
        self._alone = self._results(ALONE)

    def dims(self) -> list[str]:
        """Returns the dims of all weights and constrained activations."""
        found = [dim for spec in self._specs.values() for dim in spec.dims]
        found += [dim for dims, _ in self._activations.values() for dim in dims]
        return list(dict.fromkeys(dim for dim in found if dim is not None))

    def outcome(self, layout: str) -> str:
        """Returns what comes of a dim, or of rules."""
        rules = layout if ":" in layout else f"{layout}:a"
        axes = dict.fromkeys(axis for _, axis in Rules.parse(rules).pairs)
        mesh = ";".join(f"{axis}:2" for axis in axes)
        try:
            given = MeshLayout(MeshShape.parse(mesh), Rules.parse(rules))
            given.check(self._specs, activations=self._activations)  # without another trace
            decode_on = "mesh" if self._decode else "one_device"
            EXECUTIONS[layout] = lambda: MeshSharded.Params(
                mesh=mesh, rules=rules, xla="none", decode_on=decode_on
            )
            found = self._results(layout)
        except ExecutionError as error:
            return f"refused: {error}".replace("\n", " ")[:300]
        except Exception:
            return f"CRASH {traceback.format_exc()[-1500:]}"
        different = "; ".join(differences(self._alone, found))
        return f"DIFFERS {different[:1500]}" if different else "equal"

    def _results(self, name: str) -> dict[str, Any]:
        program, batch = self._shrunk.program(name), self._shrunk.two_batches[0]
        before = program.state()
        steps = [program.train_step(batch, STEPS[0])]
        after = program.state()
        evaluation = program.eval_step(batch)
        decoded = self._shrunk.task().decode(program, self._shrunk.input) if self._decode else None
        steps.append(program.train_step(batch, STEPS[1]))
        sums = {f"step {i} {m}": float(step[m]) for i, step in enumerate(steps) for m in METRICS}
        for metric, pair in evaluation.items():
            sums |= {f"{metric} {part}": float(x) for part, x in zip(PARTS, pair, strict=True)}
        return {
            "sums": sums,
            "changes": {key: np.float64(end) - before[key] for key, end in after.items()},
            "decoded": None if decoded is None else decoded.records,
        }


def differences(alone: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Yields how results differ from those of one device."""
    for name, value in alone["sums"].items():
        other = found["sums"][name]
        if not np.isclose(other, value, rtol=RELATIVE, atol=1e-6, equal_nan=True):
            yield f"{name} {value:.7g} is {other:.7g}"
    changes = alone["changes"]
    slots = [key for key in changes if not key.startswith("weights/")]
    by_kind: dict[str, float] = {}
    for key, change in changes.items():
        kind = key.rpartition("/")[2]
        by_kind[kind] = max(by_kind.get(kind, 0.0), float(np.linalg.norm(change)))
    # An optimizer may turn rounding of a gradient into a large change of its weight.
    for key in (key for key in changes if not _has_moments(key, slots)):
        moved = np.linalg.norm(changes[key])
        apart = np.linalg.norm(found["changes"][key] - changes[key])
        if not apart <= OF_A_TENSOR * moved + ROUNDING * by_kind[key.rpartition("/")[2]]:
            yield f"{key} moved by {moved:.3g}, and is {apart:.3g} apart"
    if not _same(alone["decoded"], found["decoded"]):
        yield f"decoded {alone['decoded']} is {found['decoded']}"


def _has_moments(key: str, slots: Sequence[str]) -> bool:
    """Returns whether a key is a weight for which the optimizer has slots, or its average."""
    kind, _, path = key.partition("/")
    if kind != "weights":
        if not path.endswith("/ema"):
            return False
        path = path.removesuffix("/ema")
    return any(f"/{path}/" in slot and not slot.endswith("/ema") for slot in slots)


def _same(one: Any, other: Any) -> bool:
    """Returns whether two nests are the same, but for the rounding of numbers."""
    if isinstance(one, dict | list) and type(one) is type(other) and len(one) == len(other):
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        return (isinstance(one, list) or keys == other.keys()) and all(
            _same(one[key], other[key]) for key in keys
        )
    if isinstance(one, float) and isinstance(other, float):
        return bool(np.isclose(one, other, rtol=RELATIVE, atol=1e-5, equal_nan=True))
    return bool(one == other)


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each layout; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("key", metavar="EXPERIMENT")
    parser.add_argument(
        "layouts",
        nargs="*",
        metavar="LAYOUT",
        help="a dim, rules, or dims: every dim",
        default=["dims"],
    )
    parser.add_argument("--decode", action="store_true", help="also decode, on the mesh")
    options = parser.parse_args(arguments)
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    MeshSharded.Params(mesh=f"devices:{shrunk_program.DEVICES}").instantiate().setup_devices()
    devices.set_graph_optimizer(False)
    model = Model(options.key, decode=options.decode)
    has_failed = False
    every = {"dims": model.dims()}
    for layout in [one for given in options.layouts for one in every.get(given, [given])]:
        start = time.process_time()
        line = model.outcome(layout)
        has_failed |= line.startswith(BUGS)
        print(f"{options.key} {layout}: {line} ({time.process_time() - start:.0f} s)", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
