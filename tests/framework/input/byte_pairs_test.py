"""The tokenizer of GPT-2: published ids, the order of merges, exact texts, and broken files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input.byte_pairs import BytePairs
from tekso.framework.input.errors import InputError

MERGES = ["#version: 0.2", "h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "a a", "aa b", "Ã ©"]


def tokenizer(folder: Path, lines: list[str] = MERGES, **rest: str) -> BytePairs:
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return BytePairs.Params(file=str(folder / "merges.txt")).instantiate(**rest)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> BytePairs:
    return tokenizer(tmp_path_factory.mktemp("merges"))


def test_bytes_have_the_published_ids(made: BytePairs) -> None:
    # In the vocabulary of GPT-2: "!" 0, "A" 32, newline 198, space 220, the byte 0xAD 255.
    for text, i in {"!": 0, "A": 32, "\n": 198, " ": 220}.items():
        assert list(made.encode(text)) == [i]
    assert made.token_bytes[255] == b"\xad"
    assert sorted(made.token_bytes[:256]) == [bytes([byte]) for byte in range(256)]
    assert made.vocab_size == 256 + len(MERGES) - 1 + 1
    assert made.end_id == made.vocab_size - 1
    assert made.token_bytes[made.end_id] == b""


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello world", ["hello", " wo", "r", "l", "d"]),
        ("hell", ["hell"]),
        ("aaa", ["aa", "a"]),  # from the left
        ("aaab", ["aa", "a", "b"]),  # a a comes before aa b
        ("aab", ["aab"]),
        ("it's  x12?!", ["i", "t", "'", "s", " ", " ", "x", "1", "2", "?", "!"]),
        ("é", ["é"]),
        ("ll l", ["ll", " ", "l"]),  # no merge across parts
    ],
)
def test_the_first_merge_of_the_file_comes_first(
    made: BytePairs, text: str, tokens: list[str]
) -> None:
    assert [made.token_bytes[i].decode() for i in made.encode(text)] == tokens


@given(st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back(made: BytePairs, text: str) -> None:
    assert made.decode(made.encode(text)) == text


@pytest.mark.parametrize("line", ["h", "h e l", "h zz", "漢 e"])
def test_a_line_that_is_no_pair_of_tokens_is_reported(tmp_path: Path, line: str) -> None:
    with pytest.raises(InputError, match=r"file: line 2 of .*merges.txt is .* expected two tokens"):
        tokenizer(tmp_path, ["#version: 0.2", line])


def test_the_run_keeps_a_copy(tmp_path: Path) -> None:
    assets = str(tmp_path / "assets")
    first = tokenizer(tmp_path, assets_dir=assets)
    (tmp_path / "merges.txt").unlink()
    again = first.params.instantiate(assets_dir=assets)
    assert again.fingerprint() == first.fingerprint()
