"""Tests of the probes of elementwise functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.costs import function_probes, op_kinds
from tekso.framework.costs.probe_runs import ProbeRuns


def _measured(monkeypatch: pytest.MonkeyPatch, probes: ProbeRuns) -> list[tuple[Any, Any]]:
    """Returns (graph, results) of each function that the probes run, compiled ones as they are."""
    found = []

    def of_each(self: Any, function: Any, a: Any, b: Any, *, times: int, **_: Any) -> Any:
        assert times <= 15
        traced = tf.function(function, autograph=False).get_concrete_function(a, b)
        # Other pairs of arguments are up to 1.15 times as large.
        found.append((traced.graph, [traced(x * a, x * b) for x in (1.0, 1.15)]))
        return np.full(2, 1.0 + len(found))

    monkeypatch.setattr(ProbeRuns, "of_each", of_each)
    monkeypatch.setattr(ProbeRuns, "compiled", lambda self, function: function)
    function_probes.speeds(probes)
    return found


def test_each_function_is_measured_where_it_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _measured(monkeypatch, ProbeRuns(1))
    kinds = {op.type for graph, _ in found for op in graph.get_operations()}
    functions = function_probes._functions()
    assert functions.keys() <= kinds
    assert len(found) == 2 + len(functions) + 1 + len(function_probes._CLUSTERED)
    for graph, results in found:
        for y in results:
            assert np.isfinite(y).all(), [op.type for op in graph.get_operations()]


def test_the_functions_of_models_have_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProbeRuns, "of_each", lambda *_, **__: np.ones(2))
    monkeypatch.setattr(ProbeRuns, "compiled", lambda self, function: function)
    found = function_probes.speeds(ProbeRuns(1))
    functions, of_clusters = (dict(found[name]) for name in ("functions", "cluster_functions"))
    # These take no longer than their bytes.
    assert op_kinds.FUNCTIONS - functions.keys() == {"Rsqrt", "Sqrt"}
    assert {"RandomUniform", "TruncatedNormal", "CumulativeLogsumexp"} <= functions.keys()
    assert of_clusters.keys() <= op_kinds.FUNCTIONS
