"""Language models of any text: `--set input.files='texts/*.txt'`.

The last tenth of every file is held out for evaluation, unless `input.corpus.dev_files` is set.
"""

from __future__ import annotations

import math

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.initializers import Normal
from tekso.framework.input.characters import Characters
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.text_files import TextFiles
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import LayerNorm
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm
from tekso.params.lm import python_source
from tekso.tasks.lm.decode import TextDecoder
from tekso.tasks.lm.input import TextStream
from tekso.tasks.lm.task import LanguageModel


def samples(max_new_tokens: int = 384) -> TextDecoder.Params:
    """Returns Params that continue the beginnings of three training examples."""
    return TextDecoder.Params(
        num_samples=3, max_new_tokens=max_new_tokens, temperature=0.8, top_p=0.95
    )


@register
class Char(Experiment):
    """Small character-level GPT: 4 layers, 4 heads, width 128, 64 characters of context.

    Size and settings follow nanoGPT's recipe for a CPU, which its README reports to reach 1.88 nats
    per character on Tiny Shakespeare.

    Source: Karpathy, nanoGPT, README, "I only have a macbook"; Radford et al. 2019 (GPT-2).
    """

    def task(self) -> Params:
        """GPT-2: learned positions, pre-norm, GELU, tied embedding; but without biases."""
        num_layers = 4
        init = Normal.Params(stddev=0.02)
        into_residual = Normal.Params(stddev=0.02 / math.sqrt(2 * num_layers))
        norm = LayerNorm.Params(use_bias=False, epsilon=1e-5)
        layer = TransformerLayer.Params(
            norm=norm,
            attention=MultiHeadAttention.Params(
                num_heads=4, mask="causal", use_bias=False, init=init, output_init=into_residual
            ),
            feed_forward=FeedForward.Params(
                hidden_dim=512,
                activation="gelu",
                use_bias=False,
                init=init,
                output_init=into_residual,
            ),
        )
        model = TransformerLm.Params(
            dim=128,
            embedding=Embedding.Params(init=init),
            positions=LearnedPositions.Params(init=init),  # as many as the input's length
            stack=Stack.Params(num_layers=num_layers, layer=layer),
            final_norm=norm,
        )
        return LanguageModel.Params(model=model, decode=samples())

    def input(self) -> Params:
        """Characters of the given files."""
        return TextStream.Params(
            corpus=TextFiles.Params(), tokenizer=Characters.Params(), length=64, batch_size=12
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All held-out text."""
        return {"dev": HeldOut.Params(split="dev", batch_size=64)}

    def learner(self) -> Params:
        """AdamW, cosine from 1e-3 to a tenth of it."""
        return Learner.Params(
            optimizer=AdamW.Params(beta2=0.99, weight_decay=0.1, weight_decay_exclude=[".*/scale"]),
            schedule=schedules.Cosine.Params(
                initial_value=1e-3, final_value=1e-4, warmup_steps=100
            ),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """2,000 steps, evaluated every 250."""
        return Run.Params(steps=2000, eval_every_steps=250, checkpoint_every_steps=500)


@register
class Bytes(python_source.Tiny):
    """Byte-level Transformer of 4 layers and width 128, as `lm.python_source.Tiny`."""

    def task(self) -> Params:
        """The same model; samples continue training examples."""
        return super().task().set(decode=samples())

    def input(self) -> Params:
        """Bytes of the given files."""
        return super().input().set(corpus=TextFiles.Params())


@register
class SentencePiece(python_source.Small):
    """Sub-word Transformer of 4 layers and width 256, as `lm.python_source.Small`."""

    def task(self) -> Params:
        """The same model; samples continue training examples."""
        return super().task().set(decode=samples(max_new_tokens=192))

    def input(self) -> Params:
        """SentencePiece tokens of the given files; the pieces are learned from them."""
        return super().input().set(corpus=TextFiles.Params())
