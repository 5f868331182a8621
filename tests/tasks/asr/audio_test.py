"""Audio files, transcripts and sources: what is read, and how what is broken is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tekso.framework.input.errors import InputError
from tekso.tasks.asr.audio import AudioError, Resampler, read_audio, resample, seconds_of
from tekso.tasks.asr.sources import AsteriskPrompts, LibriSpeech, TranscriptFiles
from tekso.tasks.asr.transcripts import spoken_form
from tekso.tasks.asr.word_errors import word_errors


def tone(rate: int, hz: float, seconds: float = 0.5) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(rate * seconds)) / rate)).astype("f4")


@pytest.mark.parametrize(("rate", "new_rate"), [(8000, 16_000), (44_100, 16_000), (16_000, 8000)])
def test_resampling_keeps_tones_below_the_limit_and_removes_those_above(
    rate: int, new_rate: int
) -> None:
    found = resample(tone(rate, 1000), rate, new_rate)
    assert len(found) == new_rate // 2
    inside = slice(new_rate // 20, -new_rate // 20)
    np.testing.assert_allclose(found[inside], tone(new_rate, 1000)[inside], atol=2e-3)
    if new_rate < rate:
        aliased = resample(tone(rate, 0.6 * new_rate), rate, new_rate)
        assert np.abs(aliased[inside]).max() < 2e-3


@pytest.mark.parametrize(("rate", "new_rate"), [(8000, 16_000), (44_100, 16_000), (16_000, 8000)])
def test_a_stream_is_resampled_as_the_whole(rate: int, new_rate: int) -> None:
    samples = np.random.default_rng(0).normal(size=5003).astype(np.float32)
    resampler, found = Resampler(rate, new_rate), []
    for part in np.split(samples, [1, 3, 700, 701, 2500]):
        found.append(resampler.add(part))
    assert 0 < sum(map(len, found)) < 5003 * new_rate / rate  # some wait for later samples
    found.append(resampler.add([], is_last=True))
    expected = resample(samples, rate, new_rate)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_reads_stereo_files_as_mono(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"a.{suffix}")
    both = np.stack([tone(16_000, 500), np.zeros(8000, "f4")], 1)
    soundfile.write(path, both, 16_000)
    found = read_audio(path, 16_000)
    assert found.dtype == np.float32 and abs(len(found) - 8000) < 2400  # codecs pad
    assert 0.15 < np.abs(found).max() < 0.35
    if suffix in ("wav", "flac"):
        np.testing.assert_allclose(found, both.mean(1), atol=1e-4)
        assert seconds_of(path) == 0.5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"not audio at all", "not audio"),
        (None, "no samples"),
        (1, "a sample rate of 1 Hz: must be 1000 to 1000000 Hz"),
        (2_000_000_000, "a sample rate of 2000000000 Hz"),
    ],
)
def test_says_what_is_wrong_with_a_file(
    tmp_path: Path, data: bytes | int | None, message: str
) -> None:
    path = tmp_path / "a.wav"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        soundfile.write(path, np.zeros(0 if data is None else 40, "f4"), 8000)
    if isinstance(data, int):  # in the header
        content = bytearray(path.read_bytes())
        content[24:28] = data.to_bytes(4, "little")
        path.write_bytes(content)
    with pytest.raises(AudioError, match=message):
        read_audio(str(path), 8000)
    with pytest.raises(AudioError, match=message):
        seconds_of(str(path))


@pytest.mark.parametrize("header", [0, 2**36 - 1])  # a program that wrote to a pipe; damage
def test_reads_flac_whose_header_has_no_length(tmp_path: Path, header: int) -> None:
    path, x = tmp_path / "a.flac", tone(8000, 500, 3.0)
    soundfile.write(path, x, 8000)
    content = bytearray(path.read_bytes())
    found = int.from_bytes(content[18:26])  # rate, channels and bits, then 36 bits of the length
    content[18:26] = (found >> 36 << 36 | header).to_bytes(8)
    path.write_bytes(content)
    np.testing.assert_allclose(read_audio(str(path), 8000), x, atol=1e-4)
    assert seconds_of(str(path)) == 3.0


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Press 1, then *pound*!", "press one then pound"),
        ("[tone] You don't (5 seconds) say", "you don't say"),
        ("<beep>", ""),
        ("Ça va: 42 'fois'", "ça va four two fois"),
    ],
)
def test_the_spoken_form_has_words_only(text: str, spoken: str) -> None:
    assert spoken_form(text) == spoken


def write(path: Path, seconds: float = 0.2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(8000, 300, seconds), 8000)


def texts(source: Any) -> list[str]:
    return [record.text for _, record in source.records()]


def test_reads_the_folders_of_librispeech(tmp_path: Path) -> None:
    chapter = tmp_path / "dev-clean" / "84" / "121123"
    for name in ("84-121123-0000", "84-121123-0001"):
        write(chapter / f"{name}.flac")
    lines = "84-121123-0000 GO DO YOU HEAR\n84-121123-0001 BUT IN LESS\n"
    (chapter / "84-121123.trans.txt").write_text(lines)
    source: Any = LibriSpeech.Params(folder=str(tmp_path)).instantiate(split="dev")
    assert texts(source) == ["go do you hear", "but in less"]
    assert source.seconds(1) == pytest.approx(0.2)
    assert len(source.samples(0, 16_000)) == 3200
    with pytest.raises(OSError, match="train-clean-100"):
        LibriSpeech.Params(folder=str(tmp_path)).instantiate(split="train")


@pytest.mark.parametrize("suffix", ["tsv", "jsonl"])
def test_reads_tables_and_holds_out_texts(tmp_path: Path, suffix: str) -> None:
    rows = [(f"clips/{i}.wav", f"Sentence number {i // 2}!") for i in range(100)]
    if suffix == "tsv":
        lines = ["client\tpath\ttext", *(f"x\t{path}\t{text}" for path, text in rows), "y\tz"]
    else:
        lines = [json.dumps({"path": path, "text": text}) for path, text in rows] + ["{}"]
    (tmp_path / f"all.{suffix}").write_text("\n".join(lines) + "\n")
    params = TranscriptFiles.Params(files=str(tmp_path / f"all.{suffix}"), text_form="raw")
    by_split = {s: params.instantiate(split=s) for s in ("train", "dev", "test")}
    found = {split: texts(source) for split, source in by_split.items()}
    assert sum(map(len, found.values())) == 100
    assert all(len(own) > 2 for own in found.values())
    assert not set(found["train"]) & set(found["dev"] + found["test"])
    assert by_split["train"].skipped().count == 1
    path = by_split["train"][0].audio
    assert path.startswith(str(tmp_path / "clips"))


def test_a_split_with_tables_of_its_own_takes_no_text_of_training(tmp_path: Path) -> None:
    for name, count in (("all", 40), ("dev", 3)):
        rows = [f"{name}{i}.wav\t{name} sentence {'x' * i}" for i in range(count)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["path\ttext", *rows]) + "\n")
    params = TranscriptFiles.Params(
        files=str(tmp_path / "all.tsv"),
        dev_files=str(tmp_path / "dev.tsv"),
        dev_fraction=0.5,
        test_fraction=0.25,
    )
    found: dict[Any, Any] = {s: params.instantiate(split=s) for s in ("train", "dev", "test")}
    train, dev, test = (texts(source) for source in found.values())
    assert [text.split()[0] for text in dev] == ["dev"] * 3
    assert len(test) > 2 and len(train) > 20 and len(train) + len(test) == 40
    assert all(found["train"].in_split(text, "train") for text in train)


def test_a_table_without_the_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("path\tsentence\n1.wav\ta\n")
    with pytest.raises(InputError, match=r"no column 'text'; its columns are \['path'"):
        TranscriptFiles.Params(files=str(tmp_path / "a.tsv")).instantiate()


def test_missing_prompts_name_the_packages(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"packages asterisk-core-sounds-en and .*-wav"):
        AsteriskPrompts.Params(folder=str(tmp_path)).instantiate()


@pytest.mark.parametrize("name", ["soundfile", "jiwer"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"package {name}.*pip install 'tekso\[speech\]'"):
        if name == "jiwer":
            word_errors(["a"], ["a"])
        else:
            read_audio(str(tmp_path / "a.wav"), 8000)
