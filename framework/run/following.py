"""Console, checkpoints and report of all processes of a run except the first.

The first process of a run claims the logdir, reports, and completes the checkpoints. The others run
every step and evaluation, write their shards of a checkpoint, and read the checkpoint that the
first one restores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints, Description
from tekso.framework.run.pace import Reading
from tekso.framework.run.report.console import Console, Style
from tekso.framework.run.report.report import BEFORE_STEPS, Report, phase
from tekso.framework.run.tensor_files import Piece
from tekso.framework.run.time_use import TimeUse
from tekso.framework.task import Scored


class FollowingConsole:
    """Shows only lines about this process: warnings, and lines of style "good"."""

    def __init__(self, console: Console, process: int) -> None:
        self._console, self._process = console, process

    @property
    def width(self) -> int:
        """Maximum number of columns of a line."""
        return self._console.width

    def line(self, text: str, style: Style = "plain") -> None:
        """Shows the line if it is about this process."""
        if style in ("good", "warning"):
            self._console.line(f"process {self._process}: {text}", style)

    def progress(self, done: int, total: int, doing: str = "") -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Does nothing."""


class FollowingCheckpoints(Checkpoints):
    """Writes the shards of this process; the first process does the rest."""

    def prepare(self) -> None:
        """Does nothing: the first process prepares the folder."""

    def resume(self, known_damage: Mapping[int, str] | None = None) -> Checkpoint | None:
        """Opens the checkpoint that the first process restores; see `Checkpoints`.

        Raises:
          CheckpointError: this process cannot read the checkpoint, or it is damaged.
        """
        step = self._group.from_first(None)
        if step is None:
            return None
        checkpoint = self.open(str(step), unread=True)
        self._saved = step
        return checkpoint

    def _write(
        self, parts: Iterable[Sequence[Piece]], description: Description, size_bytes: int
    ) -> None:
        checkpoint_files.write_shards(
            self.path(description.step),
            parts,
            description,
            size_bytes=size_bytes,
            group=self._group,
        )


class FollowingReport(Report):
    """Reports nothing."""

    def __init__(self) -> None:
        self.time_use = TimeUse()
        self.phase = BEFORE_STEPS

    def continue_from(self, step: int) -> None:
        """Does nothing."""

    def evaluated(self, step: int) -> dict[str, dict[str, float]]:
        """Returns an empty dict: only the first process has reported evaluations."""
        return {}

    def history(self, metric: str, *, since: int = -1) -> list[tuple[int, float | None]]:
        """Returns an empty list, like `evaluated`."""
        return []

    def count(self, units: int, unit: str) -> None:
        """Does nothing."""

    def train(
        self, step: int, values: Mapping[str, float], reading: Reading | None, *, unit: str
    ) -> None:
        """Does nothing."""

    def compiled(self, step: int, what: str, *, seconds: float) -> None:
        """Does nothing."""

    def evaluation(
        self, name: str, step: int, values: Mapping[str, float], *, seconds: float, is_best: bool
    ) -> None:
        """Does nothing."""

    def scored(self, name: str, step: int, scored: Scored) -> None:
        """Does nothing."""

    def weights(
        self, step: int, values: Mapping[str, float], layers: Mapping[str, np.ndarray]
    ) -> None:
        """Does nothing."""

    def warn(self, text: str) -> None:
        """Does nothing."""

    def progress(self, step: int, doing: str = "") -> None:
        """Shows nothing."""
        self.phase = phase(step, doing)

    def draw_curves_if_old(self) -> None:
        """Does nothing."""

    def draw_curves(self, *, references: Mapping[str, float] | None = None) -> None:
        """Does nothing."""

    def sync(self, step: int) -> None:
        """Does nothing."""

    def finish(self, step: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
