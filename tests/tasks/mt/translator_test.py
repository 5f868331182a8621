"""Translating texts by a model that copies: order, batches, cuts, languages, scores, decoding."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.decoder import DecoderStep
from tekso.models.decoding.sampler import Sampler
from tekso.tasks.mt import attention_plot, target_search
from tekso.tasks.mt.input import PaddedPairs
from tekso.tasks.mt.pairs import InMemoryPairs
from tekso.tasks.mt.task import Translation
from tekso.tasks.mt.translator import Translator

CERTAIN = 12.0  # a difference of logits


class Copying(Layer):
    """Says the source again, token by token; a language token is left out."""

    class Params(Layer.Params):
        liked: int | None = param("A token liked better than the source's.", default=None)
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
        logits = CERTAIN * tf.one_hot(token, self.params.target_vocab_size)
        if self.params.liked is not None:
            liked = tf.one_hot(self.params.liked, self.params.target_vocab_size)
            logits += (CERTAIN + 1) * liked
        return DecoderStep(logits, None, state)

    def attention(self, theta: Theta, batch: Any, ctx: Any) -> tf.Tensor:
        shares = tf.eye(batch["target_ids"].shape[1], batch["source_ids"].shape[1])
        return tf.expand_dims(shares, 0)


class PlainProgram:
    """Calls functions eagerly, and counts the shapes that it is given."""

    serialize_calls = False

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


@pytest.mark.parametrize("beam_size", [1, 3])
def test_translations_come_in_the_order_of_the_texts(beam_size: int) -> None:
    input = pairs_input(train=PLAIN)
    task = task_of(input, **{"translator.search.beam_size": beam_size})
    program = PlainProgram()
    found = task.translator.translate(program, input, TEXTS)
    assert found.best == ["b", "a longer text than it", "", "éü 日本", "", "x" * 39, "c"]
    assert found.num_cut == 0 and len(program.functions) == 1
    assert {columns for _, columns in program.shapes} == {16, 32, 40}  # few, and not beyond 40


@pytest.mark.parametrize(
    ("num_texts", "rows"), [(1, [1]), (2, [8]), (8, [8]), (9, [16]), (20, [32]), (70, [32] * 3)]
)
def test_few_texts_are_few_rows_and_all_batches_of_a_length_are_alike(
    num_texts: int, rows: list[int]
) -> None:
    input, program = pairs_input(train=PLAIN), PlainProgram()
    translator = task_of(input, **{"translator.batch_tokens": 32 * 16}).translator
    texts = [f"a {n}" for n in range(num_texts)]
    assert translator.translate(program, input, texts).best == texts
    assert program.shapes == [(count, 16) for count in rows]


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


@pytest.mark.parametrize("search", [BeamSearch.Params(), Sampler.Params(temperature=0.0)])
def test_tokens_that_the_tokenizer_has_not_are_never_said(search: Any) -> None:
    languages = pairs_input(languages=("de", "fr"), train=[("a", "a", "de"), ("b", "b", "fr")])
    liked = languages.target_tokenizer.vocab_size + 1  # the token of a language
    settings = {"translator.search": search, "model.liked": liked}
    translator = task_of(languages, **settings).translator
    found = translator.translate(PlainProgram(), languages, ["ab"], languages=["fr"])
    assert found.best == ["ab"]

    plain = pairs_input(train=PLAIN)
    size = plain.target_tokenizer.vocab_size
    sizes = {"model.source_vocab_size": size + 5, "model.target_vocab_size": size + 5}
    translator = task_of(plain, **settings, **sizes).translator
    assert translator.translate(PlainProgram(), plain, ["ab"]).best == ["ab"]


def test_nothing_is_forbidden_where_the_tokenizer_has_all_tokens() -> None:
    input = pairs_input(train=PLAIN)
    assert not len(task_of(input).translator.forbidden_ids(input.target_tokenizer))


@pytest.mark.slow
def test_a_compiled_search_translates_the_same() -> None:
    input, program = pairs_input(train=PLAIN), PlainProgram()
    settings = {"translator.xla": "search", "translator.batch_tokens": 32 * 16}
    translator = task_of(input, **settings).translator
    texts = [f"é {n}" for n in range(9)]
    for few in (["abc"], texts[:2], texts):
        assert translator.translate(program, input, few).best == few
    assert program.shapes == [(1, 16), (8, 16), (32, 16)]  # nothing between 8 and all


def test_it_stops_on_request() -> None:
    input, program = pairs_input(train=PLAIN), PlainProgram()
    translator = task_of(input, **{"translator.batch_tokens": 16}).translator
    asked = iter([False, True])
    found = translator.translate(program, input, ["a"] * 20, stopped=lambda: next(asked))
    # The batch of the shortest, 4 of 20, comes first.
    assert len(program.shapes) == 1 and [bool(own) for own in found.hypotheses].count(True) == 4


class Rendezvous(PlainProgram):
    """After the first call, two have to come before either ends; one may fail."""

    def __init__(self, failing: int | None = None) -> None:
        super().__init__()
        self._failing = failing
        self._numbers = itertools.count()
        self._is_first_over = False
        self._barrier = threading.Barrier(2)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        number = next(self._numbers)
        if number:
            assert self._is_first_over
            self._barrier.wait(timeout=60)
        if number == self._failing:
            raise ValueError("it fails")
        result = super().call(function, *inputs)
        self._is_first_over = True
        return result


def test_batches_are_searched_side_by_side_and_the_first_alone() -> None:
    input = pairs_input(train=PLAIN)
    settings = {"translator.batch_tokens": 16, "translator.num_searches": 2}
    translator = task_of(input, **settings).translator
    texts = [f"{'é' * (n % 4)} {n}" for n in range(24)]  # 3 batches of 8
    assert translator.translate(Rendezvous(), input, texts).best == texts
    with pytest.raises(ValueError, match="it fails"):
        translator.translate(Rendezvous(failing=2), input, texts)


@pytest.mark.parametrize(
    ("devices", "cores", "num"), [("CPU", 3, 3), ("CPU", 64, 4), ("CPU GPU", 3, 1)]
)
def test_as_many_are_searched_at_a_time_as_a_cpu_has_cores(
    monkeypatch: pytest.MonkeyPatch, devices: str, cores: int, num: int
) -> None:
    there = [tf.config.LogicalDevice(name, name) for name in devices.split()]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: there)
    monkeypatch.setattr(target_search, "num_cores", lambda: cores)
    translator = task_of(pairs_input(train=PLAIN)).translator
    assert translator.most_searches(PlainProgram()) == num


def test_of_a_program_whose_calls_are_to_be_alike_batches_have_one_shape_one_at_a_time() -> None:
    program, input = PlainProgram(), pairs_input(train=PLAIN)
    program.serialize_calls = True
    settings = {"translator.batch_tokens": 320, "translator.num_searches": 3}
    translator = task_of(input, **settings).translator
    assert translator.most_searches(program) == 1
    texts = [*TEXTS, "d" * 20, *"efghij"]
    assert translator.translate(program, input, texts).best == [text.strip() for text in texts]
    assert translator.translate(program, input, ["b"]).best == ["b"]
    assert program.shapes == [(8, 40)] * 3


def test_scores_are_those_of_the_search() -> None:
    input = pairs_input(train=PLAIN)
    ((best, *_),) = task_of(input).translator.translate(PlainProgram(), input, ["abc"]).hypotheses
    certain = 4 * -np.log1p((input.vocab_size - 1) * np.exp(-CERTAIN))
    assert best.log_prob == pytest.approx(certain, rel=1e-3)
    assert best.score == pytest.approx(certain / ((5 + 4) / 6) ** 0.6, rel=1e-3)
    assert best.ids.tolist() == list(b"abc")


def test_scores_that_are_no_numbers_are_reported() -> None:
    input, program = pairs_input(train=PLAIN), PlainProgram()
    translator = task_of(input).translator
    call = program.call

    def spoilt(function: Callable[..., Any], *inputs: Any) -> Any:
        return call(function, *inputs) | {"scores": tf.fill([1, 1], float("nan"))}

    program.call = spoilt  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="some weights are not finite"):
        translator.translate(program, input, ["ab"])


@pytest.mark.parametrize("name", ["batch_tokens", "num_searches", "max_source_length"])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, must be at least 1"):
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


def test_a_model_without_attention_is_scored_without_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Copying, "attention")
    input = pairs_input(train=DEV)
    scored = task_of(input).score(PlainProgram(), input, is_last=True)
    assert scored is not None and set(scored.figures) == {"bleu", "chrf"} and not scored.images


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
    assert "2 of 2 pairs; of 1 sources only the beginning was translated" in scored.text


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
    sampler = Sampler.Params(num_hypotheses=3, max_length_ratio=1.0)
    task = task_of(input, decode=["ab"], **{"translator.search": sampler})
    (record,) = task.decode(PlainProgram(), input).records
    assert [h["text"] for h in record["hypotheses"]] == ["ab"] * 3  # all but certain


def test_a_sampler_is_not_exported() -> None:
    input = pairs_input(train=PLAIN)
    task = task_of(input, **{"translator.search": Sampler.Params()})
    with pytest.raises(
        ValueError, match=r"is Sampler, but export supports only beam search: --set"
    ):
        task.exports(input)


def test_texts_that_are_cut_are_reported() -> None:
    input = pairs_input(train=PLAIN, length=8)
    decoded = task_of(input, decode=["x" * 30]).decode(PlainProgram(), input)
    assert decoded is not None and "1 texts are longer" in decoded.text


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
