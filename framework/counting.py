"""Counts in texts: "1 step", "2 steps", and multiples to suggest."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "", *, grouping: str = ",") -> str:
    """Returns a count with its noun.

    Args:
      count: the number.
      noun: in the singular.
      plural: "": the noun with an s.
      grouping: separates thousands.
    """
    return f"{count:{grouping}} {noun if count == 1 else plural or f'{noun}s'}"


def multiples_near(count: int, of: int) -> list[int]:
    """Returns the multiples of a number next to a count, below and above it, but not 0."""
    below = count // of * of
    return [n for n in (below, below + of) if n]
