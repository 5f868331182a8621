"""Sizes that the experiment leaves to the data."""

from __future__ import annotations

from typing import Any

import pytest

from tekso.framework.params import REQUIRED, Params, param
from tekso.tasks.unset_sizes import set_sizes, set_vocab_size


class Model(Params):
    """A model with two sizes."""

    vocab_size: int = param("Tokens.", default=REQUIRED)
    length: int = param("Length.", default=7)


def test_the_vocabulary_is_that_of_the_input_unless_it_is_set() -> None:
    unset: Any = Model()
    set_vocab_size(unset, "vocab_size", 30, data="captions")
    assert unset.vocab_size == 30
    larger: Any = Model(vocab_size=31)
    set_vocab_size(larger, "vocab_size", 30, data="captions")
    set_vocab_size(larger, "vocab_size", None, data="captions")
    assert larger.vocab_size == 31
    with pytest.raises(ValueError, match=r"task.model.vocab_size is 31, but the input has 32 tok"):
        set_vocab_size(larger, "vocab_size", 32, data="captions")
    with pytest.raises(ValueError, match="takes it from the captions; without captions, set it"):
        set_vocab_size(Model(), "vocab_size", None, data="captions")


def test_defaults_are_replaced_and_what_an_experiment_sets_is_not() -> None:
    sizes = {"vocab_size": 3, "length": 5, "width": 2}
    unset: Any = Model()
    set_sizes(unset, sizes)
    assert (unset.vocab_size, unset.length) == (3, 5)
    given: Any = Model(length=7)
    set_sizes(given, sizes)
    assert given.length == 7
