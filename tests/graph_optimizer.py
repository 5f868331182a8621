"""Switches TensorFlow's graph optimizer off in tests that compute a function once or twice.

The optimizer takes longer than such a function. Runs and executions, whose tests start programs,
are tested with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def graph_optimizer_off() -> Iterator[None]:
    """Computes the functions of a module as they were traced."""
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    is_off = before.get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": is_off})
