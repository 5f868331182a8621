"""Pieces: a task as an ordered list of parts, between which a pipeline may cut it into stages."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.theta import SEPARATOR, Theta

Flow: TypeAlias = dict[str, Any]
"""What is handed from piece to piece, by name: tensors whose dim 0 counts examples, nests of them,
or None. A piece returns what it was given, with what it changes and adds; so a value may be read
by any later piece."""

Run: TypeAlias = Callable[[Theta, Flow, StepContext], Flow]

LOSS_SUM = "loss_sum"
METRICS = "metrics"
"""What the last piece of a task adds to the flow: the fields of `LossSums`."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a model that is never cut.

    Attributes:
      name: what is computed, as a path: "embedding", "stack/layers/0", …, "softmax".
      layers: the layers whose weights it reads, by their paths from the model. Two pieces may read
        the same layer (an embedding and the softmax that is tied to it).
      run: `run(theta, flow, ctx) -> flow`, pure. Of the model's theta it reads `layers` alone.
      rows: of weights that are stacked over layers, those that it reads: from the first up to, not
        including, the second. None where no weight of `layers` is stacked, or all is read.
      kind: equal for pieces of a model that read and make values of the same names and compute the
        same, given layers with the same Params; they are then traced once. None: like no other.
      run_rows: `run_rows(first, theta, flow, ctx)`, with theta of any such rows, of which the first
        is the layer of number `first`: runs several neighbours at once.
    """

    name: str
    layers: Mapping[str, Layer]
    run: Run
    rows: tuple[int, int] | None = None
    run_rows: Callable[[int, Theta, Flow, StepContext], Flow] | None = None
    kind: str | None = None

    def weights(self, paths: Sequence[str]) -> list[str]:
        """Returns which of some paths from the model, in alphabetical order, `owns` holds for."""
        found: list[str] = []
        for layer_path in self.layers:
            prefix = _prefix(layer_path)
            start = bisect.bisect_left(paths, prefix)
            end = bisect.bisect_left(paths, f"{layer_path}{chr(ord(SEPARATOR) + 1)}")
            found += paths[start:end] if layer_path else paths
        return found

    def owns(self, path: str) -> bool:
        """Whether the weight at a path from the model is read by this piece."""
        return any(path.startswith(_prefix(layer_path)) for layer_path in self.layers)

    def theta(self, flat: Mapping[str, Any]) -> Theta:
        """Returns the part of the model's theta that `run` reads.

        Args:
          flat: {path from the model: tensor} of at least the weights that this piece reads; those
            that are stacked over layers with its `rows` alone.
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
        """Returns this piece of a model as one of the task, or model, that has it as a child."""
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


def rows_of_stack(
    name: str,
    layers: Mapping[str, Layer],
    count: int,
    run_rows: Callable[[int, Theta, Flow, StepContext], Flow],
) -> list[Piece]:
    """Returns the layers of a repeated stack as a piece each.

    Args:
      name: of the stack; a piece is called "<name>/<number>".
      layers: the stack, by its path.
      count: its number of layers.
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
    """Returns pieces in which neighbouring layers of one repeated stack are one loop."""
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
    """Runs pieces one after the other on the weights {path: tensor} that they read."""
    paths = sorted(flat)
    for piece in pieces:
        own = {path: flat[path] for path in piece.weights(paths)}
        flow = piece.run(piece.theta(own), flow, ctx)
    return flow
