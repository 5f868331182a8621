"""`wrap`: Params of callables and classes from outside."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from tekso.framework.params import REQUIRED, Configurable, Params, param, wrap


def power(base: float, exponent: int = 2, *args: Any, scale=None, **kwargs: Any) -> float:
    return base**exponent * (scale or 1.0)


def positional(a: int, /, b: int) -> tuple[int, int]:
    return a, b


def sloppy(x: int = None, y: str = 3) -> tuple[Any, Any]:  # type: ignore[assignment]  # noqa: RUF013
    return x, y


class Plain:
    def __init__(self, size: int, inner: Any = None, names: list[str] | None = None) -> None:
        self.size, self.inner, self.names = size, inner, names


def test_fields_come_from_the_signature() -> None:
    fields = wrap(power)().fields()
    assert list(fields) == ["base", "exponent", "scale"]
    assert [field.type for field in fields.values()] == [float, int, Any]
    assert [field.default for field in fields.values()] == [REQUIRED, 2, None]
    assert all("power" in field.doc for field in fields.values())


def test_instantiate_calls_the_target() -> None:
    params = wrap(power)(base=3)
    assert params.instantiate() == 9.0
    assert params.set(exponent=3).instantiate(scale=2.0) == 54.0
    assert wrap(positional)(a=1, b=2).instantiate() == (1, 2)


def test_types_are_checked_and_required_arguments_are_required() -> None:
    params = wrap(power)()
    with pytest.raises(TypeError, match="exponent: wanted int"):
        params.exponent = 0.5
    with pytest.raises(ValueError, match="base is REQUIRED"):
        params.instantiate()
    with pytest.raises(AttributeError, match="did you mean exponent"):
        params.exponnet = 2


def test_a_default_that_does_not_fit_its_annotation_widens_it() -> None:
    params = wrap(sloppy)()
    assert params.instantiate() == (None, 3)
    params.set(x=3, y="a")
    with pytest.raises(TypeError):
        params.set(x="a")


def test_children_are_built_and_containers_are_plain() -> None:
    inner = wrap(Plain)(size=2)
    plain = wrap(Plain)(size=3, inner=[inner, {"a": inner}], names=["x"]).instantiate()
    assert plain.inner[0].size == plain.inner[1]["a"].size == 2
    assert type(plain.names) is list
    plain.names.append("y")


def test_an_argument_that_wants_params_gets_params() -> None:
    def takes_params(child: Params) -> Params:
        return child

    child = wrap(Plain)(size=2)
    assert wrap(takes_params)(child=child).instantiate() == child


def test_the_same_target_gives_the_same_class() -> None:
    assert wrap(power) is wrap(power)
    assert wrap(Plain) is wrap(Plain) is not wrap(power)
    assert isinstance(wrap(Plain)(), Params)


def test_two_functions_of_one_name_are_not_confused() -> None:
    def make(factor: int) -> type[Any]:
        def scale(x: int) -> int:
            return x * factor

        return wrap(scale)

    first, second = make(2), make(3)
    assert (first(x=1).instantiate(), second(x=1).instantiate()) == (2, 3)
    assert second(x=1).to_text()
    with pytest.raises(TypeError, match=r"another .* was wrapped since"):
        first(x=1).to_text()


def test_a_configurable_class_keeps_its_params() -> None:
    class Mine(Configurable):
        pass

    assert wrap(Mine) is Mine.Params


def test_defined_fields_are_passed_as_further_arguments() -> None:
    params = wrap(collections.Counter)()
    params.define("a", 3, "How many.")
    assert params.instantiate() == collections.Counter(a=3)


def test_what_cannot_be_wrapped_says_why() -> None:
    with pytest.raises(TypeError, match="takes a callable"):
        wrap(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="signature"):
        wrap(range)

    def takes_copy(copy: bool) -> None:
        pass

    with pytest.raises(TypeError, match="'copy' is a method of Params"):
        wrap(takes_copy)


def test_a_wrapped_class_may_be_a_child() -> None:
    class Outer(Configurable):
        class Params(Configurable.Params):
            plain: Params = param("Something from outside.", default=wrap(Plain)(size=2))

    params = Outer.Params()
    params.plain.size = 5
    assert Outer.Params().plain.size == 2
    assert params.plain.instantiate().size == 5
