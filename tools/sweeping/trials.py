"""A trial: one run of a sweep, trained by tekso-trainer in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.exit_codes import ExitCode
from tekso.framework.run.metrics_log import SPLIT, STEP, MetricsLog, history
from tekso.framework.stopping_signals import stopping_signals

_POLL_S = 1.0
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_FINISHED = "trial.json"
_ERROR = "tekso-trainer: "  # begins an error; the lines below it are indented
TRIALS = "trials"
"""Name of the folder of all trials in the folder of a sweep."""

ENDS = {"min": "smallest", "max": "largest"}
"""{goal: the values that are best, in words}."""

Evaluations = Sequence[tuple[int, float | None]]
"""The step and the value of every evaluation; None: it was not finite."""


@dataclasses.dataclass(frozen=True)
class SweepTrial:
    """A trial.

    Attributes:
      name: name of its folder.
      settings: the settings that the sweep varies, {path: text}.
      seed: its seed.
    """

    name: str
    settings: Mapping[str, str]
    seed: int

    @property
    def title(self) -> str:
        """The settings and the seed as text."""
        return ", ".join([*(f"{p}={v}" for p, v in self.settings.items()), f"seed {self.seed}"])


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains trials, one at a time.

    Attributes:
      folder: folder of all trials.
      flags: flags of tekso-trainer that all trials have.
    """

    folder: str
    flags: Sequence[str]

    def logdir(self, trial: SweepTrial) -> str:
        """Returns the logdir of a trial."""
        return files.join(self.folder, trial.name)

    def code(self, trial: SweepTrial) -> int | None:
        """Returns the exit code of a trial that is finished; None: it is not, or it failed."""
        return exit_code_of(self.logdir(trial))

    def has_failed(self, trial: SweepTrial) -> bool:
        """Returns whether the last attempt of a trial failed."""
        return bool(_record(self.logdir(trial)).get("exit_code") == ExitCode.FAILED)

    def recorded(self, name: str) -> SweepTrial:
        """Returns the trial of a folder, with settings and seed if it is finished or failed."""
        record = _record(files.join(self.folder, name))
        return SweepTrial(name, record.get("settings", {}), record.get("seed", 0))

    def records(self, trial: SweepTrial) -> list[dict[str, Any]]:
        """Returns the records of a trial so far."""
        return MetricsLog(files.join(self.logdir(trial), "metrics.jsonl")).read()

    def evaluations(self, trial: SweepTrial, metric: str) -> list[tuple[int, float | None]]:
        """Returns the evaluations of a trial so far."""
        return history(self.records(trial), metric)

    def metrics(self, trial: SweepTrial) -> list[str]:
        """Returns the names of all figures that a trial has logged, "dev/loss"."""
        records = self.records(trial)
        names = (f"{r[SPLIT]}/{name}" for r in records for name in r if name not in (SPLIT, STEP))
        return list(dict.fromkeys(names))

    def train(self, trial: SweepTrial, stops: Callable[[], bool]) -> int:
        """Trains a trial, from its last checkpoint if there is one; returns its exit code.

        A trial whose loss was not finite too often (exit code 3) is finished too: it is a result. A
        failure (exit code 1) is recorded, and the same command tries the trial again.

        Args:
          trial: the trial.
          stops: called every second; returns whether to end the trial here, as finished. If it
            raises an error, the trial is stopped, and can be resumed.
        """
        logdir = self.logdir(trial)
        files.make_folder(logdir)
        settings = [f"--set={path}={value}" for path, value in trial.settings.items()]
        words = [*self.flags, *settings, f"--seed={trial.seed}", f"--logdir={logdir}"]
        was_stopped = False
        with files.open(files.join(logdir, "output.txt"), "ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tekso.tools.trainer", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's SIGINT reaches the trial only once
                preexec_fn=_end_with_parent,
            )
            with _passing_signals_to(process):
                while True:
                    try:
                        code = process.wait(_POLL_S)
                        break
                    except subprocess.TimeoutExpired:
                        if not was_stopped and _called(stops, process):
                            was_stopped = True
                            process.terminate()
        code = code if code >= 0 else 128 - code
        if was_stopped and code == ExitCode.TERMINATED:
            code = ExitCode.OK
        if code in (ExitCode.OK, ExitCode.NOT_FINITE, ExitCode.FAILED):
            record = {"exit_code": int(code), "settings": dict(trial.settings), "seed": trial.seed}
            if code == ExitCode.FAILED:
                record["error"] = self.last_words(trial)
            files.write_atomically(files.join(logdir, _FINISHED), json.dumps(record) + "\n")
        return int(code)

    def last_words(self, trial: SweepTrial) -> str:
        """Returns the error with which a trial ended, without its place; else its last line."""
        path = files.join(self.logdir(trial), "output.txt")
        lines = (
            files.read(path).decode("utf-8", "replace").split("\n") if files.exists(path) else []
        )
        printed = [line for line in lines if line.strip()]
        head = next((line for line in reversed(printed) if not line.startswith(" ")), "")
        return head if head.startswith(_ERROR) else printed[-1].strip() if printed else ""


def _called(stops: Callable[[], bool], process: subprocess.Popen[Any]) -> bool:
    """Returns what a function returns; if it raises an error, ends a process first."""
    try:
        return stops()
    except Exception:
        process.terminate()
        process.wait()
        raise


def exit_code_of(logdir: str) -> int | None:
    """Returns the exit code of a run, if it is a finished trial of a sweep; None: it is not."""
    code = _record(logdir).get("exit_code")
    return code if isinstance(code, int) and code != ExitCode.FAILED else None


def _record(logdir: str) -> Mapping[str, Any]:
    """Returns how the last attempt of a trial ended; {}: unknown."""
    path = files.join(logdir, _FINISHED)
    if files.exists(path):
        with contextlib.suppress(ValueError):
            found = bounded.parse_json(files.read(path))
            if isinstance(found, dict):
                return found
    return {}


def best_of(evaluations: Evaluations, goal: str) -> float | None:
    """Returns the best value of a trial; None if none is finite."""
    values = [value for _, value in evaluations if value is not None and math.isfinite(value)]
    return (min(values) if goal == "min" else max(values)) if values else None


def folder_name(number: int, seed: int, settings: Mapping[str, str]) -> str:
    """Returns the name of the folder of a trial, "003_initial_value=1e-3_seed=0"."""
    parts = [f"{path.rpartition('.')[2]}={value}" for path, value in settings.items()]
    text = re.sub(r"[^\w.=+-]+", "-", "_".join(parts))[:80]
    return "_".join(part for part in (f"{number:03d}", text, f"seed={seed}") if part)


def _end_with_parent() -> None:
    """Makes this process get SIGTERM when the sweep is killed, so that it saves and ends."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)


@contextlib.contextmanager
def _passing_signals_to(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Passes signals to stop on to a process."""

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in stopping_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
