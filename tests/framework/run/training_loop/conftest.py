"""A run that nothing interrupts, and no pictures of curves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from loop_runs import Run

from tekso.framework.run.report import curves


@pytest.fixture(scope="module", autouse=True)
def no_drawing() -> Iterator[None]:
    """Curves are drawn in a test of their own: here they would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda *args, **options: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 20 steps that nothing interrupts."""
    run = Run(tmp_path_factory.mktemp("whole"))
    run.train()
    return run
