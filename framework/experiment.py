"""Experiments: what is learned, from which data, how, and on which devices.

An experiment is a stateless class whose methods return Params; a variant is a subclass that
changes a few of them:

    @register
    class Tiny(Experiment):
        \"\"\"A small language model of Python source.\"\"\"

        def task(self) -> Params:
            return LanguageModel.Params(model=TransformerLm.Params(num_layers=2))

`tree()` puts them together into the one tree that `--set`, `params.txt` and the reference address.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal

from tekso.framework.params import REQUIRED, Configurable, Params, param
from tekso.framework.params.origins import Origin, hide_from_origins
from tekso.framework.params.types import describe, type_name
from tekso.framework.source_lines import line_of, place_of
from tekso.framework.warm_start import WarmStart

hide_from_origins(__file__)


class Experiment:
    """Base of all experiments; `task` and `input` have no default."""

    def task(self) -> Params:
        """What is learned: Params of a Task, the model in it."""
        raise NotImplementedError(f"{type_name(type(self))}.task() has to return Params of a Task")

    def input(self) -> Params:
        """The training data: Params of an Input."""
        raise NotImplementedError(
            f"{type_name(type(self))}.input() has to return Params of an Input"
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The evaluation data by name ("dev", "test"): Params of finite Inputs."""
        return {}

    def learner(self) -> Params:
        """Optimizer, schedule, clipping: Params of a Learner."""
        from tekso.framework.learner import Learner

        return _params_of(Learner)

    def execution(self) -> Params:
        """How a step is laid over devices: Params of an execution."""
        from tekso.framework.execution import DataParallel

        return _params_of(DataParallel)

    def run(self) -> Params:
        """Steps, seed and intervals: Params of a Run."""
        return Run.Params()

    def tree(self) -> Tree.Params:
        """All parts as one tree, copied, so that no two trees share anything.

        Raises:
          TypeError: a method returns something else than Params.
          ValueError: the name of an evaluation input is no plain name.
        """
        tree = Tree.Params()
        for name in tree.fields():
            method = self._method(name)
            value = self._eval_inputs() if name == "eval_inputs" else self._part(name, method())
            tree._assign(name, value, origin=_defined_at(method))
        return tree

    def _method(self, name: str) -> Any:
        """A method of the class that can be called without arguments.

        Raises:
          TypeError: it is something else.
        """
        method = getattr(self, name)
        if not callable(method) or isinstance(method, (type, Params)):
            raise TypeError(
                f"{type_name(type(self))}.{name} is {describe(method)}, and has to be a method: "
                f"def {name}(self): return ..."
            )
        try:
            inspect.signature(method).bind()
        except (TypeError, ValueError):
            code = getattr(inspect.unwrap(method), "__code__", None)
            given = ", ".join(code.co_varnames[: code.co_argcount]) if code is not None else "…"
            raise TypeError(
                f"{type_name(type(self))}.{name}({given}){place_of(method)} has to have one "
                f"parameter: def {name}(self): return ..."
            ) from None
        return method

    def _eval_inputs(self) -> dict[str, Params]:
        title, returned = type_name(type(self)), self.eval_inputs()
        if not isinstance(returned, dict):
            raise TypeError(
                f"{title}.eval_inputs() has to return a dict of Params by name, "
                f"given {describe(returned)}"
            )
        for name in returned:
            if not isinstance(name, str) or not re.fullmatch(r"[^\W\d][\w-]*", name):
                raise ValueError(
                    f"{title}.eval_inputs(): {name!r} is no name; a name has letters, digits, "
                    "_ and -, and begins with a letter"
                )
        return {name: self._part(f"eval_inputs.{name}", part) for name, part in returned.items()}

    def _part(self, name: str, value: Any) -> Params:
        """A copy of what a method returned, after a check."""
        if not isinstance(value, Params):
            hint = ""
            if isinstance(value, type) and issubclass(value, Params):
                hint = f"; call it: {type_name(value)}()"
            raise TypeError(
                f"{type_name(type(self))}: {name} has to be Params, given {describe(value)}{hint}"
            )
        base = _BASES.get(name.partition(".")[0], "")
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in value.owner.__mro__}
        if base and base not in kinds and kinds & {*_BASES.values(), *_PARTS_OF_PARTS}:
            raise TypeError(
                f"{type_name(type(self))}.{name}{place_of(getattr(self, name, None))} returns "
                f"{type_name(type(value))}, and has to return Params of a subclass of {base}"
            )
        return value.copy()


_BASES = {
    "task": "tekso.framework.task.Task",
    "input": "tekso.framework.input.input.Input",
    "eval_inputs": "tekso.framework.input.input.Input",
    "learner": "tekso.framework.learning_step.LearnerBase",
    "execution": "tekso.framework.execution.base.Execution",
    "run": f"{__name__}.Run",
}
"""What the parts of an experiment derive from; not imported here, since TensorFlow is slow to."""

_PARTS_OF_PARTS = (
    "tekso.framework.layer.Layer",
    "tekso.framework.optimizers.optimizer.Optimizer",
    "tekso.framework.schedules.Schedule",
)


def _defined_at(method: Any) -> Origin:
    """File and line of a method of an experiment; those of the base class are defaults."""
    line = line_of(method)
    return "default" if line is None or line[0] == __file__ else line


def _params_of(owner: Any) -> Params:
    params: Params = owner.Params()
    return params


class KeepBest(Configurable):
    """Which checkpoints are kept for their evaluation, besides the last ones."""

    class Params(Configurable.Params):
        """Params of KeepBest."""

        metric: str = param("Name of the metric that decides.", default="loss")
        eval_input: str | None = param(
            "Name of the evaluation input; None is the first one.", default=None
        )
        goal: Literal["min", "max"] | None = param(
            "Which end of the metric is good; None: the one that the task says (`goals`).",
            default=None,
        )
        count: int = param("How many are kept; 0 keeps none.", default=1)


class Run(Configurable):
    """How long a training runs, and what happens how often."""

    class Params(Configurable.Params):
        """Params of Run."""

        steps: int = param("Number of training steps.", default=1000)
        seed: int = param("Seed of weights, data order, dropout and sampling.", default=0)
        deterministic: bool = param(
            "Whether the same run gives the same bits, at some cost in speed.", default=False
        )
        log_every_steps: int = param("Steps between two logged lines.", default=50)
        eval_every_steps: int = param(
            "Steps between two evaluations; 0 evaluates at the end only.", default=500
        )
        checkpoint_every_steps: int = param(
            "Steps between two checkpoints; 0 writes one at the end only.", default=500
        )
        keep_last_checkpoints: int = param("How many of the last ones are kept.", default=3)
        keep_best: KeepBest.Params = param(
            "Which ones are kept for their evaluation.", default=KeepBest.Params()
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
          ValueError: a number is out of its range.
        """
        super().__init__(params)
        least = {
            "steps": 0,
            "seed": 0,
            "log_every_steps": 1,
            "eval_every_steps": 0,
            "checkpoint_every_steps": 0,
            "keep_last_checkpoints": 1,
            "keep_best.count": 0,
        }
        for name, minimum in least.items():
            if self.params.get(name) < minimum:
                raise ValueError(
                    f"run.{name} is {self.params.get(name)}, but it has to be at least {minimum}"
                )
        if self.params.seed >= 2**64:
            raise ValueError(f"run.seed is {self.params.seed}, but it has to be below 2**64")


class Tree(Configurable):
    """The parts of one experiment; the trainer instantiates them one by one."""

    class Params(Configurable.Params):
        """The root of the tree that `--set` addresses."""

        task: Params = param("What is learned, the model in it.", default=REQUIRED)
        input: Params = param("The training data.", default=REQUIRED)
        eval_inputs: dict[str, Params] = param("The evaluation data by name.", default={})
        learner: Params = param("Optimizer, schedule, clipping.", default=REQUIRED)
        execution: Params = param("How a step is laid over devices.", default=REQUIRED)
        run: Run.Params = param("Steps, seed and intervals.", default=Run.Params())
