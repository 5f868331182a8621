r"""COCO 2017: boxes of 80 classes, and captions, in 118,287 training and 5,000 validation images.

    tekso-trainer --model=image.coco.Ssd300 --logdir=runs/ssd300 \
        --set input.source.file=coco/annotations/instances_train2017.json \
        --set input.source.folder=coco/train2017 \
        --set input.source.dev_file=coco/annotations/instances_val2017.json \
        --set input.source.dev_folder=coco/val2017

For `image.coco.Captions`, set the files captions_train2017.json and captions_val2017.json.

These experiments have not been trained on COCO with Tekso. Published figures of Ssd300 are those of
MLPerf-0.6.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.captioner import Captioner
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.memory_decoder import decoder_layer
from tekso.models.resnet import resnet
from tekso.models.ssd import Ssd
from tekso.params.image.imagenet import DEVIATION, MEAN
from tekso.tasks.captioning.input import CaptionedImages
from tekso.tasks.captioning.scoring import CaptionScoring
from tekso.tasks.captioning.sources import CocoCaptions
from tekso.tasks.captioning.task import Captioning
from tekso.tasks.detection.input import BoxImages
from tekso.tasks.detection.sources import CocoBoxes
from tekso.tasks.detection.steps import BoxFlip, Recolour, SsdCrop
from tekso.tasks.detection.task import Detection
from tekso.tasks.image.steps import CentreCrop, InceptionCrop

NUM_TRAIN = 117_266
"""Training images with a box."""

NUM_CAPTIONS = 591_753
"""Captions of the training images, according to their publisher."""


@register
class Ssd300(Experiment):
    """SSD300 with a ResNet-34 (19,972,534 weights) on COCO, by MLPerf-0.6's recipe for 32 images.

    The target of MLPerf-0.6 is an AP of 0.23. It starts from weights of a ResNet-34 that was
    trained on ImageNet; without them, as here by default, expect less. See docs/vision.md.

    Source:
      Liu et al. 2016; MLPerf training v0.6, the reference of "single stage detector".
    """

    BATCH_SIZE = 32

    def task(self) -> Params:
        """80 classes and the background; 8,732 default boxes."""
        return Detection.Params(model=Ssd.Params(), num_classes=80)

    def input(self) -> Params:
        """Random parts, flips and colours, at 300 × 300 pixels; images without a box are left out.

        The most boxes of an image are 93.
        """
        return BoxImages.Params(
            source=CocoBoxes.Params(train_on="with_objects"),
            image_size=300,
            batch_size=self.BATCH_SIZE,
            augment=[SsdCrop.Params(), BoxFlip.Params(), Recolour.Params()],
            mean=MEAN,
            deviation=DEVIATION,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All validation images."""
        return {"dev": HeldOut.Params(split="dev", batch_size=100)}

    def learner(self) -> Params:
        """Momentum; 0.0025 per 32 images after 300 steps, a tenth at 40 and 50 epochs.

        L2 loss of 0.0005 on all weights.
        """
        epoch, rate = NUM_TRAIN // self.BATCH_SIZE, 2.5e-3 * self.BATCH_SIZE / 32
        return Learner.Params(
            optimizer=Momentum.Params(weight_decay=5e-4, weight_decay_scaling="gradient"),
            schedule=schedules.PiecewiseConstant.Params(
                values=[rate, rate / 10, rate / 100],
                boundaries=[40 * epoch, 50 * epoch],
                warmup_steps=300,
            ),
        )

    def run(self) -> Params:
        """70 epochs; the checkpoint of the best AP is kept."""
        epoch = NUM_TRAIN // self.BATCH_SIZE
        return Run.Params(
            steps=70 * epoch,
            eval_every_steps=5 * epoch,
            checkpoint_every_steps=epoch,
            keep_best=KeepBest.Params(metric="ap"),
        )


@register
class Captions(Experiment):
    """A ResNet-50 and a Transformer decoder of 6 layers of width 512 on COCO's captions.

    "Show and tell" with an LSTM reached a BLEU-4 of 27.7. The experiment starts from weights of a
    ResNet-50 that was trained on ImageNet, if `run.warm_start` gives them; see docs/vision.md.

    Source:
      Vinyals et al. 2015; the decoder: Vaswani et al. 2017, table 3, base.
    """

    BATCH_SIZE = 64

    def task(self) -> Params:
        """49 features of an image; 10,000 pieces."""
        layer = TransformerLayer.Params(
            attention=MultiHeadAttention.Params(num_heads=8),
            feed_forward=FeedForward.Params(hidden_dim=2048),
            dropout_rate=0.1,
        )
        model = Captioner.Params(
            encoder=resnet(50),
            dim=512,
            target_vocab_size=10_000,
            memory_positions=LearnedPositions.Params(max_length=49),
            decoder=Stack.Params(num_layers=6, layer=decoder_layer(layer)),
            dropout_rate=0.1,
        )
        scoring = CaptionScoring.Params().set({"scorer.lowercase": True})
        return Captioning.Params(model=model, label_smoothing=0.1, scoring=scoring)

    def input(self) -> Params:
        """An example for each of the about five captions of an image, at 224 × 224 pixels."""
        return CaptionedImages.Params(
            source=CocoCaptions.Params(),
            tokenizer=SentencePiece.Params(vocab_size=10_000),
            image_size=224,
            target_length=32,
            batch_size=self.BATCH_SIZE,
            augment=[InceptionCrop.Params(least_area=0.5)],
            evaluate=[CentreCrop.Params()],
            mean=MEAN,
            deviation=DEVIATION,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All validation images."""
        return {"dev": HeldOut.Params(split="dev", batch_size=100)}

    def learner(self) -> Params:
        """AdamW; 0.0003 after 5,000 steps, and to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=0.01),
            schedule=schedules.Cosine.Params(initial_value=3e-4, warmup_steps=5000),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """20 passes over the captions; the checkpoint of the best CIDEr-D is kept."""
        epoch = NUM_CAPTIONS // self.BATCH_SIZE
        return Run.Params(
            steps=20 * epoch,
            eval_every_steps=epoch,
            checkpoint_every_steps=epoch,
            keep_best=KeepBest.Params(metric="cider"),
        )
