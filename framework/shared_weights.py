"""SharedWeights: weights of one part of a model that are those of another, and so exist once.

    shared = {"mt/model/stack": "lm/model/stack"}

        lm/model/stack/layers/0/w   ◄── stored: in specs, checkpoints, and the learner
        mt/model/stack/layers/0/w   ─── another path to it, in theta only

Only theta has the weight at both paths. Layers do not change: each computes with its own Params, so
a dropout rate or a mask may differ where weights are shared. A gradient is the sum over both paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tekso.framework.path_patterns import PathPatterns, listed
from tekso.framework.spelling import close_matches
from tekso.framework.theta import SEPARATOR
from tekso.framework.weight_spec import WeightSpec


class SharedPart(NamedTuple):
    """A part of a model whose weights are those of another part.

    Attributes:
      path: path of the part.
      stored_at: path of the other part, which stores the weights.
      weights: number of weights (elements) that both have in common.
      tensors: number of tensors.
    """

    path: str
    stored_at: str
    weights: int
    tensors: int


class SharedWeights:
    """The stored path of every weight.

    Args:
      specs: specs of all weights, before any is shared.
      shared: {path of a layer or a weight: path of the one that stores its weights}.
      own: patterns of the weights that stay separate although they are in a shared part.
      where: the setting, for messages: "task".

    Attributes:
      stored: {path: path of the stored weight} of all weights.
      several: stored paths of the weights that several paths lead to.
      parts: the shared parts.

    Raises:
      ValueError: a path does not exist, two weights differ, or a weight would be itself.
    """

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        shared: Mapping[str, str],
        own: Sequence[str],
        *,
        where: str,
    ) -> None:
        self._where = where
        self._own = PathPatterns(own, name=f"{where}.own")
        if shared and (missed := self._own.missed(specs)):
            raise ValueError(self._own.explain_miss(missed, specs))
        links: dict[str, str] = {}
        for path, source in shared.items():
            links.update(self._links(specs, path, source))
        self.stored = {path: self._end(path, links) for path in specs}
        self.several = frozenset(s for path, s in self.stored.items() if path != s)
        self.parts = tuple(self._part(specs, links, *pair) for pair in shared.items())
        self._layers = {_above(p): _above(s) for p, s in self.stored.items()}

    def _links(self, specs: Mapping[str, WeightSpec], path: str, source: str) -> dict[str, str]:
        """Returns {path: path of the other} of the weights of one pair of parts."""
        setting = f"{self._where}.shared[{path!r}]"
        targets, sources = (self._below(specs, p, setting) for p in (path, source))
        kept = {name for name in targets if targets[name] in self._own}
        unknown = [targets[name] for name in targets.keys() - sources.keys() - kept]
        missing = [p for n, p in sources.items() if n not in targets and p not in self._own]
        if unknown or missing:
            more, less = (path, source) if unknown else (source, path)
            raise ValueError(
                f"{setting} is {source!r}, but {more} has weights that {less} does not have: "
                f"{listed(sorted(unknown or missing))}. Both need the same weights; exclude others "
                f"by a pattern in {self._where}.own"
            )
        names = [name for name in targets if name in sources and name not in kept]
        for name in names:
            one, other = specs[targets[name]], specs[sources[name]]
            for what in ("shape", "dtype", "trainable"):
                if getattr(one, what) != getattr(other, what):
                    raise ValueError(
                        f"{setting} is {source!r}, but {what} of {one.path} is "
                        f"{_text(getattr(one, what))} and of {other.path} "
                        f"{_text(getattr(other, what))}: shared weights must be equal in shape, "
                        f"dtype and trainable; set the same sizes, or exclude it by "
                        f"{self._where}.own"
                    )
        return {targets[name]: sources[name] for name in names}

    def _below(self, specs: Mapping[str, WeightSpec], path: str, setting: str) -> dict[str, str]:
        """Returns {path from there: path} of the weights of a part."""
        if path in specs:
            return {"": path}
        prefix = path.rstrip(SEPARATOR) + SEPARATOR
        found = {p[len(prefix) :]: p for p in specs if p.startswith(prefix)}
        if not found:
            parts = {SEPARATOR.join(p.split(SEPARATOR)[:n]) for p in specs for n in range(1, 9)}
            close = close_matches(path, sorted(parts), count=1)
            hint = (
                f"; did you mean {close[0]!r}?" if close else f"; there are {listed(list(specs))}"
            )
            raise ValueError(f"{setting}: no weight is at or below {path!r}{hint}")
        return found

    def _end(self, path: str, links: Mapping[str, str]) -> str:
        """Returns the end of the chain of links from a weight."""
        seen = [path]
        while seen[-1] in links:
            if links[seen[-1]] in seen:
                raise ValueError(
                    f"{self._where}.shared: {path} is stored nowhere: it leads back to itself "
                    f"({' → '.join([*seen, links[seen[-1]]])})"
                )
            seen.append(links[seen[-1]])
        return seen[-1]

    def _part(
        self, specs: Mapping[str, WeightSpec], links: Mapping[str, str], path: str, source: str
    ) -> SharedPart:
        prefix = path.rstrip(SEPARATOR) + SEPARATOR
        own = [specs[p] for p in links if p == path or p.startswith(prefix)]
        return SharedPart(path, source, sum(spec.size for spec in own), len(own))

    def specs(self, specs: Mapping[str, WeightSpec]) -> dict[str, WeightSpec]:
        """Returns the specs of the stored weights."""
        return {path: spec for path, spec in specs.items() if self.stored[path] == path}

    def flat(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns {path: tensor} for all paths that lead to the given stored weights."""
        return {path: stored[at] for path, at in self.stored.items() if at in stored}

    def statistic(self, name: str) -> str:
        """Returns the name of a statistic, "<layer path>/<name>", for the layer that stores it."""
        layer, _, own = name.rpartition(SEPARATOR)
        return SEPARATOR.join(filter(None, [self._layers.get(layer, layer), own]))


def _above(path: str) -> str:
    return path.rpartition(SEPARATOR)[0]


def _text(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
