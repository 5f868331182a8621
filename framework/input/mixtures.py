"""Weighted mixtures: the input of each example is a function of its position.

Position g of the mixture has the number u(g) = (g · 2654435769 + shift) mod 2**32, a rotation by
the golden ratio. Each input has an interval of [0, 2**32) whose length is proportional to its
weight, and g belongs to the input whose interval contains u(g). These numbers are evenly spread at
every scale: among the first n positions, the count of an input is off by at most about log(n)
examples. The number of positions before g that belong to an input is a sum of floors. It is
computed in some tens of additions, without iterating over earlier positions.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.errors import InputError
from tekso.framework.input.forms import form_of, form_text
from tekso.framework.input.input import Batch, ExampleInput, Input, Signature, check_step
from tekso.framework.input.param_checks import check_counts
from tekso.framework.input.skips import SkipReport
from tekso.framework.input.unread import KnownText
from tekso.framework.params import REQUIRED, param

_ROTATION = 2654435769  # 2**32 divided by the golden ratio
_TURN = 1 << 32

Ints = npt.NDArray[np.int64]


class Mixture(Input):
    """Mixes the examples of several endless inputs in proportion to their weights."""

    class Params(Input.Params):
        """Params of Mixture."""

        batch_size: int = param("Examples in a global batch.", default=REQUIRED)
        inputs: list[ExampleInput.Params] = param("The inputs.", default=REQUIRED)
        weights: list[float] = param(
            "Relative weight of each input. Empty: equal weights.", default=[]
        )

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Opens the inputs, each with a different seed.

        Raises:
          InputError: the weights or the inputs do not fit together.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir)
        p = self.params
        weights = list(p.weights) or [1.0] * len(p.inputs)
        if not p.inputs or len(weights) != len(p.inputs):
            raise InputError(
                f"{p.path_of('inputs')} has {len(p.inputs)} inputs, but {p.path_of('weights')} "
                f"has {len(weights)} weights; the numbers must be equal and above 0"
            )
        self._inputs: list[ExampleInput] = []
        for number, part in enumerate(p.inputs):
            own = part if part.batch_size == p.batch_size else part.copy()
            if own is not part:
                own.batch_size = p.batch_size
            part_seed = int(shuffle.fold(shuffle.key_of(seed, "mixture"), number)[0])
            one = own.instantiate(seed=part_seed, assets_dir=assets_dir, train=train)
            if one.num_batches is not None:
                raise InputError(
                    f"{p.path_of('inputs')}.{number}: an input of a mixture must be endless, but "
                    "its order is 'once'"
                )
            self._inputs.append(one)
        self._check_forms()
        sizes = {one.vocab_size for one in self._inputs}
        if len(sizes) > 1:
            raise InputError(
                f"the inputs of the mixture have vocabularies of {sorted(map(str, sizes))} ids: "
                "use the same tokenizer for all"
            )
        self.tokenizer = self._inputs[0].tokenizer
        self._choice = Interleaving(weights, seed=seed)

    @classmethod
    def check_params(cls, params: Any) -> None:
        """See `Input`."""
        super().check_params(params)
        check_counts(params, "batch_size")

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`: the signature of the first input, which is the same for all."""
        first = params.inputs[0].copy().set(batch_size=params.batch_size)
        found: Signature | None = type(first).owner.signature(first)
        return found

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> Any:
        """See `Input`: the tokenizer of the first input, which is the same for all."""
        first = params.inputs[0]
        known = type(first).owner.known(first, assets_dir=assets_dir)
        return KnownText(params, known.tokenizer) if isinstance(known, KnownText) else None

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None if there are no tokens."""
        return self._inputs[0].vocab_size

    def form(self) -> Signature | None:
        """See `Input`: the form of the first input, which is the same for all."""
        return self._inputs[0].form()

    def _check_forms(self) -> None:
        """Checks that the examples of all inputs have the same arrays.

        Raises:
          InputError: names, shapes or dtypes differ.
        """
        path, begin = self.params.path_of("inputs"), np.zeros(1, np.int64)
        first, *others = (form_of(one.at(begin)) for one in self._inputs)
        for number, form in enumerate(others, start=1):
            if form != first:
                raise InputError(
                    f"{path}.{number} ({type(self._inputs[number]).__name__}) has different arrays "
                    f"than {path}.0 ({type(self._inputs[0]).__name__}): {form_text(form)}; "
                    f"{path}.0 has {form_text(first)}. Names, shapes and dtypes must be the same "
                    "in all inputs of a mixture"
                )

    def batch(self, step: int) -> Batch:
        """Returns the global batch of a step.

        Raises:
          IndexError: the step is negative.
        """
        return self.batch_rows(step, 0, self.params.batch_size)

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        del step
        size: int = self.params.batch_size
        return size

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        """See `Input`; builds only these examples."""
        check_step(step, None)
        size = end - begin
        part, position = self._choice.places(step * self.params.batch_size + begin, size)
        batch: Batch = {}
        for number in np.unique(part).tolist():
            rows = np.flatnonzero(part == number)
            for key, values in self._inputs[number].at(position[rows]).items():
                if key not in batch:
                    batch[key] = np.zeros((size, *values.shape[1:]), values.dtype)
                batch[key][rows] = values
        return batch

    def check_unchanged(self) -> None:
        """See `Input`: checks every input."""
        for one in self._inputs:
            one.check_unchanged()

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return sum((one.skipped() for one in self._inputs), SkipReport())

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        return "mixture of " + " and ".join(one.describe() for one in self._inputs)


class Interleaving:
    """Assigns positions to inputs in proportion to weights."""

    def __init__(self, weights: list[float], *, seed: int) -> None:
        """Divides [0, 2**32) into intervals.

        Raises:
          InputError: a weight is not positive and finite.
        """
        total = float(sum(weights))
        if not all(weight > 0 for weight in weights) or not np.isfinite(total):
            raise InputError(f"weights of a mixture must be positive numbers, given {weights}")
        ends = np.cumsum(weights) / total * _TURN
        self._ends = [round(end) for end in ends[:-1]] + [_TURN]
        self._shift = int(shuffle.key_of(seed, "choice")[0]) % _TURN

    def places(self, begin: int, size: int) -> tuple[Ints, Ints]:
        """Returns the input of each position, and its position in the stream of that input.

        Args:
          begin: the first position.
          size: number of positions.

        Shapes:
          returns: [size], [size]
        """
        turns = (np.arange(size, dtype=np.uint64) * np.uint64(_ROTATION)) + np.uint64(
            (begin * _ROTATION + self._shift) % _TURN
        )
        part = np.searchsorted(self._ends, turns % np.uint64(_TURN), side="right").astype(np.int64)
        position = np.empty(size, np.int64)
        for number, before in enumerate(self.counts(begin)):
            rows = np.flatnonzero(part == number)
            position[rows] = before + np.arange(len(rows))
        return part, position

    def counts(self, end: int) -> list[int]:
        """Returns for each input how many of the positions before `end` belong to it."""
        below = [0, *(self._below(bound, end) for bound in self._ends)]
        return [after - before for before, after in itertools.pairwise(below)]

    def _below(self, bound: int, end: int) -> int:
        """Returns the number of g < end with u(g) < bound.

        With y = g · rotation + shift, ⌊y / 2**32⌋ - ⌊(y - bound) / 2**32⌋ is 1 for these g, else 0.
        """
        lower = self._shift - bound + _TURN  # _TURN is added so that it is not negative
        return (
            floor_sum(end, _TURN, _ROTATION, self._shift)
            - floor_sum(end, _TURN, _ROTATION, lower)
            + end
        )


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Returns the sum of ⌊(a·i + b) / m⌋ over i = 0, …, n - 1, for a, b ≥ 0, in O(log m) steps.

    It counts lattice points under a line: it removes whole rows, then swaps the axes.
    """
    total = 0
    while n:
        total += (n * (n - 1) // 2) * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, b, a, m = top // m, top % m, m, a
        if not n:
            break
    return total
