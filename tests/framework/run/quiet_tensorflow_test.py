"""What the garbage collector does while TensorFlow is imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tekso.framework.run.quiet_tensorflow import without_collecting


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_in_the_block_nor_what_it_leaves_afterwards() -> None:
    with without_collecting():
        assert not gc.isenabled()
        module = {"objects": [[]]}
    assert gc.isenabled()
    assert not any(found is module for found in gc.get_objects())
    later = [module]
    assert any(found is later for found in gc.get_objects())


def test_a_collector_that_was_off_stays_off_and_an_error_turns_it_on_again() -> None:
    with pytest.raises(ImportError), without_collecting():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with without_collecting():
        pass
    assert not gc.isenabled()
