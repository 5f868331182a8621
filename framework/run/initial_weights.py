"""Warm start: the weights of other runs become the initial weights of a new one.

    run.warm_start = {"encoder": WarmStart.Params(checkpoint="runs/a", only=["model/encoder/.*"]),
                      "decoder": WarmStart.Params(checkpoint="runs/b", only=["model/decoder/.*"])}

Every weight comes from exactly one checkpoint, or a pattern says that it keeps its initial values.
A stack of layers may be repeated (one weight "stack/layers/w" with a leading dim "layers") in one
run, and unrolled (a weight "stack/layers/0/w" for each layer) in the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.counting import counted
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.shards import Slices
from tekso.framework.input.assets import inherit, learned_assets
from tekso.framework.path_patterns import PathPatterns
from tekso.framework.run import weight_path_text
from tekso.framework.run.checkpoint_errors import CheckpointError
from tekso.framework.run.initialized import Initialized
from tekso.framework.run.warm_start_sources import WarmStartError, open_source
from tekso.framework.run.weight_files import StoredWeights
from tekso.framework.run.weight_scales import left_out_problem, scale_problem, stored_scales
from tekso.framework.spelling import close_matches
from tekso.framework.state import WEIGHTS
from tekso.framework.tables import table
from tekso.framework.theta import SEPARATOR
from tekso.framework.weight_spec import WeightSpec

_MOST_PROBLEMS = 8  # in a message
_VOCAB = "vocab"  # the dim of weights that have a row for each token


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """The plan of a warm start.

    Attributes:
      checkpoints: {source: its checkpoint}.
      weights: of the task, in their order.
      unused: {source: weights of its checkpoint that are not used}.
      uses: {source: "evaluation" or "training"}.
    """

    checkpoints: Mapping[str, StoredWeights]
    weights: Sequence[Initialized]
    unused: Mapping[str, Sequence[str]]
    uses: Mapping[str, Any]

    def restore(self, program: ExecutionProgram) -> None:
        """Gives an initialized program the weights; its slots stay as they are.

        Raises:
          WarmStartError: a weight of a checkpoint is not finite.
        """
        taken = {WEIGHTS + weight.spec.path: weight for weight in self.weights if weight.name}

        def value(key: str, where: Slices) -> np.ndarray:
            weight = taken[key]
            return weight.value(
                self.checkpoints[weight.name],
                self.uses[weight.name],
                where,
                initial=functools.partial(program.initial_value, key),
            )

        program.assign(value, taken.keys())

    def lines(self) -> list[str]:
        """Returns the table of what comes from where.

        Layers of a stack are one line, unless only some of them come from a checkpoint.
        """
        lines = []
        mixed = weight_path_text.mixed({one.spec.path: one.name for one in self.weights})
        for name, checkpoint in self.checkpoints.items():
            own = [weight for weight in self.weights if weight.name == name]
            lines.append(
                f"warm start from {checkpoint.path} (step {checkpoint.step}, {self.uses[name]} "
                f"weights): {len(own)} of {len(self.weights)} weights"
            )
            lines += _rows(own, mixed)
            if unused := self.unused[name]:
                used = {weight_path_text.numberless(key) for weight in own for key in weight.keys}
                lines.append(f"  not used of the checkpoint: {weight_path_text.some(unused, used)}")
        kept = [weight.spec.path for weight in self.weights if not weight.name]
        if kept:
            lines.append(f"  keep their initial values: {weight_path_text.some(kept, mixed)}")
        return lines


def plan(
    specs: Mapping[str, WeightSpec],
    sources: Mapping[str, Any],
    *,
    assets: str | None,
    warn: Callable[[str], None],
) -> InitialWeights:
    """Returns where every weight of a new run comes from.

    Args:
      specs: of the weights of the task, by path.
      sources: `run.warm_start`: {name: Params of WarmStart}.
      assets: folder of the tokenizers of the new run; None: they are not compared.
      warn: takes the text of a warning.

    Raises:
      WarmStartError: a weight comes from no checkpoint or from several, or has another shape
        there; a pattern matches no weight; or the tokenizers differ.
      CheckpointError: a checkpoint is missing or damaged.
    """
    found = [_Source(name, params, specs, warn) for name, params in sources.items()]
    ignored = {path for source in found for path in specs if path in source.ignore}
    weights: list[Initialized] = []
    problems: list[str] = []
    missing: dict[str, list[str]] = {}
    for path, spec in specs.items():
        claiming = [source for source in found if source.claims(path)]
        if path in ignored or not claiming:
            if path not in ignored:
                problems.append(f"{path} is in no `only` of run.warm_start: add it to `ignore`")
            weights.append(Initialized(spec))
            continue
        if len(claiming) > 1:
            names = " and ".join(f"run.warm_start.{source.name}" for source in claiming)
            problems.append(f"{path} comes from {names}: separate them by `only`")
            continue
        weight = claiming[0].find(spec)
        if weight is None:
            missing.setdefault(claiming[0].name, []).append(path)
            continue
        weights.append(weight)
        problems += filter(None, [claiming[0].problem(weight)])
    used = {name: {key for w in weights if w.name == name for key in w.keys} for name in sources}
    problems += [problem for source in found for problem in source.unused_problems(used)]
    problems += [source.missing(missing[source.name]) for source in found if source.name in missing]
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        text = "\n  ".join([*problems[:_MOST_PROBLEMS], *([f"and {more} more"] * (more > 0))])
        raise WarmStartError(f"the warm start does not fit the model:\n  {text}")
    for source in found:
        source.check_tokens([w for w in weights if w.name == source.name], assets)
        source.warn_of_unknown_scale([w for w in weights if w.name == source.name], warn)
    return InitialWeights(
        {source.name: source.weights for source in found},
        weights,
        {source.name: sorted(source.paths - used[source.name]) for source in found},
        {source.name: source.params.use for source in found},
    )


def take_tokenizers(
    sources: Mapping[str, Any], *, assets: str, warn: Callable[[str], None]
) -> None:
    """Copies the tokenizers that the other runs learned to the folder of a new run.

    Args:
      sources: as in `plan`.
      assets: the folder, before the new run has learned any.
      warn: takes the text of a warning.

    Raises:
      WarmStartError: two checkpoints have different ones of the same name.
      CheckpointError: a checkpoint is missing or damaged.
    """
    for asset, theirs in _tokenizers(sources, warn).items():
        inherit(asset, theirs, assets)


def _tokenizers(sources: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, str]:
    """Returns {tokenizer: folder to take it from}; for errors see `take_tokenizers`."""
    taken: dict[str, str] = {}
    for name, params in sources.items():
        theirs = open_source(name, params, warn)[1]
        if not params.tokenizers or not theirs:
            continue
        for asset in learned_assets(theirs):
            first = files.join(taken.setdefault(asset, theirs), asset)
            other = files.join(theirs, asset)
            if files.read(first) != files.read(other):
                raise WarmStartError(
                    f"{first} and {other} differ: set run.warm_start.{name}.tokenizers=False"
                )
    return taken


def problem(specs: Mapping[str, WeightSpec], sources: Mapping[str, Any], *, assets: str) -> str:
    """Returns why a new run cannot begin with the weights of other runs, or ""; writes nothing.

    Args:
      specs: as in `plan`.
      sources: as in `plan`.
      assets: as in `plan`; the folder may not exist.
    """
    if not sources:
        return ""

    def ignore(text: str) -> None:
        del text

    try:
        taken = _tokenizers(sources, ignore)  # those in `assets` would be replaced by them
        plan(specs, sources, assets=None if taken else assets, warn=ignore)
    except (WarmStartError, CheckpointError, OSError) as error:
        return str(error)
    return ""


class _Source:
    """A checkpoint, and the rules by which weights are taken from it."""

    def __init__(
        self,
        name: str,
        params: Any,
        specs: Mapping[str, WeightSpec],
        warn: Callable[[str], None],
    ) -> None:
        self.name, self.params = name, params
        self.weights, self._assets = open_source(name, params, warn)
        keys = self.weights.keys
        self.paths = {key.removeprefix(WEIGHTS) for key in keys if key.startswith(WEIGHTS)}
        self._scales = stored_scales(self.weights)
        where = f"run.warm_start.{name}"
        self._only = PathPatterns(params.only, name=f"{where}.only")
        self.ignore = PathPatterns(params.ignore, name=f"{where}.ignore")
        self._partial = PathPatterns(params.partial, name=f"{where}.partial")
        rules = PathPatterns(list(params.rules), name=f"{where}.rules")
        for patterns in (self._only, self.ignore, self._partial, rules):
            missed = patterns.missed(specs)
            if missed:
                raise WarmStartError(patterns.explain_miss(missed, list(specs)))
        self._rules = [(re.compile(pattern), to) for pattern, to in params.rules.items()]

    def claims(self, path: str) -> bool:
        """Whether a weight comes from here, if it is not ignored."""
        return not self._only.patterns or path in self._only

    def problem(self, found: Initialized) -> str:
        """Returns what is wrong with the shape of a weight, or ""."""
        spec = found.spec
        if found.shape != spec.shape:
            given = f"{found.keys[0]} is {list(found.shape)} in {self.weights.path}"
            wanted = f"{spec.path} of the new model is {list(spec.shape)}"
            if len(found.shape) != len(spec.shape):
                return f"{given}, and {wanted}: the number of dims differs"
            if spec.path not in self._partial:
                return (
                    f"{given}, and {wanted}: to keep its initial values, as of a new head, add it "
                    f"to run.warm_start.{self.name}.ignore; to copy the common part, to .partial"
                )
        return scale_problem(spec, found.keys[0], self._scales, self.weights.path)

    def unused_problems(self, used: Mapping[str, Iterable[str]]) -> list[str]:
        """Returns the problem of adapters in the checkpoint that the new model does not have.

        Args:
          used: {source: paths in its checkpoint that the new model uses}.
        """
        unused = filter(self.claims, sorted(self.paths.difference(used[self.name])))
        problem = left_out_problem(unused, self._scales, self.weights.path)
        return [f"{problem} with run.warm_start.{self.name}.only"] if problem else []

    def warn_of_unknown_scale(
        self, weights: Sequence[Initialized], warn: Callable[[str], None]
    ) -> None:
        """Warns if the file does not describe the scale of its adapters."""
        scaled = [w.spec for w in weights if w.spec.scale is not None]
        if scaled and self._scales is None:
            warn(
                f"{self.weights.path} does not describe the alpha / rank of its adapters: it must "
                f"be {scaled[0].scale:g}, which is that of {scaled[0].path}"
            )

    def find(self, spec: WeightSpec) -> Initialized | None:
        """Returns where a weight comes from; None: it is not in the checkpoint."""
        shape_of = self.weights.shape
        path = self._renamed(spec.path)
        if path in self.paths:
            return Initialized(spec, self.name, (path,), None, shape_of(WEIGHTS + path))
        if spec.stacked:
            numbers = itertools.product(*map(range, spec.shape[: spec.stacked]))
            layers = tuple(self._renamed(spec.path_of_layer(index)) for index in numbers)
            if layers and set(layers) <= self.paths:
                shape = shape_of(WEIGHTS + layers[0])
                if all(shape_of(WEIGHTS + layer) == shape for layer in layers):
                    stacks = spec.shape[: spec.stacked]
                    return Initialized(spec, self.name, layers, None, (*stacks, *shape))
        parts = path.split(SEPARATOR)
        for place, part in enumerate(parts):
            stack = SEPARATOR.join([*parts[:place], *parts[place + 1 :]])
            if part.isdecimal() and stack in self.paths:
                size, *rest = shape_of(WEIGHTS + stack)
                if int(part) < size:
                    return Initialized(spec, self.name, (stack,), int(part), tuple(rest))
        return None

    def _renamed(self, path: str) -> str:
        for pattern, to in self._rules:
            if match := pattern.fullmatch(path):
                try:
                    return match.expand(to)
                except (re.error, IndexError) as error:
                    raise WarmStartError(
                        f"run.warm_start.{self.name}.rules: {to!r} is not a valid replacement for "
                        rf"{pattern.pattern!r}: {error}; \1 is the first group of the pattern"
                    ) from None
        return path

    def missing(self, paths: Sequence[str]) -> str:
        """Returns the problem of weights that the checkpoint does not have."""
        first = self._renamed(paths[0])
        close = close_matches(first, sorted(self.paths), count=2)
        hint = f" It has {' and '.join(close)}." if close else ""
        by_rule = "" if first == paths[0] else f" (by a rule of {paths[0]})"
        more = f" and {counted(len(paths) - 1, 'more weight')}" if len(paths) > 1 else ""
        setting = f"run.warm_start.{self.name}.ignore={weight_path_text.patterns(paths)}"
        return (
            f"{first}{by_rule}{more} not in {self.weights.path}.{hint} Give their paths "
            f"there in run.warm_start.{self.name}.rules, or let them keep their initial values: "
            f"--set {shlex.quote(setting)}"
        )

    def check_tokens(self, weights: Iterable[Initialized], assets: str | None) -> None:
        """Checks that rows of a vocabulary stand for the same tokens in both runs."""
        of_vocab = [w.spec.path for w in weights if _VOCAB in w.spec.dims]
        theirs = self._assets
        if not of_vocab or not theirs or assets is None:
            return
        for name in learned_assets(theirs):
            own, other = files.join(assets, name), files.join(theirs, name)
            if files.exists(own) and files.read(own) != files.read(other):
                raise WarmStartError(
                    f"{name} was learned from the text of the new run, and {other} differs: rows "
                    f"of {of_vocab[0]} would mean other tokens. Set "
                    f"run.warm_start.{self.name}.tokenizers=True, or add these weights to `ignore`"
                )


def _rows(weights: Sequence[Initialized], mixed: Container[str]) -> list[str]:
    """One line for weights that differ in the number of their layer alone.

    The paths in `mixed` are shown with the numbers of their layers.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for weight in weights:
        given = weight.keys[0] if len(weight.keys) == 1 else f"{weight.keys[0]} …"
        if weight.row is not None:
            given = f"{given}[{weight.row}]"
        shape = " x ".join(map(str, weight.spec.shape)) or "scalar"
        if weight.is_partial:
            shape += f", of which {' x '.join(map(str, weight.shape))} are copied"
        path, given = map(weight_path_text.numberless, (weight.spec.path, given))
        row = (path, given, shape)
        groups.setdefault(row, []).append(weight.spec.path)
    rows = [
        (
            weight_path_text.numbered(paths) if path in mixed else path,
            ("" if path == given else f"<- {given}, ")
            + shape
            + (f", {counted(len(paths), 'layer')}" if len(paths) > 1 else ""),
        )
        for (path, given, shape), paths in groups.items()
    ]
    return table((), rows, indent="  ")
