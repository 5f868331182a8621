"""Log-mel features against formulas in NumPy, frame by frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.layers.frames import FrameSequence, NormalizeFrames, StackFrames
from tekso.models.layers.log_mel import LogMel, kaldi_log_mel

RNG = np.random.default_rng(3)
TIME = np.arange(2400) / 16_000
NOISE = RNG.normal(0, 1, (2, 2400))
TONES = 0.3 * np.sin(2 * np.pi * 440 * TIME) + 0.1 * np.sin(2 * np.pi * 2900 * TIME + 1)
# Without the noise, rounding of the tones in float32 would show in the other channels.
SAMPLES = np.stack([TONES + 0.1 * NOISE[0], 0.05 * NOISE[1]]).astype(np.float32)


def triangles(rate: int, fft: int, low: float, high: float, channels: int) -> np.ndarray:
    """Weights [bins, channels], by loops."""

    def to_mel(hz: float) -> float:
        return 2595 * np.log10(1 + hz / 700)

    step = (to_mel(high) - to_mel(low)) / (channels + 1)
    weights = np.zeros((fft // 2 + 1, channels))
    for k in range(fft // 2 + 1):
        for c in range(channels):
            centre = to_mel(low) + (c + 1) * step
            weights[k, c] = max(0, 1 - abs(to_mel(k * rate / fft) - centre) / step)
    return weights


def lingvo(signal: np.ndarray) -> np.ndarray:
    weights = triangles(16_000, 1024, 125, 7600, 80)
    window = [0.5 - 0.5 * np.cos(2 * np.pi * i / 400) for i in range(400)]
    rows = []
    for t in range(1 + (len(signal) - 401) // 160):
        frame = 32_768.0 * signal[t * 160 : t * 160 + 401].astype(np.float64)
        emphasised = np.array([frame[i] - 0.97 * frame[i - 1] for i in range(1, 401)])
        rows.append(np.log(np.maximum(1.0, abs(np.fft.rfft(emphasised * window, 1024)) @ weights)))
    return np.stack(rows)


def kaldi(signal: np.ndarray, rate: int, channels: int, high: float) -> np.ndarray:
    size, step = rate * 25 // 1000, rate // 100
    fft = 512 if rate == 16_000 else 256
    weights = triangles(rate, fft, 20, high, channels)
    window = [(0.5 - 0.5 * np.cos(2 * np.pi * i / (size - 1))) ** 0.85 for i in range(size)]
    rows = []
    for t in range(1 + (len(signal) - size) // step):
        frame = 32_768.0 * signal[t * step : t * step + size].astype(np.float64)
        frame -= frame.mean()
        emphasised = np.array([frame[i] - 0.97 * frame[max(i - 1, 0)] for i in range(size)])
        power = abs(np.fft.rfft(emphasised * window, fft)) ** 2
        rows.append(np.log(np.maximum(np.finfo(np.float32).eps, power @ weights)))
    return np.stack(rows)


def features(params: Any, samples: Any, lengths: list[int] | None = None) -> FrameSequence:
    layer = params.instantiate()
    given = None if lengths is None else tf.constant(lengths)
    return layer.fprop(Theta(), tf.constant(samples), StepContext(), lengths=given)


def test_the_default_equals_the_formula_of_lingvo() -> None:
    found = features(LogMel.Params(), SAMPLES)
    assert found.lengths.numpy().tolist() == [13, 13]
    for row, signal in zip(found.features.numpy(), SAMPLES, strict=True):
        np.testing.assert_allclose(row, lingvo(signal), atol=1e-4)


@pytest.mark.parametrize(("rate", "channels", "high"), [(16_000, 80, 8000.0), (8000, 23, 3800.0)])
def test_features_of_kaldi_equal_their_formula(rate: int, channels: int, high: float) -> None:
    params = kaldi_log_mel(sample_rate=rate, num_channels=channels, high_hz=high)
    found = features(params, SAMPLES).features.numpy()
    for row, signal in zip(found, SAMPLES, strict=True):
        np.testing.assert_allclose(row, kaldi(signal, rate, channels, high), atol=1e-4)


def test_float64_is_exact_in_channels_without_power_next_to_strong_ones() -> None:
    params = kaldi_log_mel(num_channels=80)
    exact = kaldi(TONES.astype(np.float32), 16_000, 80, 8000.0)
    strongest = exact.max(1, keepdims=True)
    assert np.mean(exact < strongest - np.log(1e8)) > 0.2
    errors = {}
    for precision in ("float32", "float64"):
        found = features(params.copy().set(precision=precision), TONES[None].astype(np.float32))
        assert found.features.dtype == tf.float32
        errors[precision] = abs(found.features[0].numpy() - exact).max()
    assert errors["float64"] < 5e-6 and errors["float32"] > 1e-4


def test_int16_samples_have_the_features_of_floats() -> None:
    whole = np.round(SAMPLES * 32_768).astype(np.int16)
    one = features(LogMel.Params(), whole)
    other = features(LogMel.Params(), (whole / 32_768).astype(np.float32))
    np.testing.assert_array_equal(one.features, other.features)


def test_samples_after_the_end_change_nothing_and_frames_after_it_are_0() -> None:
    lengths = [2400, 1000]
    noisy = SAMPLES.copy()
    noisy[1, 1000:] = 0.9
    one, other = (features(LogMel.Params(), x, lengths) for x in (SAMPLES, noisy))
    alone = features(LogMel.Params(), SAMPLES[1:, :1000])
    assert one.lengths.numpy().tolist() == [13, 4] and alone.lengths.numpy().tolist() == [4]
    np.testing.assert_array_equal(one.features, other.features)
    np.testing.assert_allclose(one.features[1, :4], alone.features[0], atol=1e-5)
    assert not np.any(one.features[1, 4:])


def test_dither_adds_noise_of_the_given_deviation_in_training_only() -> None:
    """With a window of ones and no pre-emphasis, the mean power of a bin is F * deviation**2."""
    params = LogMel.Params(
        dither=3.0, preemphasis=0.0, window="rectangular", spectrum="power", fft_length=512
    )
    layer = params.instantiate()
    silence = tf.zeros([4, 32_000])
    assert not np.any(layer.fprop(Theta(), silence, StepContext()).features)

    def dithered(**context: Any) -> np.ndarray:
        ctx = StepContext(mode="train", seed=1, **context)
        found: np.ndarray = layer.fprop(Theta(), silence, ctx).features.numpy()
        return found

    x = dithered(step=2)
    power = np.exp(x).mean((0, 1)) / layer.mel_weights().sum(0)
    np.testing.assert_allclose(power, 400 * 3.0**2, rtol=0.25)
    assert power.mean() == pytest.approx(400 * 3.0**2, rel=0.02)
    np.testing.assert_array_equal(dithered(step=2), x)
    assert (dithered(step=3) != x).any()
    halves = layer.fprop(
        Theta(), silence[2:], StepContext(mode="train", seed=1, step=2, example_offset=2)
    )
    np.testing.assert_array_equal(halves.features, x[2:])


def test_an_utterance_shorter_than_a_frame_has_no_frames() -> None:
    found = features(LogMel.Params(), SAMPLES[:, :300])
    assert found.features.shape == (2, 1, 80) and found.lengths.numpy().tolist() == [0, 0]
    assert not np.any(found.features)


@pytest.mark.parametrize("rate", [8000, 16_000])
def test_odd_recordings_have_the_features_of_kaldi(rate: int) -> None:
    """Silence, an offset next to full scale, clipping, and lengths around that of a window."""
    params, size = kaldi_log_mel(sample_rate=rate), rate * 25 // 1000
    noise = 0.1 * np.random.default_rng(1).standard_normal(3 * size)
    recordings = {
        "silence": np.zeros(2 * size),
        "offset": 0.9 + noise / 10,
        "clipped": np.clip(30 * noise, -1, 1),
        "one window": noise[:size],
        "a sample more": noise[: size + 1],
        "a step more": noise[: size + rate // 100],
    }
    for name, samples in recordings.items():
        given = samples.astype(np.float32)
        found = features(params, given[None])
        wanted = kaldi(given, rate, 80, rate / 2)
        assert found.lengths.numpy().tolist() == [len(wanted)], name
        np.testing.assert_allclose(found.features[0], wanted, atol=1e-4, err_msg=name)
    short = features(params, noise[None, : size - 1].astype(np.float32))
    assert short.lengths.numpy().tolist() == [0] and not np.any(short.features)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_rate": 8000}, "half the sample_rate, 4000"),
        ({"fft_length": 256}, "fft_length 256 must be at least 400"),
        ({"step_ms": 0.0}, "step 0"),
        ({"dither": -1.0}, "dither is -1.0, must be finite and at least 0"),
    ],
)
def test_rejects_impossible_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogMel.Params(**changes).instantiate()


X = RNG.normal(2, 3, size=(2, 5, 3)).astype(np.float32)
LENGTHS = [5, 3]


def frames() -> FrameSequence:
    lengths = tf.constant(LENGTHS)
    return FrameSequence(tf.constant(X), lengths).with_features(tf.constant(X))


def test_normalises_every_utterance_over_its_own_frames() -> None:
    layer = NormalizeFrames.Params(input_dim=3).instantiate()
    y = layer.fprop(Theta(), frames(), StepContext()).features.numpy()
    for i, length in enumerate(LENGTHS):
        own = X[i, :length].astype(np.float64)
        expected = (own - own.mean(0)) / np.sqrt(own.var(0) + 1e-5)
        np.testing.assert_allclose(y[i, :length], expected, atol=1e-5)
        assert not np.any(y[i, length:])


def test_normalises_by_given_statistics() -> None:
    mean, deviation = [1.0, 2.0, 3.0], [2.0, 4.0, 8.0]
    layer = NormalizeFrames.Params(
        input_dim=3, statistics="global", mean=mean, deviation=deviation
    ).instantiate()
    y = layer.fprop(Theta(), frames(), StepContext()).features.numpy()
    np.testing.assert_allclose(y[0], (X[0] - mean) / deviation, rtol=1e-5)
    assert not np.any(y[1, 3:])
    with pytest.raises(ValueError, match="mean has 0 values, but statistics 'global' needs 3"):
        NormalizeFrames.Params(input_dim=3, statistics="global").instantiate()


def test_stacks_frames_and_keeps_the_last_that_is_not_full() -> None:
    found = StackFrames.Params(size=2).instantiate().fprop(Theta(), frames(), StepContext())
    assert found.lengths.numpy().tolist() == [3, 2]
    padded = np.concatenate([frames().features, np.zeros((2, 1, 3))], 1)
    np.testing.assert_array_equal(found.features, padded.reshape(2, 3, 6))
