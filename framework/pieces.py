"""Pieces: a task as an ordered list of parts. A pipeline stage consists of neighbouring pieces."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.graph_errors import IN_PIECE
from tekso.framework.layer import Layer
from tekso.framework.source_lines import place_of
from tekso.framework.theta import SEPARATOR, Theta

Flow: TypeAlias = dict[str, Any]
"""{name: value} that pieces pass on: tensors with the batch as dim 0, nests of such tensors, or
None. A piece returns its input with changed and added values, so all later pieces can read them."""

Run: TypeAlias = Callable[[Theta, Flow, StepContext], Flow]

LOSS_SUM = "loss_sum"
METRICS = "metrics"
"""Names that the last piece of a task adds to the flow: the fields of `LossSums`."""


class RowsError(ValueError):
    """Pieces read only some rows of a repeated stack, so only a pipeline can run them."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a model that always belongs to one stage.

    Attributes:
      name: the computation, as a path: "embedding", "stack/layers/0", …, "softmax".
      layers: {path from the model: layer} of the layers whose weights it reads. Two pieces may read
        the same layer (an embedding and its tied softmax).
      run: pure function `run(theta, flow, ctx) -> flow`. It reads only `layers` of the model's
        theta.
      rows: (first, end) of the rows of stacked weights that it reads, without `end`. None: no
        weight of `layers` is stacked, or it reads all rows.
      kind: the same for pieces that read and write flow values of the same names, and compute the
        same for layers with the same Params. Such pieces are traced once. None: different from all
        other pieces.
      run_rows: `run_rows(first, theta, flow, ctx)` computes several neighbouring pieces; theta has
        their rows, and `first` is the number of the first one.
    """

    name: str
    layers: Mapping[str, Layer]
    run: Run
    rows: tuple[int, int] | None = None
    run_rows: Callable[[int, Theta, Flow, StepContext], Flow] | None = None
    kind: str | None = None

    def compute(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        """Returns `run(theta, flow, ctx)`; an error about a missing name gets a note on the piece.

        `run` gets a copy of the flow, so it may change the dict.

        Raises:
          ValueError: the result lacks values of the flow, and has no loss.
        """
        try:
            after = self.run(theta, copy.copy(flow), ctx)
        except (AttributeError, KeyError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            is_weight = frame.f_code.co_filename == theta_lib.__file__
            if is_weight or isinstance(error, KeyError):
                error.add_note(f"{IN_PIECE}{self.name!r}, {self._given(flow, weights=is_weight)}")
            raise
        returned = set(after) if isinstance(after, dict) else set()
        if LOSS_SUM not in returned and (missing := sorted(set(flow) - returned)):
            raise ValueError(
                f"the piece {self.name!r}{place_of(self.function)} does not return "
                f"{', '.join(missing)}: return its input with its outputs, {{**flow, name: y}}"
            )
        return after

    def _given(self, flow: Flow, *, weights: bool) -> str:
        """Returns what the piece can read, for messages: weights or inputs."""
        if not weights:
            return f"whose inputs are {', '.join(sorted(flow))}"
        text = f"whose theta has the weights of its layers: {', '.join(self.layers) or 'none'}"
        if getattr(self.function, "__name__", "") == "<lambda>":
            return f"{text}. A lambda in a loop sees the last i: use functools.partial(run, i)"
        return f"{text}. List all layers that it reads: Piece(name, {{path: layer}}, run)"

    def weights(self, paths: Sequence[str]) -> list[str]:
        """Returns those of the paths that this piece reads.

        Args:
          paths: weight paths from the model, sorted.
        """
        found: list[str] = []
        for layer_path in self.layers:
            prefix = _prefix(layer_path)
            start = bisect.bisect_left(paths, prefix)
            end = bisect.bisect_left(paths, f"{layer_path}{chr(ord(SEPARATOR) + 1)}")
            found += paths[start:end] if layer_path else paths
        return found

    @property
    def function(self) -> Callable[..., Flow]:
        """The function of the model that `run` calls, for messages."""
        found: Any = self.run
        while isinstance(found, functools.partial):
            found = found.args[1] if found.func is _enter else found.func
        return cast(Callable[..., Flow], found)

    def owns(self, path: str) -> bool:
        """Returns whether this piece reads the weight at a path from the model."""
        return any(path.startswith(_prefix(layer_path)) for layer_path in self.layers)

    def theta(self, flat: Mapping[str, Any]) -> Theta:
        """Returns the part of the model's theta that `run` reads.

        Args:
          flat: {path from the model: tensor} of at least the weights that this piece reads; stacked
            weights have only its `rows`.
        """
        root = Theta()
        for path, layer in self.layers.items():
            prefix = _prefix(path)
            own = {p[len(prefix) :]: t for p, t in flat.items() if p.startswith(prefix)}
            if not path:
                return layer.theta(own)
            node = root
            *parents, name = path.split(SEPARATOR)
            for parent in parents:
                node = node.setdefault(parent, Theta())
            node[name] = layer.theta(own)
        return root

    def below(self, child: str) -> Piece:
        """Returns this piece as a piece of the parent that has the model as its child `child`."""
        return dataclasses.replace(
            self,
            name=f"{child}{SEPARATOR}{self.name}",
            layers={
                f"{child}{SEPARATOR}{path}" if path else child: layer
                for path, layer in self.layers.items()
            },
            kind=self.kind and f"{child}{SEPARATOR}{self.kind}",
            run=functools.partial(_enter, child, self.run),
            run_rows=self.run_rows and functools.partial(_enter, child, self.run_rows),
        )


def _enter(child: str, run: Callable[..., Flow], *args: Any) -> Flow:
    """Runs a piece of a child: `run(theta, flow, ctx)`, with the child's theta."""
    *first, theta, flow, ctx = args
    return run(*first, theta.get(child, Theta()), flow, ctx)


def _prefix(path: str) -> str:
    return f"{path}{SEPARATOR}" if path else ""


def of_layers(
    name: str, layers: Sequence[Layer], run: Callable[[int, Theta, Flow, StepContext], Flow]
) -> list[Piece]:
    """Returns one piece for each layer of a list, all of one kind.

    Args:
      name: path of the list; its pieces are named "<name>/<number>".
      layers: the layers.
      run: `run(number, theta, flow, ctx)` computes one layer.
    """
    return [
        Piece(path, {path: layer}, functools.partial(run, i), kind=name)
        for i, layer in enumerate(layers)
        if (path := f"{name}{SEPARATOR}{i}")
    ]


def rows_of_stack(
    name: str,
    layers: Mapping[str, Layer],
    count: int,
    run_rows: Callable[[int, Theta, Flow, StepContext], Flow],
) -> list[Piece]:
    """Returns one piece for each layer of a repeated stack.

    Args:
      name: name of the stack; its pieces are named "<name>/<number>".
      layers: {path: stack}.
      count: number of layers.
      run_rows: see `Piece`.
    """
    return [
        Piece(
            f"{name}{SEPARATOR}{i}",
            layers,
            functools.partial(run_rows, i),
            rows=(i, i + 1),
            run_rows=run_rows,
            kind=name,
        )
        for i in range(count)
    ]


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces, with neighbouring layers of a repeated stack merged into one loop."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if (
            last is not None
            and last.rows is not None
            and piece.rows is not None
            and piece.run_rows is not None
            and list(last.layers) == list(piece.layers)
            and last.rows[1] == piece.rows[0]
        ):
            rows = (last.rows[0], piece.rows[1])
            run = functools.partial(piece.run_rows, rows[0])
            result[-1] = dataclasses.replace(
                last, name=f"{last.name.split('…')[0]}…{piece.name}", rows=rows, run=run
            )
        else:
            result.append(piece)
    return result


def run_all(pieces: Iterable[Piece], flat: Mapping[str, Any], flow: Flow, ctx: StepContext) -> Flow:
    """Runs pieces one after the other.

    Args:
      pieces: the pieces.
      flat: {path from the model: tensor} of at least the weights that they read.
      flow: input of the first piece.
      ctx: the step context.
    """
    paths = sorted(flat)
    for piece in pieces:
        own = {path: flat[path] for path in piece.weights(paths)}
        flow = piece.compute(piece.theta(own), flow, ctx)
    return flow
