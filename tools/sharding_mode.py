"""--mode=inspect_sharding: prints how a model is sharded, and the collectives of a step."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from tekso.framework.json_text import to_json
from tekso.tools.command_errors import FAILED, OK

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree


def run(
    model: str,
    tree: Tree.Params,
    *,
    assets_dir: str | None,
    num_devices: int | None,
    as_json: bool,
) -> int:
    """Prints the layout of an experiment; returns the exit code.

    Args:
      model: key of the experiment.
      tree: Params of the experiment.
      assets_dir: assets of a run of the experiment; None if there is no run.
      num_devices: number of devices of a preset without `execution.mesh`.
      as_json: print one object instead of text.

    Raises:
      ExecutionError: the experiment has no mesh, or its mesh and rules do not fit the model.
    """
    from tekso.framework.execution import ExecutionError
    from tekso.framework.planning import sharding
    from tekso.framework.run import mesh_plan, sharding_text
    from tekso.framework.tables import terminal_width

    plan = mesh_plan.plan_of(tree, assets_dir=assets_dir)
    layout = plan.layout(num_devices)
    placed = plan.sharding(layout)
    width = terminal_width()
    if not as_json:
        print(sharding_text.sharding_text(model, placed, width=width), flush=True)
    problem, found = None, None
    try:
        found = plan.collectives(layout)
    except ExecutionError as error:
        problem = str(error)
    if as_json:
        record = {"model": model, **sharding.record(placed)}
        record["collectives"] = (
            None if found is None else [dataclasses.asdict(one) for one in found.collectives]
        )
        record["collectives_counted"] = sharding_text.HOW_COUNTED
        record["problem"] = problem
        print(to_json(record, indent=1))
    elif found is not None:
        print(sharding_text.collectives_text(found, width=width))
    if problem is not None:
        print(f"\ntraining with this layout fails: {problem}", file=sys.stderr)
    return OK if problem is None else FAILED
