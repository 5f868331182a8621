"""Pairs of texts from the docstrings of Python's standard library, part of every installation.

Three sources, all of real text:

    Replies       "shutil.move(src, dst)"  ─►  "Recursively move a file or directory to …"
    Triggers      the same messages        ─►  whether the function has a docstring
    Punctuation   "it returns none"        ─►  "It returns None."

A hash of the message (or of the text without punctuation) gives the split, so no message is in two
splits, although many functions of the library have the same signature.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.splits import Split, check_fractions, split_of
from tekso.framework.params import param
from tekso.tasks.classification.labelled_texts import LabelledTexts
from tekso.tasks.lm.python_source import find
from tekso.tasks.mt.pairs import InMemoryPairs

_MOST_WORDS, _LEAST_WORDS = 40, 4
_SENTENCE = re.compile(r"[A-Z][^.!?;:]*[.!?](?=\s|$)")
_MARKS = re.compile(r"[^\w\s]")


class Function(NamedTuple):
    """A function of the library.

    Attributes:
      message: its module and signature: "shutil.move(src, dst, copy_function=copy2)".
      reply: the first line of its docstring; "" if it has none.
      doc: its docstring; "" if it has none.
    """

    message: str
    reply: str
    doc: str


class Replies(InMemoryPairs):
    """(signature, first line of the docstring) of all functions that have one."""

    class Params(InMemoryPairs.Params):
        """Params of Replies."""

        root: str = param(
            "Folder of Python files; empty: the standard library of this interpreter.", default=""
        )
        dev_fraction: float = param("Share of the messages in the dev split.", default=0.05)
        test_fraction: float = param("Share of the messages in the test split.", default=0.05)

    def load(self, split: Split) -> list[tuple[str, ...]]:
        """Returns the pairs of a split, one for each message."""
        p = self.params
        check_fractions(p)
        found = messages(_root(p))
        return [
            (message, reply)
            for message, reply in found.items()
            if reply and split_of(message, p.dev_fraction, p.test_fraction) == split
        ]

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"signatures and docstrings of {_what(self.params)}"


class Punctuation(InMemoryPairs):
    """(sentence in lower case without punctuation, sentence), of all docstrings."""

    class Params(InMemoryPairs.Params):
        """Params of Punctuation."""

        root: str = param(
            "Folder of Python files; empty: the standard library of this interpreter.", default=""
        )
        dev_fraction: float = param("Share of the sentences in the dev split.", default=0.05)
        test_fraction: float = param("Share of the sentences in the test split.", default=0.05)

    def load(self, split: Split) -> list[tuple[str, ...]]:
        """Returns the pairs of a split; of equal texts, the first one."""
        p = self.params
        check_fractions(p)
        pairs: dict[str, str] = {}
        for sentence in sentences(_root(p)):
            pairs.setdefault(without_marks(sentence), sentence)
        return [
            (plain, sentence)
            for plain, sentence in pairs.items()
            if plain and split_of(plain, p.dev_fraction, p.test_fraction) == split
        ]

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"sentences in docstrings of {_what(self.params)}"


class Triggers(LabelledTexts):
    """Messages as bytes, and whether a message has a reply (class 1) or none (class 0)."""

    class Params(LabelledTexts.Params):
        """Params of Triggers."""

        root: str = param(
            "Folder of Python files; empty: the standard library of this interpreter.", default=""
        )
        dev_fraction: float = param("Share of the messages in the dev split.", default=0.05)
        test_fraction: float = param("Share of the messages in the test split.", default=0.05)

    class_names = ("no reply", "reply")

    def texts(self, split: Split) -> list[tuple[str, int]]:
        """Returns the messages of a split, and whether they have a reply."""
        p = self.params
        check_fractions(p)
        found = [
            (message, int(bool(reply)))
            for message, reply in messages(_root(p)).items()
            if split_of(message, p.dev_fraction, p.test_fraction) == split
        ]
        if not found:
            raise InputError(f"signatures of {_what(p)}: the split {split} has none")
        return found


def _root(params: Any) -> str:
    """Returns the folder of the Params.

    Raises:
      InputError: it is missing.
    """
    if params.root and not files.is_folder(params.root):
        raise InputError(f"{params.path_of('root')}: there is no folder {params.root!r}")
    return str(params.root)


def _what(params: Any) -> str:
    return f"the Python files in {params.root}" if params.root else "Python's standard library"


def messages(root: str) -> dict[str, str]:
    """Returns {message: reply, or ""} of a folder; of functions with one message, the first reply.

    Args:
      root: the folder; empty: the standard library.
    """
    found: dict[str, str] = {}
    for function in functions(root or sysconfig.get_path("stdlib")):
        found[function.message] = found.get(function.message) or function.reply
    return found


def sentences(root: str) -> Iterator[str]:
    """Yields the English sentences of all docstrings: words only, 4 to 40 of them."""
    for function in functions(root or sysconfig.get_path("stdlib")):
        for paragraph in re.split(r"\n\s*\n", function.doc):
            for sentence in _SENTENCE.findall(" ".join(paragraph.split())):
                words = sentence.split()
                if _LEAST_WORDS <= len(words) <= _MOST_WORDS and _is_prose(sentence):
                    yield sentence


def _is_prose(sentence: str) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in sentence)
    return sentence.isascii() and letters >= 0.9 * len(sentence) and "_" not in sentence


def without_marks(sentence: str) -> str:
    """Returns a sentence in lower case, without marks and double spaces."""
    return " ".join(_MARKS.sub("", sentence).lower().split())


@functools.lru_cache(maxsize=2)
def functions(root: str) -> tuple[Function, ...]:
    """Returns all functions and methods below a folder; files that do not parse are left out."""
    found = []
    for name in find(root, exclude=["test", "tests", "lib2to3", "idlelib"]):
        with open(os.path.join(root, *name.split("/")), "rb") as file:
            data = file.read()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of old escapes in strings
                tree = ast.parse(data)
        except (SyntaxError, ValueError):
            continue
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found += list(_functions(module, tree))
    return tuple(found)


def _functions(module: str, tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = (ast.get_docstring(node) or "").strip()
            message = f"{module}.{node.name}({ast.unparse(node.args)})"
            yield Function(" ".join(message.split()), doc.partition("\n")[0].strip(), doc)
