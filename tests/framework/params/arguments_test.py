"""`set_text`: values from the command line, read by the types of their fields."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Literal

import pytest

from tekso.framework.params import REQUIRED, Configurable, Params, param


class Padding(enum.Enum):
    SAME = 1
    VALID = 2


class Optimizer(Configurable):
    class Params(Configurable.Params):
        """Params of Optimizer."""

        rate: float = param("Learning rate.", default=0.1)


class Adagrade(Optimizer):
    class Params(Optimizer.Params):
        """Params of Adagrade."""

        beta: float = param("Decay.", default=0.9)


class Learner(Configurable):
    class Params(Configurable.Params):
        """Params of Learner."""

        optimizer: Optimizer.Params = param("Optimizer.", default=Optimizer.Params())
        slow: Optimizer.Params | None = param("Second optimizer.", default=None)
        all: list[Optimizer.Params] = param("Several.", default=[])


def holding(**fields: tuple[Any, Any]) -> Any:
    """Params with these fields: (type, default) by name."""
    namespace: dict[str, Any] = {
        "__annotations__": {name: kind for name, (kind, _) in fields.items()}
    }
    namespace |= {name: param("A value.", default=value) for name, (_, value) in fields.items()}
    return type("Holder", (Params,), namespace)()


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "3", 3),
        (int, " -1_000 ", -1000),
        (int, "0x10", 16),
        (float, "1e-3", 0.001),
        (float, "3", 3.0),
        (float, "-inf", -float("inf")),
        (bool, "true", True),
        (bool, "False", False),
        (str, "True", "True"),
        (str, "a b", "a b"),
        (str, "", ""),
        (str, "'a\\n'", "a\n"),
        (str, "'it's'", "'it's'"),
        (str | None, "None", None),
        (str | None, "none", "none"),
        (int | None, "None", None),
        (int | None, "4", 4),
        (bool | int, "true", True),
        (bool | int, "1", 1),
        (int | float, "0.5", 0.5),
        (int | str, "abc", "abc"),
        (Literal["min", "max"], "max", "max"),
        (Literal[1, "1"], "1", 1),
        (Literal[None, 2], "None", None),
        (Padding, "SAME", Padding.SAME),
        (Padding, "Padding.VALID", Padding.VALID),
        (list[str], "a.txt,b.txt", ["a.txt", "b.txt"]),
        (list[str], "/data/*.txt", ["/data/*.txt"]),
        (list[str], "", []),
        (list[str], "1,2", ["1", "2"]),
        (list[str], "['a,b']", ["a,b"]),
        (list[int], "3", [3]),
        (list[int], "3, 4", [3, 4]),
        (list[int], "[]", []),
        (list[int] | None, "3,4", [3, 4]),
        (list[list[int]], "[(1, 2), []]", [[1, 2], []]),
        (tuple[int, ...], "[2, 3]", (2, 3)),
        (tuple[int, ...], "2,3", (2, 3)),
        (tuple[int, str], "2,a", (2, "a")),
        (set[int], "2,3", {2, 3}),
        (frozenset[int], "{2}", frozenset({2})),
        (dict[str, float], "{'a': 1}", {"a": 1.0}),
        (dict[str, tuple[int, ...]], "{'a': [1]}", {"a": (1,)}),
        (type[Optimizer], f"{__name__}:Adagrade", Adagrade),
        (Callable, f"cls('{__name__}:Adagrade')", Adagrade),
        (bytes, "b'x'", b"x"),
        (Any, "[1, 2]", [1, 2]),
        (Any, "abc", "abc"),
        (Any, "None", None),
    ],
)
def test_text_is_read_by_the_type(annotation: Any, text: str, value: Any) -> None:
    params = holding(x=(annotation, REQUIRED))
    assert params.set_text("x", text).x == value
    assert type(params.x) is type(value)
    assert params.origin("x") == "--set"


@pytest.mark.parametrize(
    ("annotation", "text", "said"),
    [
        (int, "3.0", r"must be int, given '3.0' \(write 3\)"),
        (int, "1e3", r"must be int, given '1e3' \(write 1000\)"),
        (int, "2.5", "must be int, given '2.5'$"),
        (int, "1e400", "must be int, given '1e400'$"),
        (int, "True", "must be int"),
        (int, "", "must be int, given ''"),
        (float, "big", "must be float, given 'big'"),
        (bool, "0", "must be True or False, given '0'"),
        (bool, "1", "must be True or False"),
        (bool, "yes", "must be True or False"),
        (int | None, "x", r"must be int, given 'x' \(None is allowed\)"),
        (int | float, "x", r"must be int \| float, given 'x'"),
        (Literal["min", "max"], "mix", "must be one of min, max, given 'mix'; did you mean"),
        (Padding, "SAMT", "must be one of SAME, VALID, given 'SAMT'; did you mean SAME"),
        (list[int], "3,a", "must be int, given 'a'"),
        (list[int], "[1, 'a']", r"must be list\[int\], given .*item 1 is str 'a'"),
        (tuple[int, str], "1,a,3", "3 items instead of 2"),
        (dict[str, int], "a", r"must be dict\[str, int\], given 'a'"),
        (type[Optimizer], f"{__name__}:Learner", r"must be type\[Optimizer\]"),
        (Callable, "os:system", "must be Callable, given 'os:system'"),
    ],
)
def test_text_of_another_type_is_an_error(annotation: Any, text: str, said: str) -> None:
    params = holding(x=(annotation, REQUIRED))
    with pytest.raises(ValueError, match=f"^x: .*{said}"):
        params.set_text("x", text)
    assert params.x is REQUIRED


def test_a_child_is_set_by_its_owner() -> None:
    params = Learner.Params()
    params.set_text("optimizer", f"{__name__}:Adagrade").set_text("optimizer.beta", "0.5")
    assert isinstance(params.optimizer, Adagrade.Params) and params.optimizer.beta == 0.5
    params.set_text("slow", "Adagrade")
    assert isinstance(params.slow, Adagrade.Params)
    assert params.set_text("slow", "None").slow is None
    params.set_text("all", "Adagrade,Optimizer")
    assert [type(one) for one in params.all] == [Adagrade.Params, Optimizer.Params]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Adagrad", "did you mean Adagrade"),
        ("no_such_module:Adam", "there is no module no_such_module"),
        (f"{__name__}:Adam", "has no Adam"),
        (f"{__name__}:Learner", "must be Optimizer.Params, .*whose Params are Learner.Params"),
        ("", "no imported class has this name"),
    ],
)
def test_a_child_of_another_kind_is_an_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^optimizer: .*{said}"):
        Learner.Params().set_text("optimizer", text)


def test_a_wildcard_reads_the_text_by_each_type() -> None:
    params = holding(a=(Params, Optimizer.Params()), b=(list[int], REQUIRED), rate=(str, "x"))
    params.set_text("*rate", "3")
    assert (params.a.rate, params.rate) == (3.0, "3")
    with pytest.raises(AttributeError, match="matches no field"):
        params.set_text("*.nothing", "3")
    before = params.copy()
    with pytest.raises(ValueError, match=r"^a\.rate: must be float"):
        params.set_text("*rate", "abc")
    assert params == before


def test_text_for_an_item_is_read_by_the_type_of_the_items() -> None:
    params = holding(
        dims=(tuple[int, ...], (2, 3)),
        pair=(tuple[int, str], (2, "a")),
        names=(dict[str, float], {"a": 0.5}),
        maybe=(list[int] | None, [1]),
    )
    params.set_text("dims.1", "5").set_text("pair.1", "7").set_text("names.a", "2")
    params.set_text("maybe.0", "9")
    assert (params.dims, params.pair) == ((2, 5), (2, "7"))
    assert (params.names, params.maybe) == ({"a": 2.0}, [9])
