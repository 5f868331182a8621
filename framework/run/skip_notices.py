"""Shows malformed files and records when an input finds them, also in the middle of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from tekso.framework.input.input import Input
from tekso.framework.input.skips import Skip, SkipReport


class SkipNotices:
    """Shows what inputs have skipped, once.

    Args:
      inputs: {name: input}.
      warn: shows a warning.
    """

    def __init__(self, inputs: Mapping[str, Input], warn: Callable[[str], None]) -> None:
        self._inputs, self._warn = inputs, warn
        self._counts = dict.fromkeys(inputs, 0)
        self._named: dict[str, set[Skip]] = {name: set() for name in inputs}

    def show(self) -> None:
        """Shows what was skipped since the last call."""
        for name, input in self._inputs.items():
            report, before = input.skipped(), self._counts[name]
            if report.count > before:
                # A mixture names what the first of its sources skipped first, whenever that was.
                new = tuple(skip for skip in report.named if skip not in self._named[name])
                self._counts[name] = report.count
                self._named[name].update(new)
                self._warn(f"{name}: {SkipReport(report.count - before, new)}")

    @contextlib.contextmanager
    def around(self, first: int, last: int) -> Iterator[None]:
        """Shows what was skipped before a call of the steps from `first` to `last`."""
        del first, last
        self.show()
        yield
