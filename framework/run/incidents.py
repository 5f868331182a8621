"""Records and reads incidents: a folder for the first non-finite step of every series.

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

import dataclasses
import io
import json
import math
import shlex
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework import bounded, files
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.run.checkpoints import CheckpointError, Checkpoints, Description

DESCRIPTION, BATCH, PARAMS = "incident.json", "batch.npz", "experiment.txt"
MOST = 8
LARGEST_BYTES = 64 << 20
_HEADER_BYTES = 1 << 14  # at most, of an array in a batch

_README = """\
Step {number} (batch {position} of the training input, counted from 0) was skipped: its loss or a
gradient was not finite. The state before it is that of step {step}.

To run it again, layer by layer, on one device:

    {command}

{state}
"""


def replay_command(folder: str, imports: Sequence[str] = ()) -> str:
    """Returns the command that replays an incident.

    Args:
      folder: folder of the incident.
      imports: packages of the user that the experiment needs.
    """
    packages = [f"--import={name}" for name in imports]
    return shlex.join(["tekso-trainer", *packages, "--mode=replay", f"--incident={folder}"])


class IncidentError(ValueError):
    """An incident cannot be replayed."""


@dataclasses.dataclass(frozen=True)
class Incident:
    """What is known of a skipped step.

    Attributes:
      step: number of steps before it.
      seed: seed of the run.
      position: number of its batch.
    """

    step: int
    seed: int
    position: int


def read(folder: str) -> Incident:
    """Returns the incident of a folder.

    Raises:
      IncidentError: it is not the folder of an incident, or its description is damaged.
    """
    try:
        stored = bounded.read_json(files.join(folder, DESCRIPTION))
        values = {name: stored[name] for name in ("step", "seed", "batch")}
        for name, value in values.items():
            if type(value) is not int:
                raise ValueError(f"{name} is not an integer in {DESCRIPTION}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{DESCRIPTION} has no {error}" if isinstance(error, KeyError) else str(error)
        raise IncidentError(
            f"--incident={folder} is not the folder of an incident ({reason}): give a folder "
            "incidents/step_… of a logdir"
        ) from error
    return Incident(values["step"], values["seed"], values["batch"])


def read_batch(folder: str) -> dict[str, np.ndarray] | None:
    """Returns the batch that is stored in the folder of an incident; None if there is none.

    Raises:
      IncidentError: the file is damaged, or has more data than `Incidents` writes.
    """
    path = files.join(folder, BATCH)
    if not files.exists(path):
        return None
    try:
        with files.open(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            size_bytes = sum(member.file_size for member in members)
            if size_bytes > LARGEST_BYTES + _HEADER_BYTES * len(members):
                raise ValueError(f"it has {size_bytes:,} bytes, at most {LARGEST_BYTES:,} are read")
            return {m.filename.removesuffix(".npy"): _array(archive.read(m)) for m in members}
    except Exception as error:  # zipfile and NumPy raise errors of several classes
        raise IncidentError(
            f"{path} cannot be read: {error}. Remove it, and the training input builds the batch "
            "again"
        ) from error


def _array(data: bytes) -> np.ndarray:
    """Returns the array in the bytes of an .npy file, without Python objects.

    Raises:
      ValueError: it is damaged; or its shape needs more bytes than there are, which `np.load`
        would allocate.
    """
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }[version]
    shape, _, dtype = read_header(stream)
    size_bytes, there = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if size_bytes != there:
        raise ValueError(f"an array of {size_bytes:,} bytes has {there:,}")
    found: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    return found


def first_not_finite(batch: Mapping[str, np.ndarray]) -> tuple[str, int] | None:
    """Returns the first array with a number that is not finite, and its first such example."""
    for name, array in batch.items():
        if array.dtype.kind in "fc" and not (is_finite := np.isfinite(array)).all():
            return name, int(np.argwhere(~is_finite)[0][0])
    return None


class Incidents:
    """Writes the folders of incidents. An incident that cannot be written is a warning.

    Args:
      folder: folder of all incidents.
      batch_of: returns the global batch with a number.
      warn: called with the text of a warning.
      imports: packages of the user that the experiment needs.
      named: adds indices of the data to a text about an example of the training input.

    Attributes:
      last: folder of the last incident of this process; None: there was none.
      imports: the packages.
    """

    def __init__(
        self,
        folder: str,
        *,
        batch_of: Callable[[int], Mapping[str, np.ndarray]],
        warn: Callable[[str], None],
        imports: Sequence[str] = (),
        named: Callable[[str], str] = str,
    ) -> None:
        self.folder, self._batch_of, self._warn = folder, batch_of, warn
        self.imports, self._named = tuple(imports), named
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
            cause = self._write(folder, step, metrics, description)
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
                command=replay_command(folder, self.imports),
                state=state,
            )
            files.write_atomically(files.join(folder, "README.txt"), text)
            self.last = folder
            self._warn(f"step {step + 1} was not finite and is skipped: {cause}see {folder}")
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
    ) -> str:
        """Writes what is known of a step; returns what in its batch was not finite, or ""."""
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
        if (found := first_not_finite(batch)) is None:
            return ""
        name, example = found
        what = f"{name!r} (example {example} of input.batch({position}))"
        return self._named(f"{what} has a number that is not finite; ")

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
