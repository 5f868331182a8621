"""Decoded speech: read from audio files once, and kept in a file that processes and runs share.

    <cache_dir>/train-<digest>/     see token_cache.py
        samples.bin                 int16, of all utterances, one after the other
        ends.bin                    int64, where each utterance ends
        index.bin                   int64, which record of the source it is
        text.bin, text_ends.bin     the transcripts, UTF-8

The samples are cached, at the rate of the model, and not the features:
- Speed and noise change samples, anew in every epoch. A cache of features would fix both.
- The front end is part of the model. Its settings can change without another cache.
- Features take no less space: in a second, 16,000 16-bit samples have as many bytes as 100 frames
  of 80 float32 features. And they save little time: 0.4 to 0.6 ms of one core per second of speech.
  Decoding takes 0.1 (WAV) to 1.7 ms (OGG at 44.1 kHz, resampled), reading the cache 0.05 ms.

The digest in the name of an entry is that of names, transcripts, sizes and times of change of the
files (of the records, for TFRecord), and of the sample rate. So an entry never has to be updated.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from tekso.framework.cores import num_cores
from tekso.framework.input.columns import Column
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.token_cache import Place, TableWriter, obtain
from tekso.tasks.asr.utterances import AnySpeech, Utterance, int16_samples

_FORMAT = "decoded speech 1"
_MOST_THREADS = 16

Int16 = npt.NDArray[np.int16]


def decoded(source: AnySpeech, sample_rate: int) -> Iterator[tuple[int, str, Int16]]:
    """Yields (index, transcript, samples) of all utterances in order; several threads decode.

    Utterances that cannot be decoded are counted by the source, and skipped.

    Raises:
      InputError: more than max_skipped cannot be read.
    """

    def samples_of(record: tuple[int, Origin, Utterance]) -> Int16 | BadRecordError:
        try:
            return int16_samples(source.samples_of(record[2], record[1], sample_rate))
        except BadRecordError as error:
            return error

    threads = min(num_cores(), _MOST_THREADS)
    with ThreadPoolExecutor(threads, thread_name_prefix="audio") as pool:
        records = source.numbered_records()
        while group := list(itertools.islice(records, 8 * threads)):
            found = pool.map(samples_of, group)
            for (index, _, utterance), samples in zip(group, found, strict=True):
                if isinstance(samples, BadRecordError):
                    source.skips.add(samples.origin, samples.reason)
                    continue
                yield index, utterance.text, samples


@dataclasses.dataclass(frozen=True)
class CachedSpeech:
    """The decoded utterances of a source.

    Attributes:
      index: [utterances] which record of the source each one is.
      texts: the transcripts.
      ends: [utterances + 1] where each one ends in `column`, the first number is 0.
      column: the samples of all utterances.
    """

    index: npt.NDArray[np.int64]
    texts: list[str]
    ends: npt.NDArray[np.int64]
    column: Column

    def samples(self, place: int) -> Int16:
        """Returns the samples of an utterance by its place in the cache, [samples]."""
        begin, end = self.ends[place : place + 2]
        found: Int16 = self.column.ranges(np.array([begin]), np.array([end - begin]))
        return found


def cached_speech(source: AnySpeech, sample_rate: int, cache_dir: str | None) -> CachedSpeech:
    """Returns the decoded utterances of a source; decodes them unless they are in the cache.

    Args:
      source: the utterances; it counts those that are skipped, also if they are cached.
      sample_rate: samples per second.
      cache_dir: folder of the cache; None: keep the samples in memory.

    Raises:
      InputError: too many utterances are malformed, none is left, or the samples cannot be written.
    """

    def write(writer: TableWriter) -> None:
        end = text_end = 0
        for index, text, samples in decoded(source, sample_rate):
            data = np.frombuffer(text.encode(), np.uint8)
            end, text_end = end + len(samples), text_end + len(data)
            writer.append("samples", samples)
            writer.append("text", data)
            for name, number in (("index", index), ("ends", end), ("text_ends", text_end)):
                writer.append(name, np.array([number], np.int64))
        if writer.is_empty:
            raise source.skips.nothing_left()

    place = None
    if cache_dir is not None:
        made_of = [_FORMAT, source.content_digest(), str(sample_rate)]
        place = Place(cache_dir, source.split, made_of, in_memory_bytes=0, what="samples")
    columns = obtain(place, skips=source.skips, write=write).columns
    text = columns["text"].read().tobytes()
    ends = columns["text_ends"].read().tolist()
    texts = [text[begin:end].decode() for begin, end in itertools.pairwise([0, *ends])]
    return CachedSpeech(
        index=columns["index"].read(),
        texts=texts,
        ends=np.concatenate([np.zeros(1, np.int64), columns["ends"].read()]),
        column=columns["samples"],
    )
