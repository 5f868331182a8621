"""Converts a function of a task, for one input shape, to LiteRT (formerly TensorFlow Lite)."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from tekso.framework.exports import ExportedFunction
from tekso.framework.run.saved_model import ExportModule

Numbers = Literal["float32", "int8"]

_CONVERSIONS = {"CAST", "DEQUANTIZE", "QUANTIZE"}


class LiteRtError(ValueError):
    """A function cannot be converted; the text names the unsupported operations."""


def convert(
    module: ExportModule,
    exported: ExportedFunction,
    *,
    batch_size: int = 1,
    length: int | None = None,
    numbers: Numbers = "float32",
    calibration: Sequence[Mapping[str, np.ndarray]] = (),
) -> bytes:
    """Returns the bytes of a LiteRT file; its one signature has the inputs and outputs by name.

    Args:
      module: the weights.
      exported: the function; it must not draw random numbers.
      batch_size: the fixed number of examples.
      length: the fixed length of rows; None: the maximum length.
      numbers: int8 stores large weights as int8 with a scale per row; activations are float32,
        or int8 in the ranges that they have for the examples of `calibration`.
      calibration: inputs of the function, {name: [batch_size, …]}; only of int8.

    Raises:
      LiteRtError: the converter fails, or no operation can be computed in int8.
    """
    length = exported.lengths[-1] if length is None else length
    concrete: Any = module.trace(exported, batch_size=batch_size, length=length)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], module)
    if numbers == "int8":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if calibration:
        converter.representative_dataset = lambda: iter(map(dict, calibration))
    try:
        with _without_warnings():
            data: bytes = converter.convert()
    except Exception as error:  # the class of the error differs between versions
        named = re.findall(r"tf\.\w+", str(error))
        what = ", ".join(sorted(set(named))) or str(error).splitlines()[0]
        raise LiteRtError(f"LiteRT cannot convert the function: {what}") from error
    if calibration and not (found := operations(data))["int8"]:
        listed = ", ".join(found["float32"]) or "it has none of numbers"
        raise LiteRtError(f"LiteRT cannot compute any operation of the function in int8: {listed}")
    return data


def operations(data: bytes) -> dict[str, list[str]]:
    """Returns the kinds of operations of a LiteRT file that compute int8, and float32.

    Conversions between types are left out.
    """
    model = schema.ModelT.InitFromPackedBuf(data, 0)
    names = _names(schema.BuiltinOperator)
    found: dict[str, set[str]] = {"int8": set(), "float32": set()}
    for graph in model.subgraphs:
        for operation in graph.operators:
            code = model.operatorCodes[operation.opcodeIndex]
            name = names[max(code.builtinCode, code.deprecatedBuiltinCode)]
            for kind in found if name not in _CONVERSIONS else ():
                number = getattr(schema.TensorType, kind.upper())
                if any(graph.tensors[i].type == number for i in operation.outputs):
                    found[kind].add(name)
    return {kind: sorted(kinds) for kind, kinds in found.items()}


def interpreter(data: bytes) -> Any:
    """Returns an interpreter of a LiteRT file: that of ai-edge-litert, or else TensorFlow's."""
    try:
        from ai_edge_litert import interpreter as litert_runtime
    except ModuleNotFoundError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a later TensorFlow will not have it
            return tf.lite.Interpreter(model_content=data)
    return litert_runtime.Interpreter(model_content=data)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses the converter's warnings: about itself, and about gradients, which it drops."""
    logger = logging.getLogger("absl")

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_shown)  # saving a model sets the level again
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(is_shown)


def _names(numbers: type) -> dict[int, str]:
    return {number: name for name, number in vars(numbers).items() if isinstance(number, int)}
