"""Parallel corpora in one file: TSV and JSON lines, with one pair per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.splits import Split, files_param
from tekso.framework.params import param
from tekso.tasks.mt.line_pairs import LinePairs, split_fractions
from tekso.tasks.mt.pairs import Pair, check_language, text_of


class PairFiles(LinePairs):
    """Base of files with both sides of a pair in every line."""

    class Params(LinePairs.Params):
        """Params of PairFiles."""

        files: str = param("Training files: globs, separated by commas.", default="")
        dev_files: str = param("Dev files. Empty: a share of `files` is held out.", default="")
        test_files: str = param("Test files. Empty: a share of `files` is held out.", default="")
        languages: list[str] = param(
            "Target languages, in the order of their tokens, if pairs name their language.",
            default=[],
        )

    def describe(self) -> str:
        """Returns a short description of the source."""
        given = self.params.get(files_param(self.params, self.split))
        return f"{type(self).__name__} files {given}"

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        path = params.path_of(name := files_param(params, split))
        if params.get(name):
            return ""
        return f"{path} is empty: set the files with the pairs, as in --set {path}='pairs/*'"

    def _choose(self, split: Split) -> tuple[list[tuple[str, ...]], float, float]:
        p = self.params
        self.languages = self.languages_of(p)
        dev, test = split_fractions(
            p,
            split,
            dev_has_files=bool(p.dev_files),
            test_has_files=bool(p.test_files),
            what=f"{split}_files",
        )
        if why := self.unset(p, split):
            raise InputError(why)
        name = files_param(p, split)
        paths = files.glob(p.get(name), what=p.path_of(name))
        return [(path,) for path in paths], dev, test

    def _pair(self, lines: Sequence[bytes], origins: Sequence[Origin], where: str) -> Pair:
        line, origin = text_of(lines[0], origins[0], where), origins[0]
        try:
            source, target, language = self._fields(line)
        except ValueError as error:
            raise BadRecordError(origin, f"{where}{error}") from error
        check_language(language, self.languages, origin, where)
        return Pair(
            text_of(source, origin, f"{where}source "),
            text_of(target, origin, f"{where}target "),
            language,
        )

    def _source_of(self, line: bytes) -> bytes:
        try:
            return self._fields(line.decode())[0].encode()
        except ValueError:
            return line

    def _fields(self, line: str) -> tuple[str, str, str]:
        """Returns source, target and language of a line.

        Raises:
          ValueError: the line is malformed.
        """
        raise NotImplementedError


class Tsv(PairFiles):
    """Tab-separated columns: the source, the target, and others that are ignored.

    There is no quoting: a text cannot contain a tab or a line end.
    """

    class Params(PairFiles.Params):
        """Params of Tsv."""

        source_column: int = param("Column of the source; the first is 0.", default=0)
        target_column: int = param("Column of the target.", default=1)
        language_column: int | None = param(
            "Column of the target's language; None: there is only one language.", default=None
        )

    def _fields(self, line: str) -> tuple[str, str, str]:
        p = self.params
        columns = line.split("\t")
        wanted = [p.source_column, p.target_column]
        if p.language_column is not None:
            wanted.append(p.language_column)
        if not 0 <= min(wanted) <= max(wanted) < len(columns):
            raise ValueError(
                f"{len(columns)} columns, but column {max(wanted)} is needed (the first is 0)"
            )
        texts = [columns[column] for column in wanted]
        return texts[0], texts[1], texts[2] if p.language_column is not None else ""


class JsonLines(PairFiles):
    """One JSON object per line, with a field for each side.

    A dot in the name of a field selects a field of a nested object, as in "translation.en".
    """

    class Params(PairFiles.Params):
        """Params of JsonLines."""

        source_field: str = param("Field of the source.", default="source")
        target_field: str = param("Field of the target.", default="target")
        language_field: str = param(
            "Field of the target's language; empty: there is only one language.", default=""
        )

    def _fields(self, line: str) -> tuple[str, str, str]:
        p = self.params
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        language = _field(record, p.language_field) if p.language_field else ""
        return _field(record, p.source_field), _field(record, p.target_field), language


def _field(record: Any, path: str) -> str:
    """Returns the text of a field.

    Raises:
      ValueError: the field is missing, or is not text.
    """
    value = record
    for name in [path] if isinstance(record, dict) and path in record else path.split("."):
        if not isinstance(value, dict) or name not in value:
            has = ", ".join(map(str, value)) if isinstance(value, dict) else "none"
            raise ValueError(f"no field {path!r}; the fields are: {has}")
        value = value[name]
    if not isinstance(value, str):
        raise ValueError(f"field {path!r} must be text, is {type(value).__name__}")
    return value
