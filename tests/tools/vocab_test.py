"""Tests of tekso-vocab: its files, its output, and its errors of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tekso.framework.commands import typed
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.tools import vocab

LINES = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(500))


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(LINES)
    (tmp_path / "b.py").write_text("import os\n" * 10)
    return tmp_path


def run(*words: str) -> int:
    return vocab.main(["tekso-vocab", *words])


def test_it_learns_a_model_and_says_what_to_type_next(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--input=*.py", "--output=out/my.model", "--vocab_size=320") == 0
    printed = capsys.readouterr().out
    assert "read 2 files" in printed and "learned 320 pieces (bpe)" in printed
    assert (
        f"{typed('tekso-trainer')} --model=lm.text_files.SentencePiece '--set=input.files=*.py' "
        "--set=input.tokenizer.file=out/my.model --set=input.tokenizer.vocab_size=320" in printed
    )
    tokenizer = SentencePiece.Params(file="out/my.model", vocab_size=320).instantiate()
    assert tokenizer.decode(tokenizer.encode(LINES)) == LINES


def test_words_without_a_flag_are_files_as_a_shell_gives_them(texts: Path) -> None:
    assert run("--output=one.model", "--vocab_size=320", "--input", "a.py", "b.py") == 0
    assert run("--output=two.model", "--vocab_size=320", "--input", "*.py") == 0
    assert (texts / "one.model").read_bytes() == (texts / "two.model").read_bytes()


def test_an_existing_output_is_replaced_only_on_request(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "my.model").write_text("precious")
    assert run("--input=*.py", "--output=my.model", "--vocab_size=320") == 2
    assert "exists" in capsys.readouterr().err
    assert (texts / "my.model").read_text() == "precious"
    assert run("--input=*.py", "--output=my.model", "--vocab_size=320", "--overwrite") == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "--input is missing, as in"),
        (["--input=*.py"], 2, "--output is missing"),
        (["--source_files=*.py", "--output=m"], 2, "--target_files is missing"),
        (["--source_files=*.py", "--target_files=*.py", "--input=*.py"], 2, "give either --input"),
        (["--source_files=a.py", "--target_files=b.py", "--output=m"], 1, "b.py has 10 lines"),
        (["--inputs=*.py"], 2, "no flag --inputs; did you mean --input?"),
        (["--input=*.py", "--output=."], 2, "is a folder"),
        (["--input=*.pi", "--output=m"], 1, "nothing matches '*.pi'; did you mean"),
        (["--input=bin", "--output=m"], 1, "bin, byte 1: binary: a NUL byte"),
        (["--input=empty", "--output=m"], 1, "empty, byte 0: empty"),
        (["--input=*.py", "--output=m", "--vocab_size=100"], 1, "needs at least 300"),
        (["--input=*.py", "--output=m", "--vocab_size=many"], 2, "many"),
        (["--input=*.py", "--output=bin/m", "--vocab_size=320"], 1, "bin"),
    ],
)
def test_what_is_wrong_is_reported_without_a_traceback(
    texts: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    (texts / "bin").write_bytes(b"a\0b")
    (texts / "empty").write_bytes(b"")
    assert run(*words) == code
    error = capsys.readouterr().err
    assert error.startswith("tekso-vocab: ") and message in error
    assert "Traceback" not in error
    assert not (texts / "m").exists()


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert f"usage: {typed('tekso-vocab')} --input" in printed and "--vocab_size=N" in printed


def test_a_vocabulary_larger_than_the_text_is_reported(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--input=b.py", "--output=m") == 0
    assert "the other ids are unused" in capsys.readouterr().out


def test_both_sides_of_a_parallel_corpus_share_a_vocabulary(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (texts / "train.en").write_text("the quick brown fox\n\n" * 5 + "the slow green turtle\n" * 200)
    (texts / "train.de").write_text("der schnelle braune Fuchs\n" * 210)
    words = ["--source_files=*.en", "--target_files=*.de", "--output=m", "--vocab_size=330"]
    assert run(*words) == 0
    printed = capsys.readouterr().out
    assert "read 210 pairs of lines" in printed and "warning: 5 skipped" in printed
    assert (
        "'--set=input.corpus.source_files=*.en' '--set=input.corpus.target_files=*.de' "
        "--set=input.tokenizer.file=m --set=input.tokenizer.vocab_size=330"
    ) in printed
    tokenizer = SentencePiece.Params(file="m", vocab_size=330).instantiate()
    for text in ("turtle", "schnelle"):
        assert len(tokenizer.encode(text)) <= 3
