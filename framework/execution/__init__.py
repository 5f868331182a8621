"""Executions: how steps are laid over devices. All that knows of devices lives here."""

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
"""By the name that --execution takes."""


def by_name(name: str) -> type[Execution]:
    """Returns the execution of a name.

    Raises:
      ExecutionError: there is none.
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
