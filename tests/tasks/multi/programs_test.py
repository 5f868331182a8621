"""The program of one task gives its functions the theta of that task."""

from __future__ import annotations

from typing import Any

from tekso.tasks.multi.programs import TaskPrograms


class Recording:
    """A program that keeps the functions that it calls."""

    serialize_calls = True

    def __init__(self) -> None:
        self.called: list[Any] = []

    def call(self, function: Any, *inputs: Any) -> Any:
        """See `Program`."""
        self.called.append(function)
        return function({"a": 1, "b": 2}, *inputs)


def test_every_program_gets_the_same_function_so_that_it_is_traced_once() -> None:
    def plus(theta: int, x: int) -> int:
        return theta + x

    programs, one, other = TaskPrograms(), Recording(), Recording()
    assert [programs.of(one, task).call(plus, 10) for task in "abab"] == [11, 12, 11, 12]
    assert programs.of(other, "b").call(plus, 20) == 22 and programs.of(one, "a").serialize_calls
    first, second, *again = one.called
    assert again == [first, second] != [second, first] and other.called == [second]
