"""Searches, samples and scores with small models, on one device or over a mesh, and prints them.

Started by tests with jobs as JSON: {"model": …, "execution": Params of MeshSharded, or null}.
For models of pairs, "searches" may name some of SEARCHES; without it, all run. With "trains", a
model of texts is also trained, and draws again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution import DataParallel, MeshSharded, devices
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.schedules import Constant
from tekso.framework.theta import Theta
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.forced import score_targets
from tekso.models.decoding.sampler import Sampler
from tekso.models.decoding.search import Prefix
from tekso.tasks.lm.generation import Generator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jobs import run_all
from small_models import LENGTH, MODELS, batch

SEARCHES = {
    "beam": BeamSearch.Params(max_length=6, num_hypotheses=2),
    "covering": BeamSearch.Params(max_length=5, coverage_penalty=0.2, return_attention=True),
    "greedy": BeamSearch.Params(beam_size=1, length_normalization=0.0, max_length=5),
    "samples": Sampler.Params(max_length=5, num_hypotheses=2, top_p=0.9),
}
GENERATORS = {
    "drawn": {"max_new_tokens": 5, "top_k": 9},
    "sliding": {"max_new_tokens": 9, "window": LENGTH, "temperature": 0.0},
}
END = 1


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job; returns what came out, by name."""
    model = job["model"]
    # The reference is computed op by op, which takes less time than to trace it.
    tf.config.run_functions_eagerly(job.get("execution") is None)
    if job.get("execution") is None:
        execution = DataParallel.Params(towers=1, xla="none").instantiate()
    else:
        execution = MeshSharded.Params(decode_on="mesh").set(job["execution"]).instantiate()
    execution.setup_devices()
    devices.set_graph_optimizer(False)  # it takes longer than the calls
    task = MODELS[model]().instantiate()
    learner = Learner.Params(
        optimizer=SGD.Params(),
        schedule=Constant.Params(value=0.1),
        ema_decay=0.5,  # decoding takes the averages
    )
    given = batch(model, 0)
    program = execution.build(task, learner.instantiate(), seed=7, batch=signature_of(given))
    program.initialize()
    state, rng = program.state(), np.random.default_rng(1)
    for key, value in state.items():  # larger than weights are drawn, for answers that vary
        if key.startswith("weights/") and value.ndim > 1:
            state[key] = rng.normal(scale=0.6, size=value.shape).astype(value.dtype)
    program.restore(state.__getitem__, set(state))
    searches = job.get("searches", list(SEARCHES))
    calls = _pairs(task, given, searches) if "source_ids" in given else _texts(task, given)
    found = {}
    for name, (function, inputs) in calls.items():
        outputs = program.call(function, *inputs)
        for key, value in outputs.items():
            found[f"{name} {key}"] = np.asarray(value).astype(np.float64).tolist()
    if job.get("trains"):
        for step in range(2):  # so there are new weights, and averages
            program.train_step(given, step)
        function, inputs = calls["drawn"]
        for key, value in program.call(function, *inputs).items():
            found[f"again {key}"] = np.asarray(value).astype(np.float64).tolist()
    doubled = program.call(_doubled, np.float32(1.5), None, given)
    found["doubled number"] = [float(doubled["number"])]
    assert doubled["nothing"] is None
    return found


def _doubled(theta: Theta, number: Any, nothing: Any, batch: Any, ctx: Any) -> Any:
    return {"number": 2.0 * number, "nothing": nothing}


def _pairs(task: Any, given: Any, searches: list[str]) -> dict[str, Any]:
    sources = {n: given[n] for n in ("source_ids", "source_segment_ids")}
    sources["source_ids"] = np.where(sources["source_segment_ids"] > 0, sources["source_ids"], 0)
    sources["source_segment_ids"] = np.minimum(sources["source_segment_ids"], 1)
    prefix = np.array([[3, 4]] * len(given["source_ids"]), np.int32)
    lengths = np.arange(len(prefix), dtype=np.int32) % 3
    has_attention = hasattr(task.model, "attention")

    def search_by(params: Any, *, forced: bool = False) -> Any:
        search = params.instantiate()

        def function(theta: Theta, batch: Any, ids: Any, lengths: Any, ctx: Any) -> Any:
            prefix = Prefix(ids, lengths) if forced else None
            return search.search(
                task.model, theta.model, batch, ctx, END, prefix=prefix, forbidden_ids=[2]
            )

        return function

    def scores(theta: Theta, batch: Any, targets: Any, lengths: Any, ctx: Any) -> Any:
        return score_targets(task.model, theta.model, batch, targets, lengths, ctx, END)

    calls = {
        name: (search_by(params), (sources, prefix, lengths))
        for name, params in SEARCHES.items()
        if name in searches and (has_attention or name != "covering")
    }
    calls["forced"] = (search_by(SEARCHES["beam"], forced=True), (sources, prefix, lengths))
    targets = given["target_ids"].reshape([len(prefix), 1, -1])
    calls["scored"] = (scores, (sources, targets, np.full([len(prefix), 1], 4, np.int32)))
    if has_attention:

        def attention(theta: Theta, batch: Any, ctx: Any) -> Any:
            return {"attention": task.model.attention(theta.model, batch, ctx)}

        names = ("source_ids", "source_segment_ids", "target_ids", "target_segment_ids")
        calls["attention"] = (attention, ({name: given[name] for name in names},))
    return calls


def _texts(task: Any, given: Any) -> dict[str, Any]:
    prompts = given["ids"][:4, :3], given["ids"][:4, 3:5], np.array([3, 5, 4, 3], np.int32)

    def generate_by(how: dict[str, Any]) -> Any:
        generator = Generator(task.model, stop_id=END, **how)

        def function(theta: Theta, *inputs: Any) -> Any:
            return generator.generate(theta.model, *inputs)

        return function

    def scores(theta: Theta, ids: Any, labels: Any, ctx: Any) -> Any:
        return {"log_probs": task.log_probs(theta, ids, labels, ctx)}

    calls: dict[str, Any] = {name: (generate_by(how), prompts) for name, how in GENERATORS.items()}
    calls["scored"] = (scores, (given["ids"], given["labels"]))
    return calls


if __name__ == "__main__":
    run_all(run)
