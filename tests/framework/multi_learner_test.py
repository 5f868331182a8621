"""MultiLearner: each learner updates the weights that its patterns match."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from learner_updates import (
    SPECS,
    TRAINABLE,
    assert_equal,
    constant,
    make_learner,
    norm,
    random_tensors,
    run,
)

from tekso.framework import optimizers
from tekso.framework.learner import Learner, MultiLearner
from tekso.framework.loss_scale import LossScale


def make_multi(**fields: Any) -> MultiLearner:
    values: dict[str, Any] = {
        "patterns": {"embedding": "embedding/.*", "rest": "(?!embedding/).*"},
        "learners": {
            "embedding": Learner.Params(
                optimizer=optimizers.Adagrad.Params(), schedule=constant(0.2)
            ),
            "rest": Learner.Params(
                optimizer=optimizers.Adam.Params(), schedule=constant(0.1), ema_decay=0.9
            ),
        },
    }
    return MultiLearner.Params(**values).set(fields).instantiate()


def test_each_learner_updates_its_own_weights() -> None:
    gradients = [random_tensors(seed) for seed in range(1, 6)]
    both = run(make_multi(), gradients)[-1]
    adagrad = run(make_learner(optimizers.Adagrad.Params(), rate=0.2), gradients)[-1]
    adam = run(make_learner(optimizers.Adam.Params(), rate=0.1, ema_decay=0.9), gradients)[-1]
    for path in TRAINABLE:
        alone = adagrad if path.startswith("embedding/") else adam
        np.testing.assert_array_equal(both.weights[path], alone.weights[path])
    assert both.slots.keys() == make_multi().slots(SPECS).keys()
    assert "embedding/w/sum_of_squares" in both.slots
    assert "stack/w/ema" in both.slots and "embedding/w/ema" not in both.slots


def test_an_optimizer_may_exclude_weights_that_only_another_learner_has() -> None:
    def decayed(excluded: str) -> Learner.Params:
        adam = optimizers.AdamW.Params(weight_decay_exclude=[excluded])
        return Learner.Params(optimizer=adam, schedule=constant(0.1))

    biases = [path for path in TRAINABLE if path.endswith("/bias")]
    assert biases and not any(path.startswith("embedding/") for path in biases)
    shared = decayed(".*/bias")
    assert make_multi(learners={"embedding": shared, "rest": shared}).slots(SPECS)
    both = make_multi(learners={"embedding": decayed(".*/bais"), "rest": shared})
    said = r"^learners.embedding: AdamW.weight_decay_exclude: '\.\*/bais' matches no weight"
    with pytest.raises(ValueError, match=said):
        both.slots(SPECS)


def test_metrics_are_given_for_each_learner_and_for_all() -> None:
    gradients = random_tensors(1)
    metrics = run(make_multi(), [gradients])[0].metrics
    rest = [path for path in TRAINABLE if not path.startswith("embedding/")]
    expected = {
        "learning_rate": 0.2,
        "learning_rate/embedding": 0.2,
        "learning_rate/rest": 0.1,
        "gradient_norm": norm(gradients, TRAINABLE),
        "gradient_norm/embedding": norm(gradients, ["embedding/w"]),
        "gradient_norm/rest": norm(gradients, rest),
        "nonfinite_total": 0.0,
        "nonfinite_consecutive": 0.0,
    }
    assert_equal(metrics, expected, rtol=1e-6)


def test_each_learner_clips_by_the_norm_of_its_own_weights() -> None:
    gradients = random_tensors(1)
    sgd = optimizers.SGD.Params()
    learners = {
        "embedding": Learner.Params(optimizer=sgd, schedule=constant(1.0), clip_global_norm=0.5),
        "rest": Learner.Params(optimizer=sgd, schedule=constant(1.0)),
    }
    made = run(make_multi(learners=learners), [gradients])[0]
    weights = random_tensors(0)
    factor = 0.5 / norm(gradients, ["embedding/w"])
    expected = weights["embedding/w"] - gradients["embedding/w"] * factor
    np.testing.assert_allclose(made.weights["embedding/w"], expected, rtol=1e-5, atol=1e-6)
    expected = weights["stack/w"] - gradients["stack/w"]
    np.testing.assert_allclose(made.weights["stack/w"], expected, rtol=1e-6)


def test_bad_gradient_of_one_learner_stops_all() -> None:
    gradients = {**random_tensors(1), "scale": tf.constant(math.nan)}
    made = run(make_multi(), [gradients])[0]
    assert_equal(made.weights, random_tensors(0))


def test_statistics_are_kept_by_the_patterns_of_all_and_of_the_learner_of_their_path() -> None:
    multi = make_multi(
        frozen=["a/.*"],
        patterns={"embedding": "emb.*", "rest": "stack/.*|scale"},
        **{"learners.rest.frozen": [".*/mean"]},
    )
    paths = ("a/mean", "embedding/mean", "stack/mean", "stack/variance")
    values = dict.fromkeys(paths, tf.constant(1.0))
    assert list(multi.without_frozen(values)) == ["embedding/mean", "stack/variance"]


def test_weights_frozen_for_all_need_no_pattern() -> None:
    multi = make_multi(frozen=["scale"], patterns={"embedding": "emb.*", "rest": "stack/.*"})
    assert list(multi.trainable(SPECS)) == ["embedding/w", "stack/w", "stack/bias"]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"embedding": "embedding/.*", "rest": "stack/.*"}, "no pattern matches 'scale'"),
        (
            {"embedding": "embedding/.*", "rest": ".*"},
            "'embedding/w' is matched by the patterns of embedding and rest",
        ),
        (
            {"embedding": "embeding/.*", "rest": ".*"},
            r"patterns.embedding: 'embeding/\.\*' matches no weight; similar weights: 'embedding/w",
        ),
    ],
)
def test_patterns_that_do_not_divide_the_weights_are_refused(
    patterns: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_multi(patterns=patterns).slots(SPECS)


def test_names_of_patterns_and_learners_have_to_agree() -> None:
    with pytest.raises(ValueError, match=r"patterns has \['other'\]"):
        make_multi(patterns={"other": ".*"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("accumulation_steps", 7),
        ("loss_scale", LossScale.Params()),
        ("max_consecutive_nonfinite_steps", 7),
        ("max_rollbacks", 7),
    ],
)
def test_what_only_all_learners_can_have_is_refused_on_one(field: str, value: Any) -> None:
    one = Learner.Params(optimizer=optimizers.SGD.Params(), schedule=constant(1.0)).set(
        {field: value}
    )
    with pytest.raises(ValueError, match=f"{field} is a setting for all learners together"):
        make_multi(patterns={"all": ".*"}, learners={"all": one})
    made = make_multi(**{field: value}).params.get(field)
    assert made == value


def test_learner_params_survive_the_round_trip_through_text() -> None:
    for params in (make_multi().params, make_learner(optimizers.Adafactor.Params()).params):
        again = type(params).from_text(params.to_text())
        assert again.diff(params) in ("", [])
        again.instantiate()
