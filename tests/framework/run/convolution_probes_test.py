"""The speed of convolutions is found from steps with and without them."""

from __future__ import annotations

import collections
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.costs import graph_walks
from tekso.framework.planning import start_probes
from tekso.framework.planning.start_probes import StepTimes
from tekso.framework.run import convolution_probes
from tekso.framework.run.convolution_probes import FEW, MANY, STACKS, LayerStack, speeds_of


def test_planted_times_are_found() -> None:
    rest = [1e-3 * (i + 1) for i in range(len(STACKS))]
    whole = [
        more + 3 * stack.layers * (2e-4 + stack.flops / (1e9 * stack.intensity))
        for stack, more in zip(STACKS, rest, strict=True)
    ]
    found = speeds_of(whole, rest)
    # With more images, the same convolutions have a few more operations per byte.
    assert found["convolution_s"] == pytest.approx(2e-4, rel=0.05)
    speeds = dict(found["convolutions"])
    assert speeds == dict(found["filter_gradients"])
    assert list(speeds) == sorted(s.intensity for s in STACKS if s != FEW)
    for intensity, speed in speeds.items():
        assert speed == pytest.approx(1e9 * intensity, rel=0.05)


def test_disturbed_steps_make_no_time_negative_and_no_speed_infinite() -> None:
    with pytest.raises(ValueError, match=r"take no longer than steps without"):
        speeds_of([1e-3] * len(STACKS), [2e-3] * len(STACKS))
    index = STACKS.index(MANY)
    times = [1e-2 * (i != index) for i in range(len(STACKS))]
    found = speeds_of(times, [0.0] * len(STACKS))  # many images take no time at all
    assert 0 < found["convolution_s"] <= 1e-2 / (3 * FEW.layers)
    speeds = dict(found["convolutions"])
    assert len(speeds) == len(STACKS) - 2 and MANY.intensity not in speeds
    assert all(0 < speed < 1e13 for speed in speeds.values())


def test_a_convolution_is_counted_by_its_operations_and_its_bytes() -> None:
    stack = LayerStack(2, 4, 3, 1)
    assert stack.flops == 2 * (2 * 4 * 4 * 3) * (3 * 3 * 3)
    assert stack.intensity == stack.flops / (4 * (2 * (2 * 4 * 4 * 3) + 3 * 3 * 3 * 3))


def test_a_quarter_of_the_time_at_least_is_that_of_operations() -> None:
    """Many images take as long as few, so all the time seems to be that of the start."""
    found = speeds_of([3 * stack.layers * 1e-3 for stack in STACKS], [0.0] * len(STACKS))
    assert found["convolution_s"] == pytest.approx(1e-3)
    expected = {stack.intensity: stack.flops / 0.25e-3 for stack in STACKS}
    for intensity, speed in found["convolutions"]:
        assert speed == pytest.approx(expected[intensity])


def test_steps_with_and_without_convolutions_are_compared_in_turns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CPU time is that of the threads; other programs may make the time that passes longer."""
    cpu = {True: 30.0, False: 3.0}
    elapsed = {True: 20.0, False: 8.0}

    def typical_times(steps: Any, **settings: int) -> list[StepTimes]:
        assert [stack for stack, _ in steps[::2]] == [stack for stack, _ in steps[1::2]]
        return [StepTimes(cpu[convolves], elapsed[convolves]) for _, convolves in steps]

    execution = SimpleNamespace(setup_devices=lambda: None)
    monkeypatch.setattr(convolution_probes, "_execution", lambda: execution)
    monkeypatch.setattr(convolution_probes, "_step_of", lambda *given: given)
    monkeypatch.setattr(start_probes, "typical_times", typical_times)
    convolution_probes.main()
    count = len(STACKS)
    expected = {
        "cpu": speeds_of([30.0] * count, [3.0] * count),
        "elapsed": speeds_of([20.0] * count, [3.0] * count),  # no more than the CPU time
    }
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected))


@pytest.mark.parametrize("convolves", [True, False])
def test_a_layer_of_a_stack_has_a_convolution_of_3_by_3_and_its_two_gradients(
    convolves: bool,
) -> None:
    params = convolution_probes._Stacked.Params(channels=2, num_layers=5, convolves=convolves)
    task = params.instantiate()

    @tf.function(autograph=False)
    def gradient(w: tf.Tensor, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            ctx = StepContext(mode="train", num_examples=3)
            loss = task.loss(task.theta({"w": w}), {"x": x}, ctx).loss_sum
        return tape.gradient(loss, w)

    specs = [tf.TensorSpec(shape) for shape in ([1], [3, 4, 4, 2])]
    ops = graph_walks.needed(gradient.get_concrete_function(*specs).graph)
    counts = collections.Counter(op.type for op in ops)
    kinds = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "Relu")
    found = [counts[kind] for kind in kinds]
    assert found == ([5, 5, 5, 5] if convolves else [0, 0, 0, 5])
    assert all(op.inputs[1].shape == [3, 3, 2, 2] for op in ops if op.type == "Conv2D")
    # Equal filters would be one tensor.
    numbers = {tf.get_static_value(op.inputs[1]).item() for op in ops if op.type == "Fill"}
    assert len(numbers & {*np.float32((1.0 + 0.1 * np.arange(5)) / 9.0).tolist()}) == 5 * convolves
