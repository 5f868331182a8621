"""Switches TensorFlow's graph optimizer off in tests that compute a function once or twice.

The optimizer takes longer than such a function. `make test-matrix` has it on, and so do some of the
programs that test runs and executions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def graph_optimizer_off(request: pytest.FixtureRequest) -> Iterator[None]:
    """Computes the functions of a module as they were traced."""
    if request.config.option.markexpr not in ("not slow", "slow"):
        yield
        return
    import tensorflow as tf

    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})
