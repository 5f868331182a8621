"""tekso-decode on audio: files, folders, and raw samples while they arrive."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asterisk_folder
import numpy as np
import processes
import pytest
import soundfile
from eager_program import EagerProgram
from speech_tasks import TASKS, Letters

from tekso.tools import decode
from tekso.tools.decode_speech import _samples, audio_files, transcribe_stream

CAUSAL = "task.model.encoder.block.convolution.padding=causal"
TEXTS = ["".join(row) for row in np.random.default_rng(0).choice(list("abcdef"), (40, 3))]


def run(cwd: Path, *words: str, given: bytes = b"", op_by_op: bool = True) -> str:
    env = {**os.environ, "TEKSO_ASTERISK": str(cwd)}
    done = processes.run(
        ["-m", *words], cwd=cwd, env=env, input=given, optimized=False, op_by_op=op_by_op
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_files_and_samples_on_standard_input_have_the_same_transcript(tmp_path: Path) -> None:
    asterisk_folder.write(tmp_path, TEXTS)
    settings = (
        "task.model.encoder=tekso.models.conformer:Conformer", "task.model.encoder.dim=8",
        "task.model.encoder.num_layers=1", "task.model.encoder.chunk_frames=2", CAUSAL,
        "task.model.encoder.block.num_heads=2", "task.model.normalize=None",
        "input.bounds_s=[1.0]", "input.max_seconds=1.0", "input.max_labels=40",
        "run.decode_at_end=False", "execution.towers=1", "execution.xla=none",
    )  # fmt: skip
    flags = [f"--set={setting}" for setting in settings]
    run(
        tmp_path,
        "tekso.tools.trainer",
        "--model=asr.prompts.Ctc",
        "--logdir=r",
        "--steps=30",
        *flags,
        op_by_op=False,
    )
    (tmp_path / "new" / "deep").mkdir(parents=True)
    samples = np.concatenate([asterisk_folder.tones_of(text) for text in ("ab", "fade")])
    raw = np.rint(samples * 32_767).astype("<i2")
    soundfile.write(tmp_path / "new/deep/b.wav", raw, 8000, subtype="PCM_16")
    (tmp_path / "new/a.ogg").write_bytes(b"nothing")
    (tmp_path / "new/cover.png").write_bytes(b"no audio")

    decoding = ("tekso.tools.decode", "--logdir=r")
    lines = run(tmp_path, *decoding, "--input=new").splitlines()
    broken, good = (line.split("\t") for line in lines)
    assert broken[:2] == ["new/a.ogg", "error"] and good[0] == "new/deep/b.wav"
    raw_flags = ("--samples=s16le", "--sample_rate=8000", "--format=json")
    printed = run(tmp_path, *decoding, *raw_flags, given=raw.tobytes())
    *partial, last = (json.loads(line) for line in printed.splitlines())
    assert last["text"] == good[1] != "" and last["is_last"]
    assert all(not record["is_last"] for record in partial) and partial
    assert last["seconds"] == pytest.approx(len(samples) / 8000, abs=1e-3)
    (tmp_path / "raw").write_bytes(raw.tobytes())
    text = run(tmp_path, *decoding, "--input=raw", "--samples=s16le")
    assert text.splitlines()[-1] == f"{last['seconds']:.2f}\t{last['text']}"


def test_raw_samples_are_read_in_both_formats(tmp_path: Path) -> None:
    expected = np.array([0.5, -1.0, 0.25], np.float32)
    (tmp_path / "s").write_bytes((expected * 32_768).astype("<i2").tobytes() + b"\0")
    (tmp_path / "f").write_bytes(expected.astype("<f4").tobytes())
    for name, form in (("s", "s16le"), ("f", "f32le")):
        found = np.concatenate([*_samples(str(tmp_path / name), form)])
        np.testing.assert_array_equal(found, expected)
    (tmp_path / "n").write_bytes(np.array([np.nan], "<f4").tobytes())
    with pytest.raises(decode.UsageError, match=r"not finite: is it --samples=f32le\?"):
        list(_samples(str(tmp_path / "n"), "f32le"))


def test_a_long_stream_that_must_be_kept_until_its_end_is_refused(tmp_path: Path) -> None:
    task: Any = TASKS["ctc"](**{"model.vocab_size": 5, "longest_file_s": 0.5}).instantiate()
    given = SimpleNamespace(tokenizer=Letters())
    parts: Any = SimpleNamespace(task=task, program=EagerProgram(None), input=given)  # type: ignore[arg-type]
    (tmp_path / "raw").write_bytes(bytes(2 * 4001))
    with pytest.raises(decode.UsageError, match=r"longest_file_s=0.5 seconds, and is .* 'utteran"):
        transcribe_stream(
            parts,
            str(tmp_path / "raw"),
            io.BytesIO(),
            form="text",
            sample_format="s16le",
            sample_rate=None,
        )


def test_wrong_flags_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, reason in (
        (["--input=a.wav", "--beam_size=2"], "--beam_size is for translation, not for --input=a"),
        (["--samples=s16le", "--language=de"], "not for --samples=s16le"),
        (["--input=a.wav", "--samples=s16le"], "--input=a.wav has a header: remove --samples"),
        (["--input=a.wav", "--sample_rate=8000"], "--sample_rate is for --samples"),
        (["--samples=s16le", "--sample_rate=16"], "--sample_rate=16 must be 1000 to 1000000"),
    ):
        assert decode.main(["tekso-decode", "--logdir=r", *words]) == 2
        assert reason in capsys.readouterr().err


def test_the_audio_files_of_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("b.FLAC", "a/c.mp3", "a/notes.txt", "a/._c.mp3", ".hidden/d.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert audio_files(str(tmp_path)) == [str(tmp_path / "a/c.mp3"), str(tmp_path / "b.FLAC")]
    assert audio_files("x.wav") == ["x.wav"]
