"""Translating texts by a model that copies: order, batches, cuts, languages, scores, decoding."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.decoding.decoder import DecoderStep
from tekso.models.decoding.sampler import Sampler
from tekso.tasks.mt import attention_plot
from tekso.tasks.mt.input import PaddedPairs
from tekso.tasks.mt.pairs import InMemoryPairs
from tekso.tasks.mt.task import Translation
from tekso.tasks.mt.translator import Translator

CERTAIN = 12.0  # a difference of logits


class Copying(Layer):
    """Says the source again, token by token; a language token is left out."""

    class Params(Layer.Params):
        source_vocab_size: int = param("Number of tokens.", default=REQUIRED)
        target_vocab_size: int = param("Number of tokens.", default=REQUIRED)

    def start_decoding(self, theta: Theta, batch: Any, max_length: int, ctx: Any) -> Any:
        ids = batch["source_ids"]
        skipped = tf.cast(ids[:, 0] >= 256, tf.int32)  # after the bytes come the languages
        return {"ids": ids * tf.minimum(batch["source_segment_ids"], 1), "skipped": skipped}

    def expand(self, state: Any, k: int) -> Any:
        return state

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        return state

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: Any
    ) -> DecoderStep:
        b, s = state["ids"].shape
        place = tf.minimum(position + state["skipped"], s - 1)
        token = tf.gather(state["ids"], place, batch_dims=1)
        token = tf.repeat(token, ids.shape[0] // b)
        return DecoderStep(CERTAIN * tf.one_hot(token, self.params.target_vocab_size), None, state)

    def attention(self, theta: Theta, batch: Any, ctx: Any) -> tf.Tensor:
        shares = tf.eye(batch["target_ids"].shape[1], batch["source_ids"].shape[1])
        return tf.expand_dims(shares, 0)


class PlainProgram:
    """Calls functions eagerly, and counts the shapes that it is given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.functions: set[Any] = set()

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        self.shapes.append(tuple(inputs[0].shape))
        self.functions.add(function)
        return function(Theta(model=Theta()), *inputs, StepContext(mode="decode"))


def pairs_input(*, languages: tuple[str, ...] = (), length: int = 40, **splits: Any) -> Any:
    corpus = InMemoryPairs.Params(languages=list(languages), **splits)
    return PaddedPairs.Params(
        corpus=corpus, source_length=length, target_length=length, batch_size=2
    ).instantiate()


def task_of(input: Any, **settings: Any) -> Translation:
    params = Translation.Params(model=Copying.Params())
    params.set({"translator.search.max_length_ratio": 1.0, **settings})
    return Translation.complete(params, input).instantiate()


TEXTS = ["b", "a longer text than it", "", "éü 日本", "   ", "x" * 39, "c"]
PLAIN = [("a", "a"), ("b b", "b b")]


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_translations_come_in_the_order_of_the_texts(rows: int | None, beam_size: int) -> None:
    input = pairs_input(train=PLAIN)
    task = task_of(input, **{"translator.search.beam_size": beam_size})
    program = PlainProgram()
    found = task.translator.translate(program, input, TEXTS, rows=rows)
    assert found.best == ["b", "a longer text than it", "", "éü 日本", "", "x" * 39, "c"]
    assert found.num_cut == 0 and len(program.functions) == 1
    assert {columns for _, columns in program.shapes} == {16, 32, 40}  # few, and not beyond 40
    if rows is not None:
        assert {count for count, _ in program.shapes} == {rows}


def test_texts_beyond_the_longest_source_are_cut_and_counted() -> None:
    input = pairs_input(train=PLAIN, length=8)
    found = task_of(input).translator.translate(PlainProgram(), input, ["x" * 100_000, "ab"])
    assert found.best == ["x" * 7, "ab"] and found.num_cut == 1


def test_a_language_goes_before_the_source() -> None:
    input = pairs_input(languages=("de", "fr"), train=[("a", "a", "de"), ("b", "b", "fr")])
    translator = task_of(input).translator
    found = translator.translate(PlainProgram(), input, ["ab", "c"], languages=["fr", "de"])
    assert found.best == ["ab", "c"]
    with pytest.raises(ValueError, match="no target language 'it'"):
        translator.translate(PlainProgram(), input, ["ab"], languages=["it"])


def test_a_compiled_search_translates_the_same() -> None:
    input = pairs_input(train=PLAIN)
    task = task_of(input, **{"translator.xla": "search"})
    assert task.translator.translate(PlainProgram(), input, ["abc", "éü"]).best == ["abc", "éü"]


def test_it_leaves_off_when_it_is_told_to() -> None:
    input, program = pairs_input(train=PLAIN), PlainProgram()
    translator = task_of(input).translator
    asked = iter([False, True])
    found = translator.translate(
        program, input, ["a", "b", "c"], rows=1, stopped=lambda: next(asked)
    )
    assert len(program.shapes) == 1 and [bool(own) for own in found.hypotheses].count(True) == 1


def test_scores_are_those_of_the_search() -> None:
    input = pairs_input(train=PLAIN)
    ((best, *_),) = task_of(input).translator.translate(PlainProgram(), input, ["abc"]).hypotheses
    certain = 4 * -np.log1p((input.vocab_size - 1) * np.exp(-CERTAIN))
    assert best.log_prob == pytest.approx(certain, rel=1e-3)
    assert best.score == pytest.approx(certain / ((5 + 4) / 6) ** 0.6, rel=1e-3)
    assert best.ids.tolist() == list(b"abc")


def test_scores_that_are_no_numbers_are_told() -> None:
    input, program = pairs_input(train=PLAIN), PlainProgram()
    translator = task_of(input).translator
    call = program.call

    def spoilt(function: Callable[..., Any], *inputs: Any) -> Any:
        return call(function, *inputs) | {"scores": tf.fill([8, 1], float("nan"))}

    program.call = spoilt  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="some weights are not finite"):
        translator.translate(program, input, ["ab"])


@pytest.mark.parametrize("name", ["batch_tokens", "max_source_length"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0: want at least 1"):
        task_of(pairs_input(train=PLAIN), **{f"translator.{name}": 0})


# --- scoring ---

DEV = [("a b c d e", "a b c d e"), ("f g h i j", "f g h i x"), ("k l m n o", "k l m n o")]


def test_held_out_pairs_are_scored_shown_and_drawn() -> None:
    input = pairs_input(train=DEV)
    scored = task_of(input).score(PlainProgram(), input, is_last=True)
    assert scored is not None and set(scored.figures) == {"bleu", "chrf"}
    assert 70 < scored.figures["bleu"] < 100  # a word of 15 differs
    assert "3 of 3 pairs" in scored.text and "version:" in scored.text
    assert "model: f g h i j" in scored.text and "reference: f g h i x" in scored.text
    assert set(scored.images) == {"attention_0", "attention_1"}
    assert [note.split(":")[0] for note in scored.notes] == ["bleu", "chrf"]
    assert all("version:" in note for note in scored.notes)


def test_every_language_is_scored_with_its_own_words() -> None:
    train = [("ab cd ef gh", "ab cd ef gh", "de"), ("abcdefgh", "abcdefgx", "zh")]
    input = pairs_input(languages=("de", "zh"), train=train)
    settings = {"scoring.scorer.tokenizers": {"zh": "char"}, "scoring.nearest": 2}
    scored = task_of(input, **settings).score(PlainProgram(), input, is_last=True)
    assert scored is not None and scored.figures["bleu/de"] == pytest.approx(100.0)
    assert 60 < scored.figures["bleu/zh"] < 90  # of 8 characters, the last is wrong
    assert scored.figures["nearest/bleu"] == pytest.approx(100.0)  # each in its own language


def test_the_picture_is_that_of_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def draw(attention: np.ndarray, **texts: Any) -> bytes:
        drawn.append((attention, texts))
        return b""

    monkeypatch.setattr(attention_plot, "draw", draw)
    input = pairs_input(languages=("de", "fr"), train=[("abc", "abc", "fr"), ("ab", "ab", "de")])
    task_of(input, **{"scoring.plots": 1}).score(PlainProgram(), input, is_last=True)
    ((attention, texts),) = drawn
    np.testing.assert_array_equal(attention, np.eye(4, 5, dtype=np.float32))
    assert texts["source"] == ["<fr>", "a", "b", "c", ""] and texts["target"] == ["a", "b", "c", ""]


def test_pairs_that_are_too_long_for_the_loss_are_scored_too() -> None:
    input = pairs_input(train=[("ab", "ab"), ("x" * 30, "x" * 30)], length=8)
    assert (input.num_pairs, input.num_corpus_pairs) == (1, 2)
    scored = task_of(input).score(PlainProgram(), input, is_last=True)
    assert scored is not None and scored.figures["bleu"] < 60
    assert "2 of 2 pairs; of 1 only the beginning was read" in scored.text


def test_fewer_pairs_are_scored_where_that_is_said() -> None:
    input = pairs_input(train=DEV)
    task = task_of(input, **{"scoring.pairs": 2, "scoring.plots": 0})
    scored = task.score(PlainProgram(), input, is_last=True)
    assert scored is not None and "2 of 3 pairs" in scored.text and not scored.images


def test_a_lookup_stands_beside_the_last_scores() -> None:
    input = pairs_input(train=DEV)
    task = task_of(input, **{"scoring.nearest": 3, "scoring.plots": 0})
    scored = task.score(PlainProgram(), input, is_last=True)
    assert scored is not None and scored.figures["nearest/bleu"] == pytest.approx(100.0)
    assert task.score(PlainProgram(), input, is_last=False).figures.keys() == {"bleu", "chrf"}


def test_nothing_is_scored_where_that_is_said() -> None:
    input = pairs_input(train=DEV)
    assert task_of(input, scoring=None).score(PlainProgram(), input, is_last=True) is None


# --- decoding ---


def test_given_texts_are_decoded_with_lists_of_the_best() -> None:
    input = pairs_input(train=PLAIN)
    task = task_of(input, decode=["ab", "c"], **{"translator.search.num_hypotheses": 2})
    decoded = task.decode(PlainProgram(), input)
    assert decoded is not None
    records: list[Mapping[str, Any]] = json.loads(json.dumps(decoded.records))
    assert [record["source"] for record in records] == ["ab", "c"]
    assert [record["hypotheses"][0]["text"] for record in records] == ["ab", "c"]
    assert all(len(record["hypotheses"]) == 2 for record in records)
    assert "source: ab" in decoded.text


def test_samples_are_drawn_where_the_search_is_a_sampler() -> None:
    input = pairs_input(train=PLAIN)
    sampler = Sampler.Params(num_samples=3, max_length_ratio=1.0)
    task = task_of(input, decode=["ab"], **{"translator.search": sampler})
    (record,) = task.decode(PlainProgram(), input).records
    assert [h["text"] for h in record["hypotheses"]] == ["ab"] * 3  # all but certain


def test_texts_that_are_cut_are_told() -> None:
    input = pairs_input(train=PLAIN, length=8)
    decoded = task_of(input, decode=["x" * 30]).decode(PlainProgram(), input)
    assert decoded is not None and "of 1 texts that are longer" in decoded.text


def test_training_pairs_are_decoded_where_no_texts_are_given() -> None:
    input = pairs_input(train=PLAIN)
    decoded = task_of(input).decode(PlainProgram(), input)
    assert decoded is not None
    assert [record["reference"] for record in decoded.records] == ["a", "b b"]


def test_it_proposes_a_source_that_is_held_out() -> None:
    input = pairs_input(train=PLAIN)
    assert task_of(input).setting_to_try({"dev": input}) == 'task.decode=["a"]'


def test_translator_params_stand_alone() -> None:
    assert Translator.Params().search.beam_size == 4
