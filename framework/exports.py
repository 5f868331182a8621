"""The functions that a task exports for programs without Tekso.

A function is traced for a few fixed shapes, because models need static shapes. The exported
function takes any number of examples of any length up to the largest: it pads rows to the next
traced length, and computes a few examples at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework.input.input import Input
from tekso.framework.method_signatures import accepts
from tekso.framework.source_lines import place_of

Examples = Iterator[Mapping[str, np.ndarray]]
"""Inputs of an exported function, {name: [1, …]}: a single example each."""


@dataclasses.dataclass(frozen=True)
class ExportedInput:
    """An input of an exported function.

    Attributes:
      doc: description.
      dtype: dtype of its elements.
      has_length: whether its shape is [examples, length, *shape] instead of [examples, *shape].
      shape: fixed sizes of further dims.
      padding: the value that rows are padded with.
      longest: maximum length of its rows if it is smaller than that of other inputs; None: the same
        maximum.
    """

    doc: str
    dtype: Any = tf.int32
    has_length: bool = False
    padding: int = 0
    longest: int | None = None
    shape: tuple[int, ...] = ()

    def dims(self, length: int) -> tuple[int, ...]:
        """Returns the sizes of all dims but the first if the function pads rows to `length`."""
        return (self.length_in(length), *self.shape) if self.has_length else self.shape

    def length_in(self, length: int) -> int:
        """Returns the padded length of its rows if the function pads rows to `length`."""
        return length if self.longest is None else min(length, self.longest)


@dataclasses.dataclass(frozen=True)
class ExportedOutput:
    """An output of an exported function.

    Attributes:
      doc: description.
      length_of: name of the input whose length is the size of dim 1: the output is cut to the rows
        that are given. Empty: the output has the size for the longest rows.
      padding: the value that the other dims are padded with, to their size for the longest rows.
    """

    doc: str
    length_of: str = ""
    padding: float = 0


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the activations of a function are quantized: with examples of the experiment's data.

    Attributes:
      examples: function(training input, "train" or "held_out", most) that yields up to `most`
        examples of its data, spread evenly, as an evaluation prepares them. "train" is used for
        calibration. "held_out" is compared, and yields nothing if no data is held out.
      compared: name of the integer output that is compared with that of the float32 model.
      unit: what an element of this output is, in the plural, such as "images".
    """

    examples: Callable[[Input, Literal["train", "held_out"], int], Examples]
    compared: str
    unit: str


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """A function that is exported.

    Attributes:
      doc: what it does, in a sentence.
      function: pure function(theta, *inputs, ctx) with the theta of the task. It returns a dict of
        tensors with static shapes; dim 0 is the example.
      inputs: by name, in the order of the arguments.
      outputs: by name; further results of the function are not exported.
      lengths: ascending lengths that rows are padded to; the last one is the maximum. Without an
        input that has a length, they are not needed.
      is_random: whether it draws random numbers; the exported function then takes a seed too.
      for_litert: whether it is also exported as a LiteRT file, for small devices.
      quantization: how an int8 LiteRT file is calibrated; None: only its weights are int8.
    """

    doc: str
    function: Callable[..., Mapping[str, tf.Tensor]]
    inputs: Mapping[str, ExportedInput]
    outputs: Mapping[str, ExportedOutput]
    lengths: Sequence[int] = ()
    is_random: bool = False
    for_litert: bool = False
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        """Checks the arguments of the function.

        Raises:
          TypeError: it cannot be called with theta, the inputs and ctx.
          ValueError: an input has a length, and `lengths` is not given.
        """
        if not self.lengths:
            if having := [name for name, one in self.inputs.items() if one.has_length]:
                raise ValueError(
                    f"ExportedFunction: the input {having[0]!r} has a length: give lengths, the "
                    "lengths that rows are padded to, such as lengths_up_to(200)"
                )
            object.__setattr__(self, "lengths", (1,))
        arguments = ["theta", *self.inputs, "ctx"]
        if not accepts(self.function, arguments, []):
            name = getattr(self.function, "__name__", "function")
            raise TypeError(
                f"the exported function {name}{place_of(self.function)} is called with theta, the "
                f"inputs and ctx: write def {name}({', '.join(arguments)})"
            )


@dataclasses.dataclass(frozen=True)
class ExportedTexts:
    """Converts texts to the inputs of an exported function, and its outputs to texts.

    Attributes:
      read: function({name in `inputs`: texts}) that returns the inputs of the exported function.
      write: function(outputs of the exported function, input texts) that returns texts, or numbers
        for each text, by the names of `outputs`.
      inputs: {name: description} of the input texts; all are strings, [examples].
      outputs: {name: description} of the outputs.
      resources: trackable objects that `read` and `write` use.
      package: package with operations of the SavedModel, which a program imports before it loads
        it; empty: none.
    """

    read: Callable[[Mapping[str, tf.Tensor]], Mapping[str, tf.Tensor]]
    write: Callable[[Mapping[str, tf.Tensor], Mapping[str, tf.Tensor]], Mapping[str, tf.Tensor]]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    resources: Sequence[Any] = ()
    package: str = ""


def lengths_up_to(longest: int, *, first: int = 16, ratio: int = 4) -> list[int]:
    """Returns a few ascending lengths up to the longest: 16, 64, 200."""
    lengths = []
    while first < longest:
        lengths.append(first)
        first *= ratio
    return [*lengths, longest]
