"""Checks that an input of a user returns the examples that it returned when the run began."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.data_digests import check_digest, digest_of
from tekso.framework.input.errors import InputError
from tekso.framework.input.loaded import RAGGED, is_ragged
from tekso.framework.source_lines import place_of


class _Input(Protocol):
    """An `Input`."""

    params: Any
    seed: int
    assets_dir: str | None

    def describe(self) -> str: ...


def check_examples(
    input: _Input,
    method: str,
    counts: Sequence[int],
    some: Callable[[], Sequence[Mapping[str, np.ndarray]]],
) -> None:
    """Compares a digest of some examples with the one in the assets of the run, or stores it.

    Args:
      input: the input; without `assets_dir`, nothing is checked.
      method: name of the method that builds examples, for messages.
      counts: number of examples, or of those of each bucket.
      some: builds some of the examples.

    Raises:
      InputError: the examples have changed, or differ in two calls; or rows need padding.
    """
    if input.assets_dir is None or not sum(counts):
        return
    sizes = {"num_examples": np.array(counts)}
    what = f"{type(input).__name__}.{method}{place_of(getattr(input, method))}"
    now, again = (digest_of([sizes, *_checked(some(), what)]) for _ in range(2))
    if now != again:
        may = (
            "the seed, the epoch and the index",
            "np.random.default_rng([self.seed, epoch, index])",
        )
        more = ""
        if method == "bucket_rows":  # which gets no epoch
            may = "the seed and the index", "np.random.default_rng([self.seed, index])"
            more = (
                ". For other numbers in each epoch, draw in the task or a layer, with ctx.uniform"
            )
        raise InputError(
            f"{what} returns different arrays in each call for the same examples: random numbers "
            f"may depend only on {may[0]} of an example, as in {may[1]}. A resumed run would train "
            f"on other examples{more}"
        )
    params = input.params.copy().set(batch_size=1)
    crc = zlib.crc32(f"{params.to_text()} seed {input.seed}".encode())
    path = files.join(input.assets_dir, f"examples_{params.split}_{crc:08x}.json")
    check_digest(
        path,
        now,
        input.describe(),
        what=f"{what} returns different examples than before in this logdir",
        remedy="If the data has changed, use a new --logdir; there, --checkpoint=PATH evaluates "
        f"checkpoints of this logdir. Removing {path} accepts the new examples",
    )


def _checked(batches: Sequence[object], what: str) -> Sequence[Any]:
    """Returns the batches, whose arrays have rows of the same length."""
    for batch in batches:
        for name, values in batch.items() if isinstance(batch, Mapping) else ():
            if is_ragged(values):
                of_bucket = ", the argument bound" if "bucket_rows" in what else ""
                raise InputError(f"{what}: {name!r} {RAGGED}{of_bucket}")
    return batches


def spread_over(count: int) -> npt.NDArray[np.int64]:
    """Returns up to four indices of `count` examples: the first, the last and two in between."""
    return np.unique(np.linspace(0, count - 1, 4).astype(np.int64))
