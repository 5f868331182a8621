"""The kinds of batches of an experiment: of several tasks, or of several buckets.

The steps of a run have several programs if each step trains one of several tasks, or if the rows of
a batch have the length of a bucket. The time of a step is then the mean over them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from tekso.framework import files
from tekso.framework.counting import counted
from tekso.framework.execution.base import Execution, signature_of
from tekso.framework.execution.pipeline.staged_execution import StagedExecution
from tekso.framework.experiment import Tree
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.input import Input
from tekso.framework.input.task_inputs import TaskInputs, named
from tekso.framework.run import input_globs
from tekso.framework.signature import Signature, num_examples

_MOST_BYTES = 1 << 26  # of files that are read for the shares of buckets


class BatchKind(NamedTuple):
    """Batches of one shape.

    Attributes:
      name: name of the task, or the rows and their length, as "128 × 16".
      share: share of the steps.
      batch: signature of the largest of these batches.
    """

    name: str
    share: float
    batch: Signature


class BatchKinds(NamedTuple):
    """The batches of an experiment.

    Attributes:
      kinds: the kinds, if there are several; else nothing.
      what: what differs between them, as a note of a plan begins.
      note: why the kinds are not known, as a note of a plan; "" if they are.
      are_buckets: whether they differ in shape only.
    """

    kinds: tuple[BatchKind, ...] = ()
    what: str = ""
    note: str = ""
    are_buckets: bool = False


ONE_KIND = BatchKinds()


def differ_in_size(tree: Tree.Params, input: Input | None = None) -> bool:
    """Whether batches of training may differ in their number of examples.

    Args:
      tree: the Params.
      input: the training input; None: the answer is that of the Params, and True if only the input
        knows.
    """
    owner: Any = tree.input.owner
    if issubclass(owner, TaskInputs):
        return bool(tree.input.get("unit") == "one_task")
    if not issubclass(owner, BucketedInput):
        return False
    divides = "num_micro_batches" in tree.execution  # others need not know, so no row is built
    if input is None or not divides or not isinstance(input.inner, BucketedInput):
        is_own = owner.batch is not BucketedInput.batch
        return is_own or "fill" not in tree.input or tree.input.get("fill") != "examples"
    return len({num_examples(batch) for _, batch in input.inner.bucket_signatures()}) != 1


def execution_of(tree: Tree.Params) -> Any:
    """Returns the execution of an experiment, which knows if its batches may differ in size."""
    found: Execution = tree.execution.instantiate()
    found.batches_differ = differ_in_size(tree)
    return found


def division_warnings(tree: Tree.Params, execution: Execution, batch: Signature) -> list[str]:
    """Returns a warning if a pipeline splits the first batch into fewer parts than configured.

    Args:
      tree: the Params.
      execution: the execution, with `batches_differ` set.
      batch: signature of the first batch.

    Raises:
      ExecutionError: the pipeline cannot split it.
    """
    if not isinstance(execution, StagedExecution) or not execution.batches_differ:
        return []
    p, size, parts = execution.params, num_examples(batch), tree.learner.get("accumulation_steps")
    found = execution.division(size, parts)
    if found == (parts, p.num_micro_batches):
        return []
    numbers = (p.num_micro_batches, found[1])
    count, into = (counted(n, "micro-batch", "micro-batches") for n in numbers)
    steps = f" and {counted(parts, 'accumulation step')}" if parts > 1 else ""
    of_steps = f" in {counted(found[0], 'accumulation step')}" if parts > 1 else ""
    return [
        f"{count} (execution.num_micro_batches){steps} do not divide the first batch of {size} "
        f"examples, so it is split into {into}{of_steps}, which may be slower and need more "
        "memory. To avoid it, choose batch sizes that are multiples of "
        f"{parts * p.num_micro_batches * p.num_replicas}"
    ]


def of_experiment(tree: Tree.Params, *, assets_dir: str | None = None) -> BatchKinds:
    """Returns the kinds of batches, with their shares of the steps.

    Shares are known only with the data. For buckets, it is read if it is not in files of more than
    64 MiB.

    Args:
      tree: the Params.
      assets_dir: folder of the assets of a run, if there was one.

    Raises:
      InputError: the data of several tasks cannot be read.
      OSError: the same.
    """
    owner: Any = tree.input.owner
    if issubclass(owner, TaskInputs) and tree.input.get("unit") == "one_task":
        return _of_tasks(tree, assets_dir)
    return _of_buckets(tree, assets_dir) if issubclass(owner, BucketedInput) else ONE_KIND


def _of_tasks(tree: Tree.Params, assets_dir: str | None) -> BatchKinds:
    input: Any = tree.input.instantiate(seed=tree.run.seed, assets_dir=assets_dir)
    largest = input.largest_batches()
    kinds = tuple(
        BatchKind(name, share, signature_of(named(name, largest[name])))
        for name, share in input.shares(tree.run.steps).items()
    )
    return BatchKinds(kinds, "a step trains one task, each with its largest batch")


def _of_buckets(tree: Tree.Params, assets_dir: str | None) -> BatchKinds:
    largest = "the plan is for the largest batch: "
    owner: Any = tree.input.owner
    if owner.reads_recordings:
        return BatchKinds(note=f"{largest}recordings are not read for other lengths")
    try:
        if (size := sum(_file_sizes(tree))) > _MOST_BYTES:
            text = f"files of {size:,} bytes are not read for other lengths"
            return BatchKinds(note=largest + text)
        input: Any = tree.input.instantiate(seed=tree.run.seed, assets_dir=assets_dir)
        batches = input.bucket_signatures()
    except Exception as error:  # a plan needs no data
        return BatchKinds(note=f"{largest}the data cannot be read for other lengths ({error})")
    kinds = tuple(BatchKind(_shape_text(batch), share, batch) for share, batch in batches)
    if len(kinds) < 2:
        return ONE_KIND
    return BatchKinds(kinds, f"batches have {len(kinds)} sizes", are_buckets=True)


def _file_sizes(tree: Tree.Params) -> Iterator[int]:
    for path, value in input_globs.of_inputs(tree).items():
        if path.startswith(f"{input_globs.TRAINING}."):
            for one in files.glob(value, what=path):
                yield os.path.getsize(one) if files.is_local(one) else _MOST_BYTES + 1


def _shape_text(batch: Signature) -> str:
    """Returns the number of rows and their largest length."""
    lengths = [shape[1] for shape, _ in batch.values() if len(shape) > 1]
    return " × ".join(map(str, [num_examples(batch), *([max(lengths)] if lengths else [])]))
