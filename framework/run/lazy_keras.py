"""Prevents the import of Keras while TensorFlow is imported.

`import tensorflow` imports Keras at its end. Keras imports Matplotlib and other packages, which
takes a quarter of the total time. If the import of Keras fails, TensorFlow continues without it.
Tekso does not use Keras. Afterwards `tf.keras` and `import keras` work as usual: they import Keras
on first use.
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
    """Raises ImportError when a module is loaded."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"the import of {module.__name__} is deferred")


class _KerasFinder(importlib.abc.MetaPathFinder):
    """Finds Keras, because TensorFlow looks for its folder, but does not load it."""

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
    """Makes imports of Keras fail within the block, unless Keras was imported before."""
    finder = _KerasFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
