"""Imports TensorFlow without its log lines about itself, for programs and notebooks.

A module that users import first, such as `session.py`, imports this one before any other that needs
TensorFlow. In a notebook, which would show them below its cells, it keeps out later log lines of
TensorFlow too, as the commands do. In other programs, it changes no setting of the process.
"""

from __future__ import annotations

import sys

from tekso.framework.run.notebook import ipython_of_notebook
from tekso.framework.run.quiet_tensorflow import quiet, without_chatter

if "tensorflow" not in sys.modules:
    with quiet() if ipython_of_notebook() is not None else without_chatter():
        import tensorflow  # noqa: F401
