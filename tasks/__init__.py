"""Tasks, one folder per domain: task, input, metrics, decoding.

Imports tekso.models and tekso.framework.
"""

if __name__ != "tekso.tasks":
    raise ImportError(
        f"this folder was imported as {__name__!r}, but its name is 'tekso.tasks'. Write "
        "'from tekso.tasks import ...'; in a checkout run `pip install -e .` first, "
        "or run from pytest, whose conftest.py makes the name available."
    )

import tekso.framework  # noqa: F401  (prepares TensorFlow before it is imported)
