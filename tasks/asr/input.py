"""Batches of speech: samples and labels, in buckets of similar length.

Every batch has

    "samples"      [B, N] float32 in [-1, 1), 0 after the end
    "num_samples"  [B] int32
    "labels"       [B, U] int32, 0 after the end
    "num_labels"   [B] int32
    "weights"      [B] float32, 0 for padding

where N and U depend on the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.characters import Characters
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Signature, check_step, clear
from tekso.framework.input.skips import BadRecordError, SkipReport
from tekso.framework.input.sources import training_text
from tekso.framework.input.token_rows import cache_dir_of
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import REQUIRED, param
from tekso.tasks.asr.audio import Samples
from tekso.tasks.asr.perturbation import Perturbation
from tekso.tasks.asr.sample_cache import CachedSpeech, Int16, cached_speech, decoded
from tekso.tasks.asr.utterances import AnySpeech

Indices = npt.NDArray[np.int64]


class BucketedSpeech(BucketedInput):
    """One utterance per row, padded to the length of the smallest bucket that fits it.

    Each bucket has one batch shape. Its share of max_labels is its share of max_seconds; an
    utterance with more labels belongs to a longer bucket. Utterances that are longer than the last
    bucket, or have more labels, are left out and counted.

    Attributes:
      num_too_long: number of utterances that were left out.
    """

    reads_recordings: ClassVar[bool] = True

    class Params(BucketedInput.Params):
        """Params of BucketedSpeech."""

        corpus: AnySpeech.Params = param("Source of the utterances.", default=REQUIRED)
        tokenizer: Tokenizer.Params = param(
            "Encodes transcripts as labels.", default=Characters.Params()
        )
        sample_rate: int = param("Samples per second; files are resampled to it.", default=16_000)
        max_seconds: float = param("Longest utterance.", default=20.0)
        max_labels: int = param("Most labels of an utterance.", default=400)
        bounds_s: list[float] = param(
            "Longest utterance of each bucket, in seconds, ascending. max_seconds is added as the "
            "last bucket, and larger bounds are ignored. Empty: an eighth, a quarter and a half "
            "of it.",
            default=[],
        )
        batch_size: int = param(
            "Utterances in a batch of the longest bucket; with fill='examples', of every bucket.",
            default=REQUIRED,
        )
        fill: Literal["examples", "seconds"] = param(
            "examples: a batch of every bucket has batch_size utterances. seconds: a bucket of "
            "half the length has twice as many.",
            default="examples",
        )
        perturb: Perturbation.Params | None = param(
            "Changes of the recordings in training, with order='shuffled'; None: none.",
            default=None,
        )
        keep: Literal["memory", "cache", "files"] = param(
            "memory: all files are decoded once, at the start, and kept as 16-bit samples. cache: "
            "the same in a file, which processes and later runs share. files: only their headers "
            "are read at the start; a file that cannot be decoded later is an error.",
            default="memory",
        )
        cache_dir: str = param(
            "Folder of the samples with keep='cache', which several runs may share. Empty: the "
            "folder `assets` of the logdir.",
            default="",
        )

    tokenizer: Tokenizer

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Lists or reads the utterances of the split, and assigns them to buckets.

        Raises:
          InputError: there are no utterances, too many are malformed, or soundfile is missing.
          ValueError: a size is not possible.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir, train=train)
        p = self.params
        if min(p.max_seconds, p.max_labels, p.sample_rate) <= 0:
            raise ValueError(
                f"{p.path_of('max_seconds')} {p.max_seconds}, max_labels {p.max_labels} and "
                f"sample_rate {p.sample_rate} must be positive"
            )
        self._perturbation: Perturbation | None = None
        if p.perturb is not None and p.order == "shuffled":
            self._perturbation = p.perturb.instantiate(sample_rate=p.sample_rate)
        self._perturb_key = shuffle.key_of(seed, "perturb")
        self._source: AnySpeech = p.corpus.instantiate(split=p.split)
        has_corpus = train is not None and "corpus" in train
        training = training_text(
            self._source,
            train.corpus if has_corpus else p.corpus,
            texts=lambda source: (record.text for _, record in source.records()),
            verify=train is None,
        )
        self.tokenizer = p.tokenizer.instantiate(assets_dir=assets_dir, training=training)
        self.num_too_long = 0
        self._index: list[int] = []  # in the source
        self._texts: list[str] = []
        self._labels: list[npt.NDArray[np.int32]] = []
        self._kept: list[Int16] = []
        self._cache: CachedSpeech | None = None
        self._places: list[int] = []  # in the cache
        self._assign_buckets(self._read())

    def _read(self) -> list[int]:
        """Reads all utterances; returns the samples of each in its slowest form."""
        p, lengths = self.params, []
        self._num_samples = 0
        longest = _samples(p.max_seconds, p)
        stretch = self._perturbation.stretch if self._perturbation is not None else 1.0
        for place, index, text, count, samples in self._utterances():
            labels = self.tokenizer.encode(text)
            stretched = math.ceil(count * stretch)
            if stretched > longest or len(labels) > p.max_labels:
                self.num_too_long += 1
                continue
            if samples is not None:
                self._kept.append(samples)
            self._places.append(place)
            self._index.append(index)
            self._texts.append(text)
            self._labels.append(labels)
            lengths.append(stretched)
            self._num_samples += count
        if not lengths:
            raise InputError(
                f"{self._source.describe()}, split {p.split}: no utterance is left; "
                f"{self.num_too_long} are longer than {p.max_seconds} s or {p.max_labels} labels, "
                f"{self.skipped()}"
            )
        return lengths

    def _utterances(self) -> Iterator[tuple[int, int, str, int, Int16 | None]]:
        """Yields (place in the cache, index in the source, transcript, length, samples to keep)."""
        p, source = self.params, self._source
        if p.keep == "cache":
            cache_dir = cache_dir_of(p, self.assets_dir, "samples")
            self._cache = cache = cached_speech(source, p.sample_rate, cache_dir)
            counts = np.diff(cache.ends).tolist()
            indices = cache.index.tolist()
            for place, row in enumerate(zip(indices, cache.texts, counts, strict=True)):
                yield place, *row, None
        elif p.keep == "memory":
            for index, text, samples in decoded(source, p.sample_rate):
                yield 0, index, text, len(samples), samples
        else:
            for index, origin, record in source.numbered_records():
                try:
                    seconds = source.seconds_of(record, origin)
                except BadRecordError as error:
                    source.skips.add(error.origin, error.reason)
                    continue
                yield 0, index, record.text, math.ceil(seconds * p.sample_rate), None

    def _assign_buckets(self, lengths: list[int]) -> None:
        p, bounds = self.params, _bounds(self.params)
        last = bounds[-1]
        by_labels = [math.ceil(len(labels) * last / p.max_labels) for labels in self._labels]
        sizes = [
            p.batch_size * max(1, last // bound if p.fill == "seconds" else 1) for bound in bounds
        ]
        self.assign(np.maximum(lengths, by_labels), bounds, sizes)
        self._total_seconds = self._num_samples / p.sample_rate

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        rows = params.batch_size
        return {
            "samples": ((rows, _bounds(params)[-1]), np.dtype(np.float32)),
            "num_samples": ((rows,), np.dtype(np.int32)),
            "labels": ((rows, params.max_labels), np.dtype(np.int32)),
            "num_labels": ((rows,), np.dtype(np.int32)),
            "weights": ((rows,), np.dtype(np.float32)),
        }

    @classmethod
    def longest(cls, params: Any) -> int:
        """Returns the samples of the longest utterance that such an input has."""
        return _bounds(params)[-1]

    @property
    def num_examples(self) -> int:
        """Number of utterances in an epoch."""
        return len(self._index)

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Returns utterances by index, padded to the longest bucket; see `ExampleInput`.

        Shapes:
          index, epoch: [n]
        """
        del epoch
        return self.bucket_rows(index, self._bounds[-1])

    def text(self, example: int) -> str:
        """Returns the transcript of an utterance."""
        return self._texts[example]

    def samples(self, example: int) -> Samples:
        """Returns the samples of an utterance, [samples].

        Raises:
          InputError: its file cannot be decoded.
        """
        if self.params.keep != "files":
            cache = self._cache
            kept = cache.samples(self._places[example]) if cache else self._kept[example]
            return kept.astype(np.float32) / np.float32(32_768)
        return self._source.samples(self._index[example], self.params.sample_rate)

    def audio_file(self, example: int) -> str | None:
        """Returns the audio file of an utterance; None if its recording is not in its own file."""
        return self._source.audio_file(self._index[example])

    def origin(self, example: int) -> str:
        """Returns the audio file of an utterance, or else its record."""
        return self.audio_file(example) or str(self._source.origin(self._index[example]))

    def examples_of(self, step: int) -> Iterator[tuple[int, int]]:
        """Yields (row, example) of the rows of a batch that are not padding."""
        chosen = self.bucket_batch(step)
        for row in np.flatnonzero(chosen.real):
            yield int(row), int(chosen.examples[row])

    def skipped(self) -> SkipReport:
        """Returns a report of the files and records that were skipped."""
        return self._source.skipped()

    def describe(self) -> str:
        """Returns a description of the data in one line."""
        more = f", {self.num_too_long} too long" if self.num_too_long else ""
        more += f", {self.skipped().count} skipped" if self.skipped().count else ""
        return (
            f"{self._source.describe()}, {self.params.split}: {self.num_examples:,} utterances, "
            f"{self._total_seconds / 60:.1f} minutes{more}"
        )

    def bucket_rows(self, examples: Indices, bound: int) -> Batch:
        """See `BucketedInput` and the docstring of this module."""
        return self._rows(examples, bound, None)

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        """See `BucketedInput`; perturbs the recordings."""
        if self._perturbation is None:
            return super().batch_rows(step, begin, end)
        check_step(step, self.num_batches)
        chosen, epoch = self.bucket_batch(step), step // self._buckets.num_batches
        batch = self._rows(chosen.examples[begin:end], self._bounds[chosen.bucket], epoch)
        clear(batch, ~chosen.real[begin:end], self.padding_keys)
        return batch

    def _rows(self, examples: Indices, bound: int, epoch: int | None) -> Batch:
        """Returns some examples, perturbed for an epoch, or as they are if it is None."""
        p, rows = self.params, len(examples)
        most_labels = p.max_labels * bound // self._bounds[-1]
        batch: Batch = {
            "samples": np.zeros([rows, bound], np.float32),
            "num_samples": np.zeros(rows, np.int32),
            "labels": np.zeros([rows, most_labels], np.int32),
            "num_labels": np.zeros(rows, np.int32),
            "weights": np.ones(rows, np.float32),
        }
        for row, example in enumerate(map(int, examples)):
            samples, labels = self.samples(example), self._labels[example]
            if self._perturbation is not None and epoch is not None:
                key = shuffle.fold(shuffle.fold(self._perturb_key, epoch), example)
                samples = self._perturbation.apply(samples, int(key[0]))
            samples = samples[:bound]
            batch["samples"][row, : len(samples)] = samples
            batch["num_samples"][row] = len(samples)
            batch["labels"][row, : len(labels)] = labels
            batch["num_labels"][row] = len(labels)
        return batch


def _samples(seconds: float, params: Any) -> int:
    count: int = math.ceil(seconds * params.sample_rate)
    return count


def _bounds(params: Any) -> list[int]:
    """Returns the length of each bucket in samples."""
    longest = _samples(params.max_seconds, params)
    seconds = list(params.bounds_s) or [params.max_seconds / part for part in (8, 4, 2)]
    return [*(n for s in seconds if (n := _samples(s, params)) < longest), longest]
