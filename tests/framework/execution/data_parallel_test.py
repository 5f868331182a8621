"""Data-parallel execution gives one device's numbers on any number of devices, towers and parts."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from clusters import free_addresses
from sampling import sample

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
CLUSTERS = ["--execution", '{"towers": 2, "xla": "clusters"}', ONE_SIZE]
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
                CLUSTERS,
                IN_ONE_CALL,
                COMPILED,
                ["--execution", '{"towers": 1}', "--accumulation", "4", NO_EVALUATION, UNOPTIMIZED],
            ],
            quick=[CLUSTERS, IN_ONE_CALL],
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
    repeated = '{"num_blocks": 2, "repeated": true, "rematerialize": true}'
    run = steps("--task", repeated, UNOPTIMIZED)
    reference = one_device('{"num_blocks": 2}')
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
        (
            ("--task", '{"block.batch_norm": true, "repeated": true, "num_blocks": 2}'),
            "repeated stack",
        ),
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
