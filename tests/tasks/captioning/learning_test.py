"""Small models learn to caption new pictures, and to find them by their captions."""

from __future__ import annotations

from typing import Any

import pytest
from small_captions import Bars

from tekso.framework import task_results
from tekso.framework.execution import DataParallel
from tekso.framework.execution.base import signature_of
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.words import Words
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.schedules import Constant
from tekso.models.captioner import Captioner
from tekso.models.dual_encoder import DualEncoder, TextTower
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.memory_decoder import decoder_layer
from tekso.models.vision_transformer import vit
from tekso.tasks.captioning.input import CaptionedImages
from tekso.tasks.captioning.task import Captioning
from tekso.tasks.contrastive.task import Contrastive

LAYER = TransformerLayer.Params(
    attention=MultiHeadAttention.Params(num_heads=2), feed_forward=FeedForward.Params(hidden_dim=64)
)
IMAGE = vit("Ti", image_size=8, patch_size=4).set(
    dim=32, stack=Stack.Params(num_layers=1, layer=LAYER)
)


def learned(task: Any, steps: int, **source: Any) -> dict[str, float]:
    """Returns the scores of dev, whose pictures have other noise, after some steps."""
    input = CaptionedImages.Params(
        source=Bars.Params(count=18, **source),
        tokenizer=Words.Params(vocab_size=30),
        image_size=8,
        target_length=7,
        batch_size=6,
        captions="drawn",
        order="sequential",  # the six kinds of pictures in every batch
    )
    train, dev = input.instantiate(), HeldOut.Params(batch_size=6).instantiate(train=input)
    learner = Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.003))
    built = task_results.complete(task, train).instantiate()
    program = (
        DataParallel.Params(towers=1, xla="none")
        .instantiate()
        .build(built, learner.instantiate(), seed=1, batch=signature_of(train.batch(0)))
    )
    program.initialize()
    for step in range(steps):
        program.train_step(train.batch(step), step)
    scored = built.score(program, dev, is_last=False)
    return dict(scored.figures)


@pytest.mark.slow
def test_new_pictures_get_their_captions_in_every_language() -> None:
    model = Captioner.Params(
        encoder=IMAGE, dim=32, decoder=Stack.Params(num_layers=1, layer=decoder_layer(LAYER))
    )
    figures = learned(Captioning.Params(model=model), 150, languages=["en", "de"])
    assert figures["exact_match"] == 1.0  # without the image, a sixth; without the language, a half
    assert figures["bleu/de"] == pytest.approx(100.0)
    assert figures["cider"] == pytest.approx(10.0)


@pytest.mark.slow
def test_new_pictures_are_found_by_their_captions() -> None:
    text = TextTower.Params(dim=32, stack=Stack.Params(num_layers=1, layer=LAYER))
    model = DualEncoder.Params(dim=8, image=IMAGE, text=text)
    figures = learned(Contrastive.Params(model=model), 120)
    assert figures["image_to_text_recall_1"] == figures["text_to_image_recall_1"] == 1.0
