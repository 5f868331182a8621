"""Tells whether a checkpoint was trained on the data that its run now has.

Inputs check their data themselves, but only against that of the same Params: a `--set` of a field
of the training input, such as a vocabulary, gives other data. So every checkpoint describes its
training data too, and a command whose Params of the training input differ compares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tekso.framework.experiment import Tree
from tekso.framework.input.data_digests import digest_of
from tekso.framework.params import Params
from tekso.framework.path_patterns import listed
from tekso.framework.run import param_changes
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.checkpoints import CheckpointError, DamagedCheckpointError

if TYPE_CHECKING:  # as in `comparable`
    from tekso.framework.input.input import Batch, Input
    from tekso.framework.task import Task

_DATA = "training_data"
_EXAMPLES = "num_examples"  # in the first batch of an excerpt of examples
_INPUT = "input"


def described(input: Input) -> dict[str, Any]:
    """Returns an entry of a description: a digest of some training examples."""
    return {_DATA: digest_of(_excerpt(input))}


def warning(trained: Description, tree: Tree.Params, input: Input, *, trains: bool) -> str:
    """Returns the warning of a command with other training data than a checkpoint, or "".

    Data of unchanged Params is not compared, nor data that a command needs only for this warning
    and cannot read.

    Args:
      trained: of the checkpoint.
      tree: the Params of the command.
      input: its training input.
      trains: whether the command trains.
    """
    before: Mapping[str, Any] = trained.input
    changed = _changed(trained, tree)
    if not changed or _DATA not in before:
        return ""
    try:
        batches = _excerpt(input)
        if _EXAMPLES not in batches[0] and _changes_batches(trained, tree):
            return ""  # batches of other sizes, or in another order, differ for equal data
        if before[_DATA] == digest_of(batches):
            return ""
    except Exception:
        if trains:
            raise
        return ""
    cure = "undo the change, or train in another --logdir" if trains else "undo the change"
    return (
        f"the training examples are not those of the checkpoint of step {trained.step} "
        f"({listed(changed, 3)} changed). If ids or classes mean something else than before, as "
        f"with another vocabulary, its weights do not fit the data: {cure}"
    )


def explanation(trained: Description, tree: Tree.Params, task: Task) -> str:
    """Returns which fields of a task the input has changed since a checkpoint, or "".

    Args:
      trained: of the checkpoint.
      tree: the Params of the command.
      task: the task, whose Params have the fields that follow from its input.
    """
    try:
        fields = param_changes.lines(Params.from_text(trained.task), task.params)
        given = {_path(line) for line in _lines(trained, tree)}
    except (ValueError, ImportError, AttributeError, TypeError):
        return ""
    sizes = [f"task.{line.partition('  # ')[0]}" for line in fields]  # without their origins
    followed = [line for line in sizes if _path(line) not in given]
    if not followed:
        return ""
    changed = _changed(trained, tree)
    why = f", where {listed(changed, 3)} changed" if changed else ""
    return f"These sizes come from the training input{why}: {'; '.join(followed[:3])}"


@contextlib.contextmanager
def explaining(trained: Description, tree: Tree.Params, task: Task) -> Iterator[None]:
    """Adds the `explanation` to the error about a checkpoint that does not fit the program."""
    try:
        yield
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        if text := explanation(trained, tree, task):
            raise CheckpointError(f"{error}. {text}") from error
        raise


def _excerpt(input: Input) -> list[Batch]:
    batches = input.excerpt()
    return batches if len(batches) > 1 else [input.batch(0)]


def _changed(trained: Description, tree: Tree.Params) -> list[str]:
    """Returns the paths of the training input that changed since a checkpoint, but no sizes."""
    paths = [path for path in _paths(trained, tree) if path.partition(".")[0] == _INPUT]
    return [path for path in paths if path.rpartition(".")[2] != "batch_size"]


def _changes_batches(trained: Description, tree: Tree.Params) -> bool:
    """Returns whether the batches of equal data differ: their size, their order or the seed."""
    fields = (f"{_INPUT}.batch_size", f"{_INPUT}.order", "run.seed")
    return any(path in fields for path in _paths(trained, tree))


def _paths(trained: Description, tree: Tree.Params) -> list[str]:
    try:
        return [_path(line) for line in _lines(trained, tree)]
    except (ValueError, ImportError, AttributeError, TypeError):
        return []  # as the lines "changed since then" report


def _path(line: str) -> str:
    return line.partition(" : ")[0]


def _lines(trained: Description, tree: Tree.Params) -> list[str]:
    return param_changes.lines(Params.from_text(trained.params), tree)
