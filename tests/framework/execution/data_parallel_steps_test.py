"""Steps of data-parallel execution in the test process: sizes, padding, compiled steps, TPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import tensorflow as tf
from traced_calls import call_traced

from tekso.framework.cluster import Cluster
from tekso.framework.execution import DataParallel, ExecutionError, data_parallel
from tekso.framework.execution.replica_context import summed
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm
from tekso.models.mlp import Mlp
from tekso.models.resnet import resnet
from tekso.tasks.classification.task import Classification


class Normalised(Task):
    """Batch statistics of what the batch holds; its best output is 1 everywhere."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=3))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        y = self.norm.fprop(theta.norm, batch["x"], ctx)
        nats = tf.reduce_sum(tf.square(y - 1), -1)
        loss_sum = tf.reduce_sum(batch["weights"] * nats)
        return LossSums(loss_sum, {"size": (loss_sum, tf.reduce_sum(batch["weights"]))})


def normalised_program(xla: str = "none") -> Any:
    learner = Learner.Params(
        optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1), ema_decay=0.5
    )
    execution = DataParallel.Params(towers=1, xla=xla).instantiate()
    task = Normalised.Params().instantiate()
    program = execution.build(task, learner.instantiate(), seed=0, batch={"x": ((5, 1), "float32")})
    program.initialize()
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    program.train_step({"x": x, "weights": np.ones(5, np.float32)}, 0)
    return program


def test_processes_that_do_not_divide_the_batch_are_refused_with_numbers_that_do() -> None:
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.5))
    execution = DataParallel.Params().instantiate()
    execution.join(Cluster(("a:1", "b:1", "c:1"), 1))
    task, signature = Normalised.Params().instantiate(), {"x": ((16, 3), np.float32)}
    with pytest.raises(ExecutionError, match=r"16 does not divide evenly over 3 processes.*15, 18"):
        execution.build(task, learner.instantiate(), seed=0, batch=signature)
    with pytest.raises(ExecutionError, match="on one device, but this one has 2"):
        execution.setup_devices(cpu_devices=2)


def test_the_update_is_compiled_once_for_batches_of_all_shapes() -> None:
    program = normalised_program("clusters")
    for size in (5, 7):
        x = np.ones((size, 3), np.float32)
        program.train_step({"x": x, "weights": np.ones(size, np.float32)}, 1)
    (fusion,) = (fusion for key, fusion in program._fusions.items() if key[0] == "update")
    (call,) = fusion._made.values()  # of two weights of one shape
    (update,) = call.args
    assert update.experimental_get_tracing_count() == 1


def test_a_skipped_step_leaves_batch_statistics_as_they_were() -> None:
    program = normalised_program()
    before = program.state()
    broken = np.array([[np.nan, np.inf, 1.0]] * 5, np.float32)
    metrics = program.train_step({"x": broken, "weights": np.ones(5, np.float32)}, 1)
    assert metrics["nonfinite_total"] == 1
    after = program.state()
    for key in before:
        if "nonfinite" not in key:
            np.testing.assert_array_equal(after[key], before[key], err_msg=key)


@pytest.mark.parametrize("size", [8, 10, 7])
def test_a_later_batch_that_the_parts_do_not_divide_is_used_whole(size: int) -> None:
    model = Mlp.Params(input_dim=3, output_dim=2, hidden_dims=[4])
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(size, 3)).astype(np.float32),
        "labels": rng.integers(0, 2, size).astype(np.int32),
        "weights": np.ones(size, np.float32),
    }
    found = []
    for towers, parts in ((1, 1), (2, 4)):
        learner = Learner.Params(
            optimizer=Momentum.Params(),
            schedule=Constant.Params(value=0.1),
            accumulation_steps=parts,
        )
        task = Classification.Params(num_classes=2, model=model).instantiate()
        program = (
            DataParallel.Params(towers=towers, xla="none")
            .instantiate()
            .build(task, learner.instantiate(), seed=0, batch={"x": ((8, 3), "float32")})
        )
        program.initialize()
        metrics = program.train_step(batch, 0)
        evaluated = program.eval_step(batch).values()
        found.append([float(metrics[name]) for name in ("loss", "gradient_norm")])
        found[-1] += [float(number) for pair in evaluated for number in pair]
        before = program.state()
        broken = {**batch, "x": np.where(np.arange(size)[:, None] < 1, np.inf, batch["x"])}
        broken["x"] = broken["x"].astype(np.float32)  # in one part only
        assert program.train_step(broken, 1)["nonfinite_total"] == 1
        after = program.state()
        changed = {key for key in before if (before[key] != after[key]).any()}
        assert changed == {"learner/nonfinite/total", "learner/nonfinite/consecutive"}
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_batch_of_padding_has_loss_0_and_gradient_0() -> None:
    program = normalised_program()
    x = np.ones((5, 3), np.float32)
    metrics = program.train_step({"x": x, "weights": np.zeros(5, np.float32)}, 1)
    found = {name: float(value) for name, value in metrics.items()}
    assert (found["loss"], found["total_loss"], found["gradient_norm"]) == (0, 0, 0)
    assert found["nonfinite_total"] == 0


@pytest.mark.parametrize(
    ("model", "towers", "threads"),
    [
        (Mlp.Params(), None, 1),
        (Mlp.Params(), 1, 4),
        (resnet(18), None, 4),
        (resnet(18), 1, 4),
        (resnet(18), 2, 1),
    ],
    ids=[
        "towers",
        "one tower",
        "batch statistics",
        "batch statistics, one tower",
        "batch statistics, two towers",
    ],
)
def test_an_operation_uses_all_cores_if_there_is_one_tower(
    model: Any, towers: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_parallel, "num_cores", lambda: 4)
    set_up: dict[str, Any] = {}
    monkeypatch.setattr(data_parallel.devices, "setup_cpu", lambda **given: set_up.update(given))
    execution = DataParallel.Params(towers=towers).instantiate()
    execution.expect(Classification.Params(model=model))
    execution.setup_devices()
    assert set_up == {"logical_devices": None, "threads_per_op": threads}


def test_a_tpu_that_is_not_there_is_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolver(name: str) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", resolver)
    with pytest.raises(ExecutionError, match=r"cannot connect to the TPU 'mine': .*not known"):
        DataParallel.Params().instantiate().setup_devices(tpu="mine")


def test_a_tpu_is_connected_and_initialized_before_the_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def noted(name: str, result: Any = None) -> Any:
        return lambda given: calls.append((name, given)) or result

    monkeypatch.setattr(
        tf.distribute.cluster_resolver, "TPUClusterResolver", noted("resolve", "resolver")
    )
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", noted("connect"))
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", noted("initialize"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", noted("strategy", "its strategy"))
    execution = DataParallel.Params().instantiate()
    execution.setup_devices(tpu="mine")
    names = ["connect", "initialize", "strategy"]
    assert calls == [("resolve", "mine"), *((name, "resolver") for name in names)]
    assert execution._strategy == "its strategy"


def test_decoding_runs_in_the_replicas_of_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneCore(tf.distribute.OneDeviceStrategy):
        """Stands for a strategy that places and compiles what runs in its replicas only."""

    monkeypatch.setattr(tf.distribute, "TPUStrategy", OneCore)
    strategy = OneCore("/cpu:0")

    def decode(theta: Any, given: Any, ctx: Any) -> Any:
        is_in_replica = not tf.distribute.in_cross_replica_context()
        assert is_in_replica and tf.distribute.get_strategy() is strategy
        x, missing, (y,) = given["x"], given["missing"], given["pair"]
        assert missing is None
        return {"sum": theta.norm.scale[0] * x + y, "none": None}

    given = {"x": np.float32(2), "missing": None, "pair": (tf.constant(3.0),)}
    execution = DataParallel.Params(towers=1).instantiate()
    execution._strategy = strategy
    task = Normalised.Params().instantiate()
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    batch = {"x": ((4, 3), "float32")}
    program = execution.build(task, learner.instantiate(), seed=0, batch=batch)
    program.initialize()
    found = call_traced(program, decode, given)
    assert found["none"] is None and float(found["sum"]) == 5


def test_several_processes_on_a_tpu_are_refused_in_a_sentence() -> None:
    execution = DataParallel.Params().instantiate()
    execution.join(Cluster(("127.0.0.1:1", "127.0.0.1:2"), 0))
    with pytest.raises(ExecutionError, match=r"from one process, .* set --cluster=none"):
        execution.setup_devices(tpu="mine")


def test_step_compiles_training_and_evaluation() -> None:
    plain, compiled = normalised_program(), normalised_program("step")
    x = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    batch = {"x": x, "weights": np.ones(4, np.float32)}
    found, expected = compiled.eval_step(batch), plain.eval_step(batch)
    for name, pair in expected.items():
        np.testing.assert_allclose(found[name], pair, rtol=1e-6)
    assert {key[0] for key in compiled._compiled_functions} == {"train", "update", "eval"}
    assert not plain._compiled_functions


def test_evaluation_and_decoding_take_the_averages_of_weights() -> None:
    program = normalised_program()
    state = program.state()
    x = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)

    def figures(sevens: set[str]) -> list[float]:
        """Of an evaluation and of decoding, with a part of the state replaced by 7."""
        assert sevens <= set(state)
        values = {k: np.full_like(v, 7) if k in sevens else v for k, v in state.items()}
        program.restore(values.__getitem__, set(values))
        evaluated = program.eval_step({"x": x, "weights": np.ones(4, np.float32)})
        decoded = call_traced(program, lambda theta, ctx: tf.reduce_sum(theta.norm.scale))
        return [float(evaluated["loss"][0]), float(decoded)]

    learned = ("norm/scale", "norm/bias")
    plain = figures(set())
    assert figures({f"weights/{name}" for name in learned}) == plain
    with_other_averages = figures({f"learner/{name}/ema" for name in learned})
    assert with_other_averages[0] != plain[0]
    assert with_other_averages[1] == 21


def test_all_tensors_of_a_sum_are_on_the_device_of_their_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, tf.distribute sums them one by one, with a warning."""
    devices: list[str] = []

    def all_reduce(op: Any, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        devices.extend(x.device for x in tensors)
        return tensors

    context = SimpleNamespace(all_reduce=all_reduce)
    monkeypatch.setattr(tf.distribute, "get_replica_context", lambda: context)
    with tf.Graph().as_default():
        elsewhere = tf.constant([1.0, 2.0])
        with tf.device("/CPU:0"):
            found = summed({"a": tf.constant(3.0), "b": elsewhere, "c": tf.constant(4)})
    assert set(found) == {"a", "b", "c"} and devices == [found["a"].device] * 3
