"""Inputs of pairs: every pair once, sides that belong together, filters counted, pure in step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework.input.characters import Characters
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.mixtures import Mixture
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.input.words import Words
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.input import PaddedPairs
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.pairs import InMemoryPairs, Pair

FORMS = [PaddedPairs, BucketedPairs, PackedPairs]
TEXT = st.text("abcdefgh", min_size=1, max_size=9)
PAIRS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=20)


def make(form: Any, pairs: list[Any], *, seed: int = 1, **kwargs: Any) -> Any:
    languages = sorted({pair[2] for pair in pairs if len(pair) > 2})
    corpus = InMemoryPairs.Params(train=pairs, languages=languages, max_skipped=0)
    kwargs = {"batch_size": 3, "source_length": 12, "target_length": 11, **kwargs}
    return form.Params(corpus=corpus, **kwargs).instantiate(seed=seed)


def pairs_of(batch: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """What is in a batch, by its own description; checks that it agrees with itself."""
    found = []
    for row in range(len(batch["source_ids"])):
        if not batch["target_weights"][row].any():
            continue
        sides = [batch[f"{side}_segment_ids"][row] for side in ("source", "target")]
        assert set(sides[0].tolist()) - {0} == set(sides[1].tolist()) - {0}
        np.testing.assert_array_equal(batch["target_weights"][row], sides[1] > 0)
        assert not batch["source_ids"][row][sides[0] == 0].any()
        assert not batch["target_ids"][row][sides[1] == 0].any()
        assert not batch["target_labels"][row][sides[1] == 0].any()
        for segment in range(1, sides[0].max() + 1):
            places = [np.flatnonzero(side == segment) for side in sides]
            for side, place in zip(("source", "target"), places, strict=True):
                assert place.tolist() == list(range(place[0], place[-1] + 1))
                if f"{side}_positions" in batch:
                    positions = batch[f"{side}_positions"][row][place]
                    assert positions.tolist() == list(range(len(place)))
            source = batch["source_ids"][row][places[0]].tolist()
            labels = batch["target_labels"][row][places[1]].tolist()
            assert source[-1] == labels[-1] == 0
            assert batch["target_ids"][row][places[1]].tolist() == [0, *labels[:-1]]
            found.append((bytes(source[:-1]).decode(), bytes(labels[:-1]).decode()))
    return found


def of_pass(one: Any, first: int, count: int) -> list[tuple[str, str]]:
    return [pair for step in range(first, first + count) for pair in pairs_of(one.batch(step))]


@pytest.mark.parametrize("form", FORMS)
@given(PAIRS, st.integers(1, 5))
@settings(max_examples=40)
def test_a_pass_has_every_pair_once_in_the_order_of_the_data(
    form: Any, pairs: list[Any], batch_size: int
) -> None:
    one = make(form, pairs, batch_size=batch_size, order="once")
    assert of_pass(one, 0, one.num_batches) == pairs
    with pytest.raises(IndexError):
        one.batch(one.num_batches)


@pytest.mark.parametrize("form", FORMS)
def test_sequential_batches_go_through_the_data_again_and_again(form: Any) -> None:
    pairs = [("a" * (i % 5 + 1), f"{i}") for i in range(7)]
    one = make(form, pairs, batch_size=2, order="sequential")
    found = of_pass(one, 0, 11)
    assert len(found) >= 22
    assert found == [pairs[i % 7] for i in range(len(found))]


@pytest.mark.parametrize("form", FORMS)
def test_no_corpus_says_how_to_give_one(form: Any) -> None:
    with pytest.raises(InputError, match=r"corpus\.source_files is empty: .*--set corpus\.source"):
        form.Params(batch_size=2, source_length=4, target_length=4).instantiate()


@pytest.mark.parametrize("form", FORMS)
@given(PAIRS, st.integers(0, 2**64 - 1))
@settings(max_examples=40)
def test_an_epoch_of_training_has_every_pair_once(form: Any, pairs: list[Any], seed: int) -> None:
    one = make(form, pairs, batch_size=1, seed=seed)
    steps = len(pairs) if form is BucketedPairs else one.num_examples
    for epoch in range(2):
        assert sorted(of_pass(one, epoch * steps, steps)) == sorted(pairs)


@pytest.mark.parametrize("form", FORMS)
def test_the_batch_of_a_step_is_the_same_in_any_order_and_after_a_restart(form: Any) -> None:
    pairs = [(f"{i}" * (i % 4 + 1), f"{i}" * (i % 3 + 1)) for i in range(40)]
    used, fresh = make(form, pairs), make(form, pairs)
    steps = [7, 0, 100_000, 7, 3, 2**31 + 5]
    first = [used.batch(step) for step in steps]
    for step, expected in reversed(list(zip(steps, first, strict=True))):
        again = fresh.batch(step)
        assert set(again) == set(expected)
        for key, value in expected.items():
            np.testing.assert_array_equal(again[key], value)
    assert pairs_of(make(form, pairs, seed=2).batch(0)) != pairs_of(first[1])
    assert pairs_of(first[0]) != pairs_of(first[1])


@pytest.mark.parametrize("form", FORMS)
def test_signature_is_that_of_a_batch_and_needs_no_data(form: Any) -> None:
    one = make(form, [("a" * 11, "b" * 10)] * 3)
    batch = one.batch(0)
    params = form.Params(batch_size=3, source_length=12, target_length=11)
    assert form.signature(params) == {k: (x.shape, x.dtype) for k, x in batch.items()}
    for key, value in batch.items():
        assert value.dtype == (np.float32 if key == "target_weights" else np.int32)
        assert value.flags.c_contiguous


class TestFilters:
    PAIRS = [  # noqa: RUF012
        ("a", "b"),
        ("a" * 12, "b"),  # 13 tokens with the end
        ("a" * 11, "b"),
        ("a", "b" * 11),
        ("a" * 100_000, "b" * 100_000),
        ("aaaa", "bbb"),
    ]

    @pytest.mark.parametrize("form", FORMS)
    def test_what_is_too_long_is_left_out_and_counted(self, form: Any) -> None:
        one = make(form, self.PAIRS, order="once")
        assert one.num_pairs == 3
        assert one.chosen.left_out == {
            "source longer than 12 tokens": 2,
            "target longer than 11 tokens": 1,
        }
        assert of_pass(one, 0, one.num_batches) == [self.PAIRS[i] for i in (0, 2, 5)]
        assert one.pairs() == [Pair(*self.PAIRS[i]) for i in (0, 2, 5)]
        assert one.pairs([2, 0]) == [Pair(*self.PAIRS[5]), Pair(*self.PAIRS[0])]
        assert one.pairs(slice(1, 2)) == [Pair(*self.PAIRS[2])]
        assert one.describe() == (
            "pairs in memory, train: 3 pairs of 19 source and 8 target tokens, 3 left out: "
            "2 source longer than 12 tokens, 1 target longer than 11 tokens"
        )

    def test_unequal_sides_are_left_out_of_training_alone(self) -> None:
        one = make(PaddedPairs, self.PAIRS, max_ratio=2.0)
        assert one.chosen.left_out["one side over 2 times as long"] == 1
        assert one.pairs() == [Pair("a", "b"), Pair("aaaa", "bbb")]
        assert make(PaddedPairs, self.PAIRS, max_ratio=2.0, order="once").num_pairs == 3

    def test_a_ratio_is_met_exactly(self) -> None:
        pairs = [("aaa", "a"), ("a", "aaa"), ("aaaa", "a")]  # 4:2, 2:4, 5:2
        assert make(PaddedPairs, pairs, max_ratio=2.0).num_pairs == 2

    def test_nothing_left_says_what_to_do(self) -> None:
        with pytest.raises(InputError, match=r"all 1 pairs are left out .*1 source longer than 12"):
            make(PaddedPairs, [("a" * 50, "b")])


class TestBucketedPairs:
    PAIRS = [("a" * (i % 11 + 1), "b" * (i * 7 % 10 + 1)) for i in range(60)]  # noqa: RUF012

    def test_a_batch_is_as_long_as_its_bucket(self) -> None:
        one = make(BucketedPairs, self.PAIRS, bounds=[4, 6], fill="tokens", batch_size=2)
        shapes = {(b["source_ids"].shape, b["target_ids"].shape) for b in map(one.batch, range(90))}
        assert shapes == {((6, 4), (6, 4)), ((4, 6), (4, 6)), ((2, 12), (2, 11))}

    def test_a_pair_is_in_the_smallest_bucket_of_both_sides(self) -> None:
        one = make(BucketedPairs, self.PAIRS, bounds=[4, 6], batch_size=1)
        for batch in map(one.batch, range(60)):
            (pair,) = pairs_of(batch)
            longest = max(map(len, pair)) + 1
            wanted = next(bound for bound in (4, 6, 12) if longest <= bound)
            assert batch["source_ids"].shape == (1, wanted)

    def test_a_pass_in_order_has_the_shapes_of_buckets_too(self) -> None:
        one = make(BucketedPairs, self.PAIRS, bounds=[4, 8], fill="tokens", order="once")
        shapes = {batch["source_ids"].shape for batch in map(one.batch, range(one.num_batches))}
        assert shapes <= {(3, 4), (3, 8), (3, 12)} and len(shapes) > 1
        assert of_pass(one, 0, one.num_batches) == self.PAIRS

    @pytest.mark.parametrize("order", ["shuffled", "sequential", "once"])
    def test_padding_is_known_and_has_no_weight(self, order: str) -> None:
        one = make(BucketedPairs, self.PAIRS, bounds=[4, 8], batch_size=7, order=order)
        padded = np.stack([one.is_padding(step) for step in range(9)])
        weights = np.stack([one.batch(step)["target_weights"].sum(1) for step in range(9)])
        np.testing.assert_array_equal(padded, weights == 0)
        assert padded.any() == (order != "sequential")

    def test_it_cannot_be_mixed(self) -> None:
        with pytest.raises(TypeError, match="cannot be part of a mixture"):
            make(BucketedPairs, self.PAIRS).at(np.array([0]))


class TestTokenizers:
    CORPUS = InMemoryPairs.Params(train=[("abc", "xyz"), ("cab", "zyy")], dev=[("aq", "xq")])

    def params(self, **kwargs: Any) -> Any:
        return PaddedPairs.Params(
            corpus=self.CORPUS, source_length=8, target_length=9, batch_size=2, **kwargs
        )

    def test_a_shared_one_is_learned_from_both_sides_of_training(self, tmp_path: Path) -> None:
        train = self.params(tokenizer=Characters.Params())
        held = HeldOut.Params().instantiate(assets_dir=str(tmp_path), train=train)
        one = held.inner
        assert one.source_tokenizer is one.target_tokenizer is held.tokenizer
        assert one.source_vocab_size == one.target_vocab_size == one.vocab_size == 8
        assert one.batch(0)["source_ids"][0, :3].tolist() == [2, 1, 0]  # q was not met
        assert train.instantiate(assets_dir=str(tmp_path)).source_vocab_size == 8

    def test_separate_ones_are_learned_from_a_side_each_and_kept_apart(
        self, tmp_path: Path
    ) -> None:
        train = self.params(
            source_tokenizer=Characters.Params(vocab_size=9), target_tokenizer=Characters.Params()
        )
        one = train.instantiate(assets_dir=str(tmp_path))
        assert (one.source_vocab_size, one.target_vocab_size, one.vocab_size) == (9, 5, 5)
        assert (tmp_path / "source" / "characters.txt").read_text() == "abc"
        assert (tmp_path / "target" / "characters.txt").read_text() == "xyz"
        assert one.encode_source("ca").tolist() == [4, 2, 0]
        assert one.decode_target([2, 4, 0, 3]) == "xz"
        held = HeldOut.Params().instantiate(assets_dir=str(tmp_path), train=train)
        assert held.inner.target_tokenizer.token_bytes == one.target_tokenizer.token_bytes

    def test_pieces_are_learned_from_equal_parts_of_both_sides(self, tmp_path: Path) -> None:
        words = [f"{i:b}".replace("1", "ab") for i in range(3000)]
        pairs = [(f"over {word} under", f"über {word} unter") for word in words]
        one = PaddedPairs.Params(
            corpus=InMemoryPairs.Params(train=pairs),
            tokenizer=SentencePiece.Params(vocab_size=320, train_bytes=20_000),
            source_length=80,
            target_length=80,
            batch_size=2,
        ).instantiate(assets_dir=str(tmp_path))
        for text in ("over", "under", "über", "unter"):
            assert len(one.source_tokenizer.encode(text)) <= 2, text
        other = InMemoryPairs.Params(train=pairs[1:])
        with pytest.raises(InputError, match="was made from different training text"):
            one.params.copy().set(corpus=other).instantiate(assets_dir=str(tmp_path))

    def test_tokens_that_take_long_to_make_are_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tekso.framework.input import token_rows

        monkeypatch.setattr(token_rows, "IN_MEMORY_SLOW", 0)
        pairs = [(f"ab {i}", f"x{i} yz", "de" if i % 3 else "fr") for i in range(40)]
        corpus = InMemoryPairs.Params(train=[*pairs, ("bad", "")], languages=["fr", "de"])
        params = PaddedPairs.Params(
            corpus=corpus, tokenizer=Words.Params(vocab_size=60), source_length=8, target_length=9,
            batch_size=4,
        )  # fmt: skip
        first = params.instantiate(seed=1, assets_dir=str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(token_rows, "_encode", None)  # it must not be called again
            again = params.instantiate(seed=1, assets_dir=str(tmp_path))
        for key, value in first.batch(5).items():
            np.testing.assert_array_equal(again.batch(5)[key], value)
        assert again.skipped() == first.skipped() and again.skipped().count == 1
        assert again.pairs() == first.pairs()
        records, languages = (column.read() for column in again.tokens.numbers)
        assert records.tolist() == [*range(40)]
        assert languages.tolist() == [int(i % 3 > 0) for i in range(40)]
        target_ids = first.batch(5)["target_ids"]

        for name in ("*/number.0.bin", "*/0.ends.bin", "*/1.tokens.bin", "*/entry.json"):
            kept = next((tmp_path / "tokens").glob(name))
            kept.write_bytes(kept.read_bytes()[:-2])
            repaired = params.instantiate(seed=1, assets_dir=str(tmp_path))
            np.testing.assert_array_equal(repaired.tokens.numbers[0].read(), records)
            np.testing.assert_array_equal(repaired.batch(5)["target_ids"], target_ids)

    def test_words_work_too(self) -> None:
        one = make(PaddedPairs, [("a b", "x y z")], tokenizer=Words.Params(vocab_size=9))
        assert one.decode_target(one.batch(0)["target_labels"][0]) == "x y z"

    def test_one_alone_is_refused(self) -> None:
        with pytest.raises(InputError, match="target_tokenizer is missing"):
            self.params(source_tokenizer=Characters.Params()).instantiate()


class TestSource:
    def test_a_source_is_encoded_as_in_training(self) -> None:
        pairs = [("abc", "x", "de"), ("abc", "y", "fr")]
        one = make(PaddedPairs, pairs, order="once")
        batch = one.batch(0)
        for row, (source, _, language) in enumerate(pairs):
            ids = one.encode_source(source, language)
            np.testing.assert_array_equal(batch["source_ids"][row, : len(ids)], ids)


@pytest.mark.parametrize("name", ["source_length", "target_length", "batch_size", "temperature"])
def test_a_number_out_of_range_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        make(PaddedPairs, [("a", "b")], **{name: 0})


def test_padded_and_packed_pairs_can_be_mixed() -> None:
    for form in (PaddedPairs, PackedPairs):
        parts = [
            form.Params(
                corpus=InMemoryPairs.Params(train=[(letter, letter)]),
                source_length=2, target_length=2, batch_size=1,
            )
            for letter in "ab"
        ]  # fmt: skip
        batch = Mixture.Params(batch_size=8, inputs=parts).instantiate(seed=1).batch(0)
        assert sorted(set(pairs_of(batch))) == [("a", "a"), ("b", "b")]
