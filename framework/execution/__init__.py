"""Executions: how a step is distributed over devices. No other package deals with devices."""

from tekso.framework.execution.base import Execution, ExecutionProgram
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipelined import Pipelined

EXECUTIONS: dict[str, type[Execution]] = {
    "data_parallel": DataParallel,
    "mesh_sharded": MeshSharded,
    "pipelined": Pipelined,
}
"""{value of --execution: execution}."""


def by_name(name: str) -> type[Execution]:
    """Returns the execution with this name.

    Raises:
      ExecutionError: the name is unknown.
    """
    if name not in EXECUTIONS:
        raise ExecutionError(f"execution {name!r} is unknown; there are: {', '.join(EXECUTIONS)}")
    return EXECUTIONS[name]


__all__ = [
    "EXECUTIONS",
    "DataParallel",
    "Execution",
    "ExecutionError",
    "ExecutionProgram",
    "MeshSharded",
    "Pipelined",
    "by_name",
]
