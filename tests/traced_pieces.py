"""Traces the steps and the pieces of a model once for all plans in a test module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest

from tekso.framework.execution import pipelined, spmd_pipelined
from tekso.framework.execution.mesh import activations
from tekso.framework.planning import tracing
from tekso.framework.run import pipeline_plan


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """Traces equal steps and pieces once: tests of plans are about the rest."""
    known: dict[Any, Any] = {}

    def of_pieces(function: Any) -> Any:
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

    def of_task(function: Any) -> Any:
        def found(task: Any, *given: Any, **options: Any) -> Any:
            key = (function, task.params.to_text(), str(given), str(sorted(options.items())))
            if key not in known:
                known[key] = function(task, *given, **options)
            return known[key]

        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", of_task(tracing.trace))
        patch.setattr(activations, "of_task", of_task(activations.of_task))
        for module in (pipelined, spmd_pipelined):
            patch.setattr(module, "trace_all", of_pieces(module.trace_all))
        patch.setattr(pipeline_plan, "saved_bytes", of_pieces(pipeline_plan.saved_bytes))
        yield
