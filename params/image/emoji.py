r"""Emoji and their names, in the npm package emoji-datasource-google.

npm pack emoji-datasource-google@16.0.0
tar xzf emoji-datasource-google-16.0.0.tgz
tekso-trainer --model=image.emoji.Caption --logdir=runs/emoji \
        --set input.source.folder=package
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.words import Words
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models import dual_encoder
from tekso.models.captioner import Captioner
from tekso.models.dual_encoder import TextTower
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.residual_blocks import BATCH_NORM, BasicBlock
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.memory_decoder import decoder_layer
from tekso.models.resnet import ResNet, Stem
from tekso.tasks.captioning.emoji import Emoji
from tekso.tasks.captioning.input import CaptionedImages
from tekso.tasks.captioning.scoring import CaptionScoring
from tekso.tasks.captioning.task import Captioning
from tekso.tasks.contrastive.task import Contrastive
from tekso.tasks.image.steps import PadAndCrop

BASELINES = {"the caption of the most similar picture": 0.0}
"""{method: exact matches on dev}, whose captions are not in training, so copies never match."""

STEM = Stem.Params(
    conv=ConvNorm.Params(
        kernel_shape=(3, 3), strides=(2, 2), padding="FIXED", norm=BATCH_NORM, activation="relu"
    ),
    pool=None,
)
"""A stem that halves height and width."""


def encoder() -> ResNet.Params:
    """Returns a small ResNet: 24 channels at 32 × 32 pixels to 192 at 4 × 4."""
    return ResNet.Params(num_blocks=[1, 1, 1, 1], width=24, stem=STEM, block=BasicBlock.Params())


def text_layer() -> TransformerLayer.Params:
    """Returns a layer of width 128 with 4 heads."""
    return TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=4),
        feed_forward=FeedForward.Params(hidden_dim=512),
        dropout_rate=0.1,
    )


RECALL_BASELINE = {"chance": 0.006}
"""{method: recall at 1 on the 163 pictures of dev}."""


@register
class Caption(Experiment):
    """Names of emoji by a ResNet and a Transformer decoder; the captions of dev are unseen."""

    def task(self) -> Params:
        """16 features of an image; words with a softmax of their own."""
        model = Captioner.Params(
            encoder=encoder(),
            dim=128,
            memory_positions=LearnedPositions.Params(max_length=16),
            decoder=Stack.Params(num_layers=2, layer=decoder_layer(text_layer())),
            dropout_rate=0.1,
        )
        return Captioning.Params(model=model, scoring=CaptionScoring.Params(baselines=BASELINES))

    def input(self) -> Params:
        """64 emoji, moved by up to 4 pixels; all words of the training captions."""
        return CaptionedImages.Params(
            source=Emoji.Params(),
            tokenizer=Words.Params(vocab_size=1800),
            image_size=64,
            target_length=16,
            batch_size=64,
            augment=[PadAndCrop.Params(padding=4)],
            mean=[0.75],
            deviation=[0.3],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """New combinations of emoji and skin tones (dev), and new emoji (test)."""
        return {
            "dev": HeldOut.Params(split="dev"),
            "test": HeldOut.Params(split="test"),
        }

    def learner(self) -> Params:
        """AdamW; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=1e-4),
            schedule=schedules.Cosine.Params(initial_value=0.002, warmup_steps=100),
            clip_global_norm=1.0,
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so small a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """1,200 steps: 24 passes over the training emoji."""
        return Run.Params(steps=1200, eval_every_steps=600, checkpoint_every_steps=600)


@register
class DualEncoder(Caption):
    """Emoji and their names in one space of 64 dims, trained by contrast over the whole batch."""

    def task(self) -> Params:
        """The image encoder of Caption, and 2 layers of width 128 over the words of a name."""
        text = TextTower.Params(
            dim=128, stack=Stack.Params(num_layers=2, layer=text_layer()), dropout_rate=0.1
        )
        model = dual_encoder.DualEncoder.Params(dim=64, image=encoder(), text=text)
        return Contrastive.Params(model=model, baselines=RECALL_BASELINE)

    def input(self) -> Params:
        """As of Caption; 128 emoji, which are contrasted with each other."""
        return super().input().set(captions="drawn", batch_size=128)

    def run(self) -> Params:
        """600 steps: 24 passes over the training emoji."""
        return Run.Params(steps=600, eval_every_steps=300, checkpoint_every_steps=300)
