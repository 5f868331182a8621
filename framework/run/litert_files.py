"""The LiteRT files of an export: calibration with the experiment's data, and agreement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework.exports import ExportedFunction, Quantization
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.run import litert
from tekso.framework.run.saved_model import ExportModule

CALIBRATION_EXAMPLES = 200
COMPARED_EXAMPLES = 500


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How often an int8 file returns what the float32 model returns for held-out data.

    Attributes:
      equal: number of equal elements of the compared output.
      total: number of its elements.
      examples: number of examples; 0 if no data is held out.
      unit: what an element is, in the plural.
      compared: name of the output.
    """

    equal: int
    total: int
    examples: int
    unit: str
    compared: str

    def text(self) -> str:
        """Returns the counts as a sentence."""
        if not self.examples:
            return f"no {self.unit} are held out, so the agreement with float32 is not counted"
        return (
            f"{self.equal:,} of {self.total:,} held-out {self.unit} have the class of the float32 "
            "model"
        )


@dataclasses.dataclass(frozen=True)
class LiteRtFile:
    """A LiteRT file that is not yet written.

    Attributes:
      name: name of the file.
      data: its bytes.
      function: name of the exported function.
      numbers: its numbers.
      calibration_examples: number of examples that set the ranges of its activations; 0: they are
        float32.
      float32_operations: operations of a calibrated file that are computed in float32.
      agreement: with the float32 model; None: not calibrated.
    """

    name: str
    data: bytes = dataclasses.field(repr=False)
    function: str
    numbers: litert.Numbers
    calibration_examples: int = 0
    float32_operations: Sequence[str] = ()
    agreement: Agreement | None = None

    def record(self) -> dict[str, Any]:
        """Returns everything but the bytes, as JSON data."""
        found = {name: value for name, value in vars(self).items() if name not in ("name", "data")}
        found["float32_operations"] = list(self.float32_operations)
        found["agreement"] = self.agreement and dataclasses.asdict(self.agreement)
        return {"bytes": len(self.data), **found}

    def lines(self) -> list[str]:
        """Returns how it was calibrated, and its agreement, as lines of text."""
        if self.agreement is None:
            return []
        floats = ", ".join(self.float32_operations)
        rest = f"; in float32: {floats}" if floats else ""
        unit = "training examples"
        return [
            f"calibrated with {self.calibration_examples:,} {unit}{rest}",
            self.agreement.text(),
        ]


def converted(
    module: ExportModule,
    functions: Mapping[str, ExportedFunction],
    numbers: Sequence[litert.Numbers],
    data: Callable[[], Input],
) -> list[LiteRtFile]:
    """Returns the LiteRT files of functions.

    Args:
      module: the weights.
      functions: the exported functions, by name.
      numbers: number formats of the files.
      data: returns the training input; called once, if a function is calibrated.

    Raises:
      LiteRtError: a function cannot be converted or calibrated.
    """
    found, input = [], None
    for name, function in functions.items():
        for kind in numbers if function.for_litert else ():
            file = f"{name}_{kind}.tflite"
            if kind == "float32" or function.quantization is None:
                made = litert.convert(module, function, numbers=kind)
                found.append(LiteRtFile(file, made, name, kind))
                continue
            input = input or _opened(data)
            found.append(_calibrated(file, module, name, function, function.quantization, input))
    return found


def _opened(data: Callable[[], Input]) -> Input:
    try:
        return data()
    except (InputError, OSError) as error:
        raise litert.LiteRtError(
            f"LiteRT files with int8 are calibrated with training data, but: {error}"
        ) from error


def _calibrated(
    file: str,
    module: ExportModule,
    name: str,
    function: ExportedFunction,
    quantization: Quantization,
    input: Input,
) -> LiteRtFile:
    examples = list(quantization.examples(input, "train", CALIBRATION_EXAMPLES))
    if not examples:
        raise litert.LiteRtError(
            f"LiteRT files with int8 are calibrated with training data, but {input.describe()} has "
            f"no well-formed {quantization.unit}"
        )
    data = litert.convert(module, function, numbers="int8", calibration=examples)
    return LiteRtFile(
        file, data, name, "int8", len(examples), litert.operations(data)["float32"],
        _agreement(data, module, function, quantization, input),
    )  # fmt: skip


def _agreement(
    data: bytes,
    module: ExportModule,
    function: ExportedFunction,
    quantization: Quantization,
    input: Input,
) -> Agreement:
    trace = module.trace(function, batch_size=1, length=function.lengths[-1])
    runner, compared = litert.interpreter(data).get_signature_runner(), quantization.compared
    equal = total = count = 0
    for example in quantization.examples(input, "held_out", COMPARED_EXAMPLES):
        wanted = np.asarray(trace(**example)[compared])
        try:
            found = np.asarray(runner(**example)[compared])
        except RuntimeError as error:
            raise litert.LiteRtError(
                f"LiteRT cannot run the int8 file that it has made: {error}; use --litert=float32"
            ) from error
        hits = found == wanted
        equal, total, count = equal + int(hits.sum()), total + hits.size, count + 1
    return Agreement(equal, total, count, quantization.unit, compared)
