"""Experiments: the task, the data, the learner and the execution of a training run.

An experiment is a stateless class whose methods return Params. A variant is a subclass that
overrides some of them:

    @register
    class Tiny(Experiment):
        \"\"\"A small language model of Python source.\"\"\"

        def task(self) -> Params:
            return LanguageModel.Params(model=TransformerLm.Params(num_layers=2))

`tree()` combines the Params into one tree. The paths of `--set` and `params.txt` refer to it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tekso.framework.params import REQUIRED, Configurable, Params, param
from tekso.framework.params.origins import Origin, hide_from_origins
from tekso.framework.params.types import describe, type_name
from tekso.framework.source_lines import line_of, place_of
from tekso.framework.warm_start import WarmStart

hide_from_origins(__file__)


class Experiment:
    """Base class of all experiments. A subclass must define `task` and `input`."""

    def task(self) -> Params:
        """Returns the Params of the Task, which contain the model."""
        raise NotImplementedError(f"{type_name(type(self))}.task() must return Params of a Task")

    def input(self) -> Params:
        """Returns the Params of the training Input."""
        raise NotImplementedError(f"{type_name(type(self))}.input() must return Params of an Input")

    def eval_inputs(self) -> dict[str, Params]:
        """Returns the Params of the evaluation Inputs by name ("dev", "test"); all are finite."""
        return {}

    def learner(self) -> Params:
        """Returns the Params of a Learner: optimizer, schedule, clipping."""
        from tekso.framework.learner import Learner

        return _params_of(Learner)

    def execution(self) -> Params:
        """Returns the Params of an Execution: how a step is distributed over devices."""
        from tekso.framework.execution import DataParallel

        return _params_of(DataParallel)

    def run(self) -> Params:
        """Returns the Params of a Run: steps, seed and intervals."""
        return Run.Params()

    def tree(self) -> Tree.Params:
        """Returns copies of all Params as one tree, so that trees share nothing.

        Raises:
          TypeError: a method does not return Params.
          ValueError: an evaluation input has an invalid name.
        """
        tree = Tree.Params()
        for name in tree.fields():
            method = self._method(name)
            value = self._eval_inputs() if name == "eval_inputs" else self._part(name, method())
            tree._assign(name, value, origin=_defined_at(method))
        return tree

    def _method(self, name: str) -> Any:
        """Returns a bound method of the experiment, after a check that it takes no arguments.

        Raises:
          TypeError: the attribute is not a method, or the method has parameters besides self.
        """
        method = getattr(self, name)
        if not callable(method) or isinstance(method, (type, Params)):
            raise TypeError(
                f"{type_name(type(self))}.{name} is {describe(method)}, but must be a method: "
                f"def {name}(self): return ..."
            )
        try:
            inspect.signature(method).bind()
        except (TypeError, ValueError):
            code = getattr(inspect.unwrap(method), "__code__", None)
            given = ", ".join(code.co_varnames[: code.co_argcount]) if code is not None else "…"
            raise TypeError(
                f"{type_name(type(self))}.{name}({given}){place_of(method)} must have self as its "
                f"only parameter: def {name}(self): return ..."
            ) from None
        return method

    def _eval_inputs(self) -> dict[str, Params]:
        title, returned = type_name(type(self)), self.eval_inputs()
        if not isinstance(returned, dict):
            raise TypeError(
                f"{title}.eval_inputs() must return a dict of Params by name, such as "
                f'{{"dev": HeldOut.Params()}}, but returns {describe(returned)}'
            )
        for name in returned:
            if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w-]*", name):
                raise ValueError(
                    f"{title}.eval_inputs(): {name!r} is not a valid name; a name consists of "
                    "letters, digits, _ and -, and begins with a letter"
                )
        return {name: self._part(f"eval_inputs.{name}", part) for name, part in returned.items()}

    def _part(self, name: str, value: Any) -> Params:
        """Returns a copy of the Params that a method returned, after a check.

        Raises:
          TypeError: the value is not Params, or Params of a different kind of part.
        """
        if not isinstance(value, Params):
            place = place_of(getattr(self, name.partition(".")[0], None))
            raise TypeError(
                f"{type_name(type(self))}: {name}{place} must be Params, given {describe(value)}"
                f"{_instead_of(value)}"
            )
        if is_of_another_kind(name, value):
            raise TypeError(
                f"{type_name(type(self))}.{name}{place_of(getattr(self, name, None))} returns "
                f"{type_name(type(value))}, but must return Params of a subclass of "
                f"{base_class(name)}{_with_part(name, value)}"
            )
        return value.copy()


def _instead_of(value: Any) -> str:
    """Returns the end of an error about a value that is not Params: what to write instead."""
    if value is None:
        return ": is a return missing?"
    if isinstance(value, type) and issubclass(value, Params):
        return f": call it, {type_name(value)}()"
    if isinstance(value, type) and issubclass(value, Configurable):
        return f": write {type_name(value)}.Params()"
    module = type(value).__module__
    if module.startswith("tensorflow.python.data"):
        return ": return the dataset, of single examples, from load(split) of a subclass of Arrays"
    if module.partition(".")[0] in ("keras", "tf_keras", "torch"):
        return (
            ": docs/keras_and_pytorch.md has the classes of Tekso beside those of Keras and PyTorch"
        )
    return ""


def _with_part(name: str, params: Params) -> str:
    """Returns the end of an error about Params of another kind: the Params that contain them."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in params.owner.__mro__}
    for base, (part, example) in _PARTS_OF_PARTS.items():
        if part == name and base in kinds:
            return f": write {example.format(f'{type_name(type(params))}(…)')}"
    return ""


def base_class(path: str) -> str:
    """Returns "module.Class", the base class of a part of an experiment; "" for other paths.

    Args:
      path: "task", "input", "eval_inputs.dev", "learner", "execution" or "run".
    """
    first, _, name = path.partition(".")
    is_part = (bool(name) and "." not in name) if first == "eval_inputs" else not name
    return _BASES.get(first, "") if is_part else ""


def is_of_another_kind(path: str, params: Params) -> bool:
    """Whether Params are of a known kind, such as an optimizer, that the part at a path is not."""
    base = base_class(path)
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in params.owner.__mro__}
    return bool(base) and base not in kinds and bool(kinds & {*_BASES.values(), *_PARTS_OF_PARTS})


_BASES = {
    "task": "tekso.framework.task.Task",
    "input": "tekso.framework.input.input.Input",
    "eval_inputs": "tekso.framework.input.input.Input",
    "learner": "tekso.framework.learning_step.LearnerBase",
    "execution": "tekso.framework.execution.base.Execution",
    "run": f"{__name__}.Run",
}
"""Base classes of the parts of an experiment. Named, not imported: they import TensorFlow, which
is slow."""

_PARTS_OF_PARTS = {
    "tekso.framework.layer.Layer": ("task", "Classification.Params(model={})"),
    "tekso.framework.optimizers.optimizer.Optimizer": ("learner", "Learner.Params(optimizer={})"),
    "tekso.framework.schedules.Schedule": ("learner", "Learner.Params(optimizer=…, schedule={})"),
}
"""{base class of parts of parts: the part that contains them, and an example}."""


def _defined_at(method: Any) -> Origin:
    """Returns file and line of a method; "default" for a method of the base class `Experiment`."""
    line = line_of(method)
    return "default" if line is None or line[0] == __file__ else line


def _params_of(owner: Any) -> Params:
    params: Params = owner.Params()
    return params


class MetricChoice(Configurable):
    """A metric of an evaluation input, and whether larger or smaller values are better."""

    class Params(Configurable.Params):
        """Params of MetricChoice."""

        metric: str = param("Name of the metric to compare.", default="loss")
        eval_input: str | None = param(
            "Name of the evaluation input; None: the first one.", default=None
        )
        goal: Literal["min", "max"] | None = param(
            "Whether a small or a large metric is better; None: as the task declares (`goals`).",
            default=None,
        )


class KeepBest(MetricChoice):
    """Which checkpoints are kept because of their evaluation, besides the most recent ones."""

    class Params(MetricChoice.Params):
        """Params of KeepBest."""

        count: int = param("Number of checkpoints to keep; 0 keeps none.", default=1)


class EarlyStopping(MetricChoice):
    """When training ends before `run.steps`, because a metric does not improve any more."""

    class Params(MetricChoice.Params):
        """Params of EarlyStopping."""

        patience: int = param(
            "Number of consecutive evaluations without an improvement after which training ends; "
            "0: training does not end early.",
            default=0,
        )
        min_improvement: float = param(
            "By how much an evaluation must be better than the best one before it.", default=0.0
        )


class Run(Configurable):
    """Length, seed and intervals of a training run."""

    class Params(Configurable.Params):
        """Params of Run."""

        other_names: ClassVar[Mapping[str, str]] = {
            "epochs": "set steps; an epoch has as many as the examples divided by input.batch_size",
            "callbacks": "set early_stopping, keep_best and the other fields; "
            "docs/keras_and_pytorch.md lists them beside the callbacks of Keras",
        }

        steps: int = param("Number of training steps.", default=1000)
        seed: int = param("Seed of weights, data order, dropout and sampling.", default=0)
        activation_dtype: Literal["float32", "bfloat16", "float16"] = param(
            "Type in which layers compute. Weights, gradients and sums stay float32. float16 needs "
            "learner.loss_scale.",
            default="float32",
        )
        deterministic: bool = param(
            "Whether repeated runs are bit-identical, at some cost in speed.", default=False
        )
        steps_per_call: int = param(
            "Training steps that the host starts in one call, if their batches have one shape and "
            "no evaluation or checkpoint is due in between. DataParallel compiles them to a loop.",
            default=1,
        )
        log_every_steps: int = param("Steps between two logged lines.", default=50)
        eval_every_steps: int = param(
            "Steps between two evaluations; 0 evaluates at the end only.", default=500
        )
        checkpoint_every_steps: int = param(
            "Steps between two checkpoints; 0 writes one at the end only.", default=500
        )
        weight_figures_every_steps: int = param(
            "Steps between two comparisons of the weights before and after a step: norms, update "
            "ratios and histograms by layer, in weights.jsonl and TensorBoard; 0: none.",
            default=0,
        )
        checkpoint_buffer_mb: int = param(
            "Memory in MB that a checkpoint may need while training continues. Values that are not "
            "yet written need memory of their own when a step replaces them, so a step waits "
            "before it replaces more. The size of the state: no step waits.",
            default=64,
        )
        keep_last_checkpoints: int = param("Number of most recent checkpoints to keep.", default=3)
        keep_best: KeepBest.Params = param(
            "Which checkpoints are kept because of their evaluation.", default=KeepBest.Params()
        )
        early_stopping: EarlyStopping.Params = param(
            "When training ends before `steps`, because a metric does not improve any more.",
            default=EarlyStopping.Params(),
        )
        warm_start: dict[str, WarmStart.Params] = param(
            "Checkpoints that a new run takes initial weights from, by a name of your choice.",
            default={},
        )
        decode_at_end: bool = param("Whether samples are decoded at the end.", default=True)

    params: Params

    def __init__(self, params: Params) -> None:
        """Checks the numbers.

        Raises:
          ValueError: a number is out of range.
        """
        super().__init__(params)
        least = {
            "steps": 0,
            "seed": 0,
            "steps_per_call": 1,
            "log_every_steps": 1,
            "eval_every_steps": 0,
            "checkpoint_every_steps": 0,
            "checkpoint_buffer_mb": 0,
            "weight_figures_every_steps": 0,
            "keep_last_checkpoints": 1,
            "keep_best.count": 0,
            "early_stopping.patience": 0,
            "early_stopping.min_improvement": 0,
        }
        for name, minimum in least.items():
            if self.params.get(name) < minimum:
                raise ValueError(
                    f"run.{name} is {self.params.get(name)}, but must be at least {minimum}"
                )
            if name != "seed" and self.params.get(name) >= 2**63:
                raise ValueError(f"run.{name} is {self.params.get(name)}, but must be below 2**63")
        if self.params.early_stopping.patience and not self.params.eval_every_steps:
            raise ValueError(
                f"run.early_stopping.patience is {self.params.early_stopping.patience}, but "
                "run.eval_every_steps is 0, so there is only one evaluation, at the end: set "
                "run.eval_every_steps, or run.early_stopping.patience=0"
            )
        if self.params.seed >= 2**64:
            raise ValueError(f"run.seed is {self.params.seed}, but must be below 2**64")


class Tree(Configurable):
    """The parts of an experiment. The trainer instantiates them one by one."""

    class Params(Configurable.Params):
        """The root of the tree that the paths of `--set` refer to."""

        task: Params = param("The task, which contains the model.", default=REQUIRED)
        input: Params = param("The training data.", default=REQUIRED)
        eval_inputs: dict[str, Params] = param("The evaluation data by name.", default={})
        learner: Params = param("Optimizer, schedule, clipping.", default=REQUIRED)
        execution: Params = param("How a step is distributed over devices.", default=REQUIRED)
        run: Run.Params = param("Steps, seed and intervals.", default=Run.Params())
