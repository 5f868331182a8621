"""A tiny decoder with tables as probabilities, and the same decoder in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.layer import Layer
from tekso.models.decoding.decoder import DecoderStep, repeat_rows, take_rows

END = 1


class ToyDecoder(Layer):
    """A decoder whose next token depends on the source, the last token and all earlier tokens.

    theta: {"logits": [sources, memories, V, V], "attention": [memories, S]}
    """

    has_attention = True

    def start_decoding(
        self, theta: Any, batch: Mapping[str, tf.Tensor], max_length: int, ctx: Any
    ) -> Any:
        is_source = batch["source_segment_ids"] > 0
        kind = tf.reduce_sum(tf.where(is_source, batch["source_ids"], 0), 1)
        return {
            "kind": kind % theta["logits"].shape[0],
            "is_source": is_source,
            "memory": tf.zeros_like(kind),
        }

    def decode_step(
        self, theta: Any, ids: tf.Tensor, state: Any, position: Any, ctx: Any
    ) -> DecoderStep:
        k = ids.shape[0] // state["kind"].shape[0]
        kind, is_source = tf.repeat(state["kind"], k), tf.repeat(state["is_source"], k, 0)
        memory = (3 * state["memory"] + ids + position) % theta["logits"].shape[1]
        logits = tf.gather_nd(theta["logits"], tf.stack([kind, memory, ids], 1))
        weights = tf.where(
            is_source, tf.exp(tf.gather(theta["attention"], memory)[:, : is_source.shape[1]]), 0.0
        )
        attention = tf.math.divide_no_nan(weights, tf.reduce_sum(weights, 1, keepdims=True))
        return DecoderStep(
            logits, attention if self.has_attention else None, {**state, "memory": memory}
        )

    def expand(self, state: Any, k: int) -> Any:
        return {**state, "memory": repeat_rows(state["memory"], k)}

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        return {**state, "memory": take_rows(state["memory"], rows)}


class PlainToy:
    """ToyDecoder for one source, in lists and float64."""

    def __init__(self, theta: Any, source: list[int]) -> None:
        self.theta = {name: np.asarray(value, np.float64) for name, value in theta.items()}
        self.source = source
        self.kind = sum(source) % len(self.theta["logits"])

    def step(self, memory: int, token: int, position: int) -> tuple[list[float], list[float], int]:
        """Returns log-probabilities of the next token, attention weights and new memory."""
        memory = (3 * memory + token + position) % self.theta["logits"].shape[1]
        logits = self.theta["logits"][self.kind, memory, token]
        total = math.log(sum(math.exp(x) for x in logits))
        weights = [math.exp(x) for x in self.theta["attention"][memory][: len(self.source)]]
        return [x - total for x in logits], [w / sum(weights) for w in weights], memory


def toy_theta(
    seed: int, *, vocab: int = 4, kinds: int = 2, memories: int = 5, length: int = 6
) -> dict[str, tf.Tensor]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=[kinds, memories, vocab, vocab]) * 1.5
    attention = rng.normal(size=[memories, length]) * 2
    return {
        "logits": tf.constant(logits, tf.float32),
        "attention": tf.constant(attention, tf.float32),
    }


def toy_batch(sources: list[list[int]], length: int | None = None) -> dict[str, tf.Tensor]:
    """Returns a batch of sources of several lengths; an empty source is only padding."""
    length = length or max(map(len, sources))
    ids = np.full([len(sources), length], END, np.int32)
    segments = np.zeros([len(sources), length], np.int32)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
        segments[row, : len(source)] = 1
    return {"source_ids": tf.constant(ids), "source_segment_ids": tf.constant(segments)}


@pytest.fixture(scope="session")
def toy() -> ToyDecoder:
    return ToyDecoder.Params().instantiate()


@pytest.fixture(scope="session")
def make_theta() -> Callable[..., dict[str, tf.Tensor]]:
    return toy_theta


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., dict[str, tf.Tensor]]:
    return toy_batch


@pytest.fixture(scope="session")
def make_plain() -> Callable[..., PlainToy]:
    return PlainToy
