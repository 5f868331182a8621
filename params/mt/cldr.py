"""Translation of phrases generated from CLDR, from English to other languages, without a download.

The phrases are dates, times, intervals, numbers, amounts of money, units and lists of names. No
held-out English text is in the training data.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.lstm_encoder_decoder import LstmEncoderDecoder
from tekso.params.mt.text_files import transformer
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.cldr import LOCALES, Cldr
from tekso.tasks.mt.task import Translation


@register
class EnDe(Experiment):
    """English to German by a Transformer of 3 + 3 layers of width 128."""

    def task(self) -> Params:
        """One table for both languages; evaluation adds a nearest-neighbour baseline."""
        model = transformer(num_layers=3, dim=128, hidden_dim=512, num_heads=4, dropout_rate=0.1)
        return Translation.Params(model=model, label_smoothing=0.1).set({"scoring.nearest": 500})

    def input(self) -> Params:
        """100,000 pairs, pieces learned from both sides, 2,048 tokens per side in a batch."""
        return BucketedPairs.Params(
            corpus=Cldr.Params(locales=["de"]),
            tokenizer=SentencePiece.Params(vocab_size=2000),
            source_length=64,
            target_length=64,
            bounds=[16, 32],
            fill="tokens",
            batch_size=32,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """About 2,000 pairs whose English text is not in the training data."""
        return {"dev": HeldOut.Params(split="dev", batch_size=128)}

    def learner(self) -> Params:
        """Adam; the learning rate rises, then falls to zero at the end of the run."""
        return Learner.Params(
            optimizer=Adam.Params(beta2=0.98),
            schedule=schedules.Linear.Params(initial_value=0.003, warmup_steps=300),
            clip_global_norm=1.0,
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so narrow a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """2,000 steps."""
        return Run.Params(
            steps=2000,
            eval_every_steps=1000,
            checkpoint_every_steps=500,
            keep_best=KeepBest.Params(metric="bleu"),
        )


@register
class EnDeLstm(EnDe):
    """English to German by LSTMs with attention: 2 + 2 layers of 256 units."""

    def task(self) -> Params:
        """Bidirectional first layer of the encoder; additive attention; input feeding."""
        model = LstmEncoderDecoder.Params(dim=256, dropout_rate=0.2)
        return super().task().set(model=model)


@register
class Many(EnDe):
    """English to 100 languages by one model; a token before the source selects the language."""

    def task(self) -> Params:
        """The Transformer of EnDe at twice the width."""
        model = transformer(num_layers=3, dim=256, hidden_dim=1024, num_heads=4, dropout_rate=0.1)
        by_letter = dict.fromkeys(("ja", "km", "lo", "my", "th", "zh"), "char")  # no spaces
        return (
            super()
            .task()
            .set(
                {
                    "model": model,
                    "scoring.nearest": 0,
                    "scoring.pairs": 2000,
                    "scoring.scorer.tokenizers": by_letter,
                }
            )
        )

    def input(self) -> Params:
        """4,000 pairs per language; 8,000 pieces for all writing systems."""
        return (
            super()
            .input()
            .set(
                {
                    "corpus.locales": list(LOCALES[:100]),
                    "corpus.num_pairs": 4000,
                    "tokenizer.vocab_size": 8000,
                    "source_length": 96,
                    "target_length": 96,
                    "temperature": 2.0,
                }
            )
        )

    def run(self) -> Params:
        """10,000 steps."""
        return super().run().set(steps=10_000, eval_every_steps=2500)
