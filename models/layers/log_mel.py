"""Log-mel features: the front end of speech models, from samples to frames.

Legend: B batch, N samples, T frames, F samples of a frame, K bins of the spectrum, C mel channels.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.models.layers.frames import FrameSequence

Window = Literal["hann", "povey", "hamming", "rectangular"]
Doubles = npt.NDArray[np.float64]


class LogMel(Layer):
    """Returns the logarithm of mel-scaled spectra of overlapping frames of audio.

        frame t   = samples t * step to t * step + frame length - 1, only whole frames
        y         = frame[i] - preemphasis * frame[i - 1]
        spectrum  = |FFT(window * y)|, or its square
        feature   = log(max(floor, spectrum @ mel_weights))

    The defaults are those of Lingvo's MelAsrFrontend, without its noise; `kaldi_log_mel` returns
    Params for the features of Kaldi. Frames that do not lie completely in an utterance are padding:
    samples after the end of an utterance change no feature.

    With precision "float32", a channel with less than about 1e-8 of the power of a frame is
    accurate to about 1e-3, as in other libraries.

    Shapes:
      x: [B, N] samples, float in [-1, 1) or int16
      lengths: [B] int, samples of each utterance; None: N
      returns: features [B, T, num_channels] float32, where T is `num_frames(N)`, or 1 if N is
        shorter than a frame
    Raises:
      ValueError: sizes or frequencies are not possible.
    Source: Lingvo, tasks/asr/frontend.py; Kaldi, feat/feature-fbank.cc.
    """

    class Params(Layer.Params):
        """Params of LogMel."""

        sample_rate: int = param("Samples per second.", default=16_000)
        num_channels: int = param("Number of mel channels.", default=80)
        frame_ms: float = param("Length of a frame.", default=25.0)
        step_ms: float = param("Time from frame to frame.", default=10.0)
        scale: float = param("Factor of samples in [-1, 1).", default=32_768.0)
        dither: float = param(
            "Standard deviation of white noise that is added to scaled samples in training, as in "
            "Kaldi; 0: none.",
            default=0.0,
        )
        offset: Literal["keep", "remove"] = param(
            "Whether to subtract the mean of each frame.", default="keep"
        )
        preemphasis: float = param("Factor of the previous sample; 0: none.", default=0.97)
        before_frame: Literal["sample", "repeat"] = param(
            "The sample before the first of a frame: sample: the frame is one sample longer. "
            "repeat: its first sample, as in Kaldi.",
            default="sample",
        )
        window: Window = param(
            "Factors of the samples of a frame; hann is periodic, povey and hamming are symmetric.",
            default="hann",
        )
        fft_length: int | None = param(
            "Length of the Fourier transform. None: the next power of two of a frame.",
            default=1024,
        )
        spectrum: Literal["magnitude", "power"] = param(
            "Absolute value, or its square.", default="magnitude"
        )
        low_hz: float = param("Lower edge of the first channel.", default=125.0)
        high_hz: float = param("Upper edge of the last channel.", default=7_600.0)
        floor: float = param("Smallest value whose logarithm is taken.", default=1.0)
        precision: Literal["float32", "float64"] = param(
            "Arithmetic up to the logarithm. float64 rounds no weak channel next to a strong one; "
            "TPUs and LiteRT do not support it.",
            default="float32",
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if min(p.num_channels, self.frame_length, self.step) < 1:
            raise ValueError(
                f"LogMel: {p.num_channels} channels, frames of {self.frame_length} samples with "
                f"step {self.step}: all must be at least 1"
            )
        if not 0 <= p.low_hz < p.high_hz <= p.sample_rate / 2:
            raise ValueError(
                f"LogMel: low_hz {p.low_hz} and high_hz {p.high_hz} must be ascending and at most "
                f"half the sample_rate, {p.sample_rate / 2}"
            )
        if not 0 <= p.dither < float("inf"):
            raise ValueError(f"LogMel: dither is {p.dither}, must be finite and at least 0")
        if self.fft_length < self._windowed or p.floor <= 0:
            raise ValueError(
                f"LogMel: fft_length {self.fft_length} must be at least {self._windowed}, the "
                f"length of a frame, and floor {p.floor} positive"
            )

    @property
    def step(self) -> int:
        """Samples from frame to frame."""
        return self._samples(self.params.step_ms)

    @property
    def _windowed(self) -> int:
        return self._samples(self.params.frame_ms)

    def _samples(self, ms: float) -> int:
        count: int = round(self.params.sample_rate * ms / 1000)
        return count

    @property
    def frame_length(self) -> int:
        """Samples that a frame needs, with the one before it if it is used."""
        return self._windowed + int(self.params.before_frame == "sample")

    @property
    def fft_length(self) -> int:
        """Length of the Fourier transform."""
        given: int | None = self.params.fft_length
        return given or 2 ** math.ceil(math.log2(self._windowed))

    @property
    def output_dim(self) -> int:
        """Size of the last dim of the output."""
        return int(self.params.num_channels)

    def num_frames(self, num_samples: Any) -> Any:
        """Returns the number of whole frames in an utterance of an int, array or tensor of samples.

        Shapes:
          num_samples, returns: any, the same
        """
        whole = 1 + (num_samples - self.frame_length) // self.step
        return tf.maximum(whole, 0) if tf.is_tensor(whole) else np.maximum(whole, 0)

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        lengths: tf.Tensor | None = None,
    ) -> FrameSequence:
        """See the class."""
        del theta
        p = self.params
        if lengths is None:
            lengths = tf.ones_like(x[:, 0], tf.int32) * x.shape[1]
        scale = p.scale / 32_768.0 if x.dtype == tf.int16 else p.scale
        x = ctx.constrain(tf.cast(x, tf.float32) * scale, ("batch", None))
        dtype = np.dtype(p.precision)
        if p.dither and ctx.is_training:
            x = x + p.dither * self._noise(x, ctx)
        x = tf.cast(self._framed(x), dtype)
        if p.offset == "remove":
            # Of a large offset, the rounding error of its mean is left after the first time.
            for _ in range(2):
                x = x - tf.reduce_mean(x, 2, keepdims=True)
        if p.before_frame == "sample":
            x = x[:, :, 1:] - p.preemphasis * x[:, :, :-1]
        else:
            x = x - p.preemphasis * tf.concat([x[:, :, :1], x[:, :, :-1]], 2)
        x = x * window_of(p.window, self._windowed).astype(dtype)
        short = self.fft_length - self._windowed
        if short:
            x = tf.concat([x, tf.zeros([*x.shape[:2], short], x.dtype)], 2)
        bins = tf.signal.rfft(x)
        energy = tf.square(tf.math.real(bins)) + tf.square(tf.math.imag(bins))
        if p.spectrum == "magnitude":
            energy = tf.sqrt(energy)
        mel = tf.einsum("btk,kc->btc", energy, self.mel_weights().astype(dtype))
        features = tf.cast(tf.math.log(tf.maximum(mel, p.floor)), tf.float32)
        lengths = tf.cast(lengths, tf.int32)
        return FrameSequence(features, self.num_frames(lengths)).with_features(features)

    def _noise(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns normally distributed noise in the shape of x, by the Box-Muller transform."""
        radius, angle = (ctx.uniform(self, x.shape, f"dither_{i}") for i in range(2))
        size = tf.sqrt(-2.0 * tf.math.log(1.0 - radius))
        return ctx.constrain(size * tf.cos(2.0 * math.pi * angle), ("batch", None))

    def _framed(self, x: tf.Tensor) -> tf.Tensor:
        """Returns overlapping frames: [B, N] -> [B, T, F].

        Joins neighbouring chunks of `step` samples, which a mesh can do without a gather.
        """
        size, step = self.frame_length, self.step
        batch, length = x.shape
        frames = max(1, int(self.num_frames(length)))
        chunks = -(-size // step)
        needed = (frames - 1 + chunks) * step
        if needed > length:
            x = tf.concat([x, tf.zeros([batch, needed - length], x.dtype)], 1)
        x = tf.reshape(x[:, :needed], [batch, frames - 1 + chunks, step])
        return tf.concat([x[:, i : i + frames] for i in range(chunks)], 2)[:, :, :size]

    def mel_weights(self) -> Doubles:
        """Returns the weights of the bins of the spectrum in each channel.

        Each channel is a triangle on the mel scale, from the centre of the channel before to that
        of the next.

        Shapes:
          returns: [fft_length / 2 + 1, num_channels]
        """
        p = self.params
        edges = np.linspace(mel(p.low_hz), mel(p.high_hz), p.num_channels + 2)
        places = mel(np.arange(self.fft_length // 2 + 1) * p.sample_rate / self.fft_length)
        width = edges[1] - edges[0]
        rising = (places[:, None] - edges[:-2]) / width
        falling = (edges[2:] - places[:, None]) / width
        weights: Doubles = np.maximum(0.0, np.minimum(rising, falling))
        return weights


def mel(hz: Any) -> Any:
    """Returns frequencies on the mel scale: 1127 log(1 + f / 700), f in Hz."""
    return 1127.0 * np.log1p(np.asarray(hz, np.float64) / 700.0)


def window_of(name: Window, length: int) -> Doubles:
    """Returns the factors of a window, [length]."""
    place = np.arange(length)
    if name == "hann":
        return 0.5 - 0.5 * np.cos(2 * np.pi * place / length)
    turn = np.cos(2 * np.pi * place / max(length - 1, 1))
    if name == "povey":
        return np.asarray((0.5 - 0.5 * turn) ** 0.85)
    return np.asarray(0.54 - 0.46 * turn) if name == "hamming" else np.ones(length)


def kaldi_log_mel(**changes: Any) -> LogMel.Params:
    """Returns Params for the features of Kaldi's compute-fbank-feats, without dither.

    Further Params are given by name. Kaldi's default is 23 channels; here it is 80.
    """
    given: dict[str, Any] = {
        "offset": "remove",
        "before_frame": "repeat",
        "window": "povey",
        "fft_length": None,
        "spectrum": "power",
        "low_hz": 20.0,
        "high_hz": changes.get("sample_rate", 16_000) / 2,
        "floor": float(np.finfo(np.float32).eps),
    }
    return LogMel.Params(**{**given, **changes})
