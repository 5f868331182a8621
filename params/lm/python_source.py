"""Language models of Python source: the standard library of the running interpreter."""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import RotaryPositions
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.expert_routing import SwitchRouter
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.mixture_of_experts import MixtureOfExperts
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.lstm_lm import LstmLm
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.decode import TextDecoder
from tekso.tasks.lm.input import TextStream
from tekso.tasks.lm.python_source import PythonSource
from tekso.tasks.lm.task import LanguageModel


@register
class Tiny(Experiment):
    """Byte-level Transformer of 4 layers and width 128; the default experiment of `make train`."""

    def task(self) -> Params:
        """A Transformer with rotary positions, RMSNorm and squared ReLU, without biases."""
        layer = TransformerLayer.Params(
            norm=RMSNorm.Params(),
            attention=MultiHeadAttention.Params(
                num_heads=4, mask="causal", positions=RotaryPositions.Params(), use_bias=False
            ),
            feed_forward=FeedForward.Params(
                hidden_dim=512, activation="squared_relu", use_bias=False
            ),
        )
        model = TransformerLm.Params(
            dim=128,
            embedding=Embedding.Params(),
            positions=None,
            stack=Stack.Params(num_layers=4, layer=layer),
            final_norm=RMSNorm.Params(),
            softmax=Softmax.Params(),
        )
        decode = TextDecoder.Params(
            prompts=["def ", "class ", "import "], max_new_tokens=384, temperature=0.8, top_p=0.95
        )
        return LanguageModel.Params(model=model, decode=decode)

    def input(self) -> Params:
        """Bytes of the standard library's training files."""
        return TextStream.Params(corpus=PythonSource.Params(), length=128, batch_size=16)

    def eval_inputs(self) -> dict[str, Params]:
        """All files held out for development."""
        return {"dev": HeldOut.Params(split="dev", batch_size=64)}

    def learner(self) -> Params:
        """AdamW; the learning rate rises, then falls to zero at the end of the run."""
        return Learner.Params(
            optimizer=AdamW.Params(beta2=0.99, weight_decay=0.1, weight_decay_exclude=[".*/scale"]),
            schedule=schedules.Linear.Params(initial_value=0.003, warmup_steps=100),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """1,500 steps."""
        return Run.Params(steps=1500, eval_every_steps=500, checkpoint_every_steps=500)


@register
class TinyMesh(Tiny):
    """Tiny on a mesh of 2 x 4 devices; `--cpu_devices=8` creates them on any machine."""

    def execution(self) -> Params:
        """The batch over "data"; feed-forward units, heads and vocabulary over "model"."""
        return MeshSharded.Params(
            mesh="data:2;model:4", rules="batch:data;mlp:model;heads:model;vocab:model"
        )


@register
class TinyPipeline(Tiny):
    """Tiny as a pipeline of 4 devices, logical ones on a CPU; 8 micro-batches of 2 examples."""

    def execution(self) -> Params:
        """One layer on each device, the embedding on the first, the loss on the last."""
        return Pipelined.Params(num_stages=4, num_micro_batches=8, schedule="1f1b")


@register
class TinyMeshPipeline(Tiny):
    """Tiny as a pipeline of 2 stages, each a mesh of 2 devices; 8 micro-batches of 2 examples."""

    def execution(self) -> Params:
        """Two layers per stage; feed-forward units, heads and vocabulary over its devices."""
        return Pipelined.Params(
            num_stages=2,
            num_micro_batches=8,
            stages_on=StagesOnMesh.Params(mesh="model:2", rules="tensor"),
        )


@register
class TinySpmdPipeline(Tiny):
    """Tiny with a repeated stack, as one program of 2 stages; 4 micro-batches of 4 examples."""

    def task(self) -> Params:
        """The same layers, with stacked weights."""
        params = super().task()
        layer = params.get("model.stack.layer")
        return params.set({"model.stack": RepeatedStack.Params(num_layers=4, layer=layer)})

    def execution(self) -> Params:
        """Two layers per stage; all stages store and compute embedding and softmax."""
        return SpmdPipelined.Params(num_stages=2, num_micro_batches=4, rematerialize="all")


@register
class TinyMoe(Tiny):
    """Tiny with 8 experts in every second layer, each byte routed to one: 2.7M weights."""

    def task(self) -> Params:
        """Switch Transformer: each expert has the size of the feed-forward layer it replaces."""
        params = super().task()
        dense = params.get("model.stack.layer")
        experts = MixtureOfExperts.Params(
            num_experts=8,
            hidden_dim=512,
            activation="squared_relu",
            use_bias=False,
            router=SwitchRouter.Params(z_weight=0.001),
        )
        sparse = dense.copy().set(feed_forward=experts)
        layers = [dense, sparse, dense, sparse]
        return params.set({"model.stack.layer": None, "model.stack.layers": layers})

    def run(self) -> Params:
        """1,000 steps."""
        return super().run().set(steps=1000)


@register
class TinyLstm(Tiny):
    """Byte-level LSTM of 2 layers of 256 units: 1.0M weights."""

    def task(self) -> Params:
        """Byte embeddings of width 128; the state is 0 at the start of every example."""
        model = LstmLm.Params(
            embedding_dim=128,
            stack=RecurrentStack.Params(num_layers=2, cell=LstmCell.Params(hidden_dim=256)),
        )
        return super().task().set(model=model)

    def learner(self) -> Params:
        """Weight decay on all weights except biases."""
        return super().learner().set({"optimizer.weight_decay_exclude": [".*/b"]})

    def run(self) -> Params:
        """1,000 steps."""
        return super().run().set(steps=1000)


@register
class Small(Tiny):
    """Sub-word Transformer of 4 layers and width 256; its 8,192 pieces are learned on first use."""

    def task(self) -> Params:
        """Twice as wide, with the softmax tied to the embedding."""
        params = super().task()
        return params.set(
            {
                "model.dim": 256,
                "model.stack.layer.feed_forward.hidden_dim": 1024,
                "model.softmax": None,
                "decode.max_new_tokens": 192,
            }
        )

    def input(self) -> Params:
        """SentencePiece tokens of the standard library's training files."""
        return super().input().set(tokenizer=SentencePiece.Params(vocab_size=8192))

    def learner(self) -> Params:
        """A lower learning rate for the wider model."""
        return super().learner().set({"schedule.initial_value": 0.002})

    def run(self) -> Params:
        """4,000 steps: about one pass over the text."""
        return super().run().set(steps=4000)
