"""--mode=inspect_sharding --auto: ranks meshes and rules by the estimated time of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tekso.framework.json_text import to_json
from tekso.tools import flag_modes
from tekso.tools.command_errors import OK, UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree


def run(
    model: str,
    tree: Tree.Params,
    *,
    assets_dir: str | None,
    device: str,
    num_devices: int | None,
    as_json: bool,
) -> int:
    """Prints the ranking of layouts for an experiment; returns the exit code.

    If the experiment has a layout, the ranking includes it.

    Args:
      model: key of the experiment.
      tree: Params of the experiment.
      assets_dir: assets of a run of the experiment; None if there is no run.
      device: type of the devices.
      num_devices: search all meshes over this number of devices; None for only `execution.mesh`.
      as_json: print one object instead of text.

    Raises:
      UsageError: neither a mesh nor a number of devices is given, or the device type is unknown.
      ExecutionError: the layout of the experiment is illegal.
    """
    from tekso.framework.execution import MeshSharded
    from tekso.framework.execution.mesh.layouts import MeshShape
    from tekso.framework.planning import layout_ranking, layout_search
    from tekso.framework.run import mesh_plan
    from tekso.framework.tables import terminal_width

    flag_modes.check_device(device)
    owner = tree.execution.owner
    has_layout = owner is not None and issubclass(owner, MeshSharded)
    if not has_layout:
        tree = tree.copy()
        tree.execution = MeshSharded.Params()
    execution: Any = tree.execution
    given = execution.mesh
    if given is None and num_devices is None:
        raise UsageError(
            "--auto requires a mesh or a number of devices, and neither is given: add "
            "--devices=512, or --execution=mesh_sharded --set execution.mesh='data:16;model:32'"
        )
    mesh = MeshShape.parse(given) if given is not None and num_devices is None else None
    plan = mesh_plan.plan_of(tree, assets_dir=assets_dir)
    compare = []
    if has_layout and (given is None or num_devices in (None, MeshShape.parse(given).size)):
        compare = [plan.layout(num_devices)]
    found = layout_search.rank(
        plan.task,
        plan.learner,
        plan.batch,
        mesh=mesh,
        num_devices=num_devices,
        device=device,
        activation_dtype=plan.activation_dtype,
        compare=compare,
    )
    if as_json:
        print(to_json(layout_ranking.record(model, found), indent=1))
    else:
        print(layout_ranking.text(model, found, width=terminal_width()))
    return OK
