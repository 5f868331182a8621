"""Noise from files: its ratio to the speech, its pieces, what it depends on, and broken files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tekso.framework.input.errors import InputError
from tekso.tasks.asr.perturbation import Perturbation
from tekso.tasks.asr.recorded_noise import RecordedNoise

RNG = np.random.default_rng(0)
SPEECH = RNG.normal(0.0, 0.1, 5000).astype(np.float32)
NOISES = [RNG.uniform(-0.5, 0.5, size) for size in (700, 9000)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, noise in enumerate(NOISES):
        soundfile.write(tmp_path / f"noise{i}.wav", noise, 8000)
    return tmp_path


def params(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {"files": f"{folder}/*.wav", "snr_db": [10.0, 20.0]}
    return RecordedNoise.Params(**{**given, **changes})


def test_a_piece_of_a_file_is_added_with_the_drawn_ratio(folder: Path) -> None:
    noise = params(folder).instantiate(sample_rate=8000)
    ratios, used, places = [], set(), set()
    for key in range(40):
        added = noise.mixed(SPEECH, np.random.default_rng(key)) - SPEECH
        fits = []
        for own in NOISES:
            wrapped = np.tile(own, 10)[: len(own) + len(SPEECH)]
            spectrum = np.fft.rfft(wrapped, 16_384)
            scores = np.fft.irfft(spectrum * np.conj(np.fft.rfft(added, 16_384)))[: len(own)]
            start = int(scores.argmax())
            piece = wrapped[start : start + len(SPEECH)]
            gain = float(piece @ added / (piece @ piece))
            fits.append((float(np.abs(added - gain * piece).max()), gain, start))
        number = int(np.argmin([error for error, _, _ in fits]))
        error, gain, start = fits[number]
        assert error < 1e-4
        power = np.mean(NOISES[number] ** 2)
        ratios.append(10 * np.log10(np.mean(SPEECH**2) / (gain**2 * power)))
        used.add(number)
        places.add((number, start))
    assert 9.99 < min(ratios) < 12 and 18 < max(ratios) < 20.01
    assert used == {0, 1} and len(places) > 35


def test_noise_depends_on_the_key_alone_and_on_the_probability(folder: Path) -> None:
    perturb = Perturbation.Params(noise=params(folder, probability=0.5))
    one, other = (perturb.instantiate(sample_rate=8000) for _ in range(2))
    found = [one.apply(SPEECH, key) for key in range(60)]
    for key in range(59, -1, -1):  # in another order
        np.testing.assert_array_equal(other.apply(SPEECH, key), found[key])
    noisy = [not np.array_equal(y, SPEECH) for y in found]
    assert 18 < sum(noisy) < 42
    assert len({y.tobytes() for y, is_noisy in zip(found, noisy, strict=True) if is_noisy}) > 15
    silence = np.zeros(10, np.float32)
    assert not one.apply(silence, 3).any()


def test_broken_and_silent_files_are_named_counted_and_skipped(folder: Path) -> None:
    (folder / "broken.wav").write_bytes(b"RIFF")
    soundfile.write(folder / "silent.wav", np.zeros(100), 8000)
    noise = params(folder).instantiate(sample_rate=8000)
    found = {Path(skip.file).name: skip.reason for skip in noise.skipped().named}
    assert found["silent.wav"] == "silent" and found["broken.wav"].startswith("not audio")
    with pytest.raises(InputError, match=r"more than .*max_skipped=1 are malformed"):
        params(folder, max_skipped=1).instantiate(sample_rate=8000)
    with pytest.raises(InputError, match="none of these files can be used: 1 skipped"):
        params(folder, files=f"{folder}/silent.wav").instantiate(sample_rate=8000)


def test_wrong_settings_are_named(folder: Path) -> None:
    for changes, reason in (
        ({"snr_db": [20.0]}, "snr_db is .20.0., must be two ascending numbers"),
        ({"snr_db": [5.0, float("nan")]}, "must be two ascending numbers"),
        ({"probability": 1.5}, "probability is 1.5, must be in"),
    ):
        with pytest.raises(ValueError, match=reason):
            params(folder, **changes).instantiate(sample_rate=8000)
    with pytest.raises(FileNotFoundError, match="none"):
        params(folder, files=f"{folder}/none*.wav").instantiate(sample_rate=8000)
