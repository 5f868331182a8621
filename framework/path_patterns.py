"""Patterns: regular expressions that select weights by path.

A pattern must match the whole path: ".*/bias" matches "decoder/ffn/bias", "bias" does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tekso.framework.spelling import close_matches

_FLAGS = re.compile(r"(\(\?[aiLmsux]+\))+")


class PathPatterns:
    """A list of patterns; `path in patterns` if any pattern matches the whole path."""

    def __init__(self, patterns: Sequence[str], *, name: str) -> None:
        """Compiles the patterns; error messages contain `name`, the setting they come from.

        Raises:
          ValueError: a pattern is not a valid regular expression.
        """
        self.name = name
        self.patterns = tuple(patterns)
        self._compiled = []
        for pattern in patterns:
            try:
                self._compiled.append(re.compile(pattern))
            except re.error as error:
                raise ValueError(
                    f"{name}: {pattern!r} is not a valid regular expression: {error}"
                ) from error

    def __contains__(self, path: str) -> bool:
        """Returns whether any pattern matches the whole path."""
        return any(pattern.fullmatch(path) for pattern in self._compiled)

    def missed(self, paths: Iterable[str]) -> list[str]:
        """Returns the patterns that match none of the paths."""
        paths = list(paths)
        return [
            pattern.pattern
            for pattern in self._compiled
            if not any(pattern.fullmatch(path) for path in paths)
        ]

    def explain_miss(self, missed: Sequence[str], paths: Iterable[str]) -> str:
        """Returns an error message about patterns that match no weight."""
        paths = list(paths)
        return "; ".join(
            f"{self.name}: {pattern!r} matches no weight{_hint(pattern, paths)}"
            for pattern in missed
        )


def _whole(pattern: str, part: Sequence[re.Match[str]]) -> str:
    """Returns a pattern of the whole paths of which a pattern matches parts."""
    before = {found.string[: found.start()] for found in part}
    begin = re.escape(before.pop()) if len(before) == 1 else ".*"
    end = ".*" if any(found.end() < len(found.string) for found in part) else ""
    found = _FLAGS.match(pattern)
    flags = found[0] if found else ""  # only allowed at the beginning
    inner = pattern.removeprefix(flags) + ("\n" if "x" in flags else "")  # ends a comment
    return f"{flags}{begin}(?:{inner}){end}" if "|" in inner else f"{flags}{begin}{inner}{end}"


def _hint(pattern: str, paths: Sequence[str]) -> str:
    if part := [found for path in paths if (found := re.search(pattern, path))]:
        whole = _whole(pattern, part)
        matched = [path for path in paths if re.fullmatch(whole, path)]
        return f" as a whole; {whole!r} would match {listed(matched)}"
    if close := close_matches(pattern, paths, cutoff=0.5):
        return f"; similar weights: {listed(close)}"
    return f"; the weights are {listed(paths)}"


def listed(paths: Sequence[str], limit: int = 5) -> str:
    """Returns the first few paths as text."""
    shown = ", ".join(map(repr, paths[:limit]))
    return shown + (f" and {len(paths) - limit} more" if len(paths) > limit else "")
