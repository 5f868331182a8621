"""Records incidents of training: a folder for the first non-finite step of every series.

    logdir/incidents/step_00000110/    the step after step 110
      README.txt          how to run the step again
      incident.json       number of steps before it, number of the batch, seed, last metrics
      experiment.txt      the Params of the experiment
      batch.npz           the global batch, if it has at most 64 MB
      step_00000110/      a checkpoint of the state before the step, if it has at most 64 MB

A skipped step changes no weight. So the state before it is saved after it, unless a later step has
already been applied. At most 8 folders are kept, the newest ones.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.run.checkpoints import CheckpointError, Checkpoints, Description

DESCRIPTION, BATCH, PARAMS = "incident.json", "batch.npz", "experiment.txt"
MOST = 8
LARGEST_BYTES = 64 << 20

_README = """\
Step {number} (batch {position} of the training input, counted from 0) was skipped: its loss or a
gradient was not finite. The state before it is that of step {step}.

To run it again, layer by layer, on one device:

    tekso-trainer --mode=replay --incident={folder}

{state}
"""


class Incidents:
    """Writes the folders of incidents. An incident that cannot be written is a warning.

    Args:
      folder: folder of all incidents.
      batch_of: returns the global batch with a number.
      warn: called with the text of a warning.

    Attributes:
      last: folder of the last incident of this process; None: there was none.
    """

    def __init__(
        self,
        folder: str,
        *,
        batch_of: Callable[[int], Mapping[str, np.ndarray]],
        warn: Callable[[str], None],
    ) -> None:
        self.folder, self._batch_of, self._warn = folder, batch_of, warn
        self.last: str | None = None

    def record(
        self,
        step: int,
        metrics: Mapping[str, Any],
        description: Description,
        program: ExecutionProgram | None,
    ) -> None:
        """Records an incident.

        Args:
          step: number of steps before the step.
          metrics: figures of the step.
          description: description of the run's checkpoints.
          program: program whose state is the one before the step; None if there is none.
        """
        folder = files.join(self.folder, f"step_{step:08d}")
        try:
            self._make_room(folder)
            self._write(folder, step, metrics, description)
            saved = program is not None and self._save_state(folder, step, description, program)
            state = (
                "The state before the step is saved here."
                if saved
                else "The state is not saved here: the replay uses the run's nearest earlier "
                "checkpoint."
            )
            text = _README.format(
                step=step,
                number=step + 1,
                position=description.position(step),
                folder=folder,
                state=state,
            )
            files.write_atomically(files.join(folder, "README.txt"), text)
            self.last = folder
            self._warn(f"step {step + 1} was not finite and is skipped: see {folder}")
        except (OSError, CheckpointError) as error:
            self._warn(f"cannot write {folder}: {error}")

    def _make_room(self, folder: str) -> None:
        files.make_folder(self.folder)
        there = sorted(name for name in files.names(self.folder) if name.startswith("step_"))
        for name in there[: max(0, len(there) + 1 - MOST)]:
            files.remove_folder(files.join(self.folder, name))
        files.remove_folder(folder)
        files.make_folder(folder)

    def _write(
        self, folder: str, step: int, metrics: Mapping[str, Any], description: Description
    ) -> None:
        position = description.position(step)
        figures = {name: float(value) for name, value in metrics.items()}
        record = {
            "step": step,
            "batch": position,
            "seed": description.input.get("seed", 0),
            "model": description.model,
            "metrics": {n: v if math.isfinite(v) else str(v) for n, v in figures.items()},
        }
        batch: dict[str, Any] = dict(self._batch_of(position))
        if sum(array.nbytes for array in batch.values()) <= LARGEST_BYTES:
            buffer = io.BytesIO()
            np.savez(buffer, **batch)
            files.write_atomically(files.join(folder, BATCH), buffer.getvalue())
        files.write_atomically(files.join(folder, PARAMS), description.params)
        files.write_atomically(files.join(folder, DESCRIPTION), json.dumps(record, indent=1) + "\n")

    def _save_state(
        self, folder: str, step: int, description: Description, program: ExecutionProgram
    ) -> bool:
        if sum(spec.size_bytes for spec in program.specs().values()) > LARGEST_BYTES:
            return False
        checkpoints = Checkpoints(folder, warn=self._warn)
        try:
            checkpoints.save(program.shards, description.at(step, {}))
            checkpoints.wait()
        finally:
            checkpoints.close()
        return True
