"""Text inputs: every token a label once, segments apart, bytes counted, equal after a restart."""

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
from tekso.framework.input.sources import InMemory
from tekso.framework.input.text_files import TextFiles
from tekso.framework.input.tfrecords import TfRecords
from tekso.tasks.lm.bucketed_text import BucketedText
from tekso.tasks.lm.input import TextStream
from tekso.tasks.lm.packed_text import PackedText
from tekso.tasks.lm.synthetic import SyntheticTokens

TEXTS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30),
    min_size=1,
    max_size=12,
)
FORMS = [TextStream, PackedText, BucketedText]
SHAPES: dict[str, Any] = {"ids": np.int32, "labels": np.int32, "weights": np.float32}


def make(form: Any, texts: list[str], *, seed: int = 1, **kwargs: Any) -> Any:
    kwargs = {"batch_size": 3, "length": 5, **kwargs}
    params = form.Params(corpus=InMemory.Params(train=texts, max_skipped=0), **kwargs)
    return params.instantiate(seed=seed)


def passes(one: Any, first: int, count: int) -> list[dict[str, np.ndarray]]:
    return [one.batch(step) for step in range(first, first + count)]


def joined(texts: list[str]) -> list[int]:
    """All labels of some texts: their bytes, and an end after each."""
    return [byte for text in texts for byte in [*text.encode(), 0]]


@pytest.mark.parametrize("form", FORMS)
@given(TEXTS, st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=40)
def test_one_pass_has_every_token_as_label_once(
    form: Any, texts: list[str], length: int, batch_size: int
) -> None:
    one = make(form, texts, length=length, batch_size=batch_size, order="once")
    batches = passes(one, 0, one.num_batches)
    labels = np.concatenate([batch["labels"][batch["weights"] > 0] for batch in batches])
    assert sorted(labels.tolist()) == sorted(joined(texts))
    if form is TextStream:
        assert labels.tolist() == joined(texts)
    num_bytes = sum(float(batch["num_bytes"].sum()) for batch in batches)
    assert num_bytes == len("".join(texts).encode()) == one.num_bytes


@pytest.mark.parametrize("form", FORMS)
@given(TEXTS, st.integers(0, 2**64 - 1))
@settings(max_examples=40)
def test_a_label_is_what_follows_its_id_in_the_text(form: Any, texts: list[str], seed: int) -> None:
    one = make(form, texts, length=2, seed=seed)
    stream = bytes([0, *joined(texts)])
    for batch in passes(one, 0, 3):
        for key, dtype in SHAPES.items():
            assert batch[key].dtype == dtype and batch[key].flags.c_contiguous
        for ids, labels, weights in zip(
            batch["ids"], batch["labels"], batch["weights"], strict=True
        ):
            count = int(weights.sum())
            assert set(weights.tolist()) <= {0.0, 1.0}
            for i in np.flatnonzero(weights).tolist():
                assert bytes([ids[i], labels[i]]) in stream
            if form is TextStream:
                assert count == 2
                assert ids[1:].tolist() == labels[:-1].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_the_batch_of_a_step_is_the_same_in_any_order_and_after_a_restart(form: Any) -> None:
    texts = [f"text number {i}" * (i % 4 + 1) for i in range(20)]
    used, fresh = make(form, texts), make(form, texts)
    steps = [7, 0, 100_000, 7, 3, 2**31 + 5]
    first = [used.batch(step) for step in steps]
    for step, expected in reversed(list(zip(steps, first, strict=True))):
        again = fresh.batch(step)
        for key, value in expected.items():
            np.testing.assert_array_equal(again[key], value)
    other = make(form, texts, seed=2).batch(0)["ids"]
    assert other.shape != first[1]["ids"].shape or (other != first[1]["ids"]).any()


@pytest.mark.parametrize("form", [PackedText, BucketedText])
def test_an_epoch_has_every_token_once_whatever_its_order(form: Any) -> None:
    texts = [chr(97 + i) * (i + 1) for i in range(14)]
    one = make(form, texts, batch_size=1, length=8)
    steps = one.num_examples
    for epoch in range(2):
        batches = passes(one, epoch * steps, steps)
        labels = np.concatenate([batch["labels"][batch["weights"] > 0] for batch in batches])
        assert sorted(labels.tolist()) == sorted(joined(texts))


@pytest.mark.parametrize("form", FORMS)
def test_signature_is_that_of_a_batch_and_needs_no_data(form: Any) -> None:
    params = form.Params(corpus=TextFiles.Params(files="/nowhere/*"), batch_size=3, length=7)
    batches = passes(make(form, ["abcdefg"], batch_size=3, length=7), 0, 9)
    batch = max(batches, key=lambda batch: batch["ids"].size)  # of the longest bucket
    assert form.signature(params) == {k: (x.shape, x.dtype) for k, x in batch.items()}
    mixed = Mixture.Params(inputs=[params], batch_size=5)
    assert Mixture.signature(mixed) == form.signature(params.copy().set(batch_size=5))


def test_signature_of_synthetic_tokens_is_that_of_a_batch() -> None:
    params = SyntheticTokens.Params(batch_size=3, length=7, vocab_size=11, num_tokens=50)
    batch = params.instantiate().batch(0)
    assert SyntheticTokens.signature(params) == {k: (x.shape, x.dtype) for k, x in batch.items()}


class TestTextStream:
    def test_epochs_cut_at_other_places(self) -> None:
        text = "".join(chr(48 + i) for i in range(60))
        one = make(TextStream, [text], batch_size=1, length=10)
        starts = [
            {int(batch["ids"][0, 0]) % 10 for batch in passes(one, epoch * 5, 5)}
            for epoch in range(8)
        ]
        assert one.num_examples == 5
        assert all(len(offsets) <= 2 for offsets in starts)  # the first id may be the end, 0
        assert len({min(offsets) for offsets in starts}) > 2

    @given(st.integers(1, 60), st.integers(1, 12))
    @settings(max_examples=40)
    def test_windows_of_an_epoch_do_not_overlap_and_lie_inside(
        self, size: int, length: int
    ) -> None:
        text = "".join(chr(0x4E00 + i) for i in range(size))
        params = TextStream.Params(
            corpus=InMemory.Params(train=[text]),
            tokenizer=Characters.Params(),
            length=length,
            batch_size=1,
        )
        if size + 1 < length:
            with pytest.raises(InputError, match="not enough for one window"):
                params.instantiate()
            return
        one = params.instantiate()
        for epoch in range(3):
            seen = [
                int(label)
                for batch in passes(one, epoch * one.num_examples, one.num_examples)
                for label in batch["labels"][0]
            ]
            assert len(set(seen)) == len(seen)
            assert len(seen) > size + 1 - 2 * length

    @given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 8))
    def test_overlap_gives_context_and_counts_every_label_once(
        self, size: int, length: int, overlap: int
    ) -> None:
        overlap = min(overlap, length - 1)
        text = "".join(chr(0x4E00 + i) for i in range(size))
        one = TextStream.Params(
            corpus=InMemory.Params(train=[text]),
            tokenizer=Characters.Params(),
            length=length,
            batch_size=2,
            order="once",
            overlap=overlap,
        ).instantiate()
        seen: list[int] = []
        for number, batch in enumerate(passes(one, 0, one.num_batches)):
            for row in range(2):
                counted = np.flatnonzero(batch["weights"][row])
                seen += batch["labels"][row][counted].tolist()
                if len(counted) and (number, row) != (0, 0):
                    assert counted[0] == overlap
        assert seen == one.text.tokens.read()[1:].tolist()

    def test_too_little_text_says_what_to_do(self) -> None:
        with pytest.raises(InputError, match=r"4 tokens are not enough .* length below 4"):
            make(TextStream, ["ab"], length=5)

    def test_sequential_windows_follow_each_other(self) -> None:
        one = make(TextStream, ["abcdefghij"], length=5, batch_size=1, order="sequential")
        rows = [bytes(batch["labels"][0].astype(np.uint8)) for batch in passes(one, 0, 3)]
        assert rows == [b"abcde", b"fghij", b"abcde"]


class TestPackedText:
    @given(TEXTS, st.integers(1, 20))
    def test_a_segment_is_a_piece_of_one_text_with_positions_of_its_own(
        self, texts: list[str], length: int
    ) -> None:
        one = make(PackedText, texts, length=length, order="once")
        pieces: list[bytes] = []
        for batch in passes(one, 0, one.num_batches):
            for row in range(3):
                real = batch["weights"][row] > 0
                segments = batch["segment_ids"][row]
                if not real.any():
                    continue
                assert (segments[real] > 0).all() and (segments[~real] == 0).all()
                for segment in range(1, segments.max() + 1):
                    here = np.flatnonzero(segments == segment)
                    assert here.tolist() == list(range(here[0], here[-1] + 1))
                    assert batch["positions"][row][here].tolist() == list(range(len(here)))
                    ids = batch["ids"][row][here]
                    assert ids[1:].tolist() == batch["labels"][row][here][:-1].tolist()
                    pieces.append(bytes([ids[0], *batch["labels"][row][here]]))
        expected = []
        for text in texts:
            whole = bytes([0, *text.encode(), 0])
            expected += [whole[i : i + length + 1] for i in range(0, len(whole) - 1, length)]
        assert sorted(pieces) == sorted(expected)

    def test_rows_are_full_where_texts_are_short(self) -> None:
        texts = ["x" * (i % 7 + 1) for i in range(200)]
        one = make(PackedText, texts, length=32, order="once")
        weights = np.concatenate([b["weights"] for b in passes(one, 0, one.num_batches)])
        assert weights.mean() > 0.9


class TestBucketedText:
    def test_a_batch_is_as_long_as_its_bucket(self) -> None:
        texts = ["x" * (i % 16 + 1) for i in range(60)]
        one = make(BucketedText, texts, length=16, bounds=[4, 8], fill="tokens", batch_size=2)
        shapes = {batch["ids"].shape for batch in passes(one, 0, 60)}
        assert shapes == {(8, 4), (4, 8), (2, 16)}

    @pytest.mark.parametrize("order", ["shuffled", "once"])
    def test_padding_is_known_and_has_no_weight(self, order: str) -> None:
        texts = ["x" * (i % 16 + 1) for i in range(60)]
        one = make(BucketedText, texts, length=16, bounds=[4, 8], batch_size=7, order=order)
        padded = np.stack([one.is_padding(step) for step in range(9)])
        weights = np.stack([one.batch(step)["weights"].sum(1) for step in range(9)])
        np.testing.assert_array_equal(padded, weights == 0)
        assert padded.any()

    def test_it_cannot_be_mixed(self) -> None:
        part = BucketedText.Params(
            corpus=InMemory.Params(train=["abc"]), length=4, batch_size=2, bounds=[2]
        )
        with pytest.raises(TypeError, match="cannot be part of a mixture"):
            Mixture.Params(batch_size=2, inputs=[part]).instantiate()


class TestSources:
    def test_files_read_instead_of_the_corpus(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("abcdefghij" * 3)
        one = TextStream.Params(
            corpus=InMemory.Params(train=["other"]),
            files=str(tmp_path / "*.txt"),
            length=4,
            batch_size=2,
        )
        assert list(one.instantiate().texts()) == [("abcdefghij" * 3)[:27]]
        held = HeldOut.Params().instantiate(train=one)
        assert list(held.inner.texts()) == ["hij"]

    def test_files_keep_the_settings_of_a_corpus_of_text_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one\ntwo\n")
        one = TextStream.Params(
            corpus=TextFiles.Params(unit="line", dev_fraction=0.0),
            files=str(tmp_path / "a.txt"),
            length=4,
            batch_size=2,
        )
        assert list(one.instantiate().texts()) == ["one", "two"]

    def test_no_text_at_all_says_how_to_give_some(self) -> None:
        with pytest.raises(InputError, match=r"--set (corpus\.)?files='"):
            TextStream.Params(length=4, batch_size=2).instantiate()

    def test_records_of_bytes_and_arrays_of_tokens_are_read(self, tmp_path: Path) -> None:
        import tensorflow as tf

        with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
            for record in (b"one", b"t\xffwo", b"three"):
                writer.write(record)
        corpus = TfRecords.Params(files=str(tmp_path / "a"), dev_fraction=0.0)
        one = TextStream.Params(corpus=corpus, length=4, batch_size=1).instantiate()
        assert list(one.texts()) == ["one", "three"]
        assert one.skipped().count == 1
        assert one.skipped().named[0].reason == "not UTF-8: byte 0xff"

    def test_arrays_of_ids_are_read_as_they_are(self) -> None:
        class Arrays(InMemory):
            found = ([65, 66], [67])

            def load(self, split: str) -> list[np.ndarray]:
                return [np.array(ids) for ids in self.found]

        class Far(Arrays):
            found = ([256], [67])

        arrays = TextStream.Params(corpus=Arrays.Params(), length=4, batch_size=1)
        assert arrays.instantiate().text.tokens.read().tolist() == [0, 65, 66, 0, 67, 0]
        with pytest.raises(InputError, match="do not fit a vocabulary of 256"):
            TextStream.Params(corpus=Far.Params(), length=4, batch_size=1).instantiate()

    def test_malformed_texts_in_memory_are_skipped_up_to_the_limit(self) -> None:
        corpus = InMemory.Params(train=["good", "", "a\0b", "\ud800"], max_skipped=3)
        one = TextStream.Params(corpus=corpus, length=4, batch_size=1).instantiate()
        assert one.text.num_texts == 1
        assert [skip.reason for skip in one.skipped().named] == [
            "empty",
            "binary: a NUL character",
            "a lone surrogate, which UTF-8 cannot encode",
        ]
        with pytest.raises(InputError, match="max_skipped=2"):
            TextStream.Params(
                corpus=corpus.copy().set(max_skipped=2), length=4, batch_size=1
            ).instantiate()

    def test_the_description_counts_texts_bytes_and_tokens(self) -> None:
        one = make(TextStream, ["abé", "xyz"])
        assert one.describe() == ("texts in memory, train: 2 texts of 7 bytes, 10 tokens")


class TestVocabulary:
    CORPUS = InMemory.Params(train=["abcabcabc"], dev=["abz"])

    def params(self, **kwargs: Any) -> Any:
        return TextStream.Params(
            corpus=self.CORPUS, tokenizer=Characters.Params(), length=4, batch_size=2, **kwargs
        )

    def test_it_is_learned_from_training_text_also_by_an_evaluation(self, tmp_path: Path) -> None:
        held = HeldOut.Params().instantiate(assets_dir=str(tmp_path), train=self.params())
        assert held.vocab_size == 5
        assert held.inner.text.tokens.read().tolist() == [0, 2, 3, 1, 0]
        train = self.params().instantiate(assets_dir=str(tmp_path))
        assert train.tokenizer.token_bytes == held.tokenizer.token_bytes

    def test_other_training_text_in_the_same_folder_is_refused(self, tmp_path: Path) -> None:
        self.params().instantiate(assets_dir=str(tmp_path))
        other = self.params().set({"corpus.train": ["xyzxyz"]})
        with pytest.raises(
            InputError, match=r"characters\.txt was made from different training text"
        ):
            other.instantiate(assets_dir=str(tmp_path))

    def test_other_files_can_be_evaluated_with_it(self, tmp_path: Path) -> None:
        train = self.params()
        train.instantiate(assets_dir=str(tmp_path / "assets"))
        (tmp_path / "b.txt").write_text("cabz")
        own = {"files": str(tmp_path / "b.txt"), "corpus": TextFiles.Params(dev_fraction=0.99)}
        held = HeldOut.Params(changes=own).instantiate(
            assets_dir=str(tmp_path / "assets"), train=train
        )
        assert held.inner.text.tokens.read().tolist() == [0, 4, 2, 3, 1, 0]

    def test_tokens_that_take_long_to_make_are_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tekso.framework.input import token_rows

        monkeypatch.setattr(token_rows, "IN_MEMORY_SLOW", 0)
        texts = [f"def f{i}(x):\n    return x + {i}\n" for i in range(200)]
        params = TextStream.Params(
            corpus=InMemory.Params(train=[*texts, "a\0b"]),
            tokenizer=SentencePiece.Params(vocab_size=320),
            length=4,
            batch_size=2,
        )
        first = params.instantiate(assets_dir=str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(token_rows, "_encode", None)  # it must not be called again
            again = params.instantiate(assets_dir=str(tmp_path))
        tokens = first.text.tokens.read()
        np.testing.assert_array_equal(again.text.tokens.read(), tokens)
        np.testing.assert_array_equal(again.batch(5)["ids"], first.batch(5)["ids"])
        assert again.skipped() == first.skipped() and again.skipped().count == 1

        kept = next((tmp_path / "tokens").glob("*/*.bin"))
        kept.write_bytes(kept.read_bytes()[:-2])
        repaired = params.instantiate(assets_dir=str(tmp_path))
        np.testing.assert_array_equal(repaired.text.tokens.read(), tokens)


class TestSyntheticTokens:
    def test_tokens_are_random_and_those_of_the_seed(self) -> None:
        params = SyntheticTokens.Params(batch_size=3, length=5, vocab_size=11, num_tokens=500)
        one, again, other = (params.instantiate(seed=seed) for seed in (1, 1, 2))
        batch = one.batch(4)
        assert set(batch) == {"ids", "labels", "weights"}
        assert batch["ids"].shape == (3, 5) and batch["ids"].dtype == np.int32
        np.testing.assert_array_equal(batch["labels"][:, :-1], batch["ids"][:, 1:])
        np.testing.assert_array_equal(batch["ids"], again.batch(4)["ids"])
        assert (batch["ids"] != other.batch(4)["ids"]).any()
        seen = np.concatenate([one.batch(step)["ids"] for step in range(30)])
        assert set(seen.reshape(-1).tolist()) == set(range(11))
        assert one.vocab_size == 11 and one.tokenizer is None


def test_a_mixture_of_streams_has_the_bytes_of_its_parts() -> None:
    parts = [
        TextStream.Params(corpus=InMemory.Params(train=[letter * 50]), length=4, batch_size=1)
        for letter in "ab"
    ]
    one = Mixture.Params(batch_size=5, inputs=parts, weights=[3.0, 1.0]).instantiate(seed=1)
    batches = [one.batch(step) for step in range(20)]
    text = np.concatenate([batch["labels"] for batch in batches])
    share = (text == ord("a")).sum() / (text > 0).sum()
    assert abs(share - 0.75) < 0.05
    np.testing.assert_array_equal(
        np.concatenate([batch["num_bytes"] for batch in batches]), (text > 0).sum(axis=1)
    )
    assert one.vocab_size == 256


def test_a_length_or_overlap_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="length is 0"):
        make(TextStream, ["abcdefgh"], length=0)
    with pytest.raises(ValueError, match=r"overlap is 5, but must be in \[0, length=5\)"):
        make(TextStream, ["abcdefgh"], overlap=5)
