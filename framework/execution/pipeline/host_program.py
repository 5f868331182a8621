"""What programs that are driven from the host have in common: the step around the schedule."""

from __future__ import annotations

import abc
import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.collected import added_pairs
from tekso.framework.context import StepContext
from tekso.framework.execution.base import Batch, ExecutionError, Program, checked_state
from tekso.framework.execution.pipeline import remote
from tekso.framework.execution.pipeline.actions import Action
from tekso.framework.execution.pipeline.measured_step import MeasuredStep, measured_step
from tekso.framework.execution.pipeline.setting import Setting
from tekso.framework.execution.pipeline.simulator import Event
from tekso.framework.execution.pipeline.stage_evaluation import StageEvaluation
from tekso.framework.execution.pipeline.stage_state import Flat, StageState
from tekso.framework.execution.pipeline.workers import StageError, Worker, Workers, reason_of
from tekso.framework.theta import SEPARATOR
from tekso.framework.weight_spec import WeightSpec


class HostProgram(Program):
    """See `Program`; a subclass has the functions of the stages, the state and the evaluation."""

    _state: StageState
    _evaluation: StageEvaluation

    def __init__(
        self, task: Any, learner: Any, setting: Setting, *, num_workers: int, seed: int
    ) -> None:
        self._task, self._learner, self._setting, self._seed = task, learner, setting, seed
        self._groups = learner.groups(task.specs())
        self._workers = Workers(num_workers)
        self._decide = tf.function(self._decide_graph, autograph=False)
        self._calls: dict[Any, Callable[..., Any]] = {}
        self.events: dict[Worker, list[Event]] = {}
        """What every worker did in the last step, and when."""

    # --- state ---

    def specs(self) -> dict[str, WeightSpec]:
        """See `Program`."""
        return dict(self._state.specs)

    def initialize(self) -> None:
        """See `Program`; every device draws what it keeps."""
        specs = self._state.specs
        self._state.assign(lambda key, slices: specs[key].initial_value(self._seed, slices))
        self._evaluation.forget()

    def restore(self, read: Callable[[str], np.ndarray], keys: Set[str]) -> None:
        """See `Program`."""
        values = checked_state(self.specs(), read, keys)
        self._state.assign(lambda key, slices: values[key][slices])
        self._evaluation.forget()

    def state(self) -> dict[str, np.ndarray]:
        """See `Program`."""
        return self._state.whole()

    # --- training ---

    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `Program`."""
        sizes = {name: len(array) for name, array in batch.items()}
        if set(sizes.values()) != {self._setting.batch_size}:
            raise ExecutionError(
                f"a batch with leading dims {sizes}, where the pipeline was built for "
                f"{self._setting.batch_size} examples"
            )
        self._evaluation.forget()
        with self._lost_are_named():
            return self._train_step(batch, step)

    @abc.abstractmethod
    def _train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """See `train_step`; the batch has the size that it should."""

    def _run_parts(self, batch: Batch, run_of: Callable[[Batch, int], Any]) -> None:
        """Goes through the schedule with every part of a batch: `run_of(part, first example)`."""
        setting = self._setting
        self.events = collections.defaultdict(list)
        size = setting.batch_size // setting.num_parts
        for start in range(0, setting.batch_size, size):
            part = {name: array[start : start + size] for name, array in batch.items()}
            found = self._workers.run(
                setting.orders,
                run_of(part, start).perform,
                num_stages=len(setting.plan.stages),
                name_of=self._name_of,
            )
            for worker, events in found.items():
                self.events[worker] += events

    @contextlib.contextmanager
    def _lost_are_named(self) -> Iterator[None]:
        """Says of every error in a step which devices do not answer any more.

        The first to notice that a process is lost may be a stage of another one, and TensorFlow may
        call it Unavailable, Internal or Cancelled: only asking the devices tells.

        Raises:
          StageError: for errors of TensorFlow's too, which are those outside of the schedule.
        """
        try:
            yield
        except (tf.errors.OpError, StageError) as error:
            said = str(error) if isinstance(error, StageError) else _reason(error)
            lost = remote.lost([name for row in self._setting.devices for name in row])
            if lost:
                said += f"; lost: {', '.join(lost)}"
            raise StageError(said) from (error.__cause__ or error)

    def _name_of(self, worker: Worker, action: Action) -> str:
        names = self._setting.plan.stages[action.stage].piece_names
        held = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"{action.work} ({held}) on {self._setting.device_of(worker[0], action.stage)}"

    def _total(self, by_stage: Sequence[Any]) -> tf.Tensor:
        """The total loss; every stage has a share of it."""
        dtype = by_stage[-1]["loss"].dtype
        return added([tf.cast(found["total"], dtype) for found in by_stage])

    def _statistics(self, by_stage: Sequence[Any]) -> list[dict[str, Any]]:
        """The sums for the moving statistics of what every stage keeps; of copies, theirs too."""
        found: list[dict[str, Any]] = [{} for _ in by_stage]
        for index, sums in enumerate(by_stage):
            for name, pair in sums["statistic"].items():
                keeper = self._setting.plan.keeper(name.rpartition(SEPARATOR)[0], index)
                with self._state.on(keeper):
                    found[keeper] = added_pairs([found[keeper], {name: pair}])
        return found

    def _decide_graph(self, squares: Any, counts: Flat, step: tf.Tensor, loss: tf.Tensor) -> Any:
        return self._learner.decide(self._groups, squares, counts, step, loss=loss)

    def _reported(
        self, by_stage: Sequence[Any], total: tf.Tensor, weight: tf.Tensor, decision: Any
    ) -> dict[str, Any]:
        """What `train_step` returns."""
        loss_sum = by_stage[-1]["loss"]
        auxiliary: dict[str, Any] = {}  # shares of a mean, which add up over parts and stages
        for name, value in (pair for found in by_stage for pair in found["aux"].items()):
            auxiliary[name] = auxiliary[name] + value if name in auxiliary else value
        metrics = added_pairs([found["metric"] for found in by_stage])
        return {
            "loss": tf.math.divide_no_nan(loss_sum, tf.cast(weight, loss_sum.dtype)),
            "total_loss": total,
            **{name: tf.math.divide_no_nan(*pair) for name, pair in metrics.items()},
            **auxiliary,
            **decision.metrics,
        }

    def trace(self) -> MeasuredStep | None:
        """See `Program`."""
        return measured_step(self.events, self._setting)

    # --- evaluation ---

    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """See `Program`."""
        with self._lost_are_named():
            return self._evaluation.step(batch, self._workers, self._name_of)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `Program`; on the device of the first stage, with the weights of all."""
        if function not in self._calls:

            def run(weights: Flat, *inputs: Any) -> Any:
                ctx = StepContext(mode="decode", seed=self._seed)
                return function(self._task.theta(weights), *inputs, ctx)

            self._calls[function] = tf.function(run, autograph=False)
        with self._state.on(0):
            return self._calls[function](self._evaluation.gathered(), *inputs)


def added(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of one tensor or more."""
    return tf.add_n(list(values)) if len(values) > 1 else values[0]


def converted(batch: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns the arrays of a batch as tensors."""
    return {name: tf.convert_to_tensor(array) for name, array in batch.items()}


def _reason(error: tf.errors.OpError) -> str:
    """What failed between the actions of the schedule."""
    return f"a step of the pipeline failed: {type(error).__name__}: {reason_of(error)}"
