"""Trains a shrunk experiment on meshes that shard one dim alone, and compares it with one device.

    python tests/dims_program.py image.unet.Digits channels,out_channels

Each line is a dim: "equal", "refused: " with the reason, "DIFFERS" with the numbers, or "CRASH".
Without dims: every dim of the layers of Tekso. The exit code is 1 if a dim differs or crashes.
"""

from __future__ import annotations

import math
import os
import sys
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import shrunk_program
from shrunk_program import ALONE, EXECUTIONS, Shrunk, result

from tekso.framework.execution import MeshSharded, devices

DIMS = (
    *("batch", "length", "embed", "vocab", "mlp", "heads", "kv_heads", "head_dim", "experts"),
    *("positions", "depth", "height", "width", "channels", "in_channels", "out_channels"),
)
RELATIVE = 2e-4
"""Largest relative difference: float32 sums in another order, in two steps."""


def outcome(shrunk: Shrunk, alone: list[dict[str, float]], dim: str) -> str:
    """Returns the line for a dim."""
    EXECUTIONS[dim] = lambda: MeshSharded.Params(mesh="a:2", rules=f"{dim}:a", xla="none")
    try:
        found = result(shrunk, dim)
    except Exception:
        return f"CRASH {traceback.format_exc()[-1500:]}"
    if "refused" in found:
        return f"refused: {found['refused']}".replace("\n", " ")[:300]
    for mine, other in zip(found["steps"], alone, strict=True):
        for name, value in other.items():
            if not math.isclose(mine[name], value, rel_tol=RELATIVE, abs_tol=1e-6):
                return f"DIFFERS {found['steps']} {alone}"
    return "equal"


def main() -> int:
    """Prints a line for each dim; returns the exit code."""
    key, dims = sys.argv[1], (sys.argv[2].split(",") if sys.argv[2:] else DIMS)
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    MeshSharded.Params(mesh=f"devices:{shrunk_program.DEVICES}").instantiate().setup_devices()
    devices.set_graph_optimizer(False)
    shrunk = Shrunk(key, "float32", 10)
    alone = result(shrunk, ALONE)["steps"]
    lines = {}
    for dim in dims:
        lines[dim] = outcome(shrunk, alone, dim)
        print(f"{key} {dim}: {lines[dim]}", flush=True)
    return int(any(line.startswith(("DIFFERS", "CRASH")) for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
