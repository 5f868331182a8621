"""One Transformer for two tasks: translation of CLDR phrases, and language modelling of Python.

The translation model is a prefix language model, so that both tasks have the same parts. Both read
bytes. All of embedding, stack, norm and softmax is shared: 0.85 million weights instead of 1.7.
"""

from __future__ import annotations

from typing import Any

from tekso.framework import schedules
from tekso.framework.experiment import KeepBest
from tekso.framework.gradient_combination import GradDrop, PCGrad
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import TaskInputs
from tekso.framework.input.task_mixing import ByTemperature, ByWeight
from tekso.framework.learner import Learner, MultiLearner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import RotaryPositions
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.lora import Lora
from tekso.models.layers.normalization import RMSNorm
from tekso.models.layers.residual_adapter import AdaptedTransformerLayer, ResidualAdapter
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.prefix_lm import PrefixLm
from tekso.models.transformer_lm import TransformerLm
from tekso.params.multi.settings import NarrowExperiment, held_out, pairs_of_bytes, run_of
from tekso.tasks.lm.decode import TextDecoder
from tekso.tasks.lm.input import TextStream
from tekso.tasks.lm.python_source import PythonSource
from tekso.tasks.lm.task import LanguageModel
from tekso.tasks.mt.cldr import Cldr
from tekso.tasks.mt.task import Translation
from tekso.tasks.multi.task import MultiTask

ALL = {f"mt/model/{part}": f"lm/model/{part}" for part in (
    "embedding", "stack", "final_norm", "softmax"
)}  # fmt: skip
"""What translation shares with the language model: everything."""


@register
class Shared(NarrowExperiment):
    """English to German and Python source by one Transformer of 4 layers of width 128."""

    def layer(self) -> TransformerLayer.Params:
        """A layer with rotary positions, RMSNorm and squared ReLU, without biases."""
        return TransformerLayer.Params(
            norm=RMSNorm.Params(),
            attention=MultiHeadAttention.Params(
                num_heads=4, mask="causal", positions=RotaryPositions.Params(), use_bias=False
            ),
            feed_forward=FeedForward.Params(
                hidden_dim=512, activation="squared_relu", use_bias=False
            ),
        )

    def task(self) -> Params:
        """A language model and a prefix language model with the same weights."""
        parts: dict[str, Any] = {
            "dim": 128,
            "embedding": Embedding.Params(),
            "positions": None,
            "stack": Stack.Params(num_layers=4, layer=self.layer()),
            "final_norm": RMSNorm.Params(),
            "softmax": Softmax.Params(),
        }
        decode = TextDecoder.Params(prompts=["def ", "class "], max_new_tokens=128, top_p=0.95)
        lm = LanguageModel.Params(model=TransformerLm.Params(**parts), decode=decode)
        mt = Translation.Params(
            model=PrefixLm.Params(**parts),
            decode=["October 3, 2021 to May 4, 2022"],
        ).set({"scoring.pairs": 500})
        return MultiTask.Params(tasks={"lm": lm, "mt": mt}, shared=ALL)

    def input(self) -> Params:
        """A step trains one task: 2,048 bytes of Python, or about 2,048 bytes on each side."""
        lm = TextStream.Params(corpus=PythonSource.Params(), length=128, batch_size=16)
        mt = pairs_of_bytes(Cldr.Params(locales=["de"]), length=96, bound=32)
        return TaskInputs.Params(inputs={"lm": lm, "mt": mt}, mixing=ByWeight.Params())

    def eval_inputs(self) -> dict[str, Params]:
        """Held-out files, and pairs whose English text is not in the training data."""
        lm = HeldOut.Params(batch_size=64, max_batches=40)
        mt = HeldOut.Params(batch_size=64)
        return held_out(lm=lm, mt=mt)

    def learner(self) -> Params:
        """AdamW; the learning rate rises, then falls to zero at the end of the run."""
        return Learner.Params(
            optimizer=AdamW.Params(beta2=0.99, weight_decay=0.1, weight_decay_exclude=[".*/scale"]),
            schedule=schedules.Linear.Params(initial_value=0.003, warmup_steps=100),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """1,500 steps, about 750 of each task."""
        return run_of(1500, "mt/bleu")


@register
class Lm(Shared):
    """The language model of Shared alone, for as many of its own steps: the first task."""

    def task(self) -> Params:
        """The language model."""
        params = super().task()
        return MultiTask.Params(tasks={"lm": params.get("tasks.lm")})

    def input(self) -> Params:
        """Python only."""
        params = super().input()
        return params.set(inputs={"lm": params.get("inputs.lm")})

    def eval_inputs(self) -> dict[str, Params]:
        """Held-out files."""
        return {"lm_dev": super().eval_inputs()["lm_dev"]}

    def run(self) -> Params:
        """750 steps."""
        return super().run().set(steps=750, keep_best=KeepBest.Params(metric="lm/loss"))


@register
class Mt(Shared):
    """The translation model of Shared alone, for as many of its own steps."""

    def task(self) -> Params:
        """The prefix language model."""
        params = super().task()
        return MultiTask.Params(tasks={"mt": params.get("tasks.mt")})

    def input(self) -> Params:
        """CLDR only."""
        params = super().input()
        return params.set(inputs={"mt": params.get("inputs.mt")})

    def eval_inputs(self) -> dict[str, Params]:
        """Held-out pairs."""
        return {"mt_dev": super().eval_inputs()["mt_dev"]}

    def run(self) -> Params:
        """750 steps."""
        return super().run().set(steps=750)


@register
class ByData(Shared):
    """Shared, mixed by the amount of data of the tasks at temperature 5."""

    def input(self) -> Params:
        """P proportional to n ** (1 / 5)."""
        return super().input().set(mixing=ByTemperature.Params(temperature=5.0))


@register
class PcGrad(Shared):
    """Both tasks in every step; PCGrad removes conflicts between their gradients."""

    def task(self) -> Params:
        """PCGrad for all weights, as all are shared."""
        return super().task().set(gradients=PCGrad.Params())

    def input(self) -> Params:
        """16 examples of each task in a step: 128 bytes of Python, and pairs of up to 96 bytes."""
        pairs = {"inputs.mt.bounds": [], "inputs.mt.fill": "examples"}
        return super().input().set({"unit": "all_tasks", **pairs})

    def run(self) -> Params:
        """750 steps, each of both tasks."""
        return super().run().set(steps=750)


@register
class GradSign(PcGrad):
    """Both tasks in every step; GradDrop keeps the gradients of one sign of every element."""

    def task(self) -> Params:
        """GradDrop for all weights, as all are shared."""
        return super().task().set(gradients=GradDrop.Params())


@register
class Adapters(Shared):
    """Shared, with residual adapters of width 16 of each task after every layer."""

    def layer(self) -> TransformerLayer.Params:
        """The layer of Shared, followed by an adapter."""
        plain = super().layer()
        return AdaptedTransformerLayer.Params(
            norm=plain.norm,
            attention=plain.attention,
            feed_forward=plain.feed_forward,
            residual_adapter=ResidualAdapter.Params(hidden_dim=16),
        )

    def task(self) -> Params:
        """The adapters are the own weights of the tasks."""
        return super().task().set(own=[".*/residual_adapter/.*"])

    def learner(self) -> Params:
        """One learner for the shared weights, and one with a higher rate for the adapters."""
        learner: Any = super().learner()
        return MultiLearner.Params(
            patterns={"shared": "(?!.*/residual_adapter/).*", "adapters": ".*/residual_adapter/.*"},
            learners={
                "shared": learner,
                "adapters": learner.copy().set({"schedule.initial_value": 0.006}),
            },
        )


@register
class LoraByTask(Shared):
    """Shared, with a low-rank update (LoRA) of each task for the matrices of the attention."""

    def layer(self) -> TransformerLayer.Params:
        """The layer of Shared, whose attention has updates of rank 4."""
        return super().layer().set({"attention.adapter": Lora.Params(rank=4)})

    def task(self) -> Params:
        """The updates are the own weights of the tasks."""
        return super().task().set(own=[".*_lora_[ab]"])
