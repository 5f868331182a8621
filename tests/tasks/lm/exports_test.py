"""Exported language models: what is traced for fixed shapes gives what the task gives."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.run.saved_model import ExportModule
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.decode import TextDecoder
from tekso.tasks.lm.exports import language_model_exports
from tekso.tasks.lm.generation import Generator, PromptBlock
from tekso.tasks.lm.task import LanguageModel

SEED = 7
DECODE = TextDecoder.Params(max_new_tokens=9, window=6, temperature=0.9, top_p=0.95)
PROMPTS = [[3, 5, 2, 7], [4], [6, 6, 1]]


def task_of() -> LanguageModel:
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2, mask="causal"),
        feed_forward=FeedForward.Params(hidden_dim=12),
    )
    stack = Stack.Params(num_layers=1, layer=layer)
    model = TransformerLm.Params(vocab_size=11, dim=8, stack=stack)
    task: LanguageModel = LanguageModel.Params(model=model).instantiate()
    return task


@pytest.mark.slow
def test_generate_and_sample_continue_prompts_as_the_generator_does() -> None:
    task = task_of()
    weights = {path: spec.initial_value(2) for path, spec in task.specs().items()}
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    module = ExportModule(task, weights, seed=SEED)
    exports = language_model_exports(task, DECODE, end_id=0)
    assert list(exports) == ["score", "generate", "sample"]

    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    ids = np.full([3, 4], 8, np.int32)  # filled up with any id
    for row, prompt in zip(ids, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    inputs = {"ids": tf.constant(ids), "lengths": tf.constant(lengths)}
    for name, settings in (
        ("generate", {"temperature": 0.0}),
        ("sample", {"temperature": 0.9, "top_p": 0.95}),
    ):
        generator = Generator(task.model, max_new_tokens=9, window=6, stop_id=0, **settings)
        signature = module.signature(exports[name], batch_size=2)
        seed = {"seed": tf.constant(0, tf.int64)} if name == "sample" else {}
        found = signature(**inputs, **seed)
        block = PromptBlock.of(PROMPTS)
        wanted = generator.generate(
            theta.model,
            *(tf.constant(part) for part in (block.head, block.tail, block.lengths)),
            StepContext(mode="decode", seed=SEED),
        )
        np.testing.assert_array_equal(found["lengths"], wanted["lengths"])
        assert found["ids"].shape == (3, 6 + 9)
        np.testing.assert_array_equal(found["ids"][:, :13], wanted["ids"])
        assert not found["ids"][:, 13:].numpy().any()

    labels = np.roll(ids, -1, 1)
    found = module.signature(exports["score"], batch_size=2)(
        ids=tf.constant(ids), labels=tf.constant(labels)
    )["log_probs"]
    logits = task.model.logits(theta.model, tf.constant(ids), StepContext()).numpy().astype("f8")
    shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted_shares = np.take_along_axis(shares, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, wanted_shares, rtol=1e-4, atol=1e-5)  # float32 logits


def test_a_greedy_model_has_nothing_to_sample() -> None:
    greedy = language_model_exports(task_of(), DECODE.copy().set(temperature=0.0), end_id=None)
    assert list(greedy) == ["score", "generate"]
    assert greedy["generate"].for_litert and not greedy["generate"].is_random
