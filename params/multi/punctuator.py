"""A punctuator, which shares its encoder with a translation model.

The punctuator restores marks and capital letters in English sentences from the docstrings of
Python's standard library (7,712 sentences). Translation of CLDR phrases has far more data; the
decoders are separate.
"""

from __future__ import annotations

from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import TaskInputs
from tekso.framework.input.task_mixing import ByTemperature
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.framework.task import Task
from tekso.params.mt.text_files import transformer
from tekso.params.multi.settings import NarrowExperiment, held_out, pairs_of_bytes, run_of
from tekso.tasks.mt.cldr import Cldr
from tekso.tasks.mt.task import Translation
from tekso.tasks.multi.python_prose import Punctuation
from tekso.tasks.multi.task import MultiTask


@register
class WithTranslation(NarrowExperiment):
    """A punctuator and English to German: one encoder of 2 layers, two decoders of 2 layers."""

    def task(self) -> Params:
        """The tables of bytes and the encoders have the same weights."""
        model = transformer(num_layers=2, dim=128, hidden_dim=512, num_heads=4, dropout_rate=0.1)
        texts = {
            "punctuate": "this method should not be called directly but it may be overridden",
            "mt": "October 3, 2021 to May 4, 2022",
        }
        tasks: dict[str, Task.Params] = {
            name: Translation.Params(model=model, decode=[text]).set({"scoring.pairs": 200})
            for name, text in texts.items()
        }
        parts = ("target_embedding", "encoder", "encoder_norm")
        shared = {f"mt/model/{part}": f"punctuate/model/{part}" for part in parts}
        return MultiTask.Params(tasks=tasks, shared=shared)

    def input(self) -> Params:
        """The temperature gives the punctuator 37% of the steps; by data it would have 7%."""
        pairs = pairs_of_bytes(Punctuation.Params(), length=128, bound=64)
        phrases = pairs.copy().set(
            corpus=Cldr.Params(locales=["de"]), source_length=96, target_length=96, bounds=[32]
        )
        return TaskInputs.Params(
            inputs={"punctuate": pairs, "mt": phrases},
            mixing=ByTemperature.Params(temperature=5.0),
        )

    def eval_inputs(self) -> dict[str, Params]:
        """Held-out sentences and phrases."""
        dev = HeldOut.Params(batch_size=64)
        return held_out(punctuate=dev, mt=dev.copy())

    def run(self) -> Params:
        """2,000 steps."""
        return run_of(2000, "punctuate/chrf")
