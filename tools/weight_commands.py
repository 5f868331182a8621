"""The commands of tekso-ckpt that make a file or a run from weights: convert and merge."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tekso.framework import registry
from tekso.framework.commands import typed
from tekso.framework.params import tree as params_tree
from tekso.framework.run import inspection
from tekso.framework.run.checkpoints import CheckpointError
from tekso.framework.run.new_run import NewRun
from tekso.framework.run.opened import OpenedRun, completed_tree, open_run
from tekso.framework.run.weight_files import (
    SUFFIX,
    StoredWeights,
    WeightFile,
    is_weight_file,
    open_weights,
    write_weights,
)
from tekso.framework.run.weight_scales import scale_problem, stored_scales
from tekso.framework.run.weights import read_weight
from tekso.framework.state import WEIGHTS
from tekso.framework.task import Task
from tekso.framework.units import bytes_text
from tekso.models.adapters import merged_weights, without_adapters
from tekso.models.gpt2_layout import METADATA, Gpt2Layout, Gpt2LayoutError
from tekso.tools import experiment_flags
from tekso.tools.command_errors import UsageError

LAYOUTS = ("gpt2",)
"""Public layouts that weights can be imported from and exported to."""


class Done(NamedTuple):
    """What a command did.

    Attributes:
      record: for --format=json.
      text: lines for a person.
    """

    record: dict[str, Any]
    text: str


def convert(
    source: str,
    output: str,
    *,
    match: str | None,
    model: str | None,
    settings: Sequence[str],
    layout: str | None,
    imports: Sequence[str],
    command: Sequence[str],
    warn: Callable[[str], None],
) -> Done:
    """Writes weights in another form.

    Args:
      source: a run, a checkpoint, a safetensors file, or a folder of its shards.
      output: a safetensors file, or the folder of a new run.
      match: to a file: pattern of the paths or keys of the weights; None: all.
      model: from a file to a run: key of the experiment; None: the one that the file is from.
      settings: to a run: values of --set.
      layout: from or to a file: one of LAYOUTS; None: the names and shapes of the task.
      imports: packages of the user, for the command that evaluates the new run.
      command: the command as typed.
      warn: called with the text of a warning.

    Raises:
      UsageError: an argument does not apply to this conversion, no weight matches, the experiment
        is not known, or a setting is wrong.
      CheckpointError: the source is missing or damaged, does not fit the experiment, or the output
        cannot be written.
      Gpt2LayoutError: the tensors or the model do not have the layout.
    """
    from_file, to_file = is_weight_file(source), output.endswith(SUFFIX)
    _check_use("--match", match, to_file and not from_file, "from a run to a file")
    _check_use("--model", model, from_file and not to_file, "from a file to a run")
    _check_use("--set", settings, not to_file, "to a run")
    _check_use("--layout", layout, from_file != to_file, "between a file and a run")
    if from_file and to_file:
        raise UsageError(f"{source} and {output} are both safetensors: one of them must be a run")
    if to_file:
        return _export(open_run(source, warn=warn), output, match or "*", layout)
    if from_file:
        done = _import(source, output, model, settings, layout, command)
    else:
        done = _copy(open_run(source, warn=warn), output, settings, command)
    return done._replace(text=f"{done.text}\n{_evaluate_it(output, imports)}")


def _check_use(flag: str, value: Any, applies: bool, conversion: str) -> None:
    if value and not applies:
        raise UsageError(f"{flag} works only with a conversion {conversion}")


def _export(run: OpenedRun, output: str, match: str, layout: str | None) -> Done:
    """Writes the evaluation weights of a checkpoint to a safetensors file."""
    checkpoint = run.checkpoint
    match = match if match.startswith(WEIGHTS) else WEIGHTS + match
    keys = [k for k in sorted(checkpoint.keys) if fnmatch.fnmatch(k, match)]
    if not keys:
        raise UsageError(f"--match={match}: no weight matches")
    weights = _weights(run, [key.removeprefix(WEIGHTS) for key in keys])
    description, metadata = checkpoint.description, {"format": "np"}
    tensors = {key: description.tensors[key] for key in keys if key in description.tensors}
    description = dataclasses.replace(description, tensors=tensors, files={})
    if layout is not None:
        model = _model(run.task(), run.model)
        own = {path.removeprefix(f"{model.path}/"): value for path, value in weights.items()}
        if left := sorted(model.specs().keys() - own.keys()):
            raise UsageError(f"--match={match} leaves out {left[0]}: --layout needs all weights")
        weights, metadata = Gpt2Layout(model).to_gpt2(own), METADATA
        description = dataclasses.replace(description, tensors={})
    write_weights(output, weights, metadata, description=description)
    written = os.path.getsize(output)
    text = f"wrote {len(weights)} tensors of {checkpoint.path}: {output} ({bytes_text(written)})"
    return Done({"output": output, "tensors": len(weights), "size_bytes": written}, text)


def _import(
    source: str,
    output: str,
    model: str | None,
    settings: Sequence[str],
    layout: str | None,
    command: Sequence[str],
) -> Done:
    """Writes the folder of a run that begins with the weights of a safetensors file."""
    file = open_weights(source)
    key, tree, registered = _experiment(file, model)
    names = {name.removeprefix(WEIGHTS) for name in file.keys}
    experiment_flags.change(tree, execution=None, settings=settings)
    task = inspection.task_of(tree)
    if layout is not None:
        own = _model(task, key)
        found = Gpt2Layout(own).from_gpt2(names, file.read)
        weights = {f"{own.path}/{path}": value for path, value in found.items()}
    else:
        weights = {name: file.read(WEIGHTS + name) for name in sorted(names)}
        _check_scales(task, file)
    path = NewRun(key, tree, registered, task, weights).write(output, command=command)
    return _written(output, path, key, task, f"{len(names)} tensors of {file.path}")


def _copy(run: OpenedRun, output: str, settings: Sequence[str], command: Sequence[str]) -> Done:
    """Writes the folder of a run that begins with the evaluation weights of another run."""
    tree = run.completed_tree()
    tree.run.warm_start = {}
    weights = _weights(run, list(run.task().specs()))
    experiment_flags.change(tree, execution=None, settings=settings)
    task = inspection.task_of(tree)
    _check_scales(task, run.checkpoint)
    new = NewRun(run.model, tree, _registered(run.model, tree), task, weights)
    path = new.write(output, command=command, assets=run.logdir.assets)
    return _written(
        output, path, run.model, task, f"{len(weights)} tensors of {run.checkpoint.path}"
    )


def _written(output: str, path: str, model: str, task: Task, what: str) -> Done:
    count = sum(spec.size for spec in task.specs().values())
    text = f"wrote a run from {what}, {count:,} weights of {model}: {path}"
    record = {"output": output, "checkpoint": path, "model": model, "weights": count}
    return Done(record, text)


def merge(
    run: OpenedRun,
    output: str,
    *,
    settings: Sequence[str],
    imports: Sequence[str],
    command: Sequence[str],
) -> Done:
    """Writes the folder of a run without adapters, whose matrices contain their updates.

    The new run has the Params of the old one, without adapters, `learner.frozen` and
    `run.warm_start`.

    Args:
      run: the run with adapters.
      output: folder of the new run.
      settings: values of --set, for the new run.
      imports: packages of the user, for the command that evaluates the new run.
      command: the command as typed.

    Raises:
      CheckpointError: the run has no adapters, or the new run cannot be written.
      UsageError: a setting is wrong.
    """
    adapted = run.task()
    tree = without_adapters(run.completed_tree())
    frozen = [p for p, _, _ in params_tree.walk(tree.learner) if p.split(".")[-1] == "frozen"]
    tree.learner.set({path: [] for path in frozen})
    tree.run.warm_start = {}
    experiment_flags.change(tree, execution=None, settings=settings)
    weights = _weights(run, list(adapted.specs()))
    merged = merged_weights(adapted, weights)
    if len(merged) == len(weights):
        raise CheckpointError(f"{run.checkpoint.path} has no adapters: there is nothing to merge")
    task = inspection.task_of(tree)
    new = NewRun(run.model, tree, _registered(run.model, tree), task, merged)
    path = new.write(output, command=command, assets=run.logdir.assets)
    count = (len(weights) - len(merged)) // 2
    text = f"merged the adapters of {count} matrices of {run.checkpoint.path}: {path}"
    record = {"output": output, "checkpoint": path, "model": run.model, "matrices": count}
    return Done(record, f"{text}\n{_evaluate_it(output, imports)}")


def _experiment(file: WeightFile, model: str | None) -> tuple[str, Any, Any]:
    """Returns the key of an experiment, its tree, and the registered tree."""
    if model is not None:
        experiment = experiment_flags.experiment(model)
        tree = experiment().tree()
        return registry.key_of(experiment), tree, tree.copy()
    if file.description is None:
        raise UsageError(
            f"{file.path} does not name the experiment of its weights: give --model=KEY"
        )
    tree = completed_tree(file.description, file.path)
    return file.description.model, tree, _registered(file.description.model, tree)


def _check_scales(task: Task, weights: StoredWeights) -> None:
    """Raises a CheckpointError if stored adapters have another alpha / rank in the task."""
    scales = stored_scales(weights)
    for path, spec in task.specs().items():
        if problem := scale_problem(spec, path, scales, weights.path):
            raise CheckpointError(problem)


def _model(task: Task, key: str) -> Any:
    """Returns the model of a task, which may have a public layout."""
    if not hasattr(task, "model"):
        raise Gpt2LayoutError(
            f"{key} cannot be read or written with --layout: its task has no model"
        )
    return task.model


def _registered(model: str, tree: Any) -> Any:
    """Returns the tree of an experiment as registered; the given one if it is not registered."""
    try:
        return registry.get(model)().tree()
    except registry.UnknownExperimentError:
        return tree


def _weights(run: OpenedRun, paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the weights that evaluation uses, in the dtypes of the weights."""
    checkpoint, found = run.checkpoint, {}
    for path in paths:
        value = read_weight(path, checkpoint.read, checkpoint.keys, "evaluation")
        found[path] = value.astype(checkpoint.dtype(WEIGHTS + path).as_numpy_dtype)
    return found


def _evaluate_it(logdir: str, imports: Sequence[str]) -> str:
    packages = [f"--import={name}" for name in imports]
    flags = shlex.join([*packages, "--mode=eval", f"--logdir={logdir}"])
    return f"evaluate it:\n  {typed('tekso-trainer')} {flags}"
