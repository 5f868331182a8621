"""Hides the log lines about itself that TensorFlow writes to stderr while it is imported.

TensorFlow's C++ code writes them before any setting has an effect. So stderr is redirected to a
file during the import, and all other lines are written to stderr afterwards. `tekso.framework`
hides them in every program that imports it before TensorFlow.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

from tekso.framework.notebook import ipython_of_notebook

_CHATTER = re.compile(
    rb"All log messages before absl::InitializeLog|oneDNN custom operations|This TensorFlow binary "
    rb"is optimized|To enable the following instructions|Unable to register cu\w+ factory|"
    rb"Could not find cuda drivers|computation placer already registered|TF-TRT Warning"
)
_TENSORFLOW = "tensorflow"


def hide() -> None:
    """Hides these lines when TensorFlow is imported later; nothing happens if it was before."""
    if _TENSORFLOW not in sys.modules:
        sys.meta_path.insert(0, _Finder())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses TensorFlow's log lines in the block that imports it, and most of them later."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors also raise exceptions
    with without_chatter():
        yield


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Suppresses TensorFlow's lines about itself in the block that imports it, and nothing else.

    Without a stderr or a folder for temporary files, as in a service, it suppresses nothing.
    """
    import tempfile  # not for commands that do not import TensorFlow

    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            stderr = os.dup(2)
            stack.callback(os.close, stderr)
            file = stack.enter_context(tempfile.TemporaryFile())
        if file is None:
            yield
            return
        _flush()
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, 2)
            file.seek(0)
            kept = b"".join(line for line in file if not _CHATTER.search(line))
            if kept:
                os.write(2, kept)


def _flush() -> None:
    if sys.stderr is not None:  # Python has none if its descriptor was closed
        sys.stderr.flush()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as the other finders do, with a loader that hides its lines.

    In a notebook, which would show them below its cells, it keeps out later log lines too. In other
    programs, it changes no setting of the process.
    """

    def __init__(self) -> None:
        self._is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TENSORFLOW or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and isinstance(spec.loader, importlib.abc.Loader):
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with quiet() if ipython_of_notebook() is not None else without_chatter():
                    execute(module)
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)  # TensorFlow is imported once

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
