"""Shows malformed files and records when an input finds them, also in the middle of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from tekso.framework.input.input import Input
from tekso.framework.input.skips import SkipReport


class SkipNotices:
    """Shows what inputs have skipped, once.

    Args:
      inputs: {name: input}.
      warn: shows a warning.
    """

    def __init__(self, inputs: Mapping[str, Input], warn: Callable[[str], None]) -> None:
        self._inputs, self._warn = inputs, warn
        self._shown = dict.fromkeys(inputs, SkipReport())

    def show(self) -> None:
        """Shows what was skipped since the last call."""
        for name, input in self._inputs.items():
            report, shown = input.skipped(), self._shown[name]
            if report.count > shown.count:
                self._shown[name] = report
                # The report of several sources has those of the first one first.
                new = tuple(skip for skip in report.named if skip not in shown.named)
                self._warn(f"{name}: {SkipReport(report.count - shown.count, new)}")

    @contextlib.contextmanager
    def around(self, first: int, last: int) -> Iterator[None]:
        """Shows what was skipped before a call of the steps from `first` to `last`."""
        del first, last
        self.show()
        yield
