"""UpdateGate: holds back the update of a training step while the state before it is written.

    save   forward, backward      gate   update   forward, backward
     └── write ── write ── write ──┘ opens

A step replaces the tensors of the state only in its update. Until then, values that wait to be
written are those of the variables, and need no memory of their own.
"""

from __future__ import annotations

import threading

from tekso.framework import watchdog


class UpdateGate:
    """A gate that one thread closes and another opens; a new gate is open.

    Args:
      name: what a step waits for, in the message of the watchdog.
    """

    def __init__(self, name: str = "the state to be written") -> None:
        self._name = name
        self._is_open = threading.Event()
        self._is_open.set()

    @property
    def is_open(self) -> bool:
        """Whether steps pass."""
        return self._is_open.is_set()

    def close(self) -> None:
        """Closes the gate; no step may be running."""
        self._is_open.clear()

    def open(self) -> None:
        """Opens the gate; steps that wait continue."""
        self._is_open.set()

    def wait(self) -> None:
        """Waits on the host until the gate is open."""
        if not self._is_open.is_set():
            with watchdog.waiting(self._name, factor=watchdog.PREPARING):
                self._is_open.wait()
