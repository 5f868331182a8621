"""The translation models of the Mesh-TensorFlow paper on WMT 2014 English to French (36M pairs).

Nothing is downloaded: prepare `wmt14_translate/fr-en` with tensorflow-datasets. If it is not in the
default folder, set `--set input.corpus.data_dir=…`.

Every model uses the mesh of the paper: the batch is sharded over one axis; if there is a second
axis, vocabulary, feed-forward units and heads are sharded over it.

Source: Shazeer et al. 2018, "Mesh-TensorFlow", section 9.2 and table 3; the meshes, batches and
steps are from its code in tensor2tensor, models/mtf_transformer.py.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adafactor import Adafactor
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.encoder_decoder import EncoderDecoder, decoder_layer
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.task import Translation
from tekso.tasks.mt.tfds_pairs import TfdsPairs


@register
class Dff2048(Experiment):
    """Feed-forward 2048, 4 heads of 128: 0.15B weights; published BLEU 41.8.

    6 + 6 layers of width 1024, one table for source and target and one for the softmax, no biases.
    """

    D_FF = 2048
    MESH = "batch:32"

    def task(self) -> Params:
        """The published sizes; heads grow with the feed-forward layer. Label smoothing 0.1."""
        layer = TransformerLayer.Params(
            norm=RMSNorm.Params(),
            attention=MultiHeadAttention.Params(
                num_heads=self.D_FF // 512, head_dim=128, use_bias=False
            ),
            feed_forward=FeedForward.Params(hidden_dim=self.D_FF, use_bias=False),
            dropout_rate=0.1,
        )
        model = EncoderDecoder.Params(
            dim=1024,
            softmax=Softmax.Params(),
            dropout_rate=0.1,
            encoder=Stack.Params(num_layers=6, layer=layer),
            encoder_norm=RMSNorm.Params(),
            decoder=Stack.Params(num_layers=6, layer=decoder_layer(layer)),
            decoder_norm=RMSNorm.Params(),
        )
        return Translation.Params(model=model, label_smoothing=0.1)

    def input(self) -> Params:
        """Pairs in 32,768 sub-word pieces, packed into 128 rows of 256."""
        return PackedPairs.Params(
            corpus=TfdsPairs.Params(
                name="wmt14_translate/fr-en", source_feature="en", target_feature="fr"
            ),
            tokenizer=SentencePiece.Params(vocab_size=32_768),
            source_length=256,
            target_length=256,
            batch_size=128,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """Newstest 2013 and 2014."""
        return {"dev": HeldOut.Params(split="dev"), "test": HeldOut.Params(split="test")}

    def learner(self) -> Params:
        """Adafactor with relative step sizes."""
        return Learner.Params(
            optimizer=Adafactor.Params(), schedule=schedules.Constant.Params(value=1.0)
        )

    def run(self) -> Params:
        """154,000 steps: three passes over the data."""
        return Run.Params(
            steps=154_000, log_every_steps=100, eval_every_steps=5000, checkpoint_every_steps=1000
        )

    def execution(self) -> Params:
        """The mesh of this model, with the paper's rules for its axes."""
        rules = "batch:batch"
        if "model" in self.MESH:
            rules += ";vocab:model;mlp:model;heads:model"
        return MeshSharded.Params(mesh=self.MESH, rules=rules)


@register
class Dff4096(Dff2048):
    """Feed-forward 4096, 8 heads: 0.24B weights, on 32 devices."""

    D_FF = 4096


@register
class Dff8192(Dff2048):
    """Feed-forward 8192, 16 heads: 0.42B weights, on 32 devices."""

    D_FF = 8192
    MESH = "model:4;batch:8"


@register
class Dff16384(Dff2048):
    """Feed-forward 16,384, 32 heads: 0.77B weights, on 32 devices."""

    D_FF = 16_384
    MESH = "model:4;batch:8"


@register
class Dff32768(Dff2048):
    """Feed-forward 32,768, 64 heads: 1.48B weights, on 128 devices."""

    D_FF = 32_768
    MESH = "model:8;batch:16"


@register
class Dff65536(Dff2048):
    """Feed-forward 65,536, 128 heads: 2.89B weights, on 128 devices; published BLEU 43.9."""

    D_FF = 65_536
    MESH = "model:8;batch:16"
