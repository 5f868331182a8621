"""Recognition of acted dialogue: the game Fish Fillets in Dutch and Czech, divided by level.

The folder is that of the unpacked Debian packages, in TEKSO_FILLETS; see `FilletsDialogues`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tekso.framework.input.held_out import HeldOut
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.ctc_model import CtcModel
from tekso.models.layers.log_mel import LogMel
from tekso.params.asr import prompts
from tekso.tasks.asr.fillets import FilletsDialogues
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.joined_speech import JoinedSpeech
from tekso.tasks.asr.task import CtcTask
from tekso.tasks.asr.utterances import AnySpeech

SAMPLE_RATE = 16_000


@register
class Dutch(prompts.Ctc):
    """Characters by CTC, from 68 minutes of several actors; the model of asr.prompts.Ctc."""

    language: ClassVar[str] = "nl"

    def task(self) -> Params:
        """40 mel channels up to 7,600 Hz."""
        front_end = LogMel.Params(sample_rate=SAMPLE_RATE, num_channels=40)
        return CtcTask.Params(
            model=CtcModel.Params(**{**prompts.listening(), "front_end": front_end})
        )

    def input(self) -> Params:
        """Utterances up to 10 seconds; batches of about 80 seconds."""
        return BucketedSpeech.Params(
            corpus=self.corpus(),
            sample_rate=SAMPLE_RATE,
            max_seconds=10.0,
            max_labels=240,
            bounds_s=[2.0, 3.5, 6.0],
            batch_size=8,
            fill="seconds",
        )

    def corpus(self) -> AnySpeech.Params:
        """Returns the dialogues of one language."""
        return FilletsDialogues.Params(language=self.language)

    def run(self) -> Params:
        """4,000 steps."""
        return super().run().set(steps=4000, eval_every_steps=1000, checkpoint_every_steps=1000)


@register
class Czech(Dutch):
    """The same in Czech: 69 minutes."""

    language = "cs"


@register
class DutchAndCzech(Dutch):
    """Both languages by one model, without a language token; dev is also evaluated by language."""

    def corpus(self) -> AnySpeech.Params:
        """Returns the dialogues of both languages."""
        return JoinedSpeech.Params(sources=[_of("nl"), _of("cs")])

    def eval_inputs(self) -> dict[str, Params]:
        """Both together, and each language."""
        found: dict[str, Any] = {"dev": HeldOut.Params(split="dev")}
        for name, language in (("dutch", "nl"), ("czech", "cs")):
            changes = {"corpus.sources": [_of(language)]}
            found[f"dev_{name}"] = HeldOut.Params(split="dev", changes=changes)
        return found


def _of(language: str) -> FilletsDialogues.Params:
    return FilletsDialogues.Params(language=language)
