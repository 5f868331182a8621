"""Base of inputs whose examples are prepared one by one from the records of a source."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input import shuffle
from tekso.framework.input.data_digests import check_digest
from tekso.framework.input.input import Batch, ExampleInput, Signature
from tekso.framework.input.skips import BadRecordError, SkipReport
from tekso.framework.input.sources import Source
from tekso.framework.params import REQUIRED, param

MOST_THREADS = 16


class PreparedInput(ExampleInput):
    """Examples of one shape, each prepared from a record of a source, in several threads.

    A subclass defines `signature(params)` and `prepared(index, key)`. The key is a function of
    (seed, epoch, index) and seeds all random numbers of the example, so that an example does not
    depend on its batch, on the process that builds it, or on restarts.

    A malformed record is reported, up to `source.max_skipped` of them; its place in the batch gets
    the example `blank()`.

    Raises:
      InputError: as the source; the training data has changed since the run began.
      ValueError: a number is out of range.
    """

    class Params(ExampleInput.Params):
        """Params of PreparedInput."""

        source: Source.Params = param("Where the records come from.", default=REQUIRED)
        num_threads: int | None = param(
            f"Threads that prepare examples. None: the number of CPUs, at most {MOST_THREADS}.",
            default=None,
        )

    unit: ClassVar[str] = "examples"
    """What the records are, in the plural, for messages and for the name of the digest."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        p = self.params
        if p.num_threads is not None and p.num_threads < 1:
            raise ValueError(
                f"{p.path_of('num_threads')} is {p.num_threads}, but must be at least 1"
            )
        self.is_training = p.order != "once"
        self.source: Any = p.source.instantiate(split=p.split)
        self._random_key = shuffle.key_of(self.seed, "augmentation")
        self._pool: ThreadPoolExecutor | None = None

    def prepared(self, index: int, key: int) -> Batch:
        """Returns the arrays of one example, without the dim of the batch.

        Args:
          index: index of the record.
          key: key of the random numbers of the example.

        Raises:
          BadRecordError: the record is malformed.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prepared(index, key)")

    def blank(self) -> Batch:
        """Returns the example in the place of a malformed record: zeros, also as its weight."""
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.form().items()}

    @property
    def is_threaded(self) -> bool:
        """Whether preparing an example takes so long that threads pay."""
        return True

    def form(self) -> Signature:
        """See `Input`."""
        found = self.signature(self.params) or {}
        return {name: (shape[1:], dtype) for name, (shape, dtype) in found.items()}

    @property
    def num_examples(self) -> int:
        """Number of records of the split."""
        return len(self.source)

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """Returns the examples with the given indices; see the class.

        Shapes:
          index, epoch: [n]

        Raises:
          InputError: more than `source.max_skipped` records are malformed.
        """
        keys = shuffle.fold(shuffle.fold(self._random_key, epoch), index)
        found: list[Batch] = []
        for one in self._mapped(self._example, index.tolist(), keys.tolist()):
            if isinstance(one, BadRecordError):
                self.source.skips.add(one.origin, one.reason)
                one = self.blank()
            found.append(one)
        return {
            name: np.stack([np.asarray(one[name], dtype) for one in found])
            for name, (_, dtype) in self.form().items()
        }

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed records found so far."""
        found: SkipReport = self.source.skipped()
        return found

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        split = f"{self.source.describe()}, {self.params.split}"
        return f"{split}: {self.num_examples:,} {self.unit}"

    def check_unchanged(self) -> None:
        """See `Input`: compares a digest of the source with the one in `assets_dir`.

        Raises:
          InputError: the digests differ.
        """
        if self.assets_dir is None:
            return
        crc = zlib.crc32(self.params.source.to_text().encode())
        path = files.join(self.assets_dir, f"{self.unit}_{self.params.split}_{crc:08x}.json")
        check_digest(
            path,
            self.source.fingerprint(),
            self.describe(),
            what=f"the {self.unit} differ from those when the run began",
            remedy="Restore them, or use a new --logdir",
        )

    def _example(self, index: int, key: int) -> Batch | BadRecordError:
        try:
            return self.prepared(index, key)
        except BadRecordError as error:
            return error

    def _mapped(self, function: Callable[..., Any], *arguments: list[Any]) -> Iterable[Any]:
        """Returns `map(function, *arguments)`, in several threads if they pay."""
        threads = self.params.num_threads or min(os.cpu_count() or 1, MOST_THREADS)
        first = arguments[0]
        if threads == 1 or len(first) < 2 or not self.is_threaded:
            return map(function, *arguments)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        share = -(-len(first) // (2 * threads))
        return self._pool.map(function, *arguments, chunksize=share)
