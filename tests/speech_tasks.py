"""Small speech tasks for tests, and what takes the place of a program and a tokenizer."""

from __future__ import annotations

from typing import Any, ClassVar

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.models.ctc_model import CtcModel
from tekso.models.las import Las
from tekso.models.layers.log_mel import LogMel
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.transducer_layers import Joint, PredictionNetwork
from tekso.models.speech_encoder import RecurrentEncoder
from tekso.models.transducer import Transducer
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.las_task import LasTask
from tekso.tasks.asr.sources import AsteriskPrompts
from tekso.tasks.asr.task import CtcTask
from tekso.tasks.asr.transducer_task import TransducerTask


def listening() -> dict[str, Any]:
    """Returns Params of a small model up to its encoder."""
    return {
        "front_end": LogMel.Params(
            sample_rate=8000, num_channels=20, fft_length=256, high_hz=3800.0
        ),
        "encoder": RecurrentEncoder.Params(
            num_filters=4,
            dim=16,
            stack=RecurrentStack.Params(
                num_layers=1, direction="bidirectional", cell=LstmCell.Params(hidden_dim=16)
            ),
        ),
    }


def task_params(**changes: Any) -> Any:
    return CtcTask.Params(model=CtcModel.Params(**listening())).set(changes)


def transducer_params(**changes: Any) -> Any:
    model = Transducer.Params(
        prediction=PredictionNetwork.Params(
            dim=8, stack=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=16))
        ),
        joint=Joint.Params(dim=16),
        **listening(),
    )
    return TransducerTask.Params(model=model).set(changes)


def las_params(**changes: Any) -> Any:
    model = Las.Params(
        embedding_dim=8,
        decoder=RecurrentDecoder.Params(
            num_layers=1, cell=LstmCell.Params(hidden_dim=32), output="state_and_context"
        ),
        **listening(),
    )
    return LasTask.Params(model=model).set(changes)


TASKS = {"ctc": task_params, "transducer": transducer_params, "las": las_params}


STEPS = 120


class Tones(Experiment):
    """Letters spelled as tones."""

    kind: ClassVar[str] = "ctc"

    def task(self) -> Any:
        """A small model."""
        return TASKS[self.kind]()

    def input(self) -> Any:
        """Words of one to six letters."""
        return BucketedSpeech.Params(
            corpus=AsteriskPrompts.Params(),
            sample_rate=8000,
            max_seconds=0.8,
            max_labels=12,
            bounds_s=[0.4],
            batch_size=16,
        )

    def eval_inputs(self) -> Any:
        """Words that are not in the training data."""
        return {"dev": HeldOut.Params()}

    def learner(self) -> Any:
        """Adam."""
        return Learner.Params(
            optimizer=Adam.Params(), schedule=schedules.Linear.Params(initial_value=0.02)
        )

    def run(self) -> Any:
        """Few steps."""
        return Run.Params(steps=STEPS)


class Letters:
    """A tokenizer of the letters a to e, whose end of a text has no id of its own."""

    end_id = 5
    vocab_size = 5
    unused_ids = ()
    token_bytes = (b"a", b"b", b"c", b"d", b"e")

    def decode(self, labels: Any) -> str:
        """Returns the letters."""
        return "".join("abcde"[label] for label in labels)
