"""Executions: how steps are laid over devices. All that knows of devices lives here."""

from tekso.framework.execution.base import Execution, ExecutionError, Program
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.execution.mesh_sharded import MeshSharded

EXECUTIONS: dict[str, type[Execution] | None] = {
    "data_parallel": DataParallel,
    "mesh_sharded": MeshSharded,
    "pipelined": None,
}
"""By the name that --execution takes; None: not built yet."""


def by_name(name: str) -> type[Execution]:
    """Returns the execution of a name.

    Raises:
      ExecutionError: there is none, or it is not built yet.
    """
    built = ", ".join(n for n, e in EXECUTIONS.items() if e is not None)
    if name not in EXECUTIONS:
        raise ExecutionError(f"execution {name!r} is unknown; there are: {', '.join(EXECUTIONS)}")
    execution = EXECUTIONS[name]
    if execution is None:
        raise ExecutionError(f"execution {name!r} is not built yet; there are: {built}")
    return execution


__all__ = [
    "EXECUTIONS",
    "DataParallel",
    "Execution",
    "ExecutionError",
    "MeshSharded",
    "Program",
    "by_name",
]
