"""Finds random numbers that a layer draws twice in a step, which are the same numbers.

Numbers depend on the layer, the name of the draw and the context. Two draws on different lines of a
layer are an error. A line that runs several times may be a loop, a layer that is computed twice, or
layers of a list: a trial of the loss, decoding and predictions count these for a warning.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Hashable, Iterator
from types import CodeType, FrameType
from typing import NamedTuple, Protocol

from absl import logging

from tekso.framework.graph_errors import place_in
from tekso.framework.user_mistakes import MistakeError

_OWN = "tekso.framework."  # modules whose frames are no lines of a layer
FOLD = "ctx.fold(i)"


class HasStream(Protocol):
    """The attributes of a layer that random numbers and statistics need."""

    @property
    def path(self) -> str:
        """Path of the layer in theta."""
        ...

    @property
    def pattern(self) -> str:
        """The path with "*" for every index of a stack."""
        ...


class DrawError(MistakeError):
    """A layer draws the same random numbers twice."""


class RandomDraw(NamedTuple):
    """A draw of random numbers.

    Attributes:
      layer: the layer.
      name: name of the draw.
      calls: the calls from a method of the layer to the draw, as (code, place in it).
      in_layer: whether a method of the layer draws; otherwise `calls` has only the last call.
      frames: (file, line, function) of the stack, the innermost last.
    """

    layer: HasStream
    name: str
    calls: tuple[tuple[CodeType, int], ...]
    in_layer: bool
    frames: tuple[tuple[str, int, str], ...]

    @property
    def owner(self) -> str:
        """The class and the path of the layer."""
        kind = type(self.layer).__name__
        return f"{kind} ({self.layer.path})" if self.layer.path else kind


class Repeats:
    """The draws of a trial that gave the same numbers as an earlier one on the same line."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[RandomDraw, RandomDraw]] = {}

    def add(self, first: RandomDraw, second: RandomDraw) -> None:
        """Adds two draws with the same numbers."""
        self._found.setdefault((first.layer.pattern, first.name), (first, second))

    def warnings(self, where: str = "in a step") -> list[str]:
        """Returns a warning for each layer, or list of layers, with such draws.

        Args:
          where: what drew them, for the message.
        """
        return [_warning(*draws, where) for draws in self._found.values()]


_NOTED: contextvars.ContextVar[Repeats | None] = contextvars.ContextVar("noted", default=None)


def _log(line: str) -> None:
    logging.warning("%s", line)


@contextlib.contextmanager
def warning_of_repeats(where: str, warn: Callable[[str], object] = _log) -> Iterator[None]:
    """Warns of draws that repeat while functions are traced in the block, at its end.

    Args:
      where: what draws, for the messages: "in decode".
      warn: takes a warning.
    """
    repeats = Repeats()
    token = _NOTED.set(repeats)
    try:
        yield
    finally:
        _NOTED.reset(token)
        for line in repeats.warnings(where):
            warn(line)


def noted() -> Repeats | None:
    """Returns what takes draws that repeat, in a block of `warning_of_repeats`."""
    return _NOTED.get()


def _warning(first: RandomDraw, second: RandomDraw, where: str) -> str:
    if first.layer is not second.layer:
        return (
            f"{first.owner} and {second.owner} draw the same random numbers {where}, as all "
            f"layers of a list do with the same context. Compute layer i with {FOLD}: "
            f"layer.fprop(theta.layers[i], x, {FOLD}), in fprop and in pieces"
            f"{place_in(second.frames)}"
        )
    return (
        f"{first.owner} draws the same random numbers several times {where}: in a loop, or "
        f"because it is computed several times. Give call i its own context, {FOLD}, or each draw "
        f"its own name, as in ctx.uniform(self, shape, name=…){place_in(second.frames)}"
    )


def check(
    draws: dict[Hashable, RandomDraw],
    key: Hashable,
    layer: HasStream,
    name: str,
    repeats: Repeats | None,
) -> None:
    """Checks that a draw has other numbers than the earlier ones of a forward pass.

    Args:
      draws: {what determines the numbers: draw} of the earlier ones; takes this one.
      key: determines the numbers, with the pattern of the layer and the name.
      layer: the layer that draws.
      name: name of the draw.
      repeats: takes draws on the same line; None: these are ignored.

    Raises:
      DrawError: the layer drew the same numbers on another line.
    """
    new = _draw(layer, name)
    first = draws.setdefault((key, layer.pattern, name), new)
    if first is new:
        return
    is_same = first.layer is layer and first.in_layer == new.in_layer
    if is_same and first.calls != new.calls:
        places = [place_in(draw.frames) for draw in (first, new)]
        named = f"with the name {name!r}" if name else "without a name"
        raise DrawError(
            f"{new.owner} draws the same random numbers twice: two draws {named}, in one call. "
            'Give each its own name: ctx.uniform(self, shape, name="…") or ops.dropout(ctx, x, '
            'rate, self, name="…"), or compute the second with ctx.fold(1). If both should have '
            f"the same numbers, draw once and use the result twice{''.join(dict.fromkeys(places))}"
        )
    if repeats is not None:
        repeats.add(first, new)


def _draw(layer: HasStream, name: str) -> RandomDraw:
    """Returns the draw that the calling functions make."""
    calls: list[tuple[CodeType, int]] = []
    frames: list[tuple[str, int, str]] = []
    in_layer = 0  # calls up to the outermost one of a method of the layer
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if calls or not frame.f_globals.get("__name__", "").startswith(_OWN):
            calls.append((code, frame.f_lasti))
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
            if code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is layer:
                in_layer = len(calls)
        frame = frame.f_back
    return RandomDraw(layer, name, tuple(calls[: in_layer or 1]), in_layer > 0, tuple(frames[::-1]))
