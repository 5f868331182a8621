"""Methods of a user's task that take other arguments are rejected where the class is defined."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.exports import ExportedFunction, ExportedInput, ExportedOutput
from tekso.framework.task import Task

HERE = r" \(\S*method_signatures_test\.py:\d+\)"


def test_a_method_with_other_arguments_is_rejected_with_both() -> None:
    message = rf"^Own\.decode{HERE} is decode\(self, theta, batch, ctx\), but is called as decode\("
    with pytest.raises(TypeError, match=message) as caught:

        class Own(Task):
            def decode(self, theta: Any, batch: Any, ctx: Any) -> Any:
                return None

    assert str(caught.value).endswith("decode(self, program, input)")


def test_a_loss_without_ctx_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"is loss\(self, theta, batch\), but is called as loss\("):

        class Own(Task):
            def loss(self, theta: Any, batch: Any) -> Any:
                return None


def test_arguments_in_another_order_are_rejected() -> None:
    what = r"is loss\(self, batch, theta, ctx\), but is called as loss\(self, theta, batch, ctx\)"
    with pytest.raises(TypeError, match=what):

        class Own(Task):
            def loss(self, batch: Any, theta: Any, ctx: Any) -> Any:
                return None


def test_a_method_that_is_no_classmethod_is_rejected() -> None:
    message = rf"^Own\.complete{HERE} must be a classmethod: .* above def complete\(cls, params, in"
    with pytest.raises(TypeError, match=message):

        class Own(Task):
            def complete(self, params: Any, input: Any) -> Any:
                return params


def test_other_names_defaults_and_stars_are_no_errors() -> None:
    class Own(Task):
        def loss(self, weights: Any, x: Any, context: Any, scale: float = 1.0) -> Any:
            return None

        def decode(self, *args: Any) -> Any:
            return None

        def own(self) -> None:
            return None

    assert Own.Params().instantiate().own() is None


def exported(function: Any, *, has_length: bool = False) -> ExportedFunction:
    return ExportedFunction(
        doc="Doubles.",
        function=function,
        inputs={"x": ExportedInput("x", tf.float32, has_length=has_length)},
        outputs={"y": ExportedOutput("y")},
    )


def test_an_exported_function_without_its_input_is_rejected() -> None:
    def double(theta: Any, ctx: Any) -> Any:
        return {}

    message = rf"^the exported function double{HERE} is called .* def double\(theta, x, ctx\)$"
    with pytest.raises(TypeError, match=message):
        exported(double)
    assert exported(lambda theta, x, ctx: {"y": 2 * x}).lengths == (1,)


def test_an_exported_function_with_rows_needs_their_lengths() -> None:
    with pytest.raises(ValueError, match=r"the input 'x' has a length: give lengths"):
        exported(lambda theta, x, ctx: {"y": 2 * x}, has_length=True)
