"""Leaves Keras out while TensorFlow is imported.

`import tensorflow` ends with an import of Keras, which takes a quarter of its time, by way of
Matplotlib and others, and which it does without where Keras cannot be imported. Tekso uses none of
it. `tf.keras` and `import keras` work afterwards as ever: they import it when they are reached.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

_KERAS = "keras"


class _Refused(importlib.abc.Loader):
    """Fails to load a module, as if it lacked something."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"{module.__name__} is left for later")


class _KerasFinder(importlib.abc.MetaPathFinder):
    """Finds Keras where it is, for TensorFlow looks for its folder, and does not load it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _KERAS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Refused()
        return spec


@contextlib.contextmanager
def lazy_keras() -> Iterator[None]:
    """Imports of Keras fail within the block, unless it was imported before."""
    finder = _KerasFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
