"""Imports TensorFlow without its log lines about itself, for programs and notebooks.

A module that users import first, such as `session.py`, imports this one before any other that needs
TensorFlow. Unlike the commands, it changes no setting of the process: later log lines appear.
"""

from __future__ import annotations

import sys

from tekso.framework.run.quiet_tensorflow import without_chatter

if "tensorflow" not in sys.modules:
    with without_chatter():
        import tensorflow  # noqa: F401
