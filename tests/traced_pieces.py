"""Traces the pieces of a model once for all plans of pipelines in a test module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest

from tekso.framework.execution import pipelined
from tekso.framework.run import pipeline_plan


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """Traces the pieces of equal models once: tests of plans of pipelines are about the rest."""
    known: dict[Any, list[Any]] = {}

    def once(function: Any) -> Any:
        def found(pieces: Any, *given: Any, fuse: Any = None, **options: Any) -> list[Any]:
            *others, batch = given  # traces are those of pieces, specs and batch
            specs = next(one for one in others if isinstance(one, Mapping))
            sizes = [(path, spec.shape, spec.dtype) for path, spec in sorted(specs.items())]
            learned = [sorted(one) for one in others if isinstance(one, Set)]
            parts = (sizes, learned, batch, sorted(options.items()), type(fuse))
            read = [str(one) for one in parts]
            key = (function, *(piece.name for piece in pieces), *read)
            options |= {} if fuse is None else {"fuse": fuse}
            if key not in known:
                known[key] = function(pieces, *given, **options)
            return list(known[key])

        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "trace_all", once(pipelined.trace_all))
        patch.setattr(pipeline_plan, "saved_bytes", once(pipeline_plan.saved_bytes))
        yield
