"""Writing a function of a task as a LiteRT file (formerly TensorFlow Lite), of one shape."""

from __future__ import annotations

import re
import warnings
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.exports import ExportedFunction
from tekso.framework.run.saved_model import ExportModule

Numbers = Literal["float32", "int8"]


class LiteRtError(ValueError):
    """A function cannot be converted; the text says which operations are in the way."""


def convert(
    module: ExportModule,
    exported: ExportedFunction,
    *,
    batch_size: int = 1,
    length: int | None = None,
    numbers: Numbers = "float32",
) -> bytes:
    """Returns the bytes of the file; its one signature has the inputs and outputs by name.

    Args:
      module: the weights.
      exported: the function; not one that draws.
      batch_size: examples, always so many.
      length: of the rows, always so long; None: the longest.
      numbers: int8 keeps large weights as int8, a scale a row; activations are float32.

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
            warnings.simplefilter("ignore")  # of the converter, about itself
            data: bytes = converter.convert()
    except Exception as error:  # the converter has a class of its own for every version
        named = re.findall(r"tf\.\w+", str(error))
        what = ", ".join(sorted(set(named))) or str(error).splitlines()[0]
        raise LiteRtError(f"LiteRT cannot convert it: {what}") from error
    return data
