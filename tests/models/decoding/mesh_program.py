"""Searches on one device and over a mesh, and prints whether they found the same.

Started by a test in a process of its own: `mesh_program.py 'MESH RULES' …`. The sources are split
over the rule of "batch", the logits over that of "vocab".
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

from conftest import END, ToyDecoder, toy_batch, toy_theta
from tekso.framework.context import StepContext
from tekso.framework.execution import MeshSharded
from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.rules import Rules
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.sampler import Sampler
from tekso.models.decoding.search import Search

SEED = 5
SEARCHES: dict[str, Search] = {
    "beam": BeamSearch.Params(
        beam_size=3, num_hypotheses=2, max_length=5, coverage_penalty=0.2, return_attention=True
    ).instantiate(),
    "samples": Sampler.Params(num_hypotheses=2, max_length=5, top_p=0.9).instantiate(),
}


def run(search: Search, theta: Any, batch: Any, ctx: StepContext) -> dict[str, tf.Tensor]:
    toy = ToyDecoder.Params().instantiate()

    def function(theta: Any, batch: Any) -> Any:
        return search.search(toy, theta, batch, ctx, END, forbidden_ids=[0])

    return tf.function(function, autograph=False)(theta, batch)


def main() -> None:
    MeshSharded.Params(mesh="data:4").instantiate().setup_devices()
    theta = toy_theta(3, vocab=8)
    batch = toy_batch([[2, 3, 1], [], [3, 2, 3, 2, 1], [2, 1]])
    report = {}
    for text in sys.argv[1:]:
        mesh, rules = text.split()
        layout = MeshLayout(MeshShape.parse(mesh), Rules.parse(rules))
        placement = Placement(mesh_devices.make_mesh(layout.mesh, "CPU"))
        data, vocab = layout.rules.axis_of("batch"), layout.rules.axis_of("vocab")
        placed = (
            {
                "logits": placement.put(theta["logits"], (None, None, None, vocab)),
                "attention": placement.put(theta["attention"]),
            },
            {name: placement.put(value, (data, None)) for name, value in batch.items()},
        )
        for name, search in SEARCHES.items():
            plain = run(search, theta, batch, StepContext(mode="decode", seed=SEED))
            ctx = MeshContext(placement, layout, mode="decode", seed=SEED)
            found = {key: placement.whole(v) for key, v in run(search, *placed, ctx).items()}
            for key, value in plain.items():
                want, got = (x.astype(np.float32) for x in (value.numpy(), found[key]))
                finite = np.isfinite(want)
                same = got.shape == want.shape and bool((np.isfinite(got) == finite).all())
                worst = (
                    float(np.abs(np.subtract(want[finite], got[finite])).max(initial=0.0))
                    if same
                    else 1e9
                )
                report[f"{text} {name} {key}"] = worst
    print(json.dumps(report))


if __name__ == "__main__":
    main()
