"""Weighted mixtures: which part every example comes from is a function of its position.

Position g of the mixture gets the number u(g) = (g · 2654435769 + shift) mod 2**32, a rotation by
the golden ratio, and belongs to the part in whose interval of [0, 2**32) that lies; an interval is
as long as the weight. Such numbers are spread evenly at every scale: after n positions the share of
a part is off by about log(n) examples at most. How many positions before g belong to a part is a
sum of floors, which takes some tens of additions and no walk through the past.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.input import (
    Batch,
    ExampleInput,
    Input,
    KnownText,
    Signature,
    check_step,
    form_of,
    form_text,
)
from tekso.framework.input.skips import InputError, SkipReport
from tekso.framework.params import REQUIRED, param

_ROTATION = 2654435769  # 2**32 divided by the golden ratio
_TURN = 1 << 32

Ints = npt.NDArray[np.int64]


class Mixture(Input):
    """Examples of several endless inputs, by weight."""

    class Params(Input.Params):
        """Params of Mixture."""

        batch_size: int = param("Examples in a global batch.", default=REQUIRED)
        inputs: list[ExampleInput.Params] = param("The parts.", default=REQUIRED)
        weights: list[float] = param(
            "Share of each part, up to a common factor. Empty: equal shares.", default=[]
        )

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Opens the parts; each has a seed of its own.

        Raises:
          InputError: weights or parts do not fit.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir)
        p = self.params
        if p.batch_size < 1:
            raise ValueError(
                f"{p.path_of('batch_size')} is {p.batch_size}, but has to be at least 1"
            )
        weights = list(p.weights) or [1.0] * len(p.inputs)
        if not p.inputs or len(weights) != len(p.inputs):
            raise InputError(
                f"{p.path_of('inputs')} has {len(p.inputs)} inputs, and {p.path_of('weights')} "
                f"{len(weights)} weights: wanted as many"
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
                    f"{p.path_of('inputs')}.{number}: a part of a mixture must be endless, not once"
                )
            self._inputs.append(one)
        self._check_forms()
        sizes = {one.vocab_size for one in self._inputs}
        if len(sizes) > 1:
            raise InputError(
                f"the parts of the mixture have vocabularies of {sorted(map(str, sizes))} ids: "
                "give all the same tokenizer"
            )
        self.tokenizer = self._inputs[0].tokenizer
        self._choice = Interleaving(weights, seed=seed)

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """That of the first part, whose examples look like all others."""
        first = params.inputs[0].copy().set(batch_size=params.batch_size)
        found: Signature | None = type(first).owner.signature(first)
        return found

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> Any:
        """See `Input`: the tokenizer of the first part is that of all."""
        first = params.inputs[0]
        known = type(first).owner.known(first, assets_dir=assets_dir)
        return KnownText(params, known.tokenizer) if isinstance(known, KnownText) else None

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None where there are no tokens."""
        return self._inputs[0].vocab_size

    def form(self) -> Signature | None:
        """See `Input`: that of every part."""
        return self._inputs[0].form()

    def _check_forms(self) -> None:
        """Checks that examples of all parts have the same arrays.

        Raises:
          InputError: they have other names, shapes or dtypes.
        """
        path, begin = self.params.path_of("inputs"), np.zeros(1, np.int64)
        first, *others = (form_of(one.at(begin)) for one in self._inputs)
        for number, form in enumerate(others, start=1):
            if form != first:
                raise InputError(
                    f"{path}.{number} ({type(self._inputs[number]).__name__}) has other arrays "
                    f"than {path}.0 ({type(self._inputs[0]).__name__}): {form_text(form)}; "
                    f"{path}.0 has {form_text(first)}. Names, shapes and dtypes of an example have "
                    "to be the same in all parts of a mixture"
                )

    def batch(self, step: int) -> Batch:
        """The global batch of a step.

        Raises:
          IndexError: the step is negative.
        """
        check_step(step, None)
        size = self.params.batch_size
        part, position = self._choice.places(step * size, size)
        batch: Batch = {}
        for number in np.unique(part).tolist():
            rows = np.flatnonzero(part == number)
            for key, values in self._inputs[number].at(position[rows]).items():
                if key not in batch:
                    batch[key] = np.zeros((size, *values.shape[1:]), values.dtype)
                batch[key][rows] = values
        return batch

    def check_unchanged(self) -> None:
        """See `Input`: every part is checked."""
        for one in self._inputs:
            one.check_unchanged()

    def skipped(self) -> SkipReport:
        """What of the data was malformed and left out."""
        return sum((one.skipped() for one in self._inputs), SkipReport())

    def describe(self) -> str:
        """The data in a line."""
        return "mixture of " + " and ".join(one.describe() for one in self._inputs)


class Interleaving:
    """Which part every position belongs to, by weight."""

    def __init__(self, weights: list[float], *, seed: int) -> None:
        """Cuts the turn into intervals.

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
        """Of each position from `begin` on: its part, and its position in the part's own stream."""
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
        """How many of the positions before `end` belong to each part."""
        below = [0, *(self._below(bound, end) for bound in self._ends)]
        return [after - before for before, after in itertools.pairwise(below)]

    def _below(self, bound: int, end: int) -> int:
        """How many g < end have u(g) < bound: ⌊y / turn⌋ - ⌊(y - bound) / turn⌋ is 1 for these."""
        lower = self._shift - bound + _TURN  # a turn more, so that it is not negative
        return (
            floor_sum(end, _TURN, _ROTATION, self._shift)
            - floor_sum(end, _TURN, _ROTATION, lower)
            + end
        )


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of ⌊(a·i + b) / m⌋ over i = 0, …, n - 1, for a, b ≥ 0, in O(log m) steps.

    It counts lattice points under a line: whole rows are taken off, then the axes are swapped.
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
