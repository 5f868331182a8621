"""The core packages: Params, registry, Layer, learner, input, executions, and training runs.

Contains no models and no tasks, and imports no other package of Tekso.
"""

if __name__ != "tekso.framework":
    raise ImportError(
        f"this folder was imported as {__name__!r}, but its name is 'tekso.framework'. Write "
        "'from tekso.framework import ...'; in a checkout run `pip install -e .` first, "
        "or run from pytest, whose conftest.py makes the name available."
    )

from tekso.framework import onednn, tensorflow_log

onednn.enable()  # before any module of Tekso imports TensorFlow
tensorflow_log.hide()
