"""What is asked of the weights of a mesh outside of steps is what a single device answers.

Each job of `decoding_program` is a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest

PROGRAM = Path(__file__).with_name("decoding_program.py")
SQUARE = "data:2;model:2"
ALL = "batch:data;heads:model;mlp:model;vocab:model"
JOBS = {
    "translation": {"mesh": SQUARE, "rules": ALL},
    "pairs": {"mesh": SQUARE, "rules": "batch:data;mlp:model;vocab:model"},
    "dense": {"mesh": SQUARE, "rules": ALL, "weights_axis": "data"},
}
# "translation" runs all searches: a beam search with forced prefixes, some of which are empty, is
# always run. "pairs" is recurrent: its search is the largest program, and its cells are in
# equality_test.py. Which weights are taken after steps depends on no model: the quickest one is
# trained.
MATRIX = ("pairs",)
MORE = {
    "translation": {"searches": ["covering", "greedy", "samples"]},
    "pairs": {"searches": ["covering", "samples"]},
    "dense": {"trains": True},
}


def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = processes.run([str(PROGRAM), json.dumps(jobs)], timeout=1200, env=None)
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=pytest.mark.matrix if m in MATRIX else pytest.mark.slow) for m in JOBS],
)
def test_a_mesh_finds_draws_and_scores_what_one_device_does(model: str) -> None:
    job = {"model": model, **MORE.get(model, {})}
    alone, spread = run([job, {**job, "execution": JOBS[model]}])
    assert "error" not in alone, alone["error"]
    assert "error" not in spread, spread["error"]
    assert set(spread) == set(alone)
    for name, values in alone.items():
        # float32 sums in another order; of tokens and lengths, a difference is at least 1.
        np.testing.assert_allclose(spread[name], values, rtol=1e-5, atol=2e-5, err_msg=name)
    found = [np.asarray(values) for name, values in alone.items() if name.endswith(" ids")]
    assert all(len(np.unique(ids)) > 2 for ids in found)  # answers that could be told apart
