"""Int8 LiteRT files: calibrated with training data only; agreement is counted on held-out data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import window_ops
from tekso.framework.context import StepContext
from tekso.framework.exports import (
    ExportedFunction,
    ExportedInput,
    ExportedOutput,
    Quantization,
)
from tekso.framework.initializers import Normal
from tekso.framework.input.errors import InputError
from tekso.framework.layer import Layer
from tekso.framework.primitives.windows import Window
from tekso.framework.run import litert, litert_files, saved_model
from tekso.framework.run.litert import LiteRtError

RNG = np.random.default_rng(0)
W = RNG.normal(size=(6, 3)).astype(np.float32)
DATA = {
    "train": RNG.uniform(-1, 3, size=(40, 6)).astype(np.float32),
    "held_out": RNG.uniform(-9, 27, size=(30, 6)).astype(np.float32),
}


class Classes(Layer):
    """The largest of three products."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [6, 3], dims=("in", "out"), init=Normal.Params())

    def classify(self, theta: Any, x: Any, ctx: Any) -> dict[str, Any]:
        scores = x @ theta.w
        return {"scores": scores, "labels": tf.argmax(scores, 1, output_type=tf.int32)}


def examples(input: Any, split: str, most: int) -> Iterator[dict[str, np.ndarray]]:
    assert input == "the training input" and most >= 200
    for row in DATA[split]:
        yield {"x": row[None]}


def exported(layer: Classes, **changes: Any) -> ExportedFunction:
    given = ExportedFunction(
        doc="Classifies.",
        function=layer.classify,
        inputs={"x": ExportedInput("numbers", tf.float32, shape=(6,))},
        outputs={"scores": ExportedOutput("scores"), "labels": ExportedOutput("the largest")},
        lengths=[1],
        for_litert=True,
        quantization=Quantization(examples, "labels", "images"),
    )
    return dataclasses.replace(given, **changes)


def int8_file(data: Any = lambda: "the training input", **changes: Any) -> litert_files.LiteRtFile:
    layer = Classes.Params().instantiate()
    module = saved_model.ExportModule(layer, {"w": W}, seed=0)  # type: ignore[arg-type]
    functions = {"classify": exported(layer, **changes)}
    (file,) = litert_files.converted(module, functions, ["int8"], data)
    return file


def test_ranges_are_those_of_training_data_and_agreement_that_of_held_out_data() -> None:
    file = int8_file()
    assert (file.name, file.calibration_examples) == ("classify_int8.tflite", 40)
    assert litert.operations(file.data)["int8"] == ["FULLY_CONNECTED"]
    interpreter = litert.interpreter(file.data)
    low, high = DATA["train"].min(), DATA["train"].max()
    scales = [
        one["quantization"][0]
        for one in interpreter.get_tensor_details()
        if one["dtype"] == np.int8 and list(one["shape"]) == [1, 6]
    ]
    assert scales == [pytest.approx((high - low) / 255, rel=1e-5)]

    # Held-out numbers lie outside of these ranges and are cut, so that some classes change.
    runner = interpreter.get_signature_runner()
    found = np.concatenate([runner(x=row[None])["labels"] for row in DATA["held_out"]])
    equal = int((found == (DATA["held_out"] @ W).argmax(1)).sum())
    agreement = litert_files.Agreement(equal, 30, 30, "images", "labels")
    assert file.agreement == agreement and 10 <= equal < 30
    assert file.lines() == [
        "calibrated with 40 training examples; in float32: ARG_MAX"
        if "ARG_MAX" in file.float32_operations
        else "calibrated with 40 training examples",
        f"{equal} of 30 held-out images have the class of the float32 model",
    ]
    record = file.record()
    assert record["bytes"] == len(file.data) and record["agreement"]["equal"] == equal


class Peaks(Classes):
    """The largest of the products of an image of 4 x 6 pixels that pooling has made smaller."""

    def classify(self, theta: Any, x: Any, ctx: Any) -> dict[str, Any]:
        window = Window((3, 3), (2, 2), (1, 1), "FIXED")
        image = tf.nn.conv2d(x[:, None, :, None] * tf.ones([1, 4, 1, 1]), [[[[1.0]]]], 1, "SAME")
        pooled = window_ops.max_pool(StepContext(mode="decode"), image, window)
        scores = tf.reshape(pooled, [1, 6]) @ theta.w
        return {"scores": scores, "labels": tf.argmax(scores, 1, output_type=tf.int32)}


def test_padding_of_a_maximum_is_not_in_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA, "held_out", DATA["train"])
    file = int8_file(function=Peaks.Params().instantiate().classify)
    assert "MAX_POOL_2D" in litert.operations(file.data)["int8"]
    assert file.agreement is not None and file.agreement.equal >= 36  # of 40


def test_gradients_of_gradients_give_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def twice(x: Any) -> Any:
        return 2 * x, twice  # whose gradient is custom too

    def double(theta: Any, x: Any, ctx: Any) -> dict[str, Any]:
        scores = twice(x @ theta.w)
        return {"scores": scores, "labels": tf.argmax(scores, 1, output_type=tf.int32)}

    int8_file(function=double)
    assert not caplog.records


def test_a_file_that_the_interpreter_cannot_run_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def get_signature_runner(self) -> Any:
            def run(**inputs: Any) -> Any:
                raise RuntimeError("Node number 44 failed to prepare.")

            return run

    monkeypatch.setattr(litert, "interpreter", lambda data: Broken())
    with pytest.raises(LiteRtError, match=r"run the int8 file .*44 .*; use --litert="):
        int8_file()


def test_without_held_out_data_no_agreement_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA, "held_out", DATA["held_out"][:0])
    assert int8_file().lines()[1] == (
        "no images are held out, so the agreement with float32 is not counted"
    )


def test_data_that_cannot_be_read_and_unsupported_functions_are_named() -> None:
    def missing() -> Any:
        raise InputError("input.source.folder: there is no folder 'x'")

    with pytest.raises(LiteRtError, match=r"calibrated with training data, but: input\.source"):
        int8_file(missing)

    def unsupported(theta: Any, x: Any, ctx: Any) -> dict[str, Any]:
        scores = tf.sin(x)
        return {"scores": scores, "labels": tf.argmax(scores, 1, output_type=tf.int32)}

    with pytest.raises(LiteRtError, match="cannot compute any operation of the function in int8"):
        int8_file(function=unsupported)
