"""Layers and complete networks. Imports tekso.framework only."""

if __name__ != "tekso.models":
    raise ImportError(
        f"this folder was imported as {__name__!r}, but its name is 'tekso.models'. Write "
        "'from tekso.models import ...'; in a checkout run `pip install -e .` first, "
        "or run from pytest, whose conftest.py makes the name available."
    )

import tekso.framework  # noqa: F401  (prepares TensorFlow before it is imported)
