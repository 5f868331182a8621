"""Data-parallel execution gives one device's numbers on any number of devices, towers and parts."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import processes
import pytest
import tensorflow as tf
from clusters import free_addresses
from sampling import sample
from traced_calls import call_traced

from tekso.framework.cluster import Cluster
from tekso.framework.execution import DataParallel, ExecutionError, data_parallel
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm
from tekso.models.mlp import Mlp
from tekso.models.resnet import resnet
from tekso.tasks.classification.task import Classification

TIMEOUT_S = 300
PROGRAM = Path(__file__).with_name("steps_program.py")
TWO_DEVICES = ["--cpu_devices", "2", "--accumulation", "2", "--execution", '{"xla": "none"}']
BATCH_NORM = '{"block.batch_norm": true}'
# Where another test evaluates with as many devices or towers, as they do in each accumulation.
NO_EVALUATION = "--no_evaluation"
# Where another test evaluates smaller batches, each of which is traced, and compiled.
ONE_SIZE = "--one_size"
# Where another test has TensorFlow's graph optimizer on, which takes longer than the steps.
UNOPTIMIZED = "--unoptimized"
# In a fixed order of sums, which timing decides otherwise.
IN_ONE_CALL = ["--deterministic", "--in_one_call", *TWO_DEVICES, UNOPTIMIZED]
COMPILED = ["--deterministic", "--in_one_call", "--execution", '{"towers": 2, "xla": "step"}']
COMPILED += [ONE_SIZE]
# LLVM takes longer to optimize than the steps take.
XLA_FLAGS = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


@functools.cache
def steps(*arguments: str) -> dict[str, Any]:
    done = processes.run([str(PROGRAM), *arguments], env={**os.environ, **XLA_FLAGS})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def together(count: int, *arguments: str) -> dict[str, Any]:
    """Runs the program in several processes; all must find the same, to the last bit."""
    cluster = f"--cluster={','.join(free_addresses(count))}"
    started = [
        processes.start(
            [str(PROGRAM), cluster, f"--process={p}", *arguments], env={**os.environ, **XLA_FLAGS}
        )
        for p in range(count)
    ]
    ends = [process.communicate(timeout=TIMEOUT_S) for process in started]
    assert [p.returncode for p in started] == [0] * count, ends[0][1][-3000:]
    found = [json.loads(out.splitlines()[-1]) for out, _ in ends]
    for one in found[1:]:
        assert {**one, "fusions": None} == {**found[0], "fusions": None}
    return found[0]


def one_device(task: str = "{}") -> dict[str, Any]:
    """Steps on one device: traced, as those of a user, or op by op if there is another task."""
    traced = UNOPTIMIZED if task == "{}" else "--op_by_op"
    return steps("--execution", '{"towers": 1, "xla": "none"}', "--task", task, traced)


def assert_same_run(run: dict[str, Any], reference: dict[str, Any]) -> None:
    # The sums of 16 examples are taken in another order, so float32 rounding may differ.
    for mine, other in zip(run["steps"], reference["steps"], strict=True):
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=3e-6, abs=3e-7), name
    if run["eval"] is not None:  # None with --no_evaluation
        assert run["eval"] and {*run["eval"]} <= {*reference["eval"]}  # fewer with --one_size
        for name, pair in run["eval"].items():
            assert pair == pytest.approx(reference["eval"][name], rel=3e-6), name
    for path, value in reference["weights"].items():
        np.testing.assert_allclose(run["weights"][path], value, rtol=1e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize(
    "arguments",
    [
        *sample(
            [
                ["--execution", '{"towers": 2, "xla": "clusters"}'],
                IN_ONE_CALL,
                COMPILED,
                ["--execution", '{"towers": 1}', "--accumulation", "4", NO_EVALUATION, UNOPTIMIZED],
            ],
            quick=[["--execution", '{"towers": 2, "xla": "clusters"}'], IN_ONE_CALL],
        ),
        pytest.param(  # IN_ONE_CALL has two devices
            ["--cpu_devices", "4", "--execution", '{"xla": "none"}', UNOPTIMIZED],
            marks=pytest.mark.matrix,
        ),
    ],
    ids=" ".join,
)
def test_steps_equal_those_of_one_device_with_dropout_padding_and_auxiliary_loss(
    arguments: list[str],
) -> None:
    run = steps(*arguments)
    assert run["first"] == one_device()["first"]  # the first weights are equal to the last bit
    assert_same_run(run, one_device())


@pytest.mark.parametrize(
    "arguments",
    [
        *sample(
            [
                [2, "--execution", '{"towers": 1, "xla": "none"}'],
                [2, "--execution", '{"xla": "step"}', ONE_SIZE],
                [2, "--task", BATCH_NORM, NO_EVALUATION, UNOPTIMIZED],
            ],
            quick=[[2, "--execution", '{"towers": 1, "xla": "none"}']],
        ),
        # Four also train in data_parallel_processes_test.py, until one of them gets a signal.
        pytest.param([4, "--execution", '{"towers": 1, "xla": "none"}'], marks=pytest.mark.matrix),
        pytest.param(  # above, without processes; of one tower in parts, below
            [
                *(2, "--accumulation", "2", NO_EVALUATION, UNOPTIMIZED),
                *("--execution", '{"towers": 2, "xla": "clusters"}'),
            ],
            marks=pytest.mark.matrix,
        ),
    ],
    ids=str,
)
def test_processes_equal_one_device(arguments: list[Any]) -> None:
    run = together(*arguments)
    alone = one_device(*(a for a in arguments if a == BATCH_NORM))
    assert run["first"] == alone["first"]
    assert_same_run(run, alone)


def test_processes_that_do_not_divide_the_batch_are_refused_with_numbers_that_do() -> None:
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.5))
    execution = DataParallel.Params().instantiate()
    execution.join(Cluster(("a:1", "b:1", "c:1"), 1))
    task, signature = Normalised.Params().instantiate(), {"x": ((16, 3), np.float32)}
    with pytest.raises(ExecutionError, match=r"16 does not divide evenly over 3 processes.*15, 18"):
        execution.build(task, learner.instantiate(), seed=0, batch=signature)
    with pytest.raises(ExecutionError, match="on one device, but this one has 2"):
        execution.setup_devices(cpu_devices=2)


# Replicas split all arrays of a batch alike, those of pictures and their texts in
# tests/tasks/contrastive/executions_test.py.
@pytest.mark.matrix
@pytest.mark.parametrize("model", ["repeated_translation"])
def test_models_of_pairs_equal_one_device(model: str) -> None:
    common = ["--execution", '{"towers": 1, "xla": "none"}', "--model", model]
    common += [NO_EVALUATION]
    alone = steps(*common, "--op_by_op")
    spread = steps("--cpu_devices", "2", *common, UNOPTIMIZED)
    assert spread["first"] == alone["first"]
    assert_same_run(spread, alone)


def test_steps_depend_on_dropout_and_learn() -> None:
    found = one_device()["same_batch"]  # which leaves the step as the only difference
    assert found["again"] == found["one"][:1]
    assert abs(found["other"][0] - found["one"][0]) > 1e-3
    # The same masks: each step goes down the gradient of the very loss that is compared.
    first, second, third = found["one"]
    assert first - 1e-2 > second > third


@pytest.mark.parametrize(
    "arguments",
    [
        # Two replicas share their statistics in tests/models/image_models_test.py, too.
        pytest.param(["--cpu_devices", "2"], marks=pytest.mark.matrix),
        pytest.param(["--execution", '{"towers": 2}'], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_batch_statistics_are_those_of_the_global_batch(arguments: list[str]) -> None:
    run = steps(*arguments, "--task", BATCH_NORM)
    assert_same_run(run, one_device(BATCH_NORM))


# tests/models/layers/stack_test.py compares such stacks by themselves.
@pytest.mark.matrix
def test_repeated_rematerialised_stack_equals_the_unrolled_one() -> None:
    run = steps("--task", '{"repeated": true, "rematerialize": true}', UNOPTIMIZED)
    reference = one_device()
    unstacked = {}
    for path, value in run["weights"].items():
        if path.startswith("weights/blocks/"):
            for i, layer in enumerate(value):
                unstacked[path.replace("blocks/", f"blocks/{i}/")] = layer
        else:
            unstacked[path] = value
    assert_same_run({**run, "weights": unstacked}, reference)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cpu_devices", "3"), ["batch_size 16", "3 devices", "15", "18"]),
        (
            ("--accumulation", "5"),
            ["batch_size 16", "1 device and 5 accumulation steps", "15", "20"],
        ),
        (("--execution", '{"towers": 3}'), ["execution.towers is 3", "16 examples"]),
        (
            ("--execution", '{"towers": 2, "xla": "step"}', "--task", BATCH_NORM),
            ["blocks/0/norm", "compiled as a whole", "execution.towers=1"],
        ),
    ],
    ids=["devices", "parts", "towers", "batch statistics"],
)
def test_uneven_parts_are_refused_with_what_would_fit(
    arguments: tuple[str, ...], words: list[str]
) -> None:
    done = processes.run([str(PROGRAM), *arguments])
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert "ExecutionError" in last
    for word in words:
        assert word in last


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (("--accumulation", "2"), "learner.accumulation_steps=1"),
        (("--execution", '{"xla": "step"}'), "execution.xla"),
        (("--task", '{"block.batch_norm": true, "repeated": true}'), "repeated stack"),
    ],
    ids=["parts", "compiled", "repeated"],
)
def test_batch_statistics_of_several_devices_are_refused_inside_of_a_loop_or_a_compiled_step(
    arguments: tuple[str, ...], cure: str
) -> None:
    task = () if "--task" in arguments else ("--task", BATCH_NORM)
    done = processes.run([str(PROGRAM), "--cpu_devices", "2", *arguments, *task])
    last = done.stderr.strip().splitlines()[-1]
    assert "ExecutionError: blocks" in last
    assert cure in last


@pytest.mark.parametrize(
    "arguments",
    sample(
        [
            IN_ONE_CALL,  # also compared with one device above, as the next one, so each runs once
            COMPILED,
            ["--execution", '{"towers": 2, "xla": "clusters"}'],
        ],
        quick=[IN_ONE_CALL],
    ),
    ids=" ".join,
)
def test_steps_in_one_call_are_the_same_to_the_last_bit(arguments: list[str]) -> None:
    if "--in_one_call" not in arguments:
        arguments = ["--deterministic", "--in_one_call", NO_EVALUATION, *arguments]
    found = steps(*arguments)
    assert found["together"] == {name: found[name] for name in ("steps", "weights")}


@pytest.mark.slow
def test_replicas_and_towers_share_no_compiled_cluster() -> None:
    execution = ["--execution", '{"towers": 2, "xla": "clusters"}']
    run = steps("--cpu_devices", "2", *execution, UNOPTIMIZED, ONE_SIZE)
    in_training = [[replica, tower] for replica in range(2) for tower in range(2)]
    evaluated = [("eval", *pair) for pair in in_training]
    updated = [("update", replica) for replica in range(2)]
    expected = map(str, [*map(tuple, in_training), *evaluated, *updated])
    assert sorted(run["fusions"]) == sorted(expected)


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
        found.append([float(metrics[name]) for name in ("loss", "gradient_norm")])
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
