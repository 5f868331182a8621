"""Checks whether a batch given to a session fits the input of its experiment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.counting import counted
from tekso.framework.input.loaded import RAGGED, about_objects, is_ragged
from tekso.framework.params.types import type_name
from tekso.framework.run.session_arrays import dtype_of, not_named
from tekso.framework.signature import Signature
from tekso.framework.task import Task

Batch = Mapping[str, Any]


class SessionError(ValueError):
    """A batch, weights or a number of steps do not fit the experiment of a session."""


def too_many(
    steps: int, done: int, limit: int, batches: int | None = None, *, session: str = "session"
) -> str:
    """Returns why so many further steps cannot be trained, and what to do.

    Args:
      steps: the further steps.
      done: steps so far.
      limit: run.steps.
      batches: number of batches of the input; None: it has no end.
      session: the session, as the caller writes it.
    """
    left = min(end for end in (limit, batches) if end is not None) - done
    text = f"cannot train {counted(steps, 'further step')}: {done} of run.steps={limit} "
    text += "is done" if done == 1 else "are done"
    if batches is not None and done + steps > batches:
        text += f", and the input has only {counted(batches, 'batch', 'batches')}"
    if left > 0:
        text += f". {counted(left, 'step')} can still be trained: {session}.train({left})"
    if done + steps > limit:
        total = done + steps
        text += f'. For more, build a session with a larger run.steps, {{"run.steps": {total}}}'
        if done:
            text += (
                f", and give it these weights: new_session.assign({session}.theta()). To keep the "
                f"state of the optimizer too, write {session}.save('runs/mine'), and continue it "
                f"with tekso-trainer --logdir=runs/mine --steps={total}"
            )
    return text


@contextlib.contextmanager
def explaining(batch: Batch, wanted: Signature) -> Iterator[None]:
    """Converts an error of the block to a SessionError if shapes differ from the input."""
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if shapes := other_shapes(batch, wanted):
            reason = str(error).partition("\n")[0]
            raise SessionError(f"the task cannot compute {shapes}: {reason}") from error
        raise


def problems_of_batch(batch: Batch, wanted: Signature) -> list[str]:
    """Returns how a batch differs from the input in names, dtypes and ranks, or [].

    Args:
      batch: arrays or tensors by name.
      wanted: signature of a batch of the input.
    """
    if problems := not_named(batch, "session.input.batch(0)"):
        return problems
    plain = {name: value for name, value in batch.items() if not hasattr(value, "dtype")}
    if plain:
        kinds = {name: type_name(type(value)) for name, value in plain.items()}
        return [
            f"{name!r} is a {kind}; np.asarray() makes an array" for name, kind in kinds.items()
        ]
    problems = [f"{name!r} is missing" for name in wanted if name not in batch]
    problems += [f"{name!r} is unknown" for name in batch if name not in wanted]
    for name in wanted.keys() & batch.keys():
        dtype = np.dtype(wanted[name][1])
        if (found := dtype_of(batch[name])) != dtype:
            problems.append(f"{name!r} is {found}, expected {dtype}")
    return [*problems, *problems_of_shapes(batch, wanted)]


def problems_of_values(batch: Batch) -> list[str]:
    """Returns why the values of a batch cannot be converted to arrays of numbers, or []."""
    if problems := not_named(batch, "session.input.batch(0)"):
        return problems
    for name, value in batch.items():
        if is_ragged(value):
            problems.append(f"{name!r} {RAGGED}")
        elif not isinstance(value, tf.Tensor) and (array := np.asarray(value)).dtype == object:
            problems.append(f"{name!r} {about_objects(value, array)}")
    return problems


def problems_of_shapes(batch: Batch, wanted: Signature) -> list[str]:
    """Returns how the ranks of arrays differ from the input, and the sizes from each other, or [].

    Args:
      batch: arrays or tensors by name, perhaps not all of the input.
      wanted: signature of a batch of the input.
    """
    problems, sizes = [], {}
    for name, value in batch.items():
        shape = list(value.shape)
        if name in wanted and len(shape) != len(wanted[name][0]):
            problems.append(f"{name!r} has shape {shape}, expected {len(wanted[name][0])} dims")
        if shape:
            sizes[name] = shape[0]
    if len(set(sizes.values())) > 1:
        problems.append(f"the arrays have different numbers of examples: {sizes}")
    return problems


def other_shapes(batch: Batch, wanted: Signature) -> str:
    """Returns the shapes of a batch and of the input if those of examples differ, or "".

    Args:
      batch: arrays or tensors by name, perhaps not all of the input.
      wanted: signature of a batch of the input.
    """
    shapes = {name: list(value.shape) for name, value in batch.items()}
    expected = {name: list(shape) for name, (shape, _) in wanted.items() if name in shapes}
    if all(shapes[name][1:] == expected[name][1:] for name in expected):
        return ""
    return f"a batch of shapes {shapes}; batches of the input have {expected}"


def missing_array(error: KeyError, task: Task, batch: Batch, wanted: Signature) -> str:
    """Returns which array of the input `predict` of a task reads and a batch has not, or "".

    Args:
      error: what reading it raised.
      task: the task.
      batch: arrays or tensors by name.
      wanted: signature of a batch of the input.
    """
    name = error.args[0] if error.args else None
    if name not in wanted or name in batch:
        return ""
    return (
        f"{task_results.method_of(task, 'predict')} reads the array {name!r}, which is not given; "
        f"given: {', '.join(map(repr, batch)) or 'none'}"
    )
