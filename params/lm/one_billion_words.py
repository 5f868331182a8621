"""Language models of the One Billion Word benchmark (Chelba et al. 2013), TFDS `lm1b`.

Nothing is downloaded: prepare the data set with tensorflow-datasets. If it is not in the default
folder, set `--set input.corpus.data_dir=…`.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.input.tfds import Tfds
from tekso.framework.input.words import Words
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adafactor import Adafactor
from tekso.framework.optimizers.adagrad import Adagrad
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.softmax import SampledSoftmax, Softmax
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.lstm_lm import LstmLm
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.packed_text import PackedText
from tekso.tasks.lm.task import LanguageModel


@register
class Dff4096(Experiment):
    """Transformer of the Mesh-TensorFlow paper, feed-forward 4096, 4 heads of 256: 0.14B weights.

    6 layers of width 1024, separate embedding and softmax, no biases. Published: perplexity 35.0.

    Source: Shazeer et al. 2018, "Mesh-TensorFlow", section 9.1 and table 2.
    """

    D_FF = 4096

    def task(self) -> Params:
        """The published sizes; heads grow with the feed-forward layer."""
        layer = TransformerLayer.Params(
            norm=RMSNorm.Params(),
            attention=MultiHeadAttention.Params(
                num_heads=self.D_FF // 1024, head_dim=256, mask="causal", use_bias=False
            ),
            feed_forward=FeedForward.Params(hidden_dim=self.D_FF, use_bias=False),
        )
        model = TransformerLm.Params(
            dim=1024,
            stack=Stack.Params(num_layers=6, layer=layer),
            final_norm=RMSNorm.Params(),
            softmax=Softmax.Params(),
        )
        return LanguageModel.Params(model=model)

    def input(self) -> Params:
        """Sentences in 32,768 sub-word pieces, packed into 256 rows of 256."""
        return PackedText.Params(
            corpus=Tfds.Params(name="lm1b", splits={"train": "train", "dev": "test"}),
            tokenizer=SentencePiece.Params(vocab_size=32_768),
            length=256,
            batch_size=256,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The held-out text of the benchmark, which TFDS calls "test"."""
        return {"dev": HeldOut.Params(split="dev")}

    def learner(self) -> Params:
        """Adafactor with relative step sizes."""
        return Learner.Params(
            optimizer=Adafactor.Params(), schedule=schedules.Constant.Params(value=1.0)
        )

    def run(self) -> Params:
        """136,000 steps: ten passes over the data."""
        return Run.Params(
            steps=136_000, log_every_steps=100, eval_every_steps=5000, checkpoint_every_steps=1000
        )


@register
class Dff8192(Dff4096):
    """Dff4096 with feed-forward 8192 and 8 heads: 0.22B weights; published perplexity 31.7."""

    D_FF = 8192


@register
class Dff16384(Dff4096):
    """Dff4096 with feed-forward 16,384 and 16 heads."""

    D_FF = 16_384


@register
class Dff32768(Dff4096):
    """Dff4096 with feed-forward 32,768 and 32 heads."""

    D_FF = 32_768


@register
class Dff65536(Dff4096):
    """Dff4096 with feed-forward 65,536 and 64 heads."""

    D_FF = 65_536


@register
class Dff131072(Dff4096):
    """Dff4096 with feed-forward 131,072 and 128 heads."""

    D_FF = 131_072


@register
class Dff262144(Dff4096):
    """Dff4096 with feed-forward 262,144, 256 heads: 4.90B weights; published perplexity 24.0."""

    D_FF = 262_144


@register
class MeshDff4096(Dff4096):
    """Dff4096 on a mesh of batch:16;model:4: batch over one axis, all large dims over the other.

    As in the paper, vocabulary, heads and feed-forward units are sharded over "model". The paper's
    largest model uses 512 devices, batch:16;model:32. For the smaller ones, the size of "model" is
    the number of heads.

    Source: Shazeer et al. 2018, "Mesh-TensorFlow", sections 5 and 9.1.
    """

    def execution(self) -> Params:
        """The paper's rules on a mesh of 16 by the number of heads, at most 32."""
        model = min(32, self.D_FF // 1024)
        return MeshSharded.Params(
            mesh=f"batch:16;model:{model}", rules="batch:batch;vocab:model;mlp:model;heads:model"
        )


@register
class MeshDff8192(MeshDff4096):
    """Dff8192 on a mesh of batch:16;model:8."""

    D_FF = 8192


@register
class MeshDff16384(MeshDff4096):
    """Dff16384 on a mesh of batch:16;model:16."""

    D_FF = 16_384


@register
class MeshDff32768(MeshDff4096):
    """Dff32768 on a mesh of batch:16;model:32."""

    D_FF = 32_768


@register
class MeshDff65536(MeshDff4096):
    """Dff65536 on a mesh of batch:16;model:32."""

    D_FF = 65_536


@register
class MeshDff131072(MeshDff4096):
    """Dff131072 on a mesh of batch:16;model:32."""

    D_FF = 131_072


@register
class MeshDff262144(MeshDff4096):
    """Dff262144, 4.90B weights, on the mesh of the paper: batch:16;model:32, 512 devices."""

    D_FF = 262_144


@register
class LstmWord(Dff4096):
    """Word-level LSTM: 2 layers of 8192 units projected to 1024, 793,472 words, sampled softmax.

    Source: Jozefowicz et al. 2016, "Exploring the limits of language modeling", section 3.
    """

    VOCAB_SIZE = 793_472

    def task(self) -> Params:
        """LSTM-8192-1024; training estimates the softmax with 8192 sampled words."""
        model = LstmLm.Params(
            vocab_size=self.VOCAB_SIZE,
            embedding_dim=1024,
            stack=RecurrentStack.Params(
                num_layers=2,
                cell=LstmCell.Params(hidden_dim=8192, projection_dim=1024),
                dropout_rate=0.1,
            ),
            softmax=SampledSoftmax.Params(use_bias=True, num_samples=8192),
            dropout_rate=0.1,
        )
        return LanguageModel.Params(model=model)

    def input(self) -> Params:
        """Words separated by white space; sentences packed into 128 rows of 64."""
        return (
            super()
            .input()
            .set(tokenizer=Words.Params(vocab_size=self.VOCAB_SIZE), length=64, batch_size=128)
        )

    def learner(self) -> Params:
        """Adagrad at 0.2; the gradient of each weight is clipped to norm 1."""
        return Learner.Params(
            optimizer=Adagrad.Params(initial_sum_of_squares=1.0),
            schedule=schedules.Constant.Params(value=0.2),
            clip_tensor_norm=1.0,
        )
