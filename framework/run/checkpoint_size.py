"""The size of a checkpoint that is not written yet, from the specs of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

from tekso.framework.experiment import Tree
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.software_versions import versions
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec

_INDEXED = 45  # bytes of the index for a tensor, as measured; names share their beginnings
_FILE = {"size_bytes": 10**9, "sha256": 64 * "0"}
_FILES = ("tensors.index", "tensors.data-00000-of-00001")


def size_bytes(model: str, tree: Tree.Params, task: Task, tensors: Mapping[str, WeightSpec]) -> int:
    """Returns the bytes of the files of a checkpoint, without metrics and digests of data.

    Args:
      model: key of the experiment.
      tree: its Params.
      task: its task.
      tensors: specs of the tensors by key.
    """
    description = Description(
        step=tree.run.steps,
        model=model,
        params=tree.to_text(),
        task=task.params.to_text(),
        tensors={key: spec.described() for key, spec in tensors.items()},
        versions=versions(),
        files=dict.fromkeys(_FILES, _FILE),
    )
    described = len(description.to_json().encode())
    return sum(spec.size_bytes + _INDEXED for spec in tensors.values()) + described
