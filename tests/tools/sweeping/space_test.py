"""The settings of a sweep: lists of values, ranges, all combinations."""

from __future__ import annotations

import pytest

from tekso.tools.command_errors import UsageError
from tekso.tools.sweeping import space


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1e-3,3e-3", ["1e-3", "3e-3"]),
        ("a.b = 1 , 2,1", ["1", "2"]),
        ("a.b=[1,2],(3,[4,5])", ["[1,2]", "(3,[4,5])"]),
        ("a.b='x,y',\"z,\"", ["'x,y'", '"z,"']),
        ("a.b=data:2;model:4", ["data:2;model:4"]),
    ],
)
def test_commas_separate_values_but_not_inside_brackets_and_quotes(
    text: str, values: list[str]
) -> None:
    assert space.parse(text) == space.Varied("a.b", tuple(values))


def test_a_range_has_ends_of_one_kind() -> None:
    assert space.parse("x=1e-4:1e-2:log").range == space.Range(1e-4, 1e-2, True)
    whole = space.parse("x=2:8").range
    assert whole is not None and whole.is_whole
    assert space.parse("x=2:8.0").range == space.Range(2, 8.0, False)
    assert space.parse("x=2:8").examples == ("2", "8")


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "x=",
        "=1",
        "x=1,,2",
        "x=3:2",
        "x=0:1:log",
        "x=1:1e999",
        "x=-9e18:1",
        "x=1:99999999999999999999",
    ],
)
def test_what_is_no_setting_is_an_error_that_repeats_it(text: str) -> None:
    with pytest.raises(UsageError, match=f"--sweep {text}: expected|a value is empty"):
        space.parse(text)


@pytest.mark.parametrize("values", ["16:64:lin", "16:64:log:2", "1e-4:1e-2:"])
def test_a_range_with_an_unknown_end_is_told_the_two_forms(values: str) -> None:
    with pytest.raises(UsageError, match=r": a range is low:high or low:high:log$"):
        space.parse(f"x={values}")


def test_an_end_of_a_range_with_many_digits_is_too_large() -> None:
    with pytest.raises(UsageError, match=r"^--sweep x=1:9{76}: expected .* and at most 1e\+18$"):
        space.parse("x=1:" + "9" * 5000)


def test_a_grid_has_all_combinations() -> None:
    found = space.grid([space.parse("x=1,2"), space.parse("y=a,b")])
    assert [tuple(one.values()) for one in found] == [
        ("1", "a"),
        ("1", "b"),
        ("2", "a"),
        ("2", "b"),
    ]
    assert space.grid([]) == [{}]
    with pytest.raises(UsageError, match=r"--sweep x has a range: .* --search=random"):
        space.grid([space.parse("x=1:2")])
