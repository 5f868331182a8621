"""Executions: how a step is distributed over devices. No other package deals with devices.

An execution is imported when it is used, so data-parallel training loads no mesh and no pipeline.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tekso.framework.execution.base import Execution, ExecutionProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.spelling import close_matches

if TYPE_CHECKING:
    from tekso.framework.execution.data_parallel import DataParallel
    from tekso.framework.execution.mesh_sharded import MeshSharded
    from tekso.framework.execution.parameter_servers import Asynchronous, Hybrid
    from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
    from tekso.framework.execution.pipelined import Pipelined
    from tekso.framework.execution.spmd_pipelined import SpmdPipelined

EXECUTIONS: dict[str, str] = {
    "data_parallel": "DataParallel",
    "mesh_sharded": "MeshSharded",
    "pipelined": "Pipelined",
    "spmd_pipelined": "SpmdPipelined",
}
"""{value of --execution: class}."""

_MODULES = {
    **{kind: name for name, kind in EXECUTIONS.items()},
    "StagesOnMesh": "pipeline.stages_on_mesh",
    "Asynchronous": "parameter_servers",
    "Hybrid": "parameter_servers",
}
"""{class: its module in this package}."""


def by_name(name: str) -> type[Execution]:
    """Returns the execution with this name.

    Raises:
      ExecutionError: the name is unknown.
    """
    if name not in EXECUTIONS:
        close = close_matches(name, EXECUTIONS, count=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ExecutionError(
            f"execution {name!r} is unknown; {hint}there are: {', '.join(EXECUTIONS)}"
        )
    found: type[Execution] = _imported(EXECUTIONS[name])
    return found


def import_all() -> None:
    """Imports all executions, so that their classes can be set by name (`--set`)."""
    for kind in _MODULES:
        _imported(kind)


def _imported(kind: str) -> Any:
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[kind]}"), kind)


if not TYPE_CHECKING:  # so that mypy and editors reject a typo

    def __getattr__(name: str) -> Any:
        """Imports a class when it is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _imported(name)


__all__ = [
    "EXECUTIONS",
    "Asynchronous",
    "DataParallel",
    "Execution",
    "ExecutionError",
    "ExecutionProgram",
    "Hybrid",
    "MeshSharded",
    "Pipelined",
    "SpmdPipelined",
    "StagesOnMesh",
    "by_name",
    "import_all",
]
