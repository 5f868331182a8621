"""A language model so small that a process spends most of its time on starting."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.experiment import Run
from tekso.framework.input.input import Batch
from tekso.framework.params import Params, param
from tekso.framework.registry import register
from tekso.framework.task import Decoded
from tekso.framework.theta import flatten
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import RepeatedStack
from tekso.params.lm.python_source import Tiny
from tekso.tasks.lm.synthetic import SyntheticTokens
from tekso.tasks.lm.task import LanguageModel

VOCAB, LENGTH = 24, 6


def size_of_weights(theta: Any, ctx: Any) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(tf.square(weight)) for weight in flatten(theta).values()])


class Measured(LanguageModel):
    """Decodes to the size of all weights: a text that depends on every bit of a run."""

    class Params(LanguageModel.Params):
        pass

    def decode(self, program: Any, input: Any) -> Decoded:
        size = float(program.call(size_of_weights))
        return Decoded(f"the squares of all weights sum to {size.hex()}", [{"size": size}])


class Block(FeedForward):
    """x + feed_forward(x), without attention, which takes most of the time of a trace."""

    class Params(FeedForward.Params):
        pass

    def fprop(
        self, theta: Any, x: tf.Tensor, ctx: Any, *, mask: Any = None, positions: Any = None
    ) -> tf.Tensor:
        return x + super().fprop(theta, x, ctx)


@register
class Small(Tiny):
    """Random tokens, dropout, 2 feed-forward layers of width 16."""

    def task(self) -> Params:
        layer = Block.Params(input_dim=16, hidden_dim=40, dropout_rate=0.1)
        params = Measured.Params(model=super().task().model)
        return params.set(
            {
                "model.vocab_size": VOCAB,
                "model.dim": 16,
                "model.stack": RepeatedStack.Params(layer=layer, num_layers=2),
            }
        )

    def input(self) -> Params:
        return SyntheticTokens.Params(vocab_size=VOCAB, length=LENGTH, batch_size=4)

    def eval_inputs(self) -> dict[str, Params]:
        dev = SyntheticTokens.Params(
            vocab_size=VOCAB,
            length=LENGTH,
            batch_size=4,
            num_tokens=60,
            split="dev",
            order="once",
        )
        return {"dev": dev}

    def run(self) -> Params:
        return Run.Params(
            steps=12,
            log_every_steps=1,
            eval_every_steps=5,
            checkpoint_every_steps=2,
            deterministic=True,
            decode_at_end=True,
        )


class PoisonedTokens(SyntheticTokens):
    """Tokens of which some batches have a loss that overflows."""

    class Params(SyntheticTokens.Params):
        bad: list[int] = param("Numbers of batches whose loss overflows.", default=[])
        left_out: list[int] = param("Numbers of batches that are not there.", default=[])

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        for number in sorted(self.params.left_out):
            step += number <= step
        batch = super().batch_rows(step, begin, end)
        if step in self.params.bad:
            batch["weights"] = batch["weights"] * np.float32(3e38)
        return batch


@register
class Poisoned(Small):
    """Small, with batches whose loss overflows; three in a row are rolled back, twice at most."""

    def input(self) -> Params:
        return PoisonedTokens.Params(vocab_size=VOCAB, length=LENGTH, batch_size=4)

    def learner(self) -> Params:
        return super().learner().set(max_consecutive_nonfinite_steps=3, max_rollbacks=2)


class HungryTokens(SyntheticTokens):
    """Tokens of which some batches make the task allocate a large tensor."""

    class Params(SyntheticTokens.Params):
        hungry: list[int] = param("Numbers of batches that have only the last id.", default=[])

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        batch = super().batch_rows(step, begin, end)
        if step in self.params.hungry:
            batch["ids"] = np.full_like(batch["ids"], VOCAB - 1)
        return batch


class HungryModel(Measured):
    """Needs memory for `num_zeros` floats in the loss of a hungry batch, and for decoding."""

    class Params(Measured.Params):
        num_zeros: int = param("Number of floats.", default=250_000_000)

    def nats(self, theta: Any, batch: Any, ctx: Any, label_smoothing: float) -> tf.Tensor:
        above = VOCAB - 1 - tf.reduce_min(batch["ids"])  # 0 if hungry
        # Of a constant zero, TensorFlow would compute the sum without the tensor.
        zeros = tf.fill(
            [tf.where(above == 0, self.params.num_zeros, 0)], tf.cast(above, tf.float32)
        )
        return super().nats(theta, batch, ctx, label_smoothing) + tf.reduce_sum(zeros)

    def decode(self, program: Any, input: Any) -> Decoded:
        decoded = super().decode(program, input)
        size = decoded.records[0]["size"]  # 0 if decoding is only tried
        np.zeros(self.params.num_zeros * (size > 0), np.float32)
        return decoded


@register
class Hungry(Small):
    """Small, whose ninth step, last evaluation and decoding need much memory."""

    def task(self) -> Params:
        return HungryModel.Params(model=super().task().model)

    def input(self) -> Params:
        return HungryTokens.Params(vocab_size=VOCAB, length=LENGTH, batch_size=4, hungry=[8])
