r"""Schedules: a learning rate (or any factor) as a pure function of the step.

Every schedule can begin with a linear warm-up, and schedules can be combined:

    value |      /^^^\__
          |    /        \__        warmup_steps and total_steps count from step 0,
          |  /             \__     so total_steps includes the warm-up; after it,
          +-+----+------------+--  a decaying schedule keeps its final value
            0    warmup_steps total_steps

A step is an optimizer update, counted from 0. Steps are int64, and only differences of steps are
converted to float32, so they are exact beyond 2**24 and 2**31 steps.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

import tensorflow as tf

from tekso.framework.params import REQUIRED, Configurable, Params, param

P = TypeVar("P", bound=Params)

_NOT_NEGATIVE = tuple(
    ["warmup_initial_value", "value", "values", "initial_value", "final_value", "scale", "factor"]
)
"""Names of fields that must not be negative, in all schedules that have them."""


class Schedule(Configurable):
    """A function of the step: `schedule(step) -> value`.

    A subclass computes `after_warmup(step)`. The warm-up is linear from `warmup_initial_value` at
    step 0 to the value of `after_warmup` at step `warmup_steps`.
    """

    class Params(Configurable.Params):
        """Params of a schedule."""

        warmup_steps: int = param("Steps of linear warm-up; 0 for none.", default=0)
        warmup_initial_value: float = param("Value at step 0 of the warm-up.", default=0.0)

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        if self.params.warmup_steps < 0:
            self._refuse("warmup_steps", "0 or more")
        own = type(self).__module__ == __name__  # in custom schedules, fields may mean otherwise
        for name in _NOT_NEGATIVE if own else ():
            given = self.params.get(name) if name in self.params else 0.0
            values = given if isinstance(given, list) else [given]
            if any(isinstance(value, (int, float)) and value < 0 for value in values):
                raise ValueError(
                    f"{self.params.path_of(name)} is {given!r}, but a learning rate cannot be "
                    "negative: every step would increase the loss"
                )

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the value at a step.

        Shapes:
          step: [], an integer tensor or an int, 0 for the first step
          returns: [], float32
        """
        step = tf.cast(step, tf.int64)
        warmup_steps = self.params.warmup_steps
        if warmup_steps == 0:
            return self.after_warmup(step)
        peak = self.after_warmup(_steps(warmup_steps))
        share = _ratio(tf.minimum(step, _steps(warmup_steps)), warmup_steps)
        warm = (1.0 - share) * self.params.warmup_initial_value + share * peak
        later = self.after_warmup(tf.maximum(step, _steps(warmup_steps)))
        return tf.where(step < _steps(warmup_steps), warm, later)

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the float32 value at an int64 step of the run, which is >= `warmup_steps`."""
        raise NotImplementedError(f"{type(self).__name__} has no after_warmup()")

    def parts(self, steps: int) -> list[tuple[Schedule, int]]:
        """Returns the schedules of which this one consists, each with its number of steps.

        Args:
          steps: number of steps of this schedule.
        """
        del steps
        return []

    def _refuse(self, name: str, allowed: str) -> None:
        given = getattr(self.params, name)
        raise ValueError(f"{type(self).__name__}: {name} is {given!r}, but must be {allowed}")


class Constant(Schedule):
    """The same value at every step."""

    class Params(Schedule.Params):
        """Params of Constant."""

        value: float = param("The value.", default=REQUIRED)

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the value at an int64 step >= `warmup_steps`."""
        return tf.constant(self.params.value, tf.float32)


class Decay(Schedule):
    """Base class of schedules that decay from an initial to a final value until `total_steps`.

    r is the remaining fraction of the steps between warm-up and `total_steps`: 1 at the end of the
    warm-up, 0 from `total_steps` on.

        value = final_value + (initial_value - final_value) * shape(r)

    If `total_steps` <= `warmup_steps`, the decay takes one step.
    """

    class Params(Schedule.Params):
        """Params of a decay."""

        initial_value: float = param("Value at the end of the warm-up.", default=REQUIRED)
        final_value: float = param("Value from total_steps on.", default=0.0)
        total_steps: int = param(
            "Steps of the whole run, the warm-up included. A run sets it to run.steps.",
            default=REQUIRED,
        )

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        if self.params.total_steps < 1:
            self._refuse("total_steps", "1 or more")

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the value at an int64 step >= `warmup_steps`."""
        p = self.params
        num_steps = max(p.total_steps - p.warmup_steps, 1)
        left = tf.maximum(_steps(p.warmup_steps + num_steps) - step, _steps(0))
        shape = self.shape(_ratio(left, num_steps))
        return p.initial_value * shape + p.final_value * (1.0 - shape)

    def shape(self, share_left: tf.Tensor) -> tf.Tensor:
        """Returns the float32 decay factor for r = `share_left`: 1 for r = 1, and 0 for r = 0."""
        raise NotImplementedError(f"{type(self).__name__} has no shape()")


class Linear(Decay):
    """Linear decay from `initial_value` to `final_value`: shape(r) = r."""

    class Params(Decay.Params):
        """Params of Linear."""

    def shape(self, share_left: tf.Tensor) -> tf.Tensor:
        """Returns the decay factor for r = `share_left`."""
        return share_left


class Polynomial(Decay):
    """Polynomial decay: shape(r) = r**power.

    Source:
      Power 2 is the decay of LARS: You et al. 2017 (arXiv 1708.03888), section 6.
    """

    class Params(Decay.Params):
        """Params of Polynomial."""

        power: float = param("Exponent of the remaining fraction of steps.", default=2.0)

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        if self.params.power <= 0:
            self._refuse("power", "above 0")

    def shape(self, share_left: tf.Tensor) -> tf.Tensor:
        """Returns the decay factor for r = `share_left`."""
        return tf.pow(share_left, self.params.power)


class Cosine(Decay):
    """Cosine decay over half a period.

    Source:
      Loshchilov & Hutter 2017 (arXiv 1608.03983), eq. 5, one period without restarts:
      (1 + cos(pi * (1 - r))) / 2, computed as sin(pi * r / 2) ** 2, which is exact near the end.
    """

    class Params(Decay.Params):
        """Params of Cosine."""

    def shape(self, share_left: tf.Tensor) -> tf.Tensor:
        """Returns the decay factor for r = `share_left`."""
        return tf.square(tf.sin(share_left * (math.pi / 2)))


class InverseSquareRoot(Schedule):
    """Linear warm-up, then inverse square-root decay: the schedule of the Transformer.

        value = scale * model_dim**-0.5 * min(t**-0.5, t * warmup_steps**-1.5),   t = step + 1

    The peak, scale * (model_dim * warmup_steps)**-0.5, is at t = warmup_steps. With `warmup_steps`
    0, the value decays from the first step on. `warmup_initial_value` is the value at t = 0.

    Source:
      Vaswani et al. 2017 (arXiv 1706.03762), eq. 3, in which steps count from 1.
    """

    class Params(Schedule.Params):
        """Params of InverseSquareRoot."""

        model_dim: int = param("Width of the model; 1: no dependence on it.", default=REQUIRED)
        scale: float = param("Factor of the whole schedule.", default=1.0)
        warmup_steps: int = param("Steps of linear warm-up.", default=4000)

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        if self.params.model_dim < 1:
            self._refuse("model_dim", "1 or more")

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the value at a step; shapes as in `Schedule`."""
        p = self.params
        t = tf.cast(step, tf.int64) + _steps(1)
        value = self.after_warmup(tf.cast(step, tf.int64))
        if p.warmup_steps == 0:
            return value
        peak = p.scale * (p.model_dim * p.warmup_steps) ** -0.5
        share = _ratio(tf.minimum(t, _steps(p.warmup_steps)), p.warmup_steps)
        warm = (1.0 - share) * p.warmup_initial_value + share * peak
        return tf.where(t < _steps(p.warmup_steps), warm, value)

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the value at an int64 step >= `warmup_steps`."""
        p = self.params
        t = tf.cast(step + _steps(1), tf.float32)
        return p.scale * p.model_dim**-0.5 * tf.math.rsqrt(t)


class Exponential(Schedule):
    """Exponential decay: the value is multiplied by `rate` every `decay_steps` steps.

    value = max(initial_value * rate ** (steps after the warm-up / decay_steps), final_value)
    """

    class Params(Schedule.Params):
        """Params of Exponential."""

        initial_value: float = param("Value at the end of the warm-up.", default=REQUIRED)
        rate: float = param("Factor over decay_steps steps.", default=REQUIRED)
        decay_steps: int = param("Steps over which the value is multiplied by rate.", default=1)
        form: Literal["smooth", "stairs"] = param(
            "Whether the value changes in every step (smooth), or once every decay_steps (stairs).",
            default="smooth",
        )
        final_value: float = param("Lower bound of the value.", default=0.0)

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        if self.params.rate <= 0:
            self._refuse("rate", "above 0")
        if self.params.decay_steps < 1:
            self._refuse("decay_steps", "1 or more")

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the value at an int64 step >= `warmup_steps`."""
        p = self.params
        step = step - _steps(p.warmup_steps)
        if p.form == "stairs":
            exponent = tf.cast(step // _steps(p.decay_steps), tf.float32)
        else:
            exponent = _ratio(step, p.decay_steps)
        return tf.maximum(p.initial_value * tf.exp(exponent * math.log(p.rate)), p.final_value)


class PiecewiseConstant(Schedule):
    """Piecewise constant: values[0] first, and values[i] from step boundaries[i - 1] on.

    Boundaries are steps of the run and include the warm-up.
    """

    class Params(Schedule.Params):
        """Params of PiecewiseConstant."""

        boundaries: list[int] = param("Ascending steps at which the value changes.", default=[])
        values: list[float] = param("The values, one more than boundaries.", default=REQUIRED)

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        _check_boundaries(self, len(self.params.values), "values")

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the value at an int64 step >= `warmup_steps`."""
        value = tf.constant(self.params.values[0], tf.float32)
        for boundary, later in zip(self.params.boundaries, self.params.values[1:], strict=True):
            value = tf.where(step < _steps(boundary), value, tf.constant(later, tf.float32))
        return value


class Sequence(Schedule):
    """One schedule after the other: schedules[i] begins at step boundaries[i - 1].

    The steps of each schedule, so also its `warmup_steps` and `total_steps`, count from its own
    beginning.
    """

    class Params(Schedule.Params):
        """Params of Sequence."""

        schedules: list[Schedule.Params] = param("The schedules in order.", default=REQUIRED)
        boundaries: list[int] = param(
            "Ascending steps of the run at which the second, third … schedule begins.", default=[]
        )

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        _check_boundaries(self, len(self.params.schedules), "schedules")
        self.schedules = [schedule.instantiate() for schedule in self.params.schedules]

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the value at an int64 step >= `warmup_steps`."""
        value = self.schedules[0](step)
        for boundary, schedule in zip(self.params.boundaries, self.schedules[1:], strict=True):
            later = schedule(tf.maximum(step - _steps(boundary), _steps(0)))
            value = tf.where(step < _steps(boundary), value, later)
        return value

    def parts(self, steps: int) -> list[tuple[Schedule, int]]:
        """Returns the schedules with the steps between their boundaries."""
        ends = [min(end, steps) for end in self.params.boundaries] + [steps]
        begins = [0, *ends[:-1]]
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return list(zip(self.schedules, sizes, strict=True))


class Product(Schedule):
    """A constant factor times the product of schedules, each evaluated at the step of the run."""

    class Params(Schedule.Params):
        """Params of Product."""

        factor: float = param("Constant factor.", default=1.0)
        schedules: list[Schedule.Params] = param("The schedules.", default=REQUIRED)

    def __init__(self, params: Schedule.Params) -> None:
        """Checks the Params."""
        super().__init__(params)
        self.schedules = [schedule.instantiate() for schedule in self.params.schedules]

    def after_warmup(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the value at an int64 step >= `warmup_steps`."""
        value = tf.constant(self.params.factor, tf.float32)
        for schedule in self.schedules:
            value *= schedule(step)
        return value

    def parts(self, steps: int) -> list[tuple[Schedule, int]]:
        """Returns the schedules, each with all steps."""
        return [(schedule, steps) for schedule in self.schedules]


def end_with_run(params: P, steps: int) -> P:
    """Returns Params of a learner in which `total_steps` of decays, if not set, is `steps`.

    So `--steps` also shortens or stretches the schedule.
    """
    params = params.copy()
    found: list[str] = []

    def note(path: str, value: Any, field: Any) -> None:
        if field.declared_in is Decay.Params and field.name == "total_steps" and value is REQUIRED:
            found.append(path)

    params.visit(note)
    return params.set({path: max(steps, 1) for path in found})


def _steps(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


def _ratio(steps: tf.Tensor, num_steps: int) -> tf.Tensor:
    return tf.cast(steps, tf.float32) / num_steps


def _check_boundaries(schedule: Schedule, num_parts: int, parts: str) -> None:
    given = list(schedule.params.boundaries)
    problem = ""
    if num_parts != len(given) + 1:
        problem = f"{num_parts} {parts} need {max(num_parts - 1, 0)} boundaries"
    elif any(low >= high for low, high in zip([0, *given], given, strict=False)):
        problem = "boundaries must be ascending and at least 1"
    if problem:
        raise ValueError(f"{type(schedule).__name__}: {problem}, given: {given}")
