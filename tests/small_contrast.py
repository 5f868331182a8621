"""A small dual encoder of bars and their captions, for tests with several processes."""

from __future__ import annotations

from small_captions import Bars

from tekso.framework.execution import DataParallel
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.words import Words
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.framework.schedules import Constant
from tekso.models.dual_encoder import DualEncoder, TextTower
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.resnet import SMALL_STEM, ResNet
from tekso.tasks.captioning.input import CaptionedImages
from tekso.tasks.contrastive.task import Contrastive


@register
class Pairs(Experiment):
    """A ResNet with statistics of the batch, and a Transformer of a layer."""

    def task(self) -> Params:
        """With dropout."""
        layer = TransformerLayer.Params(
            attention=MultiHeadAttention.Params(num_heads=2),
            feed_forward=FeedForward.Params(hidden_dim=12),
            dropout_rate=0.1,
        )
        stem, block = SMALL_STEM, BasicBlock.Params()
        model = DualEncoder.Params(
            dim=5,
            image=ResNet.Params(num_blocks=[1], width=4, stem=stem, block=block),
            text=TextTower.Params(dim=8, stack=Stack.Params(num_layers=1, layer=layer)),
        )
        return Contrastive.Params(model=model)

    def input(self) -> Params:
        """24 bars."""
        return CaptionedImages.Params(
            source=Bars.Params(count=24, captions=2),
            captions="drawn",
            image_size=8,
            batch_size=6,
            target_length=7,
            tokenizer=Words.Params(vocab_size=30),
        )

    def eval_inputs(self) -> dict[str, Params]:
        """8 bars in batches of 5: two processes get parts of other sizes, and some padding."""
        return {"dev": HeldOut.Params(batch_size=5)}

    def learner(self) -> Params:
        """SGD."""
        return Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.01))

    def execution(self) -> Params:
        """One tower, because more are not allowed on several devices."""
        return DataParallel.Params(towers=1, xla="none")

    def run(self) -> Params:
        """Two evaluations."""
        return Run.Params(steps=6, log_every_steps=1, eval_every_steps=3, checkpoint_every_steps=0)
