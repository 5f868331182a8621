"""Loads the weights of a run, for its task or for any layer, for example in a notebook.

    task = load_task("runs/ende")
    theta = load_weights(task, "runs/ende")
    theta = load_weights(task.model.encoder, "runs/ende/checkpoints/step_00002000")

Pass them to the layer: `layer.fprop(theta, x, ctx)`. All executions write the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework.layer import Layer
from tekso.framework.learning_step import APPLIED, EMA
from tekso.framework.params.types import type_name
from tekso.framework.run.checkpoints import Checkpoint, CheckpointError
from tekso.framework.run.opened import open_run
from tekso.framework.run.weight_scales import scale_problem, stored_scales
from tekso.framework.state import LEARNER, WEIGHTS
from tekso.framework.theta import SEPARATOR, Theta
from tekso.framework.weight_update import is_first_update

Use = Literal["evaluation", "training"]
"""Which weights to load: "evaluation": the weights that evaluation and decoding use, which are
moving averages if the learner keeps them; "training": the weights that training continues from."""

_MOST_PROBLEMS = 8  # maximum number in a message


def load_task(run: str) -> Any:
    """Returns the task of a run, built from the Params in its newest checkpoint, without its data.

    Args:
      run: the run's folder, or one of its checkpoints.

    Raises:
      CheckpointError: there is no good checkpoint, or its Params cannot be read.
      ValueError: an earlier version wrote the checkpoint, and the task needs a size that only the
        data determines.
    """
    return open_run(run).task()


def load_weights(
    layer: Layer,
    run: str,
    *,
    use: Use = "evaluation",
    prefix: str | None = None,
    index: int | Sequence[int] | None = None,
) -> Theta:
    """Returns the weights of a layer from a checkpoint.

    Args:
      layer: a task, a layer of a task, or a separate layer.
      run: the folder of a run, whose newest good checkpoint is read, or the folder of a checkpoint.
      use: "evaluation": moving averages if the run keeps them; "training": the weights.
      prefix: path of the layer in the checkpoint, such as "model/encoder"; None: `layer.path`.
      index: which repetition to load of a layer in a repeated stack; one number for every stack
        that contains the layer.

    Shapes:
      returns: the shapes of `layer.specs()`, in their dtypes

    Raises:
      CheckpointError: there is no good checkpoint; or weights are missing, are unknown to the
        layer, or have other shapes. The text names their paths.
      ValueError: `use` or `index` is invalid.
      TypeError: `layer` is no layer.
    """
    if not isinstance(layer, Layer):
        raise TypeError(
            "load_weights expects a layer, such as task or task.model.stack, given "
            f"{type_name(type(layer))}"
        )
    flat = weights_of(layer, open_run(run).checkpoint, use=use, prefix=prefix, index=index)
    return layer.theta(flat)


def weights_of(
    layer: Layer,
    checkpoint: Checkpoint,
    *,
    use: Use = "evaluation",
    prefix: str | None = None,
    index: int | Sequence[int] | None = None,
) -> dict[str, tf.Tensor]:
    """Returns the weights of a layer from a checkpoint, by path; see `load_weights`."""
    check_use(use)
    prefix = layer.path if prefix is None else prefix.strip(SEPARATOR)
    rows = _rows(layer, index)
    _check(checkpoint, layer, prefix, len(rows))
    flat = {}
    for path, spec in layer.specs().items():
        value = read_weight(_join(prefix, path), checkpoint.read, checkpoint.keys, use)
        if any(not -size <= row < size for row, size in zip(rows, value.shape, strict=False)):
            raise ValueError(
                f"index is {index}, but {_join(prefix, path)} is repeated "
                f"{' x '.join(map(str, value.shape[: len(rows)]))} times: count from 0"
            )
        flat[path] = tf.cast(tf.constant(value[rows]), spec.dtype)
    return flat


def check_use(use: str) -> None:
    """Raises a ValueError if `use` is not a `Use`."""
    if use not in ("evaluation", "training"):
        raise ValueError(f"use is {use!r}, but must be 'evaluation' or 'training'")


def read_weight(
    path: str, read: Callable[[str], np.ndarray], keys: Set[str], use: Use
) -> np.ndarray:
    """Returns a weight of a state, or its moving average.

    Args:
      path: path of the weight.
      read: returns the whole array of a key.
      keys: keys of the state.
      use: "training": the weight; "evaluation": its moving average, if there is one.
    """
    return read(weight_key(path, read, keys, use))


def weight_key(path: str, read: Callable[[str], np.ndarray], keys: Set[str], use: Use) -> str:
    """Returns the key of a weight of a state, or of its moving average; see `read_weight`."""
    average = f"{LEARNER}{path}{SEPARATOR}{EMA}"
    if use == "evaluation" and average in keys:
        applied = LEARNER + APPLIED
        if applied not in keys or not bool(is_first_update(read(applied))):
            return average
    return WEIGHTS + path


def _rows(layer: Layer, index: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns the repetition of each stack that contains a layer, the outermost stack first."""
    sizes = layer.stack_sizes()
    if index is None:
        if sizes:
            raise ValueError(
                f"{layer.path} is a repeated layer, and only one repetition can be loaded at a "
                "time: set index to its number, "
                f"{' and '.join(f'from 0 to {size - 1}' for size in sizes)}. To load all, load "
                "the layer that contains the stack"
            )
        return ()
    rows = tuple(index) if isinstance(index, Sequence) else (index,)
    if any(isinstance(row, bool) or not isinstance(row, int | np.integer) for row in rows):
        raise ValueError(f"index is {index!r}, but must be an integer, or one for each stack")
    if sizes and len(rows) != len(sizes):
        raise ValueError(f"index is {index}, but {layer.path} is in {len(sizes)} repeated stacks")
    return rows


def _check(checkpoint: Checkpoint, layer: Layer, prefix: str, num_rows: int) -> None:
    """Checks that a checkpoint has exactly the weights of a layer below its path.

    Raises:
      CheckpointError: weights differ; the text names their paths.
    """
    specs, problems, scales = layer.specs(), [], stored_scales(checkpoint)
    for path, spec in specs.items():
        key = WEIGHTS + _join(prefix, path)
        if key not in checkpoint.keys:
            problems.append(f"missing {_join(prefix, path)}")
        elif checkpoint.shape(key)[num_rows:] != spec.shape:
            problems.append(
                f"{_join(prefix, path)} has the shape {list(checkpoint.shape(key))}, in the layer "
                f"{['…'] * num_rows + list(spec.shape)}".replace("'…'", "…")
            )
        elif problem := scale_problem(spec, _join(prefix, path), scales, checkpoint.path):
            problems.append(problem)
    below = WEIGHTS + (prefix + SEPARATOR if prefix else "")
    known = {WEIGHTS + _join(prefix, path) for path in specs}
    unknown = sorted(key for key in checkpoint.keys if key.startswith(below))
    problems += [f"unknown {key[len(WEIGHTS) :]}" for key in unknown if key not in known]
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        listed = "; ".join(problems[:_MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(
            f"{checkpoint.path} does not fit {type(layer).__name__} at "
            f"{repr(prefix) if prefix else 'the root'}: {listed}{_hint(checkpoint, specs, prefix)}"
        )


def _hint(checkpoint: Checkpoint, paths: Any, prefix: str) -> str:
    """Returns the prefixes at which the checkpoint has weights of these paths, as a hint."""
    first = next(iter(paths), None)
    if first is None:
        return ""
    names = {key[len(WEIGHTS) :] for key in checkpoint.keys if key.startswith(WEIGHTS)}
    above = [n.removesuffix(first).rstrip(SEPARATOR) for n in names if n.endswith(f"/{first}")]
    fits = (p for p in above if p != prefix and all(_join(p, path) in names for path in paths))
    fitting = sorted(fits)
    return f". Weights of these names are at prefix={' or '.join(map(repr, fitting[:3]))}" * bool(
        fitting
    )


def _join(prefix: str, path: str) -> str:
    return f"{prefix}{SEPARATOR}{path}" if prefix else path
