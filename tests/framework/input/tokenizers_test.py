"""Tokenizers: every text comes back, bytes are counted, tables are kept and checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input.characters import Characters
from tekso.framework.input.errors import InputError
from tekso.framework.input.sentence_piece import SentencePiece, learn
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import Bytes, Tokenizer
from tekso.framework.input.words import Words

# What text can hold: everything but NUL, lone surrogates excluded by the encoding.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
CODE = st.lists(
    st.sampled_from(
        [
            "def",
            " ",
            "    ",
            "\t",
            "\n",
            "\r\n",
            "\u2581",
            "</s>",
            "<0x0A>",
            "é",
            "\ufb01",
            "\u3000",
        ]
    )
).map("".join)
LINES = [f"def f{i}(x_{i}):\n    return x_{i} + {i} * (x_{i} - 1)\n\n" for i in range(300)]


def training(*texts: str, verify: bool = True) -> TrainingText:
    return TrainingText(lambda: texts, lambda: "|".join(texts), f"{len(texts)} texts", verify)


@pytest.fixture(scope="module")
def pieces() -> Iterator[SentencePiece]:
    yield SentencePiece.Params(vocab_size=400).instantiate(training=training(*LINES))


class TestBytes:
    @given(TEXT)
    def test_every_text_comes_back_and_its_bytes_are_counted(self, text: str) -> None:
        check_round_trip(Bytes.Params().instantiate(), text)

    def test_ids_are_the_bytes(self) -> None:
        tokenizer = Bytes.Params().instantiate()
        assert tokenizer.vocab_size == 256
        assert tokenizer.dtype == np.uint8
        assert tokenizer.encode("Aé").tolist() == [65, 0xC3, 0xA9]
        assert tokenizer.encode("Aé").dtype == np.int32

    @given(st.lists(st.integers(-5, 300)))
    def test_decoding_never_fails(self, ids: list[int]) -> None:
        assert isinstance(Bytes.Params().instantiate().decode(ids), str)

    def test_a_part_of_a_character_shows_as_a_replacement(self) -> None:
        assert Bytes.Params().instantiate().decode([65, 0xC3]) == "A\ufffd"

    def test_the_end_stands_for_nothing(self) -> None:
        tokenizer = Bytes.Params().instantiate()
        assert tokenizer.decode([65, tokenizer.end_id, 66]) == "AB"


class TestCharacters:
    def make(self, *texts: str, **kwargs: Any) -> Characters:
        one: Characters = Characters.Params(**kwargs).instantiate(training=training(*texts))
        return one

    @given(st.lists(TEXT, min_size=1))
    def test_every_training_text_comes_back(self, texts: list[str]) -> None:
        tokenizer = self.make(*texts)
        assert tokenizer.vocab_size == 2 + len(set("".join(texts)))
        for text in texts:
            check_round_trip(tokenizer, text)

    def test_ids_are_in_the_order_of_code_points(self) -> None:
        assert self.make("béa", "ab").encode("abé").tolist() == [2, 3, 4]

    def test_an_unknown_character_has_the_unknown_id(self) -> None:
        tokenizer = self.make("ab")
        assert tokenizer.encode("axb").tolist() == [2, 1, 3]
        assert tokenizer.decode(tokenizer.encode("axb")) == "a\ufffdb"
        assert tokenizer.unknown("axbyx") == ["x", "y"] and tokenizer.unknown("ba") == []
        assert tokenizer.token_num_bytes.tolist() == [0, 1, 1, 1]

    def test_a_size_that_is_given_leaves_spare_ids(self) -> None:
        assert self.make("ab", vocab_size=7).vocab_size == 7

    def test_ids_that_no_training_text_has_are_known(self) -> None:
        one = self.make("ab", vocab_size=7)
        assert sorted({*range(7)} - {one.end_id, *one.encode("ab")}) == list(one.unused_ids)
        assert list(Bytes.Params().instantiate().unused_ids) == []

    def test_a_table_that_is_too_small_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"vocab_size is 4, but .* 3 characters, which need 5"):
            self.make("abc", vocab_size=4)

    def test_the_table_is_kept_and_read_again(self, tmp_path: Path) -> None:
        params = Characters.Params()
        first = params.instantiate(assets_dir=str(tmp_path), training=training("ba"))
        again = params.instantiate(assets_dir=str(tmp_path))
        assert again.encode("ab").tolist() == first.encode("ab").tolist()
        assert (tmp_path / "characters.txt").read_text() == "ab"

    def test_a_table_of_other_text_is_refused(self, tmp_path: Path) -> None:
        params = Characters.Params()
        params.instantiate(assets_dir=str(tmp_path), training=training("ab", "c"))
        with pytest.raises(InputError, match=r"made from different training text \(2 texts\)"):
            params.instantiate(assets_dir=str(tmp_path), training=training("xyz"))
        params.instantiate(assets_dir=str(tmp_path), training=training("xyz", verify=False))

    def test_without_table_and_text_it_says_to_train_first(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="train first"):
            Characters.Params().instantiate(assets_dir=str(tmp_path))

    def test_a_damaged_table_is_refused(self, tmp_path: Path) -> None:
        params = Characters.Params()
        params.instantiate(assets_dir=str(tmp_path), training=training("ab"))
        (tmp_path / "characters.txt").write_text("ax")
        with pytest.raises(InputError, match="is damaged"):
            params.instantiate(assets_dir=str(tmp_path))

    def test_a_table_without_its_description_is_made_again(self, tmp_path: Path) -> None:
        # The process was killed between the two writes.
        (tmp_path / "characters.txt").write_text("x")
        tokenizer = Characters.Params().instantiate(
            assets_dir=str(tmp_path), training=training("ab")
        )
        assert tokenizer.encode("ab").tolist() == [2, 3]


class TestSentencePiece:
    @given(TEXT)
    def test_every_text_comes_back(self, pieces: SentencePiece, text: str) -> None:
        check_round_trip(pieces, text)

    @given(CODE)
    def test_white_space_and_special_spellings_come_back(
        self, pieces: SentencePiece, text: str
    ) -> None:
        check_round_trip(pieces, text)

    @given(st.lists(TEXT | CODE, max_size=5))
    def test_many_at_once_are_as_one_by_one(self, pieces: SentencePiece, texts: list[str]) -> None:
        together = [ids.tolist() for ids in pieces.encode_all(texts)]
        assert together == [pieces.encode(text).tolist() for text in texts]

    @given(st.lists(st.integers(-5, 500)))
    def test_decoding_never_fails(self, pieces: SentencePiece, ids: list[int]) -> None:
        assert isinstance(pieces.decode(ids), str)

    def test_text_is_shorter_in_pieces_than_in_bytes(self, pieces: SentencePiece) -> None:
        assert len(pieces.encode(LINES[7])) < len(LINES[7]) * 2 / 3

    def test_the_end_is_no_text(self, pieces: SentencePiece) -> None:
        assert pieces.decode([pieces.end_id]) == ""
        assert pieces.end_id not in pieces.encode("</s>")

    @pytest.mark.parametrize("model_type", ["bpe", "unigram"])
    def test_the_same_text_gives_the_same_model(self, model_type: str) -> None:
        one, two = (learn(LINES, vocab_size=350, model_type=model_type) for _ in range(2))
        assert one == two

    def test_too_few_pieces_leave_spare_ids(self) -> None:
        few = SentencePiece.Params(vocab_size=600).instantiate(training=training("ab ab"))
        assert few.vocab_size == 600 > few.num_pieces
        check_round_trip(few, "ab c")

    @given(st.integers(200, 2000))
    def test_it_learns_from_an_even_sample(self, train_bytes: int) -> None:
        from tekso.framework.input.sentence_piece import _sample

        kept = _sample(LINES, train_bytes)
        assert train_bytes / 3 < sum(map(len, kept)) <= train_bytes
        lines = [line for text in LINES for line in text.split("\n") if line]
        assert len(set(np.diff([lines.index(line) for line in kept]))) <= 1

    def test_a_given_model_is_copied_and_needed_no_more(self, tmp_path: Path) -> None:
        model = tmp_path / "a.model"
        model.write_bytes(learn(LINES, vocab_size=400))
        params = SentencePiece.Params(file=str(model), vocab_size=400)
        first = params.instantiate(assets_dir=str(tmp_path / "assets"))
        model.unlink()
        again = params.instantiate(assets_dir=str(tmp_path / "assets"))
        assert again.encode(LINES[0]).tolist() == first.encode(LINES[0]).tolist()

    def test_another_setting_than_that_of_the_kept_model_is_refused(self, tmp_path: Path) -> None:
        text = training(*LINES)
        SentencePiece.Params(vocab_size=400).instantiate(assets_dir=str(tmp_path), training=text)
        with pytest.raises(InputError, match="made with vocab_size=400, now 500"):
            SentencePiece.Params(vocab_size=500).instantiate(
                assets_dir=str(tmp_path), training=text
            )

    def test_a_model_that_changes_text_is_refused(self, tmp_path: Path) -> None:
        import sentencepiece

        path = str(tmp_path / "other")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_prefix=path,
            vocab_size=400,
            byte_fallback=True,
            minloglevel=2,
        )
        with pytest.raises(InputError, match=r"changes text .*vocab"):
            SentencePiece.Params(file=f"{path}.model").instantiate()

    def test_what_is_no_model_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.model").write_bytes(b"no model")
        with pytest.raises(InputError, match="is not a SentencePiece model"):
            SentencePiece.Params(file=str(tmp_path / "a.model")).instantiate()
        with pytest.raises(FileNotFoundError, match=r"^file: .*did you mean '.*a\.model'"):
            SentencePiece.Params(file=str(tmp_path / "b.model")).instantiate()

    def test_more_pieces_than_vocab_size_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.model").write_bytes(learn(LINES, vocab_size=305))
        with pytest.raises(InputError, match=r"has 305 pieces.* set vocab_size=305"):
            SentencePiece.Params(file=str(tmp_path / "a.model"), vocab_size=302).instantiate()

    def test_a_vocabulary_too_small_for_bytes_is_refused(self) -> None:
        with pytest.raises(InputError, match="needs at least 300"):
            learn(LINES, vocab_size=100)


class TestWords:
    def make(self, *texts: str, vocab_size: int) -> Words:
        params = Words.Params(vocab_size=vocab_size)
        one: Words = params.instantiate(training=training(*texts))
        return one

    def test_the_most_frequent_words_have_ids_ties_by_the_alphabet(self) -> None:
        words = self.make("b b c a", "b c d", vocab_size=5)
        assert words.encode("a b c d").tolist() == [4, 2, 3, 1]
        assert words.decode([2, 3, 1]) == "b c <UNK>"
        assert words.unknown("a b  c d d") == ["d"]
        assert words.token_num_bytes.tolist() == [0, 1, 2, 2, 2]
        assert list(words.unused_ids) == []
        assert list(self.make("b", vocab_size=5).unused_ids) == [3, 4]

    def test_a_table_can_be_given(self, tmp_path: Path) -> None:
        (tmp_path / "words.txt").write_text("x\ny\nz\n")
        words = Words.Params(vocab_size=4, file=str(tmp_path / "words.txt")).instantiate()
        assert words.encode("z y  x").tolist() == [1, 3, 2]
        assert words.vocab_size == 4


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_num_bytes[ids].sum() == len(text.encode())
    assert tokenizer.end_id not in ids
