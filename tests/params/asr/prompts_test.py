"""The experiment on voice prompts, on a folder of tones that is laid out like the packages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import asterisk_folder
import numpy as np
import processes
import pytest
import soundfile

TEXTS = ["".join(row) for row in np.random.default_rng(0).choice(list("abcdef"), (40, 3))]
SMALL = (
    "--set", "task.model.encoder.stack.cell.hidden_dim=8", "--set", "task.model.encoder.dim=8",
    "--set", "task.model.encoder.stack.num_layers=1", "--set", "input.bounds_s=[0.5]",
    "--set", "input.max_seconds=0.5", "--set", "input.max_labels=40",
    "--set", "execution.towers=1", "--set", "execution.xla=none",
)  # fmt: skip


def trainer(tmp_path: Path, *arguments: str) -> str:
    env = {**os.environ, "TEKSO_ASTERISK": str(tmp_path)}
    command = ["-m", "tekso.tools.trainer", *arguments]
    exports = "--mode=export" in arguments
    done = processes.run(
        command, cwd=tmp_path, env=env, merge=True, optimized=False, op_by_op=not exports
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "name",
    # The others run in all modes in tests/shrunk_runs_test.py.
    [
        pytest.param("Ctc", marks=pytest.mark.slow),
        pytest.param("Las", marks=pytest.mark.matrix),
        pytest.param("Rnnt", marks=pytest.mark.matrix),
    ],
)
def test_prompts_are_trained_on_scored_and_transcribed(tmp_path: Path, name: str) -> None:
    asterisk_folder.write(tmp_path, TEXTS)
    start = [f"--model=asr.prompts.{name}", "--logdir=runs/a", "--steps=2"]
    trainer(tmp_path, *start, *SMALL)
    assert '"wer": ' in (tmp_path / "runs/a/metrics.jsonl").read_text()
    (report, *_) = sorted((tmp_path / "runs/a/decoded/dev").glob("*.txt"))
    text = report.read_text()
    assert "most word errors:" in text and "reference: " in text and "insertions" in text

    soundfile.write(tmp_path / "hello.flac", asterisk_folder.tones_of("abc"), 8000)
    given = ["--logdir=runs/a", "--mode=decode", "--set", 'task.decode=["hello.flac"]']
    size = "task.transcriber.search.beam_size" if name == "Las" else "task.transcriber.beam_size"
    beam = ["--set", f"{size}=3", "--set", "task.transcriber.num_hypotheses=2"]
    if name == "Ctc":
        assert "hello.flac" in trainer(tmp_path, *given)
    printed = trainer(tmp_path, *given, *beam, "--format=json")
    decoded = json.loads(printed[printed.index("{\n") : printed.rindex("}") + 1])
    (record,) = decoded["records"]
    assert len(record["hypotheses"]) == 2 and record["hypotheses"][0][0] == record["text"]
    if name != "Las":  # does not know when words are spoken
        assert [word for word, _ in record["words"]] == record["text"].split()


@pytest.mark.slow
def test_prompts_are_recognised_with_a_language_model(tmp_path: Path) -> None:
    asterisk_folder.write(tmp_path, TEXTS)
    once = ("--steps=1", "--set", "run.eval_every_steps=1")
    trainer(tmp_path, "--model=asr.prompts.Texts", "--logdir=runs/texts", *once, *SMALL[-4:])
    trainer(tmp_path, "--model=asr.prompts.Ctc", "--logdir=runs/prompts", *once, *SMALL)
    language = "task.transcriber.language_model"
    trainer(
        tmp_path, "--logdir=runs/prompts", "--mode=eval", "--set", "task.transcriber.beam_size=8",
        "--set", f"{language}=tekso.tasks.asr.language_fusion:LanguageFusion",
        "--set", f"{language}.run=runs/texts/best", "--set", f"{language}.token_bonus=9",
    )  # fmt: skip
    fused = json.loads((tmp_path / "runs/prompts/evaluations.jsonl").read_text())
    assert fused["cer"] > 1.5  # with such a bonus, every frame has a token


@pytest.mark.slow
def test_prompts_are_exported(tmp_path: Path) -> None:
    asterisk_folder.write(tmp_path, TEXTS)
    trainer(tmp_path, "--model=asr.prompts.Ctc", "--logdir=runs/a", "--steps=1", *SMALL)
    printed = trainer(tmp_path, "--logdir=runs/a", "--mode=export", "--output=out")
    assert "recognize(samples, num_samples) -> log_probs, num_frames" in printed
    about = json.loads((tmp_path / "out/assets/export.json").read_text())
    assert about["functions"]["recognize"]["longest"] == 4000  # half a second
    assert "tokenizer" in about["vocabularies"]
