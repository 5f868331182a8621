"""Drawn targets against the probabilities of all sequences, and greedy as the limit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.models.decoding.sampler import Sampler
from tekso.models.decoding.search import Prefix

END = 1
SOURCES = [[2, 3, 1], [3, 2, 3, 2, 1], [2, 1]]
# 99.9 % quantiles of chi-square by degrees of freedom (tables): a sound sampler fails once in 1000
# seeds, and the seed is fixed.
CHI_SQUARE = {8: 26.12, 14: 36.12}


def run(toy: Any, theta: Any, batch: Any, *, jit: bool | None = None, **how: Any) -> Any:
    """Returns the outcome as arrays; jit None: eagerly."""
    given = {name: how.pop(name) for name in ("prefix", "forbidden_ids") if name in how}
    ctx = StepContext(mode="decode", seed=how.pop("seed", 3), example_offset=how.pop("offset", 0))
    sampler = Sampler.Params(**how).instantiate()

    def function(theta: Any, batch: Any) -> Any:
        return sampler.search(toy, theta, batch, ctx, END, **given)

    if jit is not None:
        function = tf.function(function, autograph=False, jit_compile=jit)
    return {name: value.numpy() for name, value in function(theta, batch).items()}


def targets(outcome: Any, row: int) -> list[tuple[int, ...]]:
    pairs = zip(outcome["ids"][row], outcome["lengths"][row], strict=True)
    return [tuple(ids[:length].tolist()) for ids, length in pairs]


def probabilities(plain: Any, limit: int, temperature: float) -> dict[tuple[int, ...], float]:
    """Of every target that can be drawn."""
    vocab = plain.theta["logits"].shape[-1]
    found = {}
    for length in range(1, limit + 1):
        for ids in itertools.product(range(vocab), repeat=length):
            if END in ids[:-1] or (ids[-1] != END and length < limit):
                continue
            memory, before, share = 0, END, 1.0
            for position, token in enumerate(ids):
                log_probs, _, memory = plain.step(memory, before, position)
                weights = np.exp(np.array(log_probs) / temperature)
                share *= weights[token] / weights.sum()
                before = token
            found[ids] = share
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_follow_the_distribution_of_sequences(
    temperature: float, toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    theta, source, count = make_theta(1, vocab=3), SOURCES[0], 3000
    theta["logits"] *= 0.5  # so that nothing is rare
    how = {"num_hypotheses": count, "temperature": temperature, "max_length": 3}
    outcome = run(toy, theta, make_batch([source, source]), jit=False, **how)
    shares = probabilities(make_plain(theta, source), 3, temperature)
    drawn = [*targets(outcome, 0), *targets(outcome, 1)]
    counts = {ids: 0 for ids in shares}
    for ids in drawn:
        counts[ids] += 1
    expected = {ids: share * 2 * count for ids, share in shares.items()}
    assert min(expected.values()) > 5  # so that the statistic is one of chi-square
    statistic = sum((counts[ids] - n) ** 2 / n for ids, n in expected.items())
    assert statistic < CHI_SQUARE[len(shares) - 1]


def test_log_probs_are_those_of_the_model(
    toy: Any, make_theta: Any, make_batch: Any, make_plain: Any
) -> None:
    theta = make_theta(2, vocab=5)
    how = {"num_hypotheses": 4, "temperature": 2.0, "top_k": 3, "top_p": 0.9, "max_length": 6}
    outcome = run(toy, theta, make_batch([*SOURCES, []]), **how)
    assert outcome["lengths"][3].tolist() == [0] * 4 and not outcome["log_probs"][3].any()
    for row, source in enumerate(SOURCES):
        plain = make_plain(theta, source)
        for i, ids in enumerate(targets(outcome, row)):
            memory, before, total = 0, END, 0.0
            for position, token in enumerate(ids):
                log_probs, _, memory = plain.step(memory, before, position)
                assert token in np.argsort(log_probs)[-3:]
                total, before = total + log_probs[token], token
            np.testing.assert_allclose(outcome["log_probs"][row, i], total, rtol=1e-5)
            assert outcome["is_finished"][row, i] == (ids[-1] == END)
            assert len(ids) == 6 or ids[-1] == END
            assert not outcome["ids"][row, i, len(ids) :].any()


def test_greedy_is_the_limit(toy: Any, make_theta: Any, make_batch: Any) -> None:
    theta, batch = make_theta(3, vocab=6), make_batch(SOURCES)
    greedy = run(toy, theta, batch, temperature=0.0)
    for how in ({"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-6}):
        for row in range(len(SOURCES)):
            assert targets(run(toy, theta, batch, **how), row) == targets(greedy, row)


def test_a_sample_depends_on_its_source_its_place_and_the_seed_alone(
    toy: Any, make_theta: Any, make_batch: Any
) -> None:
    theta = make_theta(4, vocab=6)
    four = run(toy, theta, make_batch(SOURCES), num_hypotheses=4, max_length=8)
    two = run(toy, theta, make_batch(SOURCES), num_hypotheses=2, max_length=8)
    last = run(toy, theta, make_batch(SOURCES[1:]), num_hypotheses=4, max_length=8, offset=1)
    same = run(toy, theta, make_batch([SOURCES[0]] * 2), num_hypotheses=4, max_length=8)
    assert targets(two, 2) == targets(four, 2)[:2]
    assert targets(last, 0) == targets(four, 1) and targets(last, 1) == targets(four, 2)
    assert targets(same, 0) == targets(four, 0) != targets(same, 1)
    assert len(set(targets(four, 1))) > 1
    other = run(toy, theta, make_batch(SOURCES), num_hypotheses=4, max_length=8, seed=9)
    assert targets(other, 1) != targets(four, 1)


def test_compiled_equals_eager(toy: Any, make_theta: Any, make_batch: Any) -> None:
    theta, batch = make_theta(4, vocab=7), make_batch([*SOURCES, []])
    prefix = Prefix(tf.constant([[2, 0], [0, 0], [3, 1], [0, 0]]), tf.constant([1, 0, 2, 0]))
    how: dict[str, Any] = {"num_hypotheses": 3, "min_length": 3, "forbidden_ids": [0, 4]}
    eager = run(toy, theta, batch, prefix=prefix, **how)
    compiled = run(toy, theta, batch, prefix=prefix, jit=True, **how)
    for name in ("ids", "lengths", "is_finished"):
        np.testing.assert_array_equal(compiled[name], eager[name], err_msg=name)
    np.testing.assert_allclose(compiled["log_probs"], eager["log_probs"], rtol=1e-5)
    assert all(ids[0] == 2 for ids in targets(eager, 0))
    assert all(ids[:2] == (3, 1) and len(ids) > 2 for ids in targets(eager, 2))
    assert all(4 not in ids and 0 not in ids and len(ids) >= 3 for ids in targets(eager, 1))


@pytest.mark.parametrize(("name", "value"), [("num_hypotheses", 0), ("temperature", -1.0)])
def test_params_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Sampler\.{name} is {value}"):
        Sampler.Params(**{name: value}).instantiate()
