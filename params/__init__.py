"""Registered experiments: settings without logic.

`params/lm/python_source.py` defines the experiments `lm.python_source.*`.
"""

if __name__ != "tekso.params":
    raise ImportError(
        f"this folder was imported as {__name__!r}, but its name is 'tekso.params'. Write "
        "'from tekso.params import ...'; in a checkout run `pip install -e .` first, "
        "or run from pytest, whose conftest.py makes the name available."
    )

import tekso.framework  # noqa: F401  (prepares TensorFlow before it is imported)
