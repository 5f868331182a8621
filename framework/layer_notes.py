"""Errors in the `fprop` of a layer name the layer, wherever it is called, such as in a notebook."""

from __future__ import annotations

import functools
from typing import Any

IN_LAYER = "in the layer "
"""Begin of a note of an error: the path and the class of the innermost layer that was computed."""


def name_in_errors(cls: Any) -> None:
    """Wraps the `fprop` that a class of layers defines: its errors get a note about the layer."""
    if "fprop" not in vars(cls):
        return
    fprop = vars(cls)["fprop"]

    @functools.wraps(fprop)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return fprop(self, *args, **kwargs)
        except Exception as error:
            if not any(note.startswith(IN_LAYER) for note in getattr(error, "__notes__", ())):
                kind = type(self).__name__
                error.add_note(f"{IN_LAYER}{f'{self.path} ({kind})' if self.path else kind}")
            raise

    cls.fprop = run
