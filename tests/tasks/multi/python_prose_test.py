"""Pairs from docstrings: messages, replies, sentences, and splits without a common message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tekso.framework.input.errors import InputError
from tekso.tasks.multi import python_prose
from tekso.tasks.multi.python_prose import Punctuation, Replies, Triggers

SOURCE = '''
def move(src, dst=None):
    """Move a file, if it exists.

    The destination is a folder.  Is it missing? Then this raises an error.
    """

class Box:
    def open(self):
        pass
'''


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "files.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    many = "\n".join(
        f'def f{i}(a):\n    """Return the number {"abcdefghij"[i % 10]} of it."""'
        for i in range(60)
    )
    (tmp_path / "many.py").write_text(many)
    python_prose.functions.cache_clear()
    return str(tmp_path)


def test_messages_are_signatures_and_replies_first_lines(root: str) -> None:
    found = python_prose.messages(root)
    assert found["files.move(src, dst=None)"] == "Move a file, if it exists."
    assert found["files.open(self)"] == ""
    assert len(found) == 62


def test_sentences_are_prose_and_lose_marks_and_capitals(root: str) -> None:
    sentences = list(python_prose.sentences(root))
    assert sentences[:4] == [
        "Move a file, if it exists.",
        "The destination is a folder.",
        "Then this raises an error.",  # "Is it missing?" has three words
        "Return the number a of it.",
    ]
    assert python_prose.without_marks("Don't stop: it's  Python!") == "dont stop its python"


def test_a_wrong_folder_and_an_empty_split_are_named(root: str, tmp_path: Path) -> None:
    for params in (Replies.Params(), Punctuation.Params()):
        with pytest.raises(InputError, match="root: there is no folder '/no/such'"):
            params.set(root="/no/such").instantiate()
    triggers = Triggers.Params(batch_size=2)
    with pytest.raises(InputError, match="root: there is no folder '/no/such'"):
        triggers.set(root="/no/such").instantiate()
    with pytest.raises(ValueError, match=r"^dev_fraction is 2\.0, but must be in"):
        triggers.set(root=root, dev_fraction=2.0).instantiate()
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    with pytest.raises(InputError, match=f"Python files in {empty}: the split train has none"):
        triggers.set(root=empty, dev_fraction=0.1).instantiate()
    with pytest.raises(InputError, match=f"Python files in {empty}: the split train has none"):
        Replies.Params(root=empty).instantiate()


def test_splits_have_no_message_in_common_and_triggers_are_the_same_messages(root: str) -> None:
    fractions = {"root": root, "dev_fraction": 0.3, "test_fraction": 0.2}
    seen: dict[str, set[str]] = {}
    for split in ("train", "dev", "test"):
        pairs = Replies.Params(**fractions).instantiate(split=split)
        seen[split] = {pairs[i].source for i in range(len(pairs))}
        triggers = Triggers.Params(**fractions, batch_size=2, split=split, length=16)
        arrays = triggers.instantiate().arrays
        assert arrays["labels"].sum() == len(seen[split])
        texts = {bytes(row[row > 0].astype(np.uint8)).decode() for row in arrays["x"]}
        assert {message[:16] for message in seen[split]} <= texts
    assert sum(map(len, seen.values())) == len(set.union(*seen.values())) == 61
    plain = [
        {p[i].source for i in range(len(p))}
        for split in ("train", "dev")
        for p in [Punctuation.Params(**fractions).instantiate(split=split)]
    ]
    assert plain[0] and plain[1] and not plain[0] & plain[1]
