"""The commands: tekso-trainer and others.

They contain little logic, and may import all other packages of Tekso.
"""

if __name__ != "tekso.tools":
    raise ImportError(
        f"this folder was imported as {__name__!r}, but its name is 'tekso.tools'. Write "
        "'from tekso.tools import ...'; in a checkout run `pip install -e .` first, "
        "or run from pytest, whose conftest.py makes the name available."
    )

import tekso.framework  # noqa: F401  (prepares TensorFlow before it is imported)
