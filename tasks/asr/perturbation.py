"""Changes the recordings of training batches: speed and noise."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from tekso.framework.params import Configurable, param
from tekso.tasks.asr.audio import Samples, resample
from tekso.tasks.asr.recorded_noise import RecordedNoise, check_ratios


class Perturbation(Configurable):
    """Changes the speed of a recording at random, and adds noise.

    The random numbers of an utterance depend on the seed, the epoch and the utterance only, so
    they do not depend on batches and processes.

    Source: Ko et al. 2015, "Audio augmentation for speech recognition" (speeds 0.9, 1.0 and 1.1).
    """

    class Params(Configurable.Params):
        """Params of Perturbation."""

        speeds: list[float] = param(
            "One of these speeds is drawn for each utterance, which changes its pitch too. Empty: "
            "no change. Rounded to thousandths.",
            default=[],
        )
        snr_db: list[float] = param(
            "Lowest and highest ratio of signal to white noise, in decibels. Empty: no white "
            "noise.",
            default=[],
        )
        noise: RecordedNoise.Params | None = param(
            "Recordings of noise that are mixed in; None: none.", default=None
        )

    def __init__(self, params: Any, *, sample_rate: int = 16_000) -> None:
        """Checks the values, and reads the recordings of noise.

        Args:
          params: Params.
          sample_rate: samples per second of the recordings that `apply` is given.

        Raises:
          InputError: there are no recordings of noise, or too many cannot be used.
          ValueError: a speed is not in [0.5, 2], or snr_db is not empty or two ascending numbers.
        """
        super().__init__(params)
        p = self.params
        if wrong := [speed for speed in p.speeds if not 0.5 <= speed <= 2.0]:
            raise ValueError(f"{p.path_of('speeds')} has {wrong[0]}, must be in [0.5, 2]")
        if p.snr_db:
            check_ratios(p)
        self._noise: RecordedNoise | None = None
        if p.noise is not None:
            self._noise = p.noise.instantiate(sample_rate=sample_rate)

    @property
    def stretch(self) -> float:
        """Length of the slowest form of a recording, per length of the recording."""
        return float(max((1 / _exact(speed) for speed in self.params.speeds), default=1))

    def apply(self, samples: Samples, key: int) -> Samples:
        """Returns a recording with a random speed and noise.

        Args:
          samples: the recording.
          key: determines the random numbers.

        Shapes:
          samples: [n]
          returns: [n / speed], rounded up
        """
        p, random = self.params, np.random.Generator(np.random.Philox(key=key))
        if p.speeds:
            speed = _exact(p.speeds[int(random.integers(len(p.speeds)))])
            samples = resample(samples, speed.numerator, speed.denominator)
        if p.snr_db:
            ratio = 10.0 ** (random.uniform(*p.snr_db) / 10.0)
            deviation = np.sqrt(np.mean(np.square(samples, dtype=np.float64)) / ratio)
            samples = samples + random.normal(0.0, deviation, len(samples)).astype(np.float32)
        return samples if self._noise is None else self._noise.mixed(samples, random)


def _exact(speed: float) -> Fraction:
    return Fraction(round(1000 * speed), 1000)
