"""--mode=plan: whether a run fits, how long it takes and what it resumes, before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tekso.framework.json_text import to_json
from tekso.tools import flag_modes
from tekso.tools.command_errors import FAILED, OK

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree


def run(
    model: str,
    tree: Tree.Params,
    *,
    logdir: str,
    assets_dir: str | None,
    device: str,
    num_devices: int | None,
    searches: bool,
    as_json: bool,
) -> int:
    """Prints the plan of a run; returns OK, or FAILED if the run would fail.

    Args:
      model: key of the experiment.
      tree: Params of the experiment.
      logdir: the logdir of the run, which may not exist.
      assets_dir: assets of a run of the experiment; None if there is no run.
      device: type of the devices.
      num_devices: number of devices; None: one, or as many as the execution needs.
      searches: whether to plan other executions too.
      as_json: print one object instead of text.

    Raises:
      UsageError: the device type is unknown.
      Exception: the parts of the experiment cannot be built or traced; what the
        Params show without them is printed; as JSON, the error too.
    """
    from tekso.framework.run import plan_text, run_plan, run_start
    from tekso.framework.run.report.lines import WIDTH
    from tekso.framework.tables import terminal_width

    flag_modes.check_device(device)
    problems: list[str] = []
    try:
        problems += run_start.params_problems(tree)
        problems += run_start.missing_files(tree)
        found = run_plan.plan(
            model,
            tree,
            logdir=logdir,
            assets_dir=assets_dir,
            device=device,
            num_devices=num_devices,
            searches=searches,
        )
    except Exception as error:
        if as_json:
            print(to_json(plan_text.record_of_problems(model, [*problems, str(error)]), indent=1))
        elif others := [text for text in dict.fromkeys(problems) if text != str(error)]:
            width = terminal_width() or WIDTH
            print("\n".join([model, "", *plan_text.problem_lines(others, width)]), flush=True)
        raise
    if as_json:
        print(to_json(plan_text.record(found), indent=1))
    else:
        print(plan_text.text(found, width=terminal_width()))
    return FAILED if found.problems else OK
