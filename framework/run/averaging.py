"""Averages the weights of several checkpoints into one; has one tensor at a time in memory.

    weights/…            floating: the mean over all checkpoints, including statistics of layers
    learner/…/ema        the mean: evaluation reads the moving average of a weight, if there is one;
                         before the first update, the moving average is the weight
    everything else      as in the last checkpoint: integers, slots of the optimizer, counters

The result is evaluated, decoded and restored like any other checkpoint. Training can continue from
it, with averaged weights and with the optimizer state of the last step.

Source: Vaswani et al. 2017, "Attention is all you need", section 6.1 (the last 5 or 20).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tekso.framework.learning_step import APPLIED, EMA
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoint_files import (
    Checkpoint,
    CheckpointError,
    DamagedCheckpointError,
    Description,
)
from tekso.framework.state import LEARNER, WEIGHTS

_PART_BYTES = 1 << 26  # tensors smaller than this are written together
_SHOWN = 3  # maximum number of changed Params in a message


def write_average(path: str, checkpoints: Sequence[Checkpoint]) -> Description:
    """Writes the average of checkpoints, given in order of steps; the write is atomic.

    The sums are float64, rounded once to the dtype of the weight. The description is copied from
    the last checkpoint, without metrics, and names all checkpoints.

    Raises:
      CheckpointError: the checkpoints are of several experiments, their tensors differ, a weight is
        not finite, or the result cannot be written.
    """
    check_same_tensors(checkpoints)
    last = checkpoints[-1]
    description = dataclasses.replace(
        last.description,
        metrics={},
        averaged=[f"{one.path} (step {one.step})" for one in checkpoints],
    )
    return checkpoint_files.write_parts(
        path,
        _parts(checkpoints),
        description,
        size_bytes=sum(last.size_bytes(key) for key in last.keys),
    )


def check_same_tensors(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises CheckpointError if checkpoints are of several experiments, or their tensors differ."""
    last = checkpoints[-1]
    for one in checkpoints[:-1]:
        if one.description.model != last.description.model:
            raise CheckpointError(
                f"{one.path} is a checkpoint of {one.description.model}, and {last.path} of "
                f"{last.description.model}: only checkpoints of one experiment can be averaged"
            )
        if other := sorted(one.keys ^ last.keys):
            where = one.path if other[0] in one.keys else last.path
            more = f", and {len(other) - 1} more differ" if len(other) > 1 else ""
            raise CheckpointError(
                f"{one.path} and {last.path} have different tensors: {other[0]} is only in "
                f"{where}{more}"
            )
        for key in sorted(last.keys):
            found, wanted = (c.shape(key) for c in (one, last))
            if found != wanted:
                raise CheckpointError(
                    f"{key} has shape {list(found)} in {one.path} and {list(wanted)} in "
                    f"{last.path}: weights of different shapes cannot be averaged"
                )


def differences(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Returns a warning for each checkpoint whose Params differ from those of the last."""
    last = checkpoints[-1]
    warnings = []
    for one in checkpoints[:-1]:
        before, after = (c.description.params.splitlines() for c in (one, last))
        lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
        changed = [line for line in lines if not line.startswith("@@")]
        if changed:
            more = "; …" if len(changed) > _SHOWN else ""
            warnings.append(
                f"{one.path} was trained with Params that differ from those of {last.path}: "
                f"{'; '.join(changed[:_SHOWN])}{more}"
            )
    return warnings


def is_averaged(key: str, dtype: tf.DType) -> bool:
    """Whether a tensor is averaged; otherwise it is copied from the last checkpoint."""
    is_evaluated = key.startswith(WEIGHTS) or (key.startswith(LEARNER) and key.endswith(f"/{EMA}"))
    return is_evaluated and dtype.is_floating


def average(key: str, checkpoints: Sequence[Checkpoint]) -> np.ndarray:
    """Returns one tensor of the average: the mean, or the tensor of the last checkpoint.

    Raises:
      CheckpointError: a value to average is not finite, or a checkpoint can no longer be read.
    """
    last = checkpoints[-1]
    if not is_averaged(key, last.dtype(key)):
        return _read(last, key)
    total = np.zeros(last.shape(key), np.float64)
    for one in checkpoints:
        value = _evaluated(one, key)
        total += value.astype(np.float64)
        if not np.isfinite(total).all():
            raise CheckpointError(f"{key} of {one.path} has values that are not finite")
    return np.asarray(total / len(checkpoints)).astype(value.dtype)


def _parts(checkpoints: Sequence[Checkpoint]) -> Iterator[dict[str, np.ndarray]]:
    part: dict[str, np.ndarray] = {}
    size = 0
    for key in sorted(checkpoints[-1].keys):
        needed = checkpoints[-1].size_bytes(key)
        if part and size + needed > _PART_BYTES:
            yield part
            part, size = {}, 0
        part[key] = average(key, checkpoints)
        size += needed
    yield part


def _evaluated(checkpoint: Checkpoint, key: str) -> np.ndarray:
    """Returns the tensor of a key; the weight for a moving average that has no updates yet."""
    applied = LEARNER + APPLIED
    if key.startswith(LEARNER) and applied in checkpoint.keys and not _read(checkpoint, applied):
        dtype = checkpoint.dtype(key).as_numpy_dtype
        key = WEIGHTS + key.removeprefix(LEARNER).removesuffix(f"/{EMA}")
        return _read(checkpoint, key).astype(dtype)
    return _read(checkpoint, key)


def _read(checkpoint: Checkpoint, key: str) -> np.ndarray:
    try:
        return checkpoint.read(key)
    except DamagedCheckpointError as error:
        raise CheckpointError(
            f"{checkpoint.path} can no longer be read: {error}. A run in progress deletes old "
            "checkpoints; run.keep_last_checkpoints sets how many it keeps"
        ) from error
