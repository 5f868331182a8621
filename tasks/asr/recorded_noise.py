"""Recordings of noise, of which a random piece is mixed into a recording of speech."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Origin, SkipReport, Skips, reason_of
from tekso.framework.params import REQUIRED, Configurable, param
from tekso.tasks.asr.audio import AudioError, Samples, read_audio
from tekso.tasks.asr.utterances import int16_samples


class RecordedNoise(Configurable):
    """Mixes noise from files into speech, with a random ratio of signal to noise.

        y = x + gain * noise[start], noise[start + 1], …      (from its beginning again at its end)
        gain = sqrt(mean(x²) / mean(noise²)) / 10**(ratio / 20)

    mean(noise²) is that of the whole file, so that a quiet piece stays quiet. All files are decoded
    at the start and kept as 16-bit samples.
    """

    class Params(Configurable.Params):
        """Params of RecordedNoise."""

        files: str = param(
            "Audio files of noise: globs, separated by commas, such as 'noise/*.wav'.",
            default=REQUIRED,
        )
        snr_db: list[float] = param(
            "Lowest and highest ratio of signal to noise, in decibels.", default=[5.0, 20.0]
        )
        probability: float = param("Share of the utterances that get noise.", default=1.0)
        max_skipped: int = param(
            "Maximum number of files that are broken or silent and are skipped; more are an error.",
            default=10,
        )

    def __init__(self, params: Any, *, sample_rate: int = 16_000) -> None:
        """Reads the files.

        Raises:
          FileNotFoundError: a glob matches nothing.
          InputError: no file is left, or too many are broken.
          ValueError: a ratio or the probability is not possible.
        """
        super().__init__(params)
        p = self.params
        check_ratios(p)
        if not 0.0 <= p.probability <= 1.0:
            raise ValueError(f"{p.path_of('probability')} is {p.probability}, must be in [0, 1]")
        self._skips = Skips(
            p.max_skipped, what=f"noise {p.files}", limit_name=p.path_of("max_skipped")
        )
        self._noises: list[np.ndarray] = []
        self._powers: list[float] = []
        for path in files.glob(p.files, what=p.path_of("files")):
            try:
                samples = read_audio(path, sample_rate)
            except (AudioError, OSError) as error:
                self._skips.add(Origin(path), reason_of(error))
                continue
            kept = int16_samples(samples)
            power = float(np.mean(np.square(kept / 32_768)))
            if not power:
                self._skips.add(Origin(path), "silent")
                continue
            self._noises.append(kept)
            self._powers.append(power)
        if not self._noises:
            raise InputError(
                f"{p.path_of('files')} is {p.files!r}, but none of these files can be used: "
                f"{self._skips.report}\nRepair them, or name other files"
            )

    def skipped(self) -> SkipReport:
        """Returns a report of the files that were skipped."""
        return self._skips.report

    def mixed(self, samples: Samples, random: np.random.Generator) -> Samples:
        """Returns speech with noise.

        Args:
          samples: the speech.
          random: draws the file, the piece and the ratio.

        Shapes:
          samples, returns: [n]
        """
        p = self.params
        if random.random() >= p.probability or not len(samples):
            return samples
        number = int(random.integers(len(self._noises)))
        noise, power = self._noises[number], self._powers[number]
        start, ratio_db = int(random.integers(len(noise))), random.uniform(*p.snr_db)
        place = (start + np.arange(len(samples))) % len(noise)
        signal = float(np.mean(np.square(samples, dtype=np.float64)))
        gain = np.sqrt(signal / power) / 10.0 ** (ratio_db / 20.0)
        found: Samples = samples + np.float32(gain / 32_768) * noise[place].astype(np.float32)
        return found


def check_ratios(params: Any) -> None:
    """Checks that `snr_db` is two ascending, finite numbers.

    Raises:
      ValueError: it is not.
    """
    ratios = list(params.snr_db)
    if len(ratios) != 2 or ratios != sorted(ratios) or not np.isfinite(ratios).all():
        raise ValueError(f"{params.path_of('snr_db')} is {ratios}, must be two ascending numbers")
