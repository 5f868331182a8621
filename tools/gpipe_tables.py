"""Prints the tables of the GPipe paper beside what Tekso computes for the same models.

    python -m tekso.tools.gpipe_tables              all tables
    python -m tekso.tools.gpipe_tables amoebanet    those of one model: amoebanet or transformer

No step is run and no weight is allocated: pieces are traced for one example, equal pieces once, and
everything is linear in the examples.

    memory       weights and their 12 bytes each; activations of a step, of all devices together
    throughput   simulated steps of K stages and M micro-batches, relative to K=2, M=1: with Tekso's
                 partition and costs; and with stages of equally many operations, whose time is
                 that of all ops on a TPU v2 (`tpu_time`)
    by K and M   memory of the device that needs most, for the model of the throughput

Activations of table 1 are the outputs of products and convolutions in bfloat16: what is saved if a
compiler recomputes all elementwise operations. A step saves the inputs of every stage for all
examples, and these outputs for one micro-batch, which is recomputed; "Naive-1" saves them for all
examples. The paper does not state M. The last table has all tensors that a step of Tekso saves in
float32 without a compiler.

Source: Huang et al. 2018, tables 1 and 2, and section 3. AmoebaNet: 128 images of 224 × 224 pixels,
8 GB a device. Transformer: 32 sequences of 1024 tokens, 16 GB a device. In table 1 the two memory
figures of the Transformer's Naive-1 are exchanged: 12 bytes for each weight are 3.15 GiB.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tekso.framework.exit_codes import ExitCode
from tekso.framework.tables import table
from tekso.tools import command_flags
from tekso.tools.command_errors import UsageError

BYTES_PER_WEIGHT = 12
MICRO_BATCHES = (1, 4, 32)


@dataclasses.dataclass(frozen=True)
class Row:
    """A column of table 1 of the paper.

    Attributes:
      name: its name there.
      key: the experiment.
      stages: number of devices.
      parameter_memory, activation_memory: of all devices together, in units of the table.
    """

    name: str
    key: str
    stages: int
    parameter_memory: float
    activation_memory: float


@dataclasses.dataclass(frozen=True)
class Tables:
    """The published tables of a model.

    Attributes:
      title: what was measured.
      unit: bytes of a unit of memory.
      batch_size: examples of a step.
      rows: table 1.
      key, settings: experiment of table 2, and what is set in it.
      speeds: {stages: relative throughput for each of MICRO_BATCHES}.
      without: settings that change neither memory nor work, but make equal pieces differ.
    """

    title: str
    unit: float
    batch_size: int
    rows: tuple[Row, ...]
    key: str
    settings: dict[str, Any]
    speeds: dict[int, tuple[float, ...]]
    without: dict[str, Any]


_D = "image.imagenet.AmoebaNetD"
TABLES = {
    "amoebanet": Tables(
        "AmoebaNet-D (L, D), 128 images",
        1e9,
        128,
        (
            Row("Naive-1 (18, 208)", f"{_D}L18F208", 0, 1.05, 6.26),
            Row("Pipeline-1 (18, 416)", f"{_D}L18F416", 1, 3.8, 3.46),
            Row("Pipeline-2 (18, 544)", f"{_D}L18F544", 2, 6.45, 8.11),
            Row("Pipeline-4 (36, 544)", f"{_D}L36F544", 4, 12.53, 15.21),
            Row("Pipeline-8 (72, 512)", f"{_D}L72F512", 8, 24.62, 26.24),
        ),
        f"{_D}L18F208",
        {"task.model.filters": 256},
        {2: (1.0, 1.07, 1.21), 4: (1.13, 1.26, 1.84), 8: (1.38, 1.72, 3.48)},
        {"task.model.drop_path_rate": 0.0},
    ),
    "transformer": Tables(
        "Transformer-L, 32 sequences",
        2.0**30,
        32,
        (
            Row("Naive-1, 3 layers", "lm.gpipe.Layers3", 0, 3.15, 11.7),
            Row("Pipeline-1, 13 layers", "lm.gpipe.Layers13", 1, 8.8, 6.4),
            Row("Pipeline-8, 103 layers", "lm.gpipe.Layers103", 8, 59.5, 50.9),
            Row("Pipeline-32, 415 layers", "lm.gpipe.Layers415", 32, 235.1, 199.9),
            Row("Pipeline-128, 1663 layers", "lm.gpipe.Layers1663", 128, 937.9, 796.1),
        ),
        "lm.gpipe.Layers13",
        {"task.model.stack.num_layers": 48},
        {2: (1.0, 1.7, 1.8), 4: (1.07, 3.2, 3.4), 8: (1.3, 4.8, 6.3)},
        {},
    ),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model in pieces; all figures are for one example.

    Attributes:
      weights: number of trained weights of every piece.
      costs: cost of every piece.
      flops: operations of the forward pass of every piece.
      seconds: time of the forward pass of every piece on a TPU v2.
      inputs: bytes, in float32, of the values that enter at every piece.
      products: bytes of the outputs of products and convolutions in every piece, in float32.
      saved: returns the bytes that some neighbouring pieces save, from the first to the last.
    """

    weights: Sequence[int]
    costs: Sequence[float]
    flops: Sequence[float]
    seconds: Sequence[float]
    inputs: Sequence[float]
    products: Sequence[float]
    saved: Callable[[int, int], float]

    def stages(self, count: int) -> list[tuple[int, int]]:
        """Returns (first piece, piece after the last) of every stage, cut by costs."""
        return cut(self.costs, count)


def cut(costs: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Returns (first piece, piece after the last) of the stages whose largest cost is lowest."""
    from tekso.framework.execution.pipeline.partition import min_max

    ends = [0, *itertools.accumulate(min_max(costs, count))]
    return list(itertools.pairwise(ends))


def main(argv: Sequence[str]) -> int:
    """Prints the tables; returns the exit code."""
    return command_flags.run_words("gpipe_tables", argv, _print, text=__doc__)


def _print(words: Sequence[str]) -> int:
    names = words or list(TABLES)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is none of {', '.join(TABLES)}")
    for name in names:
        of = TABLES[name]
        model = model_of(of.key, {**of.settings, **of.without})
        for lines in (memory(of), throughput(of, model), by_stages(of, model)):
            print("\n".join(lines) + "\n")
    return ExitCode.OK


def model_of(key: str, settings: dict[str, Any]) -> Model:
    """Traces the pieces of an experiment for one example."""
    from tekso.framework.run import quiet_tensorflow

    quiet_tensorflow.import_tensorflow()
    from tekso.framework import registry
    from tekso.framework.costs.device_types import find
    from tekso.framework.costs.piece_costs import cost_of
    from tekso.framework.costs.piece_traces import trace_all
    from tekso.framework.costs.tpu_time import tpu_seconds
    from tekso.framework.execution.pipeline.loss_pieces import pieces_of_loss
    from tekso.framework.planning.saved_bytes import saved_bytes, together
    from tekso.framework.run import inspection

    tree = registry.get(key)().tree().set(settings)
    task = inspection.task_of(tree)
    batch = inspection.batch_of(tree)
    one = {name: ((1, *shape[1:]), dtype) for name, (shape, dtype) in batch.items()}
    pieces, specs = pieces_of_loss(task), task.specs()
    device = find("tpu_v2")
    traces = trace_all(pieces, specs, one, measure=lambda graph: tpu_seconds(graph, device))
    trained = {path for path, spec in specs.items() if spec.trainable}

    @functools.cache
    def kept() -> Any:
        return saved_bytes(pieces, traces, specs, trained, one)

    return Model(
        [
            sum(specs[p].size for p in piece.weights(sorted(specs)) if p in trained)
            for piece in pieces
        ],
        [cost_of(trace) for trace in traces],
        [trace.flops for trace in traces],
        [trace.measure for trace in traces],
        _entering(traces, one),
        [trace.product_bytes for trace in traces],
        lambda first, end: together(kept()[first:end])[0],
    )


def _entering(traces: Sequence[Any], batch: dict[str, tuple[tuple[int, ...], Any]]) -> list[float]:
    """Returns the bytes of the values that pieces from each one on read from earlier ones."""
    import tensorflow as tf

    from tekso.framework.nests import tensors
    from tekso.framework.symbolic import specs_of_batch

    flows: list[Any] = [specs_of_batch(batch)]
    for trace in traces:
        flows.append({**flows[-1], **trace.writes})
    found: list[float] = []
    needed: set[str] = set()
    for trace, flow in zip(reversed(traces), reversed(flows[:-1]), strict=True):
        needed = (needed - set(trace.writes)) | set(trace.reads)
        specs = [spec for name in needed for spec in tensors(flow.get(name))]
        sizes = [math.prod(spec.shape) * tf.as_dtype(spec.dtype).size for spec in specs]
        found.append(math.fsum(sizes))
    return found[::-1]


def activations(model: Model, stages: int, parts: int, count: int, kind: str) -> list[float]:
    """Returns the bytes of the activations of a step on every device.

    Args:
      model: the model.
      stages: number of stages; 0: one, without recomputation.
      parts: number of micro-batches.
      count: number of examples.
      kind: "products" in bfloat16, or "saved" in float32.
    """
    found = []
    for first, end in model.stages(max(stages, 1)):
        inputs = model.inputs[first] * (0.5 if kind == "products" else 1.0)
        if kind == "products":
            inner = math.fsum(model.products[first:end]) / 2
        else:
            inner = model.saved(first, end) - inputs
        found.append(inputs * count + inner * count / (parts if stages else 1))
    return found


def memory(of: Tables) -> list[str]:
    """Returns table 1 as lines of text."""
    parts, rows = (2, 4, 8), []
    for row in of.rows:
        model = model_of(row.key, of.without)
        weights = sum(model.weights)
        parameters = weights * BYTES_PER_WEIGHT / of.unit
        cells = [
            row.name,
            f"{weights:,}",
            f"{row.parameter_memory:g}",
            f"{parameters:.2f}",
            _off(parameters, row.parameter_memory),
            f"{row.activation_memory:g}",
        ]
        for count in parts if row.stages else (1,):
            found = sum(activations(model, row.stages, count, of.batch_size, "products")) / of.unit
            cells.append(f"{found:.2f} {_off(found, row.activation_memory)}")
        rows.append((*cells, *[""] * (len(parts) + 6 - len(cells))))
    header = (
        *("", "weights", "parameters: paper", "computed", "off", "activations: paper"),
        *(f"computed, M={count}" for count in parts),
    )
    unit = "GB" if of.unit == 1e9 else "GiB"
    return [
        f"Memory of {of.title}, {unit}",
        *table(header, rows, right=tuple(range(1, len(header)))),
    ]


def throughput(of: Tables, model: Model) -> list[str]:
    """Returns table 2 as lines of text."""
    from tekso.framework.costs.device_types import find

    device, rows = find("tpu_v2"), []
    for stages, published in of.speeds.items():
        places, by_flops = model.stages(stages), cut(model.flops, stages)
        computing = max(math.fsum(model.flops[a:b]) for a, b in places)
        computing /= device.flops_per_s["bfloat16"] * device.reached
        moving = max(model.inputs[a] / 2 for a, _ in places[1:]) / device.link_bytes_per_s
        for count, paper in zip(MICRO_BATCHES, published, strict=True):
            # A step of K=2, M=1 takes the unit of time: its stages work one after the other.
            found = 1.0 / step_time(model.costs, places, count)
            on_tpu = 1.0 / step_time(model.seconds, by_flops, count)
            rows.append(
                (
                    f"{stages}",
                    f"{count}",
                    f"{paper:.2f}",
                    f"{found:.2f}",
                    _off(found, paper),
                    f"{on_tpu:.2f}",
                    _off(on_tpu, paper),
                    _implied(published[0] / paper, count, stages),
                    f"{100 * _largest(model.costs, places):.1f}%",
                    f"{100 * _largest(model.seconds, by_flops):.1f}%",
                    f"{100 * moving / computing:.1f}%",
                )
            )
    header = (
        *("K", "M", "paper", "computed", "off", "cut by operations", "off"),
        *("largest stage by the paper", "computed", "cut by operations"),
        "transfer / computing",
    )
    return [
        f"Throughput of {of.title.rpartition(',')[0]}, relative to K=2, M=1",
        *table(header, rows, right=tuple(range(len(header)))),
    ]


def by_stages(of: Tables, model: Model) -> list[str]:
    """Returns the memory of the device that needs most, by stages and micro-batches, as lines."""
    counts, rows = (1, 4, 16, 32), []
    for stages in (0, 1, 2, 4, 8):
        cells = []
        for parts in counts if stages else (1,):
            places = model.stages(max(stages, 1))
            kept = activations(model, stages, parts, of.batch_size, "saved")
            stored = [BYTES_PER_WEIGHT * sum(model.weights[a:b]) for a, b in places]
            cells.append(f"{max(map(sum, zip(kept, stored, strict=True))) / of.unit:.2f}")
        name = f"{stages}" if stages else "1, not recomputed"
        rows.append((name, *cells, *[""] * (len(counts) - len(cells))))
    header = ("K", *(f"M={parts}" for parts in counts))
    unit = "GB" if of.unit == 1e9 else "GiB"
    shown = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in of.settings.items())
    return [
        f"Memory of the largest device by K and M, {unit}, float32: {of.title}, {shown}",
        *table(header, rows, right=tuple(range(1, len(header)))),
    ]


def step_time(costs: Sequence[float], places: Sequence[tuple[int, int]], parts: int) -> float:
    """Returns the simulated time of a step, with recomputation; all its work takes the time 1.

    Args:
      costs: cost of every piece.
      places: first piece of every stage, and the piece after its last.
      parts: number of micro-batches.
    """
    from tekso.framework.execution.pipeline.actions import BACKWARD, FORWARD, Kind
    from tekso.framework.execution.pipeline.schedule import Gpipe
    from tekso.framework.planning.simulator import simulate

    durations: dict[tuple[int, Kind], float] = {}
    for stage, (first, end) in enumerate(places):
        cost = math.fsum(costs[first:end]) / math.fsum(costs) / parts
        durations[stage, FORWARD], durations[stage, BACKWARD] = cost / 4, 3 * cost / 4
    actions = Gpipe.Params().instantiate().actions(len(places), parts)
    return simulate(actions, num_devices=len(places), durations=durations).makespan


def _largest(costs: Sequence[float], places: Sequence[tuple[int, int]]) -> float:
    """Returns the share of the largest stage in all costs."""
    return max(math.fsum(costs[a:b]) for a, b in places) / math.fsum(costs)


def _implied(ratio: float, parts: int, stages: int) -> str:
    """Returns the share of the largest stage for which M micro-batches take `ratio` of one.

    T(M) / T(1) = (1 + (M - 1) share) / M. It cannot be below 1 / K.
    """
    if parts == 1:
        return ""
    share = (ratio * parts - 1) / (parts - 1)
    return f"{100 * share:.1f}%" if share >= 1 / stages else "below 1/K"


def _off(found: float, published: float) -> str:
    return f"{100 * (found / published - 1):+.0f}%"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
