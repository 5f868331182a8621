"""TrainedModel: the task and weights of another run, which a task may use besides its own.

A task cannot open runs. Whoever builds it (`framework/run/assembly.py`) calls `Task.use_trained`
with a function that does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tekso.framework.theta import Theta


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A task with the weights of a checkpoint; nothing trains them further.

    Attributes:
      experiment: key of the experiment that wrote the checkpoint.
      path: of the checkpoint.
      task: the task.
      theta: its weights, those that evaluations use.
      input: the training input, or what is known of it without its data; has the tokenizer.
    """

    experiment: str
    path: str
    task: Any
    theta: Theta
    input: Any


LoadTrained = Callable[[str], TrainedModel]
"""Opens a run or a checkpoint by its path; raises a ValueError or RuntimeError if it cannot."""
