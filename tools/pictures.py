"""Draws the pictures of the documentation as SVG files.

    python -m tekso.tools.pictures docs/pictures              schedules, shards and a step
    python -m tekso.tools.pictures docs/pictures runs/small   these runs, too
    python -m tekso.tools.pictures docs/pictures --tensorboard [--browser=PATH]

    schedules.svg     GPipe and 1F1B, simulated
    sharding.svg      a feed-forward layer on a mesh of 2 x 2 devices
    step.svg          a training step, from the batch to the new weights
    KEY.curves.svg    the curves of a run, from the event files that TensorBoard reads
    KEY.time.svg      what the time of the run was spent on, from its metrics.jsonl
    tensorboard.PAGE.png   with --tensorboard: screenshots of TensorBoard's pages of a new run

Only screenshots need a browser: Chromium, Chrome or Edge, the first that is on PATH or the program
of --browser. The curves are drawn from the same points without one.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tekso.framework import files
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.execution.pipeline.actions import FORWARD
from tekso.framework.execution.pipeline.schedule import schedule_of
from tekso.framework.planning import timeline_drawing
from tekso.framework.planning.simulator import simulate
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.metrics_log import SECONDS, TRAIN, MetricsLog
from tekso.tools import browser, command_flags, tensorboard_pages
from tekso.tools.command_errors import OK, UsageError

_STAGES, _MICRO_BATCHES = 4, 4
_TAGS = ("loss", "bits_per_byte", "accuracy", "learning_rate")
_COLOURS = ("#a6cee3", "#e6862d", "#b2df8a", "#cab2d6")
_SALT = {"svg.hashsalt": "tekso", "svg.fonttype": "none"}  # the same names in every file; texts

Points = dict[str, dict[str, list[tuple[int, float]]]]
"""{tag: {split: [(step, value)]}}."""

FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]
flags.DEFINE_boolean("tensorboard", False, "Take screenshots of TensorBoard.", flag_values=FLAGS)
flags.DEFINE_string("browser", "", "The browser that takes screenshots.", flag_values=FLAGS)
command_flags.define_common(FLAGS)


def main(argv: Sequence[str]) -> int:
    """Writes the pictures; returns the exit code."""
    return command_flags.run(
        "pictures", FLAGS, argv, _draw, help_text=lambda: (__doc__ or "").strip()
    )


def _draw(arguments: Sequence[str]) -> int:
    if not arguments:
        raise UsageError("a folder to write is missing; runs to draw may follow it")
    if FLAGS.browser and not FLAGS.tensorboard:
        raise UsageError("--browser is for screenshots, which --tensorboard takes")
    folder, runs = Path(arguments[0]), [Path(run) for run in arguments[1:]]
    drawn = {"schedules": schedules(), "sharding": sharding(), "step": training_step()}
    for run in runs:
        if not (run / "metrics.jsonl").exists():
            raise ValueError(f"{run} is not a run: it has no metrics.jsonl")
        key, points = key_of(run), points_of(run)
        if not points:
            raise ValueError(f"{run} has no curves: there are no scalars in its events")
        drawn[f"{key}.curves"] = curves(points, title=key)
        drawn[f"{key}.time"] = time_of(seconds_of(run), title=key)
    screenshots = _screenshots(folder) if FLAGS.tensorboard else {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in ({f"{name}.svg": svg for name, svg in drawn.items()} | screenshots).items():
        files.write_atomically(str(folder / name), data)
        print(folder / name)
    return OK


def _screenshots(folder: Path) -> dict[str, bytes]:
    """Returns {file name: screenshot of TensorBoard}; uses a temporary folder in `folder`."""
    program = browser.found(FLAGS.browser)
    tensorboard_pages.check_installed()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="tensorboard-", dir=folder, ignore_cleanup_errors=True
    ) as own:
        return tensorboard_pages.pictures(program, folder=Path(own))


# --- schedules and layouts: always the same ---


def schedules() -> str:
    """Returns the timelines of GPipe and 1F1B, for backward passes of twice the time."""
    found = {}
    for name in ("gpipe", "1f1b"):
        actions = schedule_of(name).actions(_STAGES, _MICRO_BATCHES)
        found[name] = simulate(
            actions,
            num_devices=_STAGES,
            durations=lambda _, kind: 1.0 if kind == FORWARD else 2.0,
        )
    title = f"{_STAGES} stages, {_MICRO_BATCHES} micro-batches"
    return _svg(timeline_drawing.figure(found, title=title, unit="forward passes"))


_LAYER = (
    ("x", ("batch", "embed"), (8, 4)),
    ("w", ("embed", "mlp"), (4, 8)),
    ("h = x @ w", ("batch", "mlp"), (8, 8)),
    ("v", ("mlp", "embed"), (8, 4)),
    ("y = h @ v", ("batch", "embed"), (8, 4)),
)  # name, dims, shape: of a feed-forward layer without its activation


def sharding() -> str:
    """Returns a layer's tensors, cut into shards with the devices that store each."""
    from matplotlib.patches import Rectangle

    mesh = MeshShape((("data", 2), ("model", 2)))
    layout = MeshLayout(mesh, Rules((("batch", "data"), ("mlp", "model"))))
    figure, all_axes = _figure(10.0, 2.6, len(_LAYER))
    figure.suptitle("mesh data:2;model:2, rules batch:data;mlp:model: devices of each shard")
    for axes, (name, dims, shape) in zip(all_axes, _LAYER, strict=True):
        rows, columns = shape
        for (row, column), devices in shards(layout, dims, shape).items():
            number = min(devices)
            corner = (column[0], row[0])
            size = (column[1] - column[0], row[1] - row[0])
            axes.add_patch(
                Rectangle(corner, *size, facecolor=_COLOURS[number], edgecolor="white", lw=2)
            )
            middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
            axes.text(*middle, ", ".join(map(str, devices)), ha="center", va="center")
        axes.set_title(name, fontsize="medium")
        axes.set(xlim=(0, columns), ylim=(rows, 0), aspect="equal", xticks=[], yticks=[])
        axes.set_ylabel(dims[0])
        axes.set_xlabel(dims[1])
    return _svg(figure)


def shards(
    layout: MeshLayout, dims: Sequence[str], shape: Sequence[int]
) -> dict[tuple[tuple[int, int], ...], list[int]]:
    """Returns {(begin, end) of each dim of a shard: the devices that store it}."""
    axis_of = layout.of(dims, shape)
    names = [name for name, _ in layout.mesh.axes]
    places = itertools.product(*(range(size) for _, size in layout.mesh.axes))
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, place in enumerate(places):
        ranges = []
        for axis, size in zip(axis_of, shape, strict=True):
            count = 1 if axis is None else layout.mesh.size_of(axis)
            index = 0 if axis is None else place[names.index(axis)]
            ranges.append((index * size // count, (index + 1) * size // count))
        found.setdefault(tuple(ranges), []).append(device)
    return found


_PARTS = 3  # of the batch of a step
_BOXES = {
    "batch": (0.9, 1.5, "input.batch(step)\nbatch"),
    "weight": (3.0, 3.0, "task.loss_weight(batch)\nW of the whole batch"),
    **{f"part {i}": (3.0, 1.9 - 0.8 * i, f"part {i} of the batch") for i in range(_PARTS)},
    **{
        f"loss {i}": (5.6, 1.9 - 0.8 * i, "task.loss(theta, part, ctx)\ngradients of loss_sum / W")
        for i in range(_PARTS)
    },
    "sum": (8.1, 1.1, "sum over parts\ngradients, metrics,\nstatistics"),
    "decide": (10.3, 1.1, "learner.decide(…)\nfinite? clipping,\nlearning rates"),
    "update": (12.4, 1.1, "optimizer\nnew weights\nand slots"),
}
"""{name: middle and text} of the boxes of a training step."""
_ARROWS = (
    ("batch", "weight"),
    *(("batch", f"part {i}") for i in range(_PARTS)),
    *((f"part {i}", f"loss {i}") for i in range(_PARTS)),
    ("weight", "loss 0"),
    *((f"loss {i}", "sum") for i in range(_PARTS)),
    ("sum", "decide"),
    ("decide", "update"),
)


def training_step() -> str:
    """Returns a training step: boxes, and arrows from what is computed to where it is used."""
    figure, (axes,) = _figure(10.8, 3.6, 1)
    style = {"ha": "center", "va": "center", "fontsize": 8}
    drawn = {}
    for name, (x, y, text) in _BOXES.items():
        colour = _COLOURS[0] if name in ("sum", "decide", "update") else _COLOURS[2]
        box = {"boxstyle": "round", "facecolor": colour, "edgecolor": "gray"}
        drawn[name] = axes.text(x, y, text, bbox=box, **style)
    for begin, end in _ARROWS:
        axes.annotate(
            "",
            xy=_BOXES[end][:2],
            xytext=_BOXES[begin][:2],
            arrowprops={
                "arrowstyle": "->",
                "color": "gray",
                "patchA": drawn[begin].get_bbox_patch(),
                "patchB": drawn[end].get_bbox_patch(),
            },
        )
    axes.plot([12.4, 12.4, 5.6], [0.75, -0.35, -0.35], color="gray", lw=1)
    axes.annotate(
        "", xy=(5.6, 0.05), xytext=(5.6, -0.4), arrowprops={"arrowstyle": "->", "color": "gray"}
    )
    axes.text(9.0, -0.6, "weights of the next step: theta = task.theta(weights)", **style)
    axes.set(xlim=(-0.2, 13.4), ylim=(-0.9, 3.5))
    axes.axis("off")
    return _svg(figure)


# --- runs: values are measured ---


def key_of(run: Path) -> str:
    """Returns the key of the experiment of a run."""
    return Logdir(str(run)).model() or run.name


def points_of(run: Path) -> Points:
    """Returns the scalars in the event files of a run."""
    import tensorflow as tf

    found: Points = {}
    for path in sorted(Path(Logdir(str(run)).events).glob("*/*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.HasField("simple_value") and value.tag in _TAGS:
                    curve = found.setdefault(value.tag, {}).setdefault(path.parent.name, [])
                    curve.append((event.step, value.simple_value))
    return found


def seconds_of(run: Path) -> dict[str, float]:
    """Returns the seconds of a run by activity, until its last record."""
    records = [r for r in MetricsLog(Logdir(str(run)).metrics).read() if SECONDS in r]
    return dict(records[-1][SECONDS]) if records else {}


def curves(points: Points, *, title: str) -> str:
    """Returns the curves, a panel for each tag."""
    tags = [tag for tag in _TAGS if tag in points]
    figure, all_axes = _figure(4.0 * len(tags), 3.2, len(tags))
    figure.suptitle(title)
    for axes, tag in zip(all_axes, tags, strict=True):
        for split, curve in sorted(points[tag].items(), reverse=True):
            style = {"color": "gray"} if split == TRAIN else {"marker": "o", "markersize": 4}
            axes.plot(*zip(*_thinned(curve), strict=True), label=split, **style)
        axes.set_title(tag, fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    return _svg(figure)


def time_of(seconds: Mapping[str, float], *, title: str) -> str:
    """Returns one bar with a section for each activity."""
    figure, (axes,) = _figure(8.0, 1.9, 1)
    figure.suptitle(f"{title}: time of the run")
    start, colours = 0.0, itertools.cycle((*_COLOURS, "#fdbf6f", "#fb9a99", "#dddddd"))
    for name, length in sorted(seconds.items(), key=lambda pair: -pair[1]):
        if length:
            axes.barh([0], [length], left=start, color=next(colours), label=name)
        start += length
    axes.set(xlim=(0, start or 1.0), yticks=[], xlabel="seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5), ncols=8, fontsize="small")
    return _svg(figure)


def _thinned(curve: Sequence[tuple[int, float]], most: int = 150) -> list[tuple[int, float]]:
    stride = -(-len(curve) // most)
    return [*curve[:-1:stride], curve[-1]]


def _figure(width: float, height: float, columns: int) -> tuple[Any, Sequence[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def _svg(figure: Any) -> str:
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(_SALT):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
