"""Classes with small Params, and the texts of errors, for tests of Params."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tekso.framework.params import (
    REQUIRED,
    Configurable,
    Params,
    param,
)


class Padding(enum.Enum):
    SAME = "same"
    VALID = "valid"


class Init(Configurable):
    class Params(Configurable.Params):
        """Params of Init."""

        scale: float = param("Factor.", default=1.0)


class Uniform(Init):
    class Params(Init.Params):
        """Params of Uniform."""

        low: float = param("Lower end.", default=-1.0)


class Linear(Configurable):
    class Params(Configurable.Params):
        """Params of Linear."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        use_bias: bool = param("Whether to add a bias.", default=True)
        dropout: float = param("Rate.", default=0.0)
        init: Init.Params = param("Initializer.", default=Uniform.Params(scale=0.5))


class Stack(Configurable):
    class Params(Configurable.Params):
        """Params of Stack."""

        body: Linear.Params = param("One layer.", default=Linear.Params())
        layers: list[Linear.Params] = param("More layers.", default=[])
        named: dict[str, Linear.Params] = param("Layers by name.", default={})
        dims: tuple[int, ...] = param("Sizes.", default=(2, 3))
        below: Stack.Params | None = param("A stack below.", default=None)


class Sets(Configurable):
    class Params(Configurable.Params):
        """Params of Sets."""

        nested: dict[str, list[Any]] = param("Containers.", default={"a": [{1}]})


def holding(annotation: Any, default: Any = REQUIRED) -> Any:
    """Params with one field, x, of the type."""
    namespace = {"__annotations__": {"x": annotation}, "x": param("The value.", default=default)}
    return type("Holder", (Params,), namespace)()


def message(error_type: type[BaseException], act: Callable[[], Any]) -> str:
    with pytest.raises(error_type) as caught:
        act()
    return str(caught.value)


def line_here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno
