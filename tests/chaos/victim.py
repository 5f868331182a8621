"""The trainer, which ends at a random moment of a phase as if by `kill -9`; see killer.py.

The environment variable VICTIM has a JSON object, and says either where to end:

    {"phase": "save", "call": 3, "cpu_s": 0.004}    0.004 CPU seconds after the third save began

or that the durations of all phases are recorded: {"record": FILE}. A timer of CPU time ends the
process by a signal without a handler, so none of its code runs any more. A moment in CPU time does
not depend on how busy the machine is.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tekso.framework import task_results
from tekso.framework.run import checkpoint_files, loop_evaluations, rollback, step_calls
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.incidents import Incidents
from tekso.tools import trainer

START, STEP = "start", "step"
PHASES: dict[str, tuple[Any, str]] = {
    STEP: (step_calls.StepCalls, "run"),  # the first call traces and compiles
    "evaluation": (loop_evaluations, "evaluate_and_score"),
    "save": (checkpoint_files, "write_shards"),
    "deletion": (Checkpoints, "_remove"),
    "decoding": (task_results, "decode"),
    "rollback": (rollback, "roll_back"),
    "incident": (Incidents, "record"),
}
"""{phase: the function that it is}; START is what comes before the first step."""


class Recorder:
    """Records the CPU seconds of every call of a phase, {phase: [seconds]}."""

    def __init__(self, path: Path) -> None:
        self._seconds: dict[str, list[float]] = {}
        atexit.register(lambda: path.write_text(json.dumps(self._seconds)))

    def __call__(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            if phase == STEP:
                self._seconds.setdefault(START, [begin])
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds.setdefault(phase, []).append(time.process_time() - begin)

        return recorded


class Killer:
    """Ends the process a moment after a call of a phase began."""

    def __init__(self, phase: str, call: int, cpu_s: float) -> None:
        self._phase, self._left, self._cpu_s = phase, call, cpu_s
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        if phase == START:
            self._start_timer()

    def _start_timer(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, max(self._cpu_s, 1e-6))

    def __call__(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if phase != self._phase:
            return function

        @functools.wraps(function)
        def killed(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self._start_timer()
            return function(*args, **kwargs)

        return killed


def main() -> int:
    plan = json.loads(os.environ["VICTIM"])
    wrap = Recorder(Path(plan["record"])) if "record" in plan else Killer(**plan)
    for phase, (owner, name) in PHASES.items():
        setattr(owner, name, wrap(phase, getattr(owner, name)))
    return trainer.main()


if __name__ == "__main__":
    sys.exit(main())
