"""Contrastive: recalls, scores, retrieval, and what executions reject."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from small_captions import Bars

from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel, ExecutionError, MeshSharded, Pipelined
from tekso.framework.execution.base import signature_of
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.words import Words
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.run import litert
from tekso.framework.run.saved_model import ExportModule
from tekso.framework.schedules import Constant
from tekso.models.dual_encoder import DualEncoder, TextTower
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.resnet import SMALL_STEM, ResNet
from tekso.tasks.captioning.input import CaptionedImages
from tekso.tasks.contrastive.recall import recalls
from tekso.tasks.contrastive.task import Contrastive


def captioned(**params: Any) -> Any:
    given: dict[str, Any] = {"source": Bars.Params(), "image_size": 8, "batch_size": 4}
    given |= {"target_length": 7, "tokenizer": Words.Params(vocab_size=30), "captions": "drawn"}
    return CaptionedImages.Params(**{**given, **params})


def task_params(**params: Any) -> Any:
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=12),
    )
    model = DualEncoder.Params(
        dim=5,
        image=ResNet.Params(num_blocks=[1], width=4, stem=SMALL_STEM, block=BasicBlock.Params()),
        text=TextTower.Params(dim=8, stack=Stack.Params(num_layers=1, layer=layer)),
    )
    return Contrastive.Params(model=model, **params)


def task_of(input: Any, **params: Any) -> Any:
    return Contrastive.complete(task_params(**params), input).instantiate()


class Seeing(Contrastive):
    """Embeds bars by their colour: greens are taken for the third direction."""

    class Params(Contrastive.Params):
        """Params of Seeing."""

    tokenizer: Any

    def _of_images(self, theta: Any, x: tf.Tensor, ctx: Any) -> tf.Tensor:
        del theta, ctx
        top = tf.reduce_sum(x[:, 0], [1, 2]) > tf.reduce_sum(x[:, -1], [1, 2])
        bar = tf.where(top[:, None], x[:, 0, 0], x[:, -1, 0])
        return tf.cast(tf.concat([bar > 0.5, top[:, None]], 1), tf.float32)

    def _of_texts(self, theta: Any, ids: tf.Tensor, segments: Any, ctx: Any) -> tf.Tensor:
        del theta, segments, ctx
        texts = [self.tokenizer.decode(row) for row in ids.numpy().tolist()]
        names = ("red", "green", "blue", "top")
        return tf.constant([[float(name in text) for name in names] for text in texts])


def test_recalls_count_ranks_in_both_directions() -> None:
    images = np.eye(3)
    texts = np.array([[3, 1, 0], [0, 1, 2], [0, 3, 2], [1, 0, 2]], np.float32)
    found = recalls(images, texts, [0, 1, 1, 2])
    # Of image 2, the own text has 2, as texts 1 and 2 of another image have.
    assert found["image_to_text_recall_1"] == pytest.approx(2 / 3)
    assert found["image_to_text_recall_5"] == 1.0
    # Text 1 of image 1 is closer to image 2.
    assert found["text_to_image_recall_1"] == pytest.approx(3 / 4)
    assert found["text_to_image_recall_10"] == 1.0


def test_embeddings_that_are_not_numbers_and_images_without_a_text_are_not_found() -> None:
    nothing = np.full([12, 3], np.nan)
    assert set(recalls(nothing, nothing, range(12)).values()) == {0.0}
    found = recalls(np.eye(3), np.eye(3)[:2], [0, 1])
    assert found["image_to_text_recall_10"] == pytest.approx(2 / 3)
    assert found["text_to_image_recall_1"] == 1.0


def test_recall_of_many_images_is_computed_in_blocks() -> None:
    r = np.random.default_rng(0)
    images = r.normal(size=[1100, 4]).astype(np.float32)
    texts = images + r.normal(size=[1100, 4]).astype(np.float32) * 0.3
    scores = images @ texts.T
    right = [int(np.sum(scores[i] >= scores[i, i])) for i in range(1100)]
    back = [int(np.sum(scores[:, i] >= scores[i, i])) for i in range(1100)]
    found = recalls(images, texts, range(1100))
    for k in (1, 5, 10):
        assert found[f"image_to_text_recall_{k}"] == pytest.approx(np.mean(np.array(right) <= k))
        assert found[f"text_to_image_recall_{k}"] == pytest.approx(np.mean(np.array(back) <= k))
    assert 0.01 < found["image_to_text_recall_1"] < 0.95


def seeing(params: Any, **more: Any) -> Any:
    input = params.instantiate()
    given = Contrastive.complete(task_params(**more), input)
    fields = {name: given.get(name) for name in ("model", *more)}
    task = Seeing.Params(**fields).instantiate()
    task.tokenizer = input.tokenizer
    return task


def test_scores_are_recalls_over_all_images_and_captions_of_the_input() -> None:
    params = captioned(source=Bars.Params(count=18))
    dev = HeldOut.Params(batch_size=4).instantiate(train=params)  # 6 images, all different
    task = seeing(params, baselines={"chance": 0.2})
    scored = task.score(EagerProgram(None), dev, is_last=True)
    # Texts of bars at the bottom have no word for it, so some are as close to the bar at the top.
    assert scored.figures["text_to_image_recall_5"] == 1.0
    assert 0.4 < scored.figures["image_to_text_recall_1"] < 1.0
    assert scored.text.startswith("6 images and 6 captions")
    assert scored.notes == ("other methods: chance 0.2000",)


def test_decoding_finds_the_images_of_a_text() -> None:
    params = captioned(source=Bars.Params(count=18))
    task = seeing(params, decode=["blue bar at the top"])
    (record,) = task.decode(EagerProgram(None), params.instantiate()).records
    assert record["images"][0] == {"file": "bars, record 2", "similarity": 2.0}
    assert len(record["images"]) == 5
    assert seeing(params).decode(EagerProgram(None), params.instantiate()) is None


def test_padding_and_broken_images_change_no_loss() -> None:
    input = captioned().instantiate()
    task = task_of(input)
    theta, batch = task.init(0), input.batch(0)
    less = {name: array[:3] for name, array in batch.items()}
    batch["weights"][3] = 0.0
    padded, alone = (
        float(task.loss(theta, b, StepContext(num_examples=len(b["x"]))).loss_sum)
        for b in (batch, less)
    )
    assert padded == pytest.approx(alone, rel=1e-5)
    batch["weights"][3] = 1.0
    ctx = StepContext(num_examples=4)
    assert float(task.loss(theta, batch, ctx).loss_sum) > padded


def test_sizes_are_taken_from_the_input_and_must_fit() -> None:
    input = captioned(channels=1, source=Bars.Params(colours=1)).instantiate()
    p = task_of(input).params
    assert (p.model.text.vocab_size, p.model.image.image_size, p.model.image.channels) == (30, 8, 1)
    params = task_params()
    params.model.text.vocab_size = 20
    with pytest.raises(ValueError, match="vocab_size is 20, but the input has 30 tokens"):
        Contrastive.complete(params, input)


@pytest.mark.parametrize(
    ("execution", "accumulation", "reason"),
    [
        (DataParallel.Params(), 2, "in 2 accumulation steps, which do not exchange examples: set"),
        (MeshSharded.Params(mesh="data:1"), 2, "in 2 accumulation steps, which do not exchange"),
        (Pipelined.Params(num_stages=1), 1, "couples the examples of a batch.*data_parallel$"),
    ],
)
def test_executions_that_divide_a_batch_reject_the_loss(
    execution: Any, accumulation: int, reason: str
) -> None:
    input = captioned().instantiate()
    learner = Learner.Params(
        optimizer=SGD.Params(),
        schedule=Constant.Params(value=0.1),
        accumulation_steps=accumulation,
    )
    with pytest.raises(ExecutionError, match=reason):
        execution.instantiate().build(
            task_of(input), learner.instantiate(), seed=1, batch=signature_of(input.batch(0))
        )


def test_other_inputs_are_rejected() -> None:
    class Other:
        inner = object()

    with pytest.raises(InputError, match="object has no captions: use CaptionedImages"):
        task_of(captioned().instantiate()).check_inputs({"input": Other()})


@pytest.mark.slow
def test_exported_functions_embed_pixels_and_tokens_as_the_task_does() -> None:
    input = captioned(mean=[0.4, 0.5, 0.6], deviation=[0.2, 0.3, 0.1]).instantiate()
    task = task_of(input)
    weights = {path: spec.initial_value(2) for path, spec in task.specs().items()}
    module = ExportModule(task, weights, seed=0)
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    texts = [input.source.captions(i)[0].text for i in range(3)] + ["red bar"]
    targets = [input.target(text) for text in texts]
    batch = {name: tf.constant([one[name] for one in targets]) for name in targets[0]}
    batch["x"] = tf.constant([input.pixels(i, plain=True) for i in range(4)])
    wanted = task.predict(theta, batch, StepContext())

    images = {"images": np.stack([input.source.image(i) for i in range(4)])}
    ids = batch["target_labels"].numpy()
    lengths = batch["target_segment_ids"].numpy().sum(1).astype(np.int32)
    assert set(lengths) == {3, 6}
    ids[3, 3:] = 5  # padding has no effect
    functions = task.exports(input)
    for name, given, want in (
        ("embed_images", images, wanted["images"]),
        ("embed_texts", {"ids": ids, "lengths": lengths}, wanted["texts"]),
    ):
        tensors = {key: tf.constant(value) for key, value in given.items()}
        found = module.signature(functions[name], batch_size=3)(**tensors)["embeddings"]
        np.testing.assert_allclose(found, want, atol=1e-5)
        assert np.abs(want[0] - want[3]).max() > 0.01
        data = litert.convert(module, functions[name])
        runner = litert.interpreter(data).get_signature_runner()
        for row in range(4):
            one = {key: value[row : row + 1] for key, value in given.items()}
            np.testing.assert_allclose(runner(**one)["embeddings"], want[row : row + 1], atol=1e-4)
