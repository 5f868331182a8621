"""--mode=inspect_pipeline: prints the stages of a pipeline and simulates its schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tekso.framework.json_text import to_json
from tekso.tools.command_errors import OK

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree


def run(
    model: str,
    tree: Tree.Params,
    *,
    assets_dir: str | None,
    as_json: bool,
    picture: str | None,
) -> int:
    """Prints the pipeline of an experiment; returns the exit code.

    Args:
      model: key of the experiment.
      tree: Params of the experiment.
      assets_dir: assets of a run of the experiment; None if there is no run.
      as_json: print one object instead of text.
      picture: file for a PNG of the simulated timeline.

    Raises:
      ExecutionError: the experiment has no pipeline, or its settings do not fit the model.
    """
    from tekso.framework import files
    from tekso.framework.run import pipeline_plan, pipeline_text
    from tekso.framework.tables import terminal_width

    figures = pipeline_plan.figures(tree, assets_dir=assets_dir)
    if picture is not None:
        files.write_atomically(picture, pipeline_text.png(model, figures))
    if as_json:
        print(to_json({"model": model, **pipeline_text.record(figures)}, indent=1))
    else:
        print(pipeline_text.text(model, figures, width=terminal_width()))
    return OK
