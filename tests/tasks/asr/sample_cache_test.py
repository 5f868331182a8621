"""The cache of decoded speech: equal batches, read instead of decoded, and when it is written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import asterisk_folder
import numpy as np
import pytest

from tekso.framework.input.errors import InputError
from tekso.tasks.asr import utterances
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.perturbation import Perturbation
from tekso.tasks.asr.sample_cache import cached_speech
from tekso.tasks.asr.sources import AsteriskPrompts

TEXTS = ["a", "bad", "cab", "dead", "face", "fed", "bee", "decaf", "abc", "fade"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asterisk_folder.write(tmp_path / "data", TEXTS)
    sounds = tmp_path / "data/usr/share/asterisk/sounds/en_US_f_Allison/digits"
    (sounds / "0.wav").write_bytes(b"RIFF broken")
    return tmp_path


def params(folder: Path, **changes: Any) -> Any:
    data = {"dev_fraction": 0.0, "test_fraction": 0.0}
    given: dict[str, Any] = {
        "corpus": AsteriskPrompts.Params(folder=str(folder / "data"), **data),
        "sample_rate": 8000,
        "max_seconds": 0.6,
        "batch_size": 3,
        "keep": "cache",
        "cache_dir": str(folder / "cache"),
    }
    return BucketedSpeech.Params(**{**given, **changes})


def entries(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").iterdir() if path.is_dir()}


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_audio(path: str, sample_rate: int) -> Any:
        raise AssertionError(f"{path} was decoded")

    monkeypatch.setattr(utterances, "read_audio", read_audio)


def test_cached_batches_are_those_of_memory_and_decode_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perturb = Perturbation.Params(speeds=[0.9, 1.1], snr_db=[10.0, 20.0])
    memory: Any = params(folder, keep="memory", perturb=perturb).instantiate(seed=2)
    params(folder, perturb=perturb).instantiate(seed=2)
    (before,) = entries(folder)
    forbid_decoding(monkeypatch)
    cached: Any = params(folder, perturb=perturb).instantiate(seed=2)
    assert cached._kept == [] and cached.num_too_long == memory.num_too_long == 1
    for step in range(5):
        for name, array in memory.batch(step).items():
            np.testing.assert_array_equal(cached.batch(step)[name], array)
    assert [cached.origin(i) for i in range(8)] == [memory.origin(i) for i in range(8)]
    # Settings of batches do not belong to the samples.
    params(folder, max_seconds=0.5, batch_size=2).instantiate()
    assert entries(folder) == {before}


def test_broken_files_are_named_and_counted_from_the_cache_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: Any = params(folder).instantiate()
    forbid_decoding(monkeypatch)
    second: Any = params(folder).instantiate()
    for input in (first, second):
        (skip,) = input.skipped().named
        assert skip.file.endswith("digits/0.wav") and "not audio" in skip.reason
    strict = params(folder)
    strict.corpus.max_skipped = 0
    with pytest.raises(InputError, match=r"more than .*max_skipped=0 are malformed"):
        strict.instantiate()


def test_other_recordings_texts_and_rates_are_another_entry(folder: Path) -> None:
    params(folder).instantiate()
    params(folder, sample_rate=4000).instantiate()
    assert len(entries(folder)) == 2
    changed = folder / "data/usr/share/asterisk/sounds/en_US_f_Allison/digits/3.wav"
    shutil.copyfile(changed.with_name("4.wav"), changed)
    os.utime(changed, ns=(1, 1))
    found: Any = params(folder).instantiate()
    assert len(entries(folder)) == 3
    places = {found.origin(i): i for i in range(found.num_examples)}
    np.testing.assert_allclose(
        found.samples(places[str(changed)]), asterisk_folder.tones_of("face"), atol=1e-4
    )
    raw = params(folder)
    raw.corpus.text_form = "raw"
    assert "Face." in {raw.instantiate().text(i) for i in range(5)}
    assert len(entries(folder)) == 4


def test_without_a_folder_the_samples_stay_in_memory(folder: Path) -> None:
    source: Any = params(folder).corpus.instantiate()
    found = cached_speech(source, 8000, None)
    assert found.texts == sorted(TEXTS[1:], key=lambda text: str(TEXTS.index(text)))
    np.testing.assert_allclose(
        found.samples(1) / 32_768, asterisk_folder.tones_of("cab"), atol=1e-4
    )
    assert not (folder / "cache").exists()


def test_a_corpus_of_broken_files_is_refused(tmp_path: Path) -> None:
    asterisk_folder.write(tmp_path / "data", ["a", "b"])
    for path in (tmp_path / "data").rglob("*.wav"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="nothing is left to read: 2 skipped"):
        params(tmp_path).instantiate()
