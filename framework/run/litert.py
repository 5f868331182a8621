"""Converts a function of a task, for one input shape, to LiteRT (formerly TensorFlow Lite)."""

from __future__ import annotations

import re
import warnings
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.exports import ExportedFunction
from tekso.framework.run.saved_model import ExportModule

Numbers = Literal["float32", "int8"]


class LiteRtError(ValueError):
    """A function cannot be converted; the text names the unsupported operations."""


def convert(
    module: ExportModule,
    exported: ExportedFunction,
    *,
    batch_size: int = 1,
    length: int | None = None,
    numbers: Numbers = "float32",
) -> bytes:
    """Returns the bytes of a LiteRT file; its one signature has the inputs and outputs by name.

    Args:
      module: the weights.
      exported: the function; it must not draw random numbers.
      batch_size: the fixed number of examples.
      length: the fixed length of rows; None: the maximum length.
      numbers: int8 stores large weights as int8 with a scale per row; activations are float32.

    Raises:
      LiteRtError: the converter fails.
    """
    length = exported.lengths[-1] if length is None else length
    concrete: Any = module.trace(exported, batch_size=batch_size, length=length)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    if numbers == "int8":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the converter warns about itself
            data: bytes = converter.convert()
    except Exception as error:  # the class of the error differs between versions
        named = re.findall(r"tf\.\w+", str(error))
        what = ", ".join(sorted(set(named))) or str(error).splitlines()[0]
        raise LiteRtError(f"LiteRT cannot convert the function: {what}") from error
    return data
