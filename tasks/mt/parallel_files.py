"""Parallel corpora in two files: line i of one is the translation of line i of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import Origin
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.mt.line_pairs import LinePairs, split_fractions
from tekso.tasks.mt.pairs import Pair, text_of


class ParallelFiles(LinePairs):
    """Reads pairs from the lines of two parallel text files, or of several such pairs of files.

    Files are paired in the order of the globs; the files of one glob are sorted by name. If a line
    is blank or not UTF-8, its pair is skipped and counted.
    """

    class Params(LinePairs.Params):
        """Params of ParallelFiles."""

        source_files: str = param(
            "Training files of the source language: globs, separated by commas.", default=""
        )
        target_files: str = param(
            "Training files of the target language: as many, in the same order of names.",
            default="",
        )
        dev_source_files: str = param(
            "Dev files of the source language. Empty: a share of the training files is held out.",
            default="",
        )
        dev_target_files: str = param("Dev files of the target language.", default="")
        test_source_files: str = param(
            "Test files of the source language. Empty: a share of the training files is held out.",
            default="",
        )
        test_target_files: str = param("Test files of the target language.", default="")

    def describe(self) -> str:
        """Returns a short description of the source."""
        source, target = (self.params.get(name) for name in _names(self.params, self.split))
        return f"parallel files {source} and {target}"

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        names = _names(params, split)
        for name in names:
            if not params.get(name):
                return (
                    f"{params.path_of(name)} is empty: set the files of both sides, as in --set "
                    f"{params.path_of(names[0])}='train.en' "
                    f"--set {params.path_of(names[1])}='train.de'"
                )
        return ""

    def _choose(self, split: Split) -> tuple[list[tuple[str, ...]], float, float]:
        p = self.params
        dev, test = split_fractions(
            p,
            split,
            dev_has_files=bool(p.dev_source_files or p.dev_target_files),
            test_has_files=bool(p.test_source_files or p.test_target_files),
            what=f"{split}_source_files",
        )
        if why := self.unset(p, split):
            raise InputError(why)
        names = _names(p, split)
        sides = [_in_order(p.get(name), what=p.path_of(name)) for name in names]
        if len(sides[0]) != len(sides[1]):
            raise InputError(
                f"{p.path_of(names[0])} has {len(sides[0])} files ({', '.join(sides[0])}), but "
                f"{p.path_of(names[1])} has {len(sides[1])} ({', '.join(sides[1])}): both need the "
                "same number"
            )
        return list(zip(*sides, strict=True)), dev, test

    def _pair(self, lines: Sequence[bytes], origins: Sequence[Origin], where: str) -> Pair:
        source, target = (
            text_of(line, origin, where) for line, origin in zip(lines, origins, strict=True)
        )
        return Pair(source, target)

    def _source_of(self, line: bytes) -> bytes:
        return line


def _names(params: Any, split: Split) -> list[str]:
    """Returns the names of the Params with the files of a split: of its source and target."""
    own = {"train": "", "dev": "dev_", "test": "test_"}[split]
    is_own = bool(own and (params.get(f"{own}source_files") or params.get(f"{own}target_files")))
    return [f"{own if is_own else ''}{side}_files" for side in ("source", "target")]


def _in_order(text: str, *, what: str) -> list[str]:
    """Returns the files of several globs, in the order of the globs, each once."""
    found = [path for one in files.patterns(text) for path in files.glob(one, what=what)]
    return list(dict.fromkeys(found))
