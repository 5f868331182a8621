"""Exported translation: what is traced for fixed shapes gives what the task gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction
from tekso.framework.run import litert
from tekso.framework.run.saved_model import ExportModule
from tekso.models.decoding.beam_search import BeamSearch
from tekso.params.mt.text_files import transformer
from tekso.tasks.mt.exports import translation_exports
from tekso.tasks.mt.task import Translation

END = 1
SEARCH = BeamSearch.Params(beam_size=3, num_hypotheses=2, max_length_extra=2, max_length_ratio=1.5)


@functools.cache
def parts() -> tuple[Any, dict[str, ExportedFunction], ExportModule]:
    """A task with drawn weights, its exports, and the weights as they are exported."""
    model = transformer(num_layers=1, dim=16, hidden_dim=24, num_heads=2, dropout_rate=0.3)
    params = Translation.Params(model=model.set(source_vocab_size=13, target_vocab_size=13))
    task = params.instantiate()
    # Drawn wide, so that the likeliest token is likelier by far than rounding.
    weights = {
        path: 2 * spec.initial_value(5) if len(spec.shape) > 1 else spec.initial_value(5)
        for path, spec in task.specs().items()
    }
    exports = translation_exports(task, SEARCH, end_id=END, longest=9, longest_target=20)
    return task, exports, ExportModule(task, weights, seed=0)


def theta() -> Any:
    task, _, module = parts()
    weights = {path: tf.convert_to_tensor(value) for path, value in module.weights.items()}
    return task.theta(weights)


def sources() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(3).integers(2, 13, [5, 7], np.int32)
    lengths = np.array([7, 3, 5, 1, 6], np.int32)
    ids[np.arange(5), lengths - 1] = END
    return ids, lengths


def searched(
    params: Any, ids: np.ndarray, length: int, forbidden_ids: Sequence[int] = ()
) -> dict[str, np.ndarray]:
    """What the search finds for one source, at a shape of its own."""
    batch = {
        "source_ids": tf.constant(ids[None, :length]),
        "source_segment_ids": tf.ones([1, length], tf.int32),
    }
    task = parts()[0]
    found = params.instantiate().search(
        task.model,
        theta().model,
        batch,
        StepContext(mode="decode"),
        end_id=END,
        forbidden_ids=forbidden_ids,
    )
    return {name: np.asarray(value)[0] for name, value in found.items()}


def test_translate_gives_what_the_search_finds_for_each_source() -> None:
    _, exports, module = parts()
    ids, lengths = sources()
    found = module.signature(exports["translate"], batch_size=2)(
        source_ids=tf.constant(ids), source_lengths=tf.constant(lengths)
    )
    assert found["ids"].shape == (5, 2, int(1.5 * 9) + 2)
    for row in (1, 3, 4):  # of both batches of two, and of the one that is filled up
        wanted = searched(SEARCH, ids[row], lengths[row])
        np.testing.assert_array_equal(found["lengths"][row], wanted["lengths"])
        for n, size in enumerate(wanted["lengths"]):
            np.testing.assert_array_equal(found["ids"][row, n, :size], wanted["ids"][n, :size])
            assert not found["ids"].numpy()[row, n, size:].any()
        # Sums of 15 float32 at most, in another order where rows are filled up.
        np.testing.assert_allclose(found["scores"][row], wanted["scores"], rtol=1e-5)
        np.testing.assert_allclose(found["log_probs"][row], wanted["log_probs"], rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    # The test of LiteRT below has forbidden tokens in a greedy search.
    [
        pytest.param("translate", marks=pytest.mark.slow),
        pytest.param("greedy", marks=pytest.mark.matrix),
    ],
)
def test_forbidden_tokens_are_never_said(name: str) -> None:
    task, exports, module = parts()
    forbidden = range(9, 13)
    without = translation_exports(
        task, SEARCH, end_id=END, forbidden_ids=forbidden, longest=9, longest_target=20
    )
    ids, lengths = sources()

    def found(functions: dict[str, ExportedFunction]) -> np.ndarray:
        call = module.signature(functions[name], batch_size=2)
        said = call(source_ids=tf.constant(ids), source_lengths=tf.constant(lengths))["ids"]
        return np.unique(said)

    assert set(found(exports)) & set(forbidden) and not set(found(without)) & set(forbidden)


@pytest.mark.slow
def test_score_gives_the_log_softmax_of_the_labels() -> None:
    _, exports, module = parts()
    assert exports["score"].lengths == [16, 20]
    ids, lengths = sources()
    targets = np.zeros([5, 4], np.int32)
    target_lengths = np.array([4, 1, 3, 2, 4], np.int32)
    for row, length in enumerate(target_lengths):
        targets[row, :length] = [*range(2, 1 + length), END]
    found = module.signature(exports["score"], batch_size=2)(
        source_ids=tf.constant(ids),
        source_lengths=tf.constant(lengths),
        target_labels=tf.constant(targets),
        target_lengths=tf.constant(target_lengths),
    )["log_probs"].numpy()
    assert found.shape == (5, 4)
    task = parts()[0]
    for row, (size, length) in enumerate(zip(lengths, target_lengths, strict=True)):
        assert not found[row, length:].any()
        batch = {
            "source_ids": tf.constant(ids[row : row + 1, :size]),
            "source_segment_ids": tf.ones([1, size], tf.int32),
            "target_ids": tf.constant([[END, *targets[row, : length - 1]]], tf.int32),
            "target_segment_ids": tf.ones([1, length], tf.int32),
        }
        logits = task.model.logits(theta().model, batch, StepContext()).numpy()[0].astype("f8")
        shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        wanted = shares[np.arange(length), targets[row, :length]]
        np.testing.assert_allclose(found[row, :length], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["float32", "int8"])
def test_litert_finds_the_ids_of_greedy_search(numbers: Any) -> None:
    task, _, module = parts()
    exports = translation_exports(
        task, SEARCH, end_id=END, forbidden_ids=[11, 12], longest=9, longest_target=20
    )
    ids, lengths = sources()
    data = litert.convert(module, exports["greedy"], batch_size=5, length=7, numbers=numbers)
    found = interpreter(data).get_signature_runner()(source_ids=ids, source_lengths=lengths)
    greedy = SEARCH.copy().set(beam_size=1, num_hypotheses=1, length_normalization=0.0)
    same, total = 0, 0
    for row, length in enumerate(lengths):
        wanted = searched(greedy, ids[row], length, [11, 12])
        size = wanted["lengths"][0]
        same += int((found["ids"][row, 0, :size] == wanted["ids"][0, :size]).sum())
        total += int(size)
    assert total > 20
    if numbers == "float32":
        assert same == total
    assert same >= 0.5 * total, f"int8 agrees in {same} of {total} tokens"


def interpreter(data: bytes) -> Any:
    try:
        from ai_edge_litert import interpreter as litert_runtime
    except ModuleNotFoundError:  # the one that TensorFlow still has
        return tf.lite.Interpreter(model_content=data)
    return litert_runtime.Interpreter(model_content=data)
