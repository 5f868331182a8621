"""What a step of a pipeline does beside gradients: effects, statistics, positions, how it ends.

All stages lie on one device of this process, each with a thread of its own.
"""

from __future__ import annotations

import collections
import functools
import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from pipeline_chain import DIM, EXAMPLES, Chain, Map, batch, build, chain, learner
from sampling import sample

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel, ExecutionError
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipeline import program as program_module
from tekso.framework.execution.pipeline import remote, stage_backend, stage_evaluation
from tekso.framework.execution.pipeline.workers import StageError
from tekso.framework.foreign_variables import ForeignVariableError
from tekso.framework.layer import Layer
from tekso.framework.loss_scale import LossScale
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.primitives.fusion import XlaFusion
from tekso.framework.task import Task, TaskError
from tekso.framework.theta import Theta
from tekso.models.layers.normalization import BatchNorm


class Shifted(Chain):
    """Adds 1 to the input of every map in an elementwise cluster."""

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        def shifted(x: tf.Tensor) -> tf.Tensor:
            return x + 1.0

        return super()._map(i, theta, {**flow, "x": ctx.fuse(shifted)(flow["x"])}, ctx)


class RecordedFusion(XlaFusion):
    """Notes the names of the functions that it compiles."""

    names: ClassVar[set[str]] = set()

    def __call__(self, function: Any, **static: Any) -> Any:
        self.names.add(function.__name__)
        return super().__call__(function, **static)


def test_xla_compiles_the_clusters_of_training_the_update_and_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_backend, "XlaFusion", RecordedFusion)
    program = build(Shifted.Params(num_maps=1).instantiate(), 2, 2, xla="clusters")
    RecordedFusion.names.clear()
    program.train_step(batch(), 0)
    assert RecordedFusion.names == {"shifted", "updated"}
    RecordedFusion.names.clear()
    program.eval_step(batch())
    assert RecordedFusion.names == {"shifted"}


class WithoutMetricsInEvaluation(Chain):
    """A task whose last piece returns metrics only in training."""

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        found = super()._last(theta, flow, ctx)
        return found if ctx.is_training else {LOSS_SUM: found[LOSS_SUM]}


def test_an_evaluation_without_the_sums_of_the_loss_names_the_method() -> None:
    program = build(WithoutMetricsInEvaluation.Params().instantiate(), 2, 2)
    with pytest.raises(TaskError, match=r"pipeline_chain.py:\d+.* must add 'loss_sum' and"):
        program.eval_step(batch())


# --- moving statistics ---


class TwiceNormed(Task):
    """The same batch normalisation at both ends, with a map between."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=DIM, dtype="float64"))
        self.child("map", Map.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        def norm(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "x": self.norm.fprop(theta.norm, flow["x"], ctx)}

        def middle(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "x": self.map.fprop(theta.map, flow["x"], ctx)}

        def last(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, LOSS_SUM: tf.reduce_sum(flow["x"] ** 3), METRICS: {}}

        parts = ("first", norm), ("middle", middle), ("second", norm)
        layers = {"norm": self.norm}, {"map": self.map}, {"norm": self.norm}
        found = [Piece(name, own, run) for (name, run), own in zip(parts, layers, strict=True)]
        return [*found, Piece("last", {}, last)]


@pytest.mark.parametrize(
    ("stages", "rematerialize"), sample([(2, "none"), (4, "all")], quick=[(4, "all")])
)
def test_statistics_of_a_layer_that_two_stages_run_are_added_and_moved_once(
    stages: int, rematerialize: str
) -> None:
    task, of = TwiceNormed.Params().instantiate(), batch()
    whole = build(task, 1, 2, of=of)
    cut = build(task, stages, 2, of=of, rematerialize=rematerialize)
    w = whole.state()["weights/map/w"]
    for program in (whole, cut):
        program.train_step(of, 0)
    one, other = whole.state(), cut.state()
    assert set(one) == set(other)
    for key, value in one.items():
        within = 1e-6 if "moving" in key else 1e-12  # statistics are summed in float32
        np.testing.assert_allclose(other[key], value, rtol=within, atol=1e-14, err_msg=key)
    seen = []
    for x in np.split(of["x"], 2):  # what both uses of the layer were given, micro-batch for itself
        normed = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
        seen += [x, np.tanh(normed @ w)]
    seen = np.concatenate(seen)
    np.testing.assert_allclose(other["weights/norm/moving_mean"], 0.01 * seen.mean(0), rtol=1e-5)
    moved = 0.99 + 0.01 * seen.var(0)
    np.testing.assert_allclose(other["weights/norm/moving_variance"], moved, rtol=1e-6)


class Counted(Chain):
    """Every map and the task report one metric."""

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        ctx.collect_metric("mean", tf.reduce_sum(flow["x"]), tf.size(flow["x"]))
        return super()._map(i, theta, flow, ctx)

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        mean = (tf.constant(3.0, tf.float64), tf.constant(5.0, tf.float64))
        return {**super()._last(theta, flow, ctx), METRICS: {"mean": mean}}


@pytest.mark.parametrize("stages", [1, 3])
def test_a_metric_of_task_and_layers_has_the_sums_of_all(stages: int) -> None:
    task, of, micro_batches = Counted.Params(num_maps=2).instantiate(), batch(), 4
    program = build(task, stages, micro_batches, of=of)
    first, second = (program.state()[f"weights/maps/{i}/w"] for i in range(2))
    assert not np.allclose(first, second)
    inner = np.tanh(of["x"] @ first)
    total = of["x"].sum() + inner.sum() + micro_batches * 3.0
    weight = of["x"].size + inner.size + micro_batches * 5.0
    trained = float(program.train_step(of, 0)["mean"])
    np.testing.assert_allclose(trained, total / weight, rtol=1e-6)


class Tower(Layer):
    """Two maps of one value of the batch; its pieces are of one kind."""

    class Params(Layer.Params):
        """Params of Tower."""

        reads: str = param("Name of the value.", default="x")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("maps", [Map.Params()] * 2)

    def pieces(self) -> list[Piece]:
        return [
            Piece(f"maps/{i}", {f"maps/{i}": layer}, functools.partial(self._map, i), kind="maps")
            for i, layer in enumerate(self.maps)
        ]

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        name = self.params.reads
        return {**flow, name: self.maps[i].fprop(theta.maps[str(i)], flow[name], ctx)}


class TwoTowers(Task):
    """Two models of one class, each with a value of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("a", Tower.Params(reads="a"))
        self.child("b", Tower.Params(reads="b"))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["a"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        pieces = [piece.below("a") for piece in self.a.pieces()]
        pieces += [piece.below("b") for piece in self.b.pieces()]
        return [Piece("first", {}, self._first), *pieces, Piece("last", {}, self._last)]

    def _first(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, "c": flow["a"] - flow["b"]}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        loss = tf.reduce_sum(flow["a"] * flow["c"] + 2.0 * flow["b"])
        return {**flow, LOSS_SUM: loss, METRICS: {}}


@pytest.mark.parametrize("balance", sample([[6], [4, 2], [1, 2, 2, 1]], quick=[[4, 2]]))
def test_pieces_of_two_models_of_one_class_are_distinguished(balance: list[int]) -> None:
    draw = np.random.default_rng(0)
    of = {name: draw.normal(size=(EXAMPLES, DIM)) for name in ("a", "b")}
    program = build(TwoTowers.Params().instantiate(), len(balance), 2, of=of, balance=balance)
    state = program.state()

    def tower(name: str) -> Any:
        x = of[name]
        for i in range(2):
            x = np.tanh(x @ state[f"weights/{name}/maps/{i}/w"])
        return x

    loss = np.sum(tower("a") * (of["a"] - of["b"]) + 2.0 * tower("b")) / EXAMPLES
    np.testing.assert_allclose(float(program.train_step(of, 0)["loss"]), loss, rtol=1e-6)


# --- effects and randomness ---


@pytest.mark.parametrize(
    ("schedule", "rematerialize"),
    sample(
        [("1f1b", "none"), ("gpipe", "all"), ("zero_bubble_h1", "all")], quick=[("1f1b", "none")]
    ),
)
def test_stage_that_fails_ends_the_step_with_its_own_error_and_the_next_one_works(
    schedule: str, rematerialize: str
) -> None:
    def between(number: int, x: Any) -> Any:
        if number == 2:  # nothing depends on the check
            tf.debugging.assert_less(x, tf.constant(0.9, x.dtype), message="x is too large")
        return x

    program = build(
        chain(between), 3, 4, balance=[2, 2, 1], schedule=schedule, rematerialize=rematerialize
    )
    program.train_step({"x": 0.01 * batch()["x"]}, 0)
    before = program.state()
    for weight in ("weights/maps/0/w", "weights/maps/1/w"):
        before[weight] = 30 * np.eye(DIM)  # an x far from 0 becomes 1
    program.restore(lambda key: before[key], set(before))
    bad = {"x": 0.0001 * batch()["x"]}
    bad["x"][5] = 1.0  # in micro-batch 2
    with pytest.raises(StageError) as caught:
        program.train_step(bad, 1)
    text = str(caught.value)
    assert "forward of micro-batch 2 at stage 1 (maps/2 … maps/3)" in text
    assert "x is too large" in text
    after = program.state()
    assert all(np.array_equal(after[key], value) for key, value in before.items())
    assert np.isfinite(float(program.train_step({"x": 0.0001 * batch()["x"]}, 1)["loss"]))


@pytest.mark.parametrize("is_followed", [False, True])
def test_effects_happen_in_the_forward_pass_once_for_each_micro_batch(is_followed: bool) -> None:
    seen: collections.Counter[int] = collections.Counter()

    def between(number: int, x: Any) -> Any:
        def note(_: Any) -> None:
            seen[number] += 1

        noted = tf.numpy_function(note, [x], [])
        if not is_followed:
            return x
        with tf.control_dependencies([tf.group(noted)]):
            return tf.sin(x)

    program = build(chain(between), 2, 4, schedule="zero_bubble_h1", rematerialize="all")
    seen.clear()  # of the search for mixing
    program.train_step(batch(), 0)
    assert seen == {0: 4, 1: 4, 2: 4, 3: 4}


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + tf.random.normal(x.shape, dtype=x.dtype),
        lambda x: tf.nn.dropout(x, 0.5),
        lambda x: tf.cond(
            tf.reduce_sum(x) > 0, lambda: x + tf.random.uniform([], dtype=x.dtype), lambda: x
        ),
    ],
    ids=["normal", "dropout", "inside of a branch"],
)
def test_random_numbers_that_change_when_they_are_drawn_again_are_refused(draw: Any) -> None:
    task = chain(lambda number, x: draw(x) if number == 1 else x)
    with pytest.raises(ForeignVariableError, match=r"draws random numbers .*ctx\.uniform"):
        build(task, 2, 4)


def test_random_numbers_of_a_seed_are_no_reason_to_refuse() -> None:
    def between(number: int, x: Any) -> Any:
        return x + tf.random.stateless_uniform(x.shape, seed=[1, 2], dtype=x.dtype)

    assert np.isfinite(float(build(chain(between), 2, 4).train_step(batch(), 0)["loss"]))


# --- a process that is lost ---


@pytest.mark.parametrize(
    "kind",
    sample([tf.errors.UnavailableError, tf.errors.InternalError], quick=[tf.errors.InternalError]),
)
@pytest.mark.parametrize("lost", [["/job:worker/task:1"], []])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_lost_device_is_named_whatever_stage_fails_and_however(
    monkeypatch: pytest.MonkeyPatch, mode: str, lost: list[str], kind: Any
) -> None:
    program = build(chain(), 2, 4)

    def perform(*_: Any) -> None:
        raise kind(None, None, "remote data poisoned")

    monkeypatch.setattr(program_module.ScheduleRun, "perform", perform)
    monkeypatch.setattr(stage_evaluation._Pass, "perform", perform)
    monkeypatch.setattr(remote, "lost", lambda devices: lost)
    with pytest.raises(StageError, match=r"at stage 0 .* failed: .*data poisoned") as found:
        program.train_step(batch(), 0) if mode == "train" else program.eval_step(batch())
    assert str(found.value).endswith("; lost: /job:worker/task:1") == bool(lost)
    assert isinstance(found.value.__cause__, kind)


def test_a_lost_device_is_named_between_the_actions_of_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = build(chain(), 2, 4)

    def updates(*_: Any) -> None:
        raise tf.errors.InternalError(None, None, "remote data poisoned")

    monkeypatch.setattr(program_module.StageUpdate, "squared_norms", updates)
    monkeypatch.setattr(remote, "lost", lambda devices: [devices[-1]])
    with pytest.raises(StageError, match=r"step of the pipeline failed: .*poisoned; lost: .*CPU"):
        program.train_step(batch(), 0)


# --- overlap ---


class Rendezvous(Chain):
    """Micro-batch 1 at the first stage waits for micro-batch 0 at the second, and the reverse."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.barrier = threading.Barrier(2, timeout=60)

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        def meet(m: Any) -> None:
            if (i, int(m)) in ((0, 1), (2, 0)):
                self.barrier.wait()

        tf.numpy_function(meet, [flow["m"][0]], [])
        return super()._map(i, theta, flow, ctx)


@pytest.mark.parametrize("schedule", sample(["gpipe", "1f1b", "zero_bubble_h1"], quick=["1f1b"]))
def test_stages_work_at_the_same_time(schedule: str) -> None:
    task = Rendezvous.Params().instantiate()
    of = {**batch(), "m": np.repeat(np.arange(4, dtype=np.int32), EXAMPLES // 4)}
    program = build(task, 2, 4, of=of, balance=[2, 3], schedule=schedule)
    program.train_step(of, 0)  # one after the other, they would wait for ever
    found = {event.action.work: event for events in program.events.values() for event in events}
    first, second = (found[s, m, "forward"] for s, m in ((0, 1), (1, 0)))
    assert max(first.start, second.start) < min(first.end, second.end)


# --- replicas ---


def test_replicas_compute_with_the_same_bits() -> None:
    rows = np.random.default_rng(5).normal(size=(2, 2, DIM))  # micro-batch, example
    of = {"x": np.concatenate([rows[m] for m in (0, 0, 1, 1)])}  # replicas are given the same
    program = build(chain(), 2, 2, of=of, num_replicas=2)
    for step in range(2):
        program.train_step(of, step)
        for stage in range(2):
            first, second = (program._functions[replica, stage].totals for replica in range(2))
            assert set(first) == set(second) and len(first) > 0
            for path, total in first.items():
                assert np.array_equal(total.numpy(), second[path].numpy()), path
        weights = program._state.with_copies(program._state.used(), replicas=2)
        for stage in range(2):
            pairs = zip(weights[0, stage].values(), weights[1, stage].values(), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)
    half = build(chain(), 2, 2, of={"x": of["x"][[0, 1, 4, 5]]})
    for step in range(2):
        half.train_step({"x": of["x"][[0, 1, 4, 5]]}, step)
    for key, value in half.state().items():
        np.testing.assert_allclose(program.state()[key], value, rtol=1e-12, err_msg=key)


# --- the position of an example ---


class Dropped(Chain):
    """A chain that drops of its inputs, with two losses, and auxiliary losses of its maps."""

    losses = ("square", "distance")

    def loss_weight(self, batch: Any) -> tf.Tensor:
        weight = super().loss_weight(batch)
        return tf.stack([weight, 2.5 * weight + 1.0])

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        layer = self.maps[i]
        x = ops.dropout(ctx, flow["x"], 0.5, layer)
        ctx.collect_loss(f"size/{i}", 0.1 * tf.reduce_sum(tf.cast(tf.abs(x), tf.float32)))
        return {**flow, "x": layer.fprop(theta.maps[str(i)], x, ctx)}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        sums = [tf.reduce_sum(tf.square(flow["x"])), tf.reduce_sum(tf.abs(flow["x"] - 1.0))]
        return {**flow, LOSS_SUM: tf.stack(sums), METRICS: {}}


def test_what_is_dropped_goes_by_the_position_in_the_batch_also_when_it_is_computed_again() -> None:
    task = Dropped.Params(num_maps=2).instantiate()
    scaled = {"loss_scale": LossScale.Params(initial=1024.0)}
    one_device: Any = DataParallel.Params(xla="none").instantiate()
    whole = one_device.build(task, learner(**scaled), seed=3, batch=signature_of(batch()))
    whole.initialize()
    cut = build(
        task, 2, 2, by=learner(accumulation_steps=2, **scaled), num_replicas=2,
        rematerialize="all", schedule="zero_bubble_h1", xla="none",
    )  # fmt: skip
    wanted, found = (program.train_step(batch(), 0) for program in (whole, cut))
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in wanted.items()}, rel=1e-5
    )
    for key, value in whole.state().items():
        np.testing.assert_allclose(cut.state()[key], value, rtol=1e-5, atol=1e-8, err_msg=key)


# --- complex values between stages ---


class Spectral(Chain):
    """A chain that also passes a complex value from map to map, of which the loss is."""

    def _map(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        after = super()._map(i, theta, flow, ctx)
        z = tf.complex(after["x"], 0.5 * tf.sin(after["x"]))
        return {**after, "z": z * flow["z"] if "z" in flow else z}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        x = tf.math.real(flow["z"]) + tf.square(tf.math.imag(flow["z"]))
        return super()._last(theta, {**flow, "x": x}, ctx)


@pytest.mark.parametrize("rematerialize", ["none", "all"])
def test_complex_values_between_stages_have_gradients(rematerialize: str) -> None:
    task = Spectral.Params(num_maps=2).instantiate()
    one_device: Any = DataParallel.Params(xla="none").instantiate()
    whole = one_device.build(task, learner(), seed=3, batch=signature_of(batch()))
    whole.initialize()
    cut = build(task, 2, 2, rematerialize=rematerialize, xla="none")
    for program in (whole, cut):
        program.train_step(batch(), 0)
    for key, value in whole.state().items():
        np.testing.assert_allclose(cut.state()[key], value, rtol=1e-5, atol=1e-8, err_msg=key)


# --- batches of several shapes ---


def test_a_batch_of_any_size_is_split_into_as_many_micro_batches_as_divide_it() -> None:
    task, program = chain(), build(chain(), 2, 4)
    weights = {key: value for key, value in program.state().items() if key.startswith("weights/")}
    found = []
    for step, rows in enumerate((EXAMPLES, 6, 9, 12, 7)):
        x = np.random.default_rng(step).normal(size=(rows, DIM))
        theta = {key.removeprefix("weights/"): tf.constant(w) for key, w in weights.items()}
        with tf.GradientTape() as tape:
            tape.watch(theta)
            sums = task.loss(task.theta(theta), {"x": tf.constant(x)}, StepContext())
            loss = sums.loss_sum / rows
        gradients = tape.gradient(loss, theta)
        weights = {
            f"weights/{p}": w - np.float32(0.1).item() * gradients[p] for p, w in theta.items()
        }
        metrics = program.train_step({"x": x}, step)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
        found.append(program.plan.num_micro_batches)
    assert found == [4, 3, 3, 4, 1]
    state = program.state()
    for key, weight in weights.items():
        np.testing.assert_allclose(state[key], weight, rtol=1e-12)


def test_a_batch_that_replicas_do_not_divide_says_what_to_choose() -> None:
    program = build(chain(), 2, 2, num_replicas=2)
    with pytest.raises(ExecutionError, match=r"of 7 examples cannot be split .* choose 1 replica"):
        program.train_step({"x": np.zeros([7, DIM])}, 0)
