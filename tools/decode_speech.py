"""Transcribes audio files, or samples while they arrive, for tekso-decode."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from tekso.framework import files
from tekso.framework.json_text import to_json
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import
    import numpy as np

    from tekso.framework.run.assembly import Assembly
    from tekso.tasks.asr.speech_stream import SpeechStream
    from tekso.tasks.asr.speech_task import SpeechTask

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
SAMPLE_FORMATS = {"s16le": "<i2", "f32le": "<f4"}
_READ_BYTES = 1 << 16


def is_audio_name(name: str) -> bool:
    """Returns whether a file has the name of an audio file."""
    return name.lower().endswith(SUFFIXES)


def check_rate(rate: int) -> None:
    """Checks --sample_rate: resampling from a few Hz would take all memory.

    Raises:
      UsageError: audio has no such rate.
    """
    from tekso.tasks.asr.audio import RATES

    if not RATES[0] <= rate <= RATES[1]:
        raise UsageError(
            f"--sample_rate={rate} must be {RATES[0]} to {RATES[1]}: samples per second"
        )


def audio_files(path: str) -> list[str]:
    """Returns an audio file, or those in a folder and the folders in it, sorted; none hidden."""
    if not files.is_folder(path):
        return [path]
    found = []
    for name in files.names(path):
        inside = files.join(path, name)
        if name.startswith("."):  # such as "._a.wav", which macOS writes
            continue
        if files.is_folder(inside) or is_audio_name(name):
            found += audio_files(inside)
    return sorted(found)


def transcribes(task: object) -> bool:
    """Returns whether Params of a task are those of speech recognition."""
    from tekso.tasks.asr.speech_task import SpeechTask

    return isinstance(task, SpeechTask.Params)


def transcribe_files(parts: Assembly, paths: Sequence[str], file: IO[bytes], *, form: str) -> int:
    """Writes one line for each file; returns the number of files that cannot be read.

    Args:
      parts: the experiment, with restored weights.
      paths: the audio files.
      file: written to.
      form: "text" for "file, transcript" or "file, error, reason" between tabs; "json" for an
        object.
    """
    task: Any = parts.task
    broken = 0
    for path in paths:
        record = task.transcribe_file(parts.program, parts.input, path)
        broken += "error" in record
        file.write(_line(record, form).encode("utf-8", "surrogateescape"))
        file.flush()
    return broken


def _line(record: Mapping[str, Any], form: str) -> str:
    if form == "json":
        return to_json(record, ensure_ascii=False) + "\n"
    if "error" in record:
        return f"{record['file']}\terror\t{record['error']}\n"
    return f"{record['file']}\t{record['text']}\n"


def transcribe_stream(
    parts: Assembly,
    path: str,
    file: IO[bytes],
    *,
    form: str,
    sample_format: str,
    sample_rate: int | None,
) -> str | None:
    """Writes the transcript of raw samples each time it changes, and at the end.

    Args:
      parts: the experiment, with restored weights.
      path: a file, or "-" for standard input.
      file: written to.
      form: "text" for "seconds, transcript" between a tab; "json" for an object, the last one as
        for a file.
      sample_format: one of SAMPLE_FORMATS; one channel.
      sample_rate: samples per second; None: that of the model.

    Returns:
      why there were no transcripts before the end; None: there were.

    Raises:
      UsageError: the samples are not finite, or too many for a model that waits for the end.
    """
    from tekso.tasks.asr.audio import Resampler
    from tekso.tasks.asr.speech_stream import SpeechStream

    task: Any = parts.task
    rate = int(task.model.front_end.params.sample_rate)
    resampler = Resampler(sample_rate or rate, rate)
    stream = SpeechStream(parts.program, task.transcriber, parts.input.tokenizer)
    before: str | None = None

    def write(record: Mapping[str, Any], *, is_last: bool) -> None:
        full = {"seconds": round(stream.seconds, 3), "is_last": is_last, **record}
        line = f"{stream.seconds:.2f}\t{record['text']}\n"
        shown = to_json(full, ensure_ascii=False) + "\n" if form == "json" else line
        file.write(shown.encode("utf-8", "surrogateescape"))
        file.flush()

    for samples in _samples(path, sample_format):
        text = stream.add(resampler.add(samples))
        _check_length(stream, task.params)
        if text is not None and text != before:
            write({"text": text}, is_last=False)
            before = text
    stream.add(resampler.add([], is_last=True))
    write(stream.finish(), is_last=True)
    return stream.waits_because


def _check_length(stream: SpeechStream, task: SpeechTask.Params) -> None:
    """Raises a UsageError if a stream that is transcribed at its end is longer than a file may be.

    Args:
      stream: the stream so far.
      task: Params of the task.
    """
    if stream.waits_because is not None and stream.seconds > task.longest_file_s:
        raise UsageError(
            f"the input is longer than {task.path_of('longest_file_s')}={task.longest_file_s:g} "
            f"seconds, and is transcribed at its end, because {stream.waits_because}; end it "
            "earlier, or set a higher limit"
        )


def _samples(path: str, sample_format: str) -> Iterator[np.ndarray]:
    """Yields samples in [-1, 1) as soon as they arrive; an incomplete last one is dropped."""
    import numpy as np

    dtype, rest = np.dtype(SAMPLE_FORMATS[sample_format]), b""
    for data in _pieces(path):
        data = rest + data
        size = len(data) // dtype.itemsize * dtype.itemsize
        rest = data[size:]
        samples = np.frombuffer(data[:size], dtype)
        if dtype.kind == "f" and not np.isfinite(samples).all():
            raise UsageError(
                f"--input={path} has samples that are not finite: is it --samples={sample_format}?"
            )
        yield samples / np.float32(32_768) if dtype.kind == "i" else samples


def _pieces(path: str) -> Iterator[bytes]:
    """Yields the bytes of a file, or of standard input as soon as they arrive."""
    if path == "-":
        while data := os.read(sys.stdin.fileno(), _READ_BYTES):
            yield data
        return
    with files.open(os.path.expanduser(path), streams=True) as stream:
        while data := stream.read(_READ_BYTES):
            yield data
