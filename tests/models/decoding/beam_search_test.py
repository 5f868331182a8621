"""Beam search against exhaustive search, and against a beam search in plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sample

from tekso.framework.context import StepContext
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.search import Prefix

END = 1
SOURCES = [[2, 3, 1], [3, 2, 3, 2, 1], [2, 1]]


class Hypothesis(NamedTuple):
    score: float
    log_prob: float
    ids: list[int]
    is_finished: bool


def score_of(
    log_prob: float, attention: list[list[float]], length: int, alpha: float, beta: float
) -> float:
    """GNMT, equation 14."""
    score = log_prob / ((5 + length) ** alpha / 6**alpha)
    if beta:
        totals = [sum(column) for column in zip(*attention, strict=True)]
        score += beta * sum(math.log(min(total, 1.0)) for total in totals)
    return score


def exhaustive(plain: Any, limit: int, alpha: float, beta: float) -> list[Hypothesis]:
    """Scores every sequence: those that end, best first, then those that do not."""
    found = []
    for length in range(1, limit + 1):
        for ids in itertools.product(range(plain.theta["logits"].shape[-1]), repeat=length):
            if END in ids[:-1] or (ids[-1] != END and length < limit):
                continue
            memory, before, log_prob, attention = 0, END, 0.0, []
            for position, token in enumerate(ids):
                log_probs, attention_weights, memory = plain.step(memory, before, position)
                log_prob, before = log_prob + log_probs[token], token
                attention.append(attention_weights)
            score = score_of(log_prob, attention, length, alpha, beta)
            found.append(Hypothesis(score, log_prob, list(ids), ids[-1] == END))
    return sorted(found, key=lambda h: (not h.is_finished, -h.score))


def reference(
    plain: Any,
    *,
    beam: int,
    best: int,
    limit: int,
    alpha: float,
    beta: float = 0.0,
    prefix: tuple[int, ...] = (),
    forbidden: tuple[int, ...] = (),
    min_length: int = 1,
) -> list[Hypothesis]:
    """Beam search with lists, which never stops early."""
    live: list[Any] = [(0.0, [], 0, [])]  # log-probability, tokens, memory, attention
    ended: list[Hypothesis] = []
    for t in range(limit):
        candidates = []
        for slot, (log_prob, ids, memory, attention) in enumerate(live):
            log_probs, attention_weights, after = plain.step(memory, ids[-1] if ids else END, t)
            for token, more in enumerate(log_probs):
                if t < len(prefix):
                    if token != prefix[t]:
                        continue
                elif token in forbidden or (token == END and t + 1 < min_length):
                    continue
                entry = (log_prob + more, [*ids, token], after, [*attention, attention_weights])
                candidates.append((-entry[0], slot, token, entry))
        candidates.sort(key=lambda c: c[:3])
        live = []
        for rank, (_, _, token, entry) in enumerate(candidates):
            if token == END and t >= len(prefix):
                if rank < beam:
                    score = score_of(entry[0], entry[3], t + 1, alpha, beta)
                    ended.append(Hypothesis(score, entry[0], entry[1], True))
            elif len(live) < beam:
                live.append(entry)
    open_ = [
        Hypothesis(score_of(log_prob, attention, limit, alpha, beta), log_prob, ids, False)
        for log_prob, ids, _, attention in live
    ]
    by_score = [sorted(found, key=lambda h: -h.score) for found in (ended, open_)]
    return [*by_score[0], *by_score[1]][:best]


def run(toy: Any, theta: Any, batch: Any, *, jit: bool | None = None, **how: Any) -> Any:
    """Returns the outcome as arrays; jit None: eagerly."""
    given_ = {name: how.pop(name) for name in ("prefix", "forbidden_ids") if name in how}
    search = BeamSearch.Params(**how).instantiate()

    def function(theta: Any, batch: Any) -> Any:
        return search.search(toy, theta, batch, StepContext(mode="decode"), END, **given_)

    if jit is not None:
        function = tf.function(function, autograph=False, jit_compile=jit)
    return {name: value.numpy() for name, value in function(theta, batch).items()}


def hypotheses(outcome: Any, row: int) -> list[Hypothesis]:
    """What was found for a source."""
    return [
        Hypothesis(
            float(outcome["scores"][row, i]),
            float(outcome["log_probs"][row, i]),
            outcome["ids"][row, i, :length].tolist(),
            bool(outcome["is_finished"][row, i]),
        )
        for i, length in enumerate(outcome["lengths"][row])
        if length
    ]


def assert_same(found: list[Hypothesis], want: list[Hypothesis]) -> None:
    assert [h.ids for h in found] == [h.ids for h in want]
    assert [h.is_finished for h in found] == [h.is_finished for h in want]
    # float32 against float64 over at most 8 tokens.
    np.testing.assert_allclose([h[:2] for h in found], [h[:2] for h in want], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.6, 1.0])
def test_a_beam_as_wide_as_the_space_finds_the_best_of_all(
    alpha: float, beta: float, toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    theta = make_theta(3, vocab=3)
    how = {"length_normalization": alpha, "coverage_penalty": beta, "num_hypotheses": 6}
    outcome = run(toy, theta, make_batch(SOURCES), beam_size=24, max_length=4, **how)
    for row, source in enumerate(SOURCES):
        want = exhaustive(make_plain(theta, source), 4, alpha, beta)[:6]
        assert_same(hypotheses(outcome, row), want)


def test_what_does_not_end_fills_up_what_is_missing(
    toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    theta = make_theta(3, vocab=3)
    how = {"num_hypotheses": 24, "coverage_penalty": 0.3, "max_length": 4}
    outcome = run(toy, theta, make_batch(SOURCES), beam_size=24, **how)
    for row, source in enumerate(SOURCES):
        want = exhaustive(make_plain(theta, source), 4, 0.6, 0.3)[:24]
        assert 0 < sum(h.is_finished for h in want) < 24
        assert_same(hypotheses(outcome, row), want)


@pytest.mark.parametrize("stop", ["exact", "enough"])
def test_a_beam_of_one_is_greedy(
    stop: str, toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    def greedy(plain: Any, limit: int) -> list[int]:
        ids: list[int] = []
        memory = 0
        while len(ids) < limit and (not ids or ids[-1] != END):
            log_probs, _, memory = plain.step(memory, ids[-1] if ids else END, len(ids))
            ids.append(int(np.argmax(log_probs)))
        return ids

    how = {"beam_size": 1, "length_normalization": 0.0 if stop == "exact" else 0.9, "stop": stop}
    lengths = set()
    for seed in range(6):
        theta = make_theta(seed, vocab=5)
        outcome = run(toy, theta, make_batch(SOURCES), max_length=7, **how)
        for row, source in enumerate(SOURCES):
            found = hypotheses(outcome, row)
            from_plain = greedy(make_plain(theta, source), 7)
            assert found[0].ids == from_plain
            lengths.add(len(from_plain))
    assert len(lengths) > 2


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "vocab": st.integers(2, 6),
        "beam": st.integers(1, 5),
        "alpha": st.sampled_from([-0.7, 0.0, 0.6, 1.0, 2.0]),
        "beta": st.sampled_from([0.0, 0.2, 1.0]),
        "limit": st.integers(1, 8),
    }
)


@given(case=CASES, data=st.data())
@settings(max_examples=40, derandomize=True)
def test_equals_a_beam_search_in_plain_python(
    case: dict[str, Any], data: Any, toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    beam, limit = case["beam"], case["limit"]
    best = data.draw(st.integers(1, beam))
    theta = make_theta(case["seed"], vocab=case["vocab"])
    outcome = run(
        toy,
        theta,
        make_batch(SOURCES),
        beam_size=beam,
        num_hypotheses=best,
        max_length=limit,
        length_normalization=case["alpha"],
        coverage_penalty=case["beta"],
    )
    how = {"beam": beam, "best": best, "limit": limit}
    for row, source in enumerate(SOURCES):
        plain = make_plain(theta, source)
        want = reference(plain, alpha=case["alpha"], beta=case["beta"], **how)
        assert_same(hypotheses(outcome, row), want)


@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=15, derandomize=True)
def test_prefixes_forbidden_tokens_and_least_lengths_are_kept(
    seed: int, data: Any, toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    vocab, limit, beam = 5, 7, data.draw(st.integers(1, 4))
    tokens = st.integers(0, vocab - 1)
    prefixes = [tuple(data.draw(st.lists(tokens, max_size=3))) for _ in SOURCES]
    ids = np.zeros([len(SOURCES), 3], np.int32)
    for row, prefix in zip(ids, prefixes, strict=True):
        row[: len(prefix)] = prefix
    forbidden = tuple(data.draw(st.sets(st.sampled_from([0, 2, 3]), max_size=2)))
    min_length = data.draw(st.integers(1, 5))
    theta = make_theta(seed, vocab=vocab)
    outcome = run(
        toy,
        theta,
        make_batch(SOURCES),
        beam_size=beam,
        num_hypotheses=beam,
        max_length=limit,
        min_length=min_length,
        prefix=Prefix(tf.constant(ids), tf.constant([len(p) for p in prefixes])),
        forbidden_ids=forbidden,
    )
    how: dict[str, Any] = {"beam": beam, "best": beam, "limit": limit, "alpha": 0.6}
    how |= {"forbidden": forbidden, "min_length": min_length}
    for row, source in enumerate(SOURCES):
        want = reference(make_plain(theta, source), prefix=prefixes[row], **how)
        assert_same(hypotheses(outcome, row), want)


@given(case=CASES)
@settings(max_examples=8, derandomize=True)
def test_stopping_early_changes_nothing(
    case: dict[str, Any], toy: Any, make_theta: Any, make_batch: Any
) -> None:
    theta = make_theta(case["seed"], vocab=case["vocab"])
    how = {
        "beam_size": case["beam"],
        "num_hypotheses": max(1, case["beam"] - 1),
        "length_normalization": case["alpha"],
        "coverage_penalty": case["beta"],
        "max_length": case["limit"] + 4,
    }
    early = run(toy, theta, make_batch(SOURCES), **how)
    late = run(toy, theta, make_batch(SOURCES), stop="never", **how)
    for name, value in early.items():
        np.testing.assert_array_equal(value, late[name], err_msg=name)


def test_a_source_stops_early(toy: Any, make_theta: Any, make_batch: Any) -> None:
    """The loop ends long before the most tokens where the end is likely."""
    theta = make_theta(0)
    theta["logits"] += tf.one_hot(END, 4) * 5.0
    positions = []

    class Counting(type(toy)):
        def decode_step(self, *args: Any) -> Any:
            positions.append(int(args[3]))
            return super().decode_step(*args)

    search = BeamSearch.Params(max_length=50, max_length_ratio=None).instantiate()
    model = Counting.Params().instantiate()
    search.search(model, theta, make_batch(SOURCES), StepContext(), END)
    assert positions[-1] < 8


@pytest.mark.parametrize("stop", ["exact", "enough"])
def test_rows_depend_on_no_other_and_on_no_padding(
    stop: str, toy: Any, make_theta: Any, make_batch: Any
) -> None:
    theta = make_theta(5, length=9)
    how = {"beam_size": 3, "num_hypotheses": 2, "coverage_penalty": 0.2, "return_attention": True}
    how |= {"max_length_ratio": 1.0, "max_length_extra": 2, "stop": stop}
    sources = [SOURCES[0], [], SOURCES[1], SOURCES[2]]
    together = run(toy, theta, make_batch(sources, 9), **how)
    assert hypotheses(together, 1) == []
    assert np.isneginf(together["scores"][1]).all()
    for row, source in enumerate(sources):
        if not source:
            continue
        alone = run(toy, theta, make_batch([source]), **how)
        assert_same(hypotheses(together, row), hypotheses(alone, 0))
        steps, length = alone["ids"].shape[2], len(source)
        assert steps == length + 2
        attention = together["attention"][row]
        np.testing.assert_allclose(attention[:, :steps, :length], alone["attention"][0], rtol=1e-6)
        assert not attention[:, :, length:].any() and not attention[:, steps:].any()


def test_attention_is_that_of_every_step(
    toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    theta = make_theta(8)
    how = {"beam_size": 4, "num_hypotheses": 4, "max_length": 3, "return_attention": True}
    outcome = run(toy, theta, make_batch(SOURCES), **how)
    assert not outcome["is_finished"].all() and outcome["is_finished"].any()
    for row, source in enumerate(SOURCES):
        plain = make_plain(theta, source)
        for i, hypothesis in enumerate(hypotheses(outcome, row)):
            memory, before = 0, END
            for t, token in enumerate(hypothesis.ids):
                _, attention_weights, memory = plain.step(memory, before, t)
                found = outcome["attention"][row, i, t, : len(source)]
                np.testing.assert_allclose(found, attention_weights, rtol=1e-5)
                before = token
            assert not outcome["attention"][row, i, len(hypothesis.ids) :].any()


@pytest.mark.parametrize("jit", sample([False, True], quick=[False]))
def test_compiled_equals_eager(jit: bool, toy: Any, make_theta: Any, make_batch: Any) -> None:
    theta, batch = make_theta(4, vocab=7), make_batch([*SOURCES, []])
    how: dict[str, Any] = {"beam_size": 3, "num_hypotheses": 3, "coverage_penalty": 0.2}
    how |= {"return_attention": True, "min_length": 3, "forbidden_ids": [0]}
    how["prefix"] = Prefix(tf.constant([[2, 0], [0, 0], [3, 3], [0, 0]]), tf.constant([1, 0, 2, 0]))
    eager = run(toy, theta, batch, **how)
    compiled = run(toy, theta, batch, jit=jit, **how)
    for name, value in eager.items():
        if value.dtype == np.float32:
            np.testing.assert_allclose(compiled[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(compiled[name], value, err_msg=name)


def test_of_equal_hypotheses_the_lower_token_comes_first(
    toy: Any, make_theta: Any, make_batch: Any
) -> None:
    theta = make_theta(0, vocab=5)
    theta["logits"] = tf.zeros_like(theta["logits"])
    how = {"length_normalization": 0.0, "min_length": 2, "max_length": 2}
    outcome = run(toy, theta, make_batch([[2, 1]]), beam_size=3, num_hypotheses=3, **how)
    # Tokens 0, 2, 3 live on; of their 15 continuations the best three are the first of slot 0.
    assert [h.ids for h in hypotheses(outcome, 0)] == [[0, 1], [0, 0], [0, 2]]


def test_limits_are_of_each_source(toy: Any, make_theta: Any, make_batch: Any) -> None:
    theta = make_theta(0)
    theta["logits"] -= tf.one_hot(END, 4) * 50.0  # nothing ends
    how = {"max_length_ratio": 1.5, "max_length_extra": 1, "max_length": 8}
    outcome = run(toy, theta, make_batch([*SOURCES, []], 6), beam_size=2, **how)
    assert outcome["ids"].shape == (4, 1, 8)
    assert outcome["lengths"].tolist() == [[5], [8], [4], [0]]
    assert not outcome["is_finished"].any()


def test_a_vocabulary_of_the_end_alone(toy: Any, make_batch: Any) -> None:
    theta = {"logits": tf.zeros([1, 1, 2, 2]), "attention": tf.zeros([1, 6])}
    how = {"beam_size": 4, "num_hypotheses": 4, "max_length": 3}
    outcome = run(toy, theta, make_batch([[0, 1]]), forbidden_ids=[0], **how)
    assert outcome["lengths"].tolist() == [[1, 0, 0, 0]]
    np.testing.assert_allclose(outcome["log_probs"][0, 0], math.log(0.5), rtol=1e-6)


def test_what_is_missing_goes_by_the_log_probability_however_it_is_normalised(
    toy: Any, make_batch: Any
) -> None:
    theta = {"logits": tf.constant([[[[0.0, 1.0]] * 2]]), "attention": tf.zeros([1, 6])}
    how = {"beam_size": 1, "min_length": 60, "max_length": 64, "max_length_ratio": None}
    outcome = run(toy, theta, make_batch([[0, 1]]), length_normalization=-35.0, **how)
    assert -math.inf < outcome["scores"][0, 0] < -1e37  # a sum of 60 tokens over 6e-37
    assert outcome["lengths"].tolist() == [[60]] and outcome["is_finished"].all()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0"),
        ({"num_hypotheses": 5}, "num_hypotheses is 5, must be 1 … 4"),
        ({"coverage_penalty": -0.1}, r"coverage_penalty is -0\.1"),
        ({"length_normalization": float("nan")}, "length_normalization is nan"),
        ({"max_length_ratio": None}, "both None"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_length_ratio": -1.0}, r"max_length_ratio is -1\.0"),
        ({"min_length": 0}, "min_length is 0"),
    ],
)
def test_params_out_of_range_are_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearch.Params(**how).instantiate()


def test_what_cannot_be_searched_is_refused(
    toy: Any, make_theta: Any, make_batch: Callable[..., Any]
) -> None:
    theta, batch = make_theta(0), make_batch(SOURCES)
    with pytest.raises(ValueError, match="forbidden_ids has 9"):
        run(toy, theta, batch, forbidden_ids=[9])
    with pytest.raises(ValueError, match="forbidden_ids has 1"):
        run(toy, theta, batch, forbidden_ids=[END])
    prefix = Prefix(tf.zeros([3, 4], tf.int32), tf.constant([1, 2, 4]))
    with pytest.raises(ValueError, match="no room within max_length 4"):
        run(toy, theta, batch, prefix=prefix, max_length=4)

    class BlindDecoder(type(toy)):
        has_attention = False

    toy = BlindDecoder.Params().instantiate()
    with pytest.raises(ValueError, match="BlindDecoder does not provide"):
        run(toy, theta, batch, coverage_penalty=0.1)
