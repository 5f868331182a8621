"""UpdateGate: holds back the update of a training step while the state before it is written.

    save   forward, backward      gate   update   forward, backward
     └── write ── write ── write ──┘ opens

A step replaces the tensors of the state only in its update. Until then, values that wait to be
written are those of the variables, and need no memory of their own.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tekso.framework import watchdog


class UpdateGate:
    """A gate that one thread closes and another opens; a new gate is open.

    Args:
      name: what a step waits for, in the message of the watchdog.
    """

    def __init__(self, name: str = "the state to be written") -> None:
        self._name = name
        self._lock, self._is_open = threading.Lock(), threading.Event()
        self._is_open.set()
        self._token: tf.queue.FIFOQueue | None = None  # it has an item while the gate is open

    @property
    def is_open(self) -> bool:
        """Whether steps pass."""
        return self._is_open.is_set()

    def use_in_graphs(self) -> None:
        """Permits `passed`; call it before the first graph is traced."""
        with self._lock:
            if self._token is None:
                with tf.device("/cpu:0"):
                    self._token = tf.queue.FIFOQueue(1, [tf.bool], shapes=[()])
                    if self._is_open.is_set():
                        self._token.enqueue(True)

    def close(self) -> None:
        """Closes the gate; no step may be running."""
        with self._lock:
            if self._is_open.is_set():
                self._is_open.clear()
                # A step that failed while it passed took the item with it.
                if self._token is not None and int(self._token.size()):
                    self._token.dequeue()

    def open(self) -> None:
        """Opens the gate; steps that wait continue."""
        with self._lock:
            if not self._is_open.is_set():
                self._is_open.set()
                if self._token is not None:
                    self._token.enqueue(True)

    def wait(self) -> None:
        """Waits on the host until the gate is open."""
        if not self._is_open.is_set():
            with watchdog.waiting(self._name, factor=watchdog.PREPARING):
                self._is_open.wait()

    def passed(self, nest: Any) -> Any:
        """Returns a nest of tensors in a graph, which are available when the gate is open.

        The op that waits takes no thread. It does not run on a TPU or a mesh.
        """
        if self._token is None:
            return nest
        flat = tf.nest.flatten(nest, expand_composites=True)
        with tf.control_dependencies(flat):
            token = self._token.dequeue()
        with tf.control_dependencies([self._token.enqueue(token)]):
            flat = [tf.identity(x) for x in flat]
        return tf.nest.pack_sequence_as(nest, flat, expand_composites=True)
