"""Reads audio files as mono samples of one rate, with the package soundfile."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.errors import InputError

Samples = npt.NDArray[np.float32]

_ZERO_CROSSINGS = 16
"""Zero crossings of the resampling filter on each side: about 80 dB of attenuation."""

_BLOCK_FRAMES = 1 << 18
_UNKNOWN_FRAMES = 1 << 33
"""From this number on (12 days at 8 kHz), the length in a header is missing or wrong."""

RATES = (1_000, 1_000_000)
"""Samples per second of audio; a header with another number is damaged."""


class AudioError(ValueError):
    """A file is not audio, or is damaged; the message says what is wrong."""


def soundfile_module() -> Any:
    """Returns the package soundfile.

    Raises:
      InputError: it is not installed.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: libsndfile is missing
        raise InputError(
            f"reading audio needs the package soundfile ({error}): pip install 'tekso[speech]'"
        ) from error
    return soundfile


def seconds_of(file: str | bytes) -> float:
    """Returns the length of an audio file, or of the bytes of one, according to its header.

    A FLAC file that a program wrote to a pipe has no length in its header, so it is decoded.

    Raises:
      AudioError: the file is not audio, or has no samples.
      InputError: soundfile is not installed.
      OSError: the file cannot be read.
    """
    soundfile = soundfile_module()
    with io.BytesIO(file) if isinstance(file, bytes) else files.open(file) as stream:
        try:
            seekable = stream if hasattr(stream, "seek") else io.BytesIO(stream.read())
            with soundfile.SoundFile(seekable) as sound:
                frames, rate = sound.frames, sound.samplerate
                if frames >= _UNKNOWN_FRAMES:
                    frames = sum(map(len, _blocks(sound)))
        except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
            raise AudioError(_why_not_audio(error, seekable)) from error
    if frames < 1:
        raise AudioError("no samples")
    _check_rate(rate)
    return float(frames / rate)


def _check_rate(rate: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise AudioError(f"a sample rate of {rate} Hz: must be {RATES[0]} to {RATES[1]} Hz")


def read_audio(path: str, sample_rate: int) -> Samples:
    """Returns the samples of a WAV, FLAC, OGG or MP3 file, in [-1, 1), at a given rate.

    Channels are averaged.

    Shapes:
      returns: [samples]
    Raises:
      AudioError: the file is not audio, is damaged, or has no samples.
      InputError: soundfile is not installed.
      OSError: the file cannot be read.
    """
    soundfile_module()
    return decode_audio(files.read(path), sample_rate)


def decode_audio(data: bytes, sample_rate: int) -> Samples:
    """Returns the samples of the bytes of an audio file; see `read_audio`.

    Shapes:
      returns: [samples]
    Raises:
      AudioError: it is not audio, is damaged, or has no samples.
      InputError: soundfile is not installed.
    """
    soundfile = soundfile_module()
    stream = io.BytesIO(data)
    try:
        with soundfile.SoundFile(stream) as sound:
            rate, blocks = sound.samplerate, [*_blocks(sound)]
    except (soundfile.LibsndfileError, RuntimeError, TypeError) as error:
        raise AudioError(_why_not_audio(error, stream)) from error
    if not blocks:
        raise AudioError("no samples")
    return mono(np.concatenate(blocks), rate, sample_rate)


def _blocks(sound: Any) -> Iterator[Samples]:
    """Yields the samples of an open SoundFile, [frames, channels], as long as there are any.

    A header may promise more frames than there are, and than fit into memory.
    """
    sound.seekable = lambda: False  # otherwise it seeks after each read, which needs a true length
    size = min(sound.frames, _BLOCK_FRAMES)
    while len(block := sound.read(size, dtype="float32", always_2d=True)):
        yield block


def mono(samples: npt.ArrayLike, rate: int, sample_rate: int) -> Samples:
    """Returns samples of one or several channels as one channel at another rate.

    Shapes:
      samples: [n] or [n, channels], int16, or floats in [-1, 1)
      returns: [ceil(n * sample_rate / rate)]
    Raises:
      AudioError: there are none, some are not finite, or the rate is not in RATES.
    """
    given = np.asarray(samples)
    if not given.size:
        raise AudioError("no samples")
    _check_rate(rate)
    x = given.astype(np.float32)
    if not np.isfinite(x).all():
        raise AudioError("samples that are not finite")
    if given.dtype == np.int16:
        x /= 32_768
    return resample(x.mean(axis=1) if x.ndim == 2 else x, rate, sample_rate)


def resample(samples: npt.ArrayLike, rate: int, new_rate: int) -> Samples:
    """Returns samples at another rate, interpolated by a windowed sinc below both Nyquist rates.

    Shapes:
      samples: [n]
      returns: [ceil(n * new_rate / rate)]
    """
    x = np.asarray(samples, np.float32)
    if rate == new_rate:
        return x
    common = math.gcd(rate, new_rate)
    up, down = new_rate // common, rate // common
    cutoff = min(1.0, up / down)  # of the Nyquist rate of the input
    reach = math.ceil(_ZERO_CROSSINGS / cutoff)  # input samples on each side
    padded = np.concatenate([np.zeros(reach, np.float32), x, np.zeros(reach + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    count = -(-len(x) * up // down)
    result = np.empty(count, np.float32)
    for phase in range(min(up, count)):  # outputs with the same place between two inputs
        place = np.arange(phase, count, up, dtype=np.int64) * down
        first, rest = place // up, (phase * down % up) / up
        distance = np.arange(-reach, reach + 1) - rest
        inside = np.clip(distance / (reach + 1), -1, 1)
        kernel = cutoff * np.sinc(cutoff * distance) * np.cos(np.pi / 2 * inside) ** 2
        result[phase::up] = windows[first] @ kernel.astype(np.float32)
    return result


class Resampler:
    """`resample` of a stream: all results together are those of the whole stream."""

    def __init__(self, rate: int, new_rate: int) -> None:
        """Starts without samples."""
        self._rate, self._new_rate = rate, new_rate
        common = math.gcd(rate, new_rate)
        self._up, self._down = new_rate // common, rate // common
        reach = math.ceil(_ZERO_CROSSINGS / min(1.0, self._up / self._down))
        self._reach = -(-(reach + 1) // self._down) * self._down  # a multiple, so that phases fit
        self._kept: Samples = np.zeros(0, np.float32)
        self._begin = 0  # input samples before `_kept`, a multiple of `_down`
        self._done = 0  # results so far

    def add(self, samples: npt.ArrayLike, *, is_last: bool = False) -> Samples:
        """Returns the results that the samples so far determine; with is_last, all that are left.

        Shapes:
          samples, returns: [any]
        """
        new = np.asarray(samples, np.float32)
        if self._rate == self._new_rate:
            return new
        self._kept = np.concatenate([self._kept, new])
        inside = len(self._kept) if is_last else max(0, len(self._kept) - self._reach)
        end = -(-(self._begin + inside) * self._up // self._down)
        if end <= self._done:
            return np.zeros(0, np.float32)
        first = self._begin // self._down * self._up
        found = resample(self._kept, self._rate, self._new_rate)
        result = found[self._done - first : end - first]
        self._done = end
        # Keep what the next result needs before it.
        needed = self._done * self._down // self._up - self._reach
        drop = max(0, (needed - self._begin) // self._down * self._down)
        self._kept, self._begin = self._kept[drop:], self._begin + drop
        return result


def _why_not_audio(error: Exception, stream: Any) -> str:
    is_empty = stream.seek(0, io.SEEK_END) == 0
    return "an empty file" if is_empty else f"not audio: {_reason(error)}"


def _reason(error: Exception) -> str:
    return str(error).strip().rstrip(".").rpartition(": ")[2] or type(error).__name__
