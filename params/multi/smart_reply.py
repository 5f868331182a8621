"""Smart Reply's pair of models over one encoder: whether to reply, and what.

Kannan et al. 2016 (arXiv 1606.04870) reply to e-mails, which are not public. Here the messages are
the signatures of the functions in Python's standard library, and the reply is the first line of a
function's docstring. 44% of the 12,885 messages have a reply. So the data shows how the pair is
trained, not how good replies to e-mails are.
"""

from __future__ import annotations

from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import TaskInputs
from tekso.framework.input.task_mixing import ByWeight
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.text_classifier import TextClassifier
from tekso.params.mt.text_files import transformer
from tekso.params.multi.settings import NarrowExperiment, held_out, pairs_of_bytes, run_of
from tekso.tasks.classification.task import Classification
from tekso.tasks.mt.task import Translation
from tekso.tasks.multi.python_prose import Replies, Triggers
from tekso.tasks.multi.task import MultiTask

ENCODER = {
    "trigger/model/embedding": "reply/model/target_embedding",
    "trigger/model/encoder": "reply/model/encoder",
    "trigger/model/encoder_norm": "reply/model/encoder_norm",
}
"""The encoder of the trigger is that of the reply model."""


@register
class Docstrings(NarrowExperiment):
    """A trigger and a reply decoder over one encoder of 2 layers: signatures and docstrings."""

    def task(self) -> Params:
        """2 + 2 layers of width 128; the trigger adds one linear layer to the encoder."""
        reply = transformer(num_layers=2, dim=128, hidden_dim=512, num_heads=4, dropout_rate=0.1)
        trigger = TextClassifier.Params(dim=128, dropout_rate=0.1, encoder=reply.encoder)
        tasks = {
            "trigger": Classification.Params(model=trigger, num_classes=2),
            "reply": Translation.Params(
                model=reply, decode=["shutil.move(src, dst, copy_function=copy2)"]
            ).set({"scoring.pairs": 200}),
        }
        return MultiTask.Params(tasks=tasks, shared=ENCODER)

    def input(self) -> Params:
        """Every third step trains the trigger with 64 messages, the others 32 replies."""
        reply = pairs_of_bytes(Replies.Params(), length=96, bound=64, batch_size=32)
        return TaskInputs.Params(
            inputs={"trigger": Triggers.Params(batch_size=64), "reply": reply},
            mixing=ByWeight.Params(weights={"trigger": 1.0, "reply": 2.0}),
        )

    def eval_inputs(self) -> dict[str, Params]:
        """Held-out messages."""
        dev = HeldOut.Params(batch_size=64)
        return held_out(trigger=dev, reply=dev.copy())

    def run(self) -> Params:
        """1,500 steps: about 500 of the trigger, 1,000 of the replies."""
        return run_of(1500, "trigger/accuracy", every_steps=500)
