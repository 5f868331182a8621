"""Executions: how a step is distributed over devices. No other package deals with devices.

An execution is imported when it is used, so data-parallel training loads no mesh and no pipeline.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tekso.framework.execution.base import Execution, ExecutionProgram
from tekso.framework.execution.errors import ExecutionError

if TYPE_CHECKING:
    from tekso.framework.execution.data_parallel import DataParallel
    from tekso.framework.execution.mesh_sharded import MeshSharded
    from tekso.framework.execution.pipelined import Pipelined
    from tekso.framework.execution.spmd_pipelined import SpmdPipelined

EXECUTIONS: dict[str, str] = {
    "data_parallel": "DataParallel",
    "mesh_sharded": "MeshSharded",
    "pipelined": "Pipelined",
    "spmd_pipelined": "SpmdPipelined",
}
"""{value of --execution, which is also a module of this package: its class}."""


def by_name(name: str) -> type[Execution]:
    """Returns the execution with this name.

    Raises:
      ExecutionError: the name is unknown.
    """
    if name not in EXECUTIONS:
        raise ExecutionError(f"execution {name!r} is unknown; there are: {', '.join(EXECUTIONS)}")
    module = importlib.import_module(f"{__name__}.{name}")
    found: type[Execution] = getattr(module, EXECUTIONS[name])
    return found


def __getattr__(name: str) -> Any:
    """Imports an execution when its class is first used."""
    for execution, kind in EXECUTIONS.items():
        if kind == name:
            return by_name(execution)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EXECUTIONS",
    "DataParallel",
    "Execution",
    "ExecutionError",
    "ExecutionProgram",
    "MeshSharded",
    "Pipelined",
    "SpmdPipelined",
    "by_name",
]
