"""MultiTask: sums by task, shared weights, steps that equal those of one task, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small_tasks
import tensorflow as tf
from small_pictures import Blobs

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel, ExecutionError, Pipelined
from tekso.framework.execution.base import ExecutionProgram, signature_of
from tekso.framework.gradient_combination import GradDrop, PCGrad
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import OneTask, TaskInputs, of_task
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.pieces import joined, run_all
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.models.layers.linear import Linear
from tekso.models.layers.normalization import BatchNorm
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification
from tekso.tasks.image.input import Images
from tekso.tasks.image.task import ImageClassification
from tekso.tasks.multi.task import MultiTask

SHARED = {"kind/model/layers/0/w", "kind/model/layers/0/b"}


def batches(**changes: Any) -> list[dict[str, np.ndarray]]:
    """Returns a batch of each task."""
    input = small_tasks.task_inputs(**changes).instantiate(seed=1)
    return [input.batch(step) for step in input.steps_of_each_kind()]


def both() -> dict[str, np.ndarray]:
    """Returns a batch of both tasks."""
    return batches(unit="all_tasks")[0]


def program(task: Task, batch: Any, **execution: Any) -> ExecutionProgram:
    learner = Learner.Params(
        optimizer=SGD.Params(), schedule=Constant.Params(value=0.5)
    ).instantiate()
    params = DataParallel.Params(towers=1, xla="none").set(execution)
    built = params.instantiate().build(task, learner, seed=2, batch=signature_of(batch))
    built.initialize()
    return built


def test_shared_weights_exist_once_and_theta_has_them_at_both_paths() -> None:
    task = small_tasks.multi_task().instantiate()
    specs = task.specs()
    assert task.shared_weights == SHARED
    assert not any(path.startswith("virginica/model/layers/0/") for path in specs)
    theta = task.init(0)
    assert theta["virginica"].model.layers[0].w is theta["kind"].model.layers[0].w
    assert [tuple(part) for part in task.shared_parts] == [
        ("virginica/model/layers/0", "kind/model/layers/0", 4 * 6 + 6, 2)
    ]


def test_sums_of_each_task_are_those_of_the_task_alone() -> None:
    task = small_tasks.multi_task(loss_weights={"virginica": 3.0}).instantiate()
    theta, batch = task.init(3), both()
    sums = task.loss(theta, batch, StepContext())
    weight = task.loss_weight(batch).numpy()
    for number, (name, factor) in enumerate((("kind", 1.0), ("virginica", 3.0))):
        alone = task.tasks[name].loss(theta[name], of_task(name, batch), StepContext())
        want = factor * float(alone.loss_sum)
        assert float(sums.loss_sum[number]) == pytest.approx(want, rel=1e-6)
        assert weight[number] == 8
        pair = sums.metrics[f"{name}/accuracy"]
        assert tuple(map(float, pair)) == tuple(map(float, alone.metrics["accuracy"]))
        assert float(sums.metrics[f"{name}/loss"][0]) == float(alone.loss_sum)
    total = sums.total(tf.constant(weight), tf.constant(0.0))
    assert float(total) == pytest.approx(float(sum(sums.loss_sum)) / 8, rel=1e-6)


def test_a_batch_of_one_task_has_sums_of_that_task_only() -> None:
    task = small_tasks.multi_task().instantiate()
    theta = task.init(3)
    kind, virginica = batches()
    assert {key.partition("/")[0] for key in virginica} == {"virginica"}
    sums = task.loss(theta, virginica, StepContext())
    assert sums.loss_sum[0] == 0 and sums.loss_sum[1] > 0
    assert task.loss_weight(virginica).numpy().tolist() == [0, 8]
    assert not any(name.startswith("kind/") for name in sums.metrics)
    assert task.count(kind) == (8, "examples")


def test_pieces_compute_the_loss_for_every_kind_of_batch() -> None:
    task = small_tasks.multi_task().instantiate()
    theta = task.init(3)
    pieces = joined(task_results.pieces(task))
    flat = {path: spec.initial_value(3) for path, spec in task.specs().items()}
    for batch in (*batches(), both()):
        whole = task.loss(theta, batch, StepContext())
        tensors = task_results.as_tensors(batch)
        flow = run_all(pieces, {p: tf.constant(w) for p, w in flat.items()}, tensors, StepContext())
        np.testing.assert_allclose(flow["loss_sum"], whole.loss_sum, rtol=1e-6)
        assert flow["metrics"].keys() == whole.metrics.keys()


def test_a_step_of_one_task_is_the_step_of_that_task_alone() -> None:
    """Both start from equal weights, because those are drawn from paths: they are set here."""
    task = small_tasks.multi_task().instantiate()
    (kind, _) = batches()
    multi = program(task, kind)
    metrics = multi.train_step(kind, 0)
    single = small_tasks.classifier(3).instantiate()
    alone = program(single, of_task("kind", kind))
    initial = {k: s.initial_value(2) for k, s in multi.specs().items()}
    alone.assign(lambda key, where: initial[key.replace("weights/", "weights/kind/")][where])
    want = alone.train_step(of_task("kind", kind), 0)
    assert float(metrics["loss"]) == pytest.approx(float(want["loss"]), rel=1e-6)
    assert float(metrics["gradient_norm"]) == pytest.approx(float(want["gradient_norm"]), rel=1e-5)
    state = multi.state()
    for key, value in alone.state().items():
        if key.startswith("weights/"):
            np.testing.assert_allclose(
                state[key.replace("weights/", "weights/kind/")], value, rtol=1e-5, atol=1e-6
            )
    assert np.array_equal(
        state["weights/virginica/model/layers/1/w"],
        initial["weights/virginica/model/layers/1/w"],
    )


def gradients_by_task(task: MultiTask, batch: Any) -> list[dict[str, np.ndarray]]:
    """Returns the gradients of the mean loss of every task, by autodiff of the task alone."""
    flat = {path: tf.constant(spec.initial_value(2)) for path, spec in task.specs().items()}
    found = []
    for name, own in task.tasks.items():
        with tf.GradientTape() as tape:
            tape.watch(flat)
            data = of_task(name, batch)
            sums = own.loss(task.theta(flat)[name], data, StepContext(mode="train"))
            loss = sums.loss_sum / own.loss_weight(data)
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(loss, flat, unconnected_gradients=zero)
        found.append({path: gradient.numpy() for path, gradient in gradients.items()})
    return found


def test_pc_grad_projects_the_gradients_of_the_tasks_in_a_training_step() -> None:
    """With two tasks there is one order, so the step is g - lr · Σ g_i^PC, computed in NumPy."""
    task = small_tasks.multi_task(gradients=PCGrad.Params()).instantiate()
    batch = both()
    one, other = gradients_by_task(task, batch)
    flat = [np.concatenate([g[p].ravel() for p in sorted(SHARED)]) for g in (one, other)]
    product = float(flat[0] @ flat[1])
    # Make the tasks disagree, whatever the data says: the second labels are reversed.
    if product >= 0:
        batch["virginica/labels"] = 1 - batch["virginica/labels"]
        one, other = gradients_by_task(task, batch)
        flat = [np.concatenate([g[p].ravel() for p in sorted(SHARED)]) for g in (one, other)]
        product = float(flat[0] @ flat[1])
    assert product < 0
    built = program(task, batch)
    metrics = built.train_step(batch, 0)
    assert float(metrics["gradient_conflicts"]) == 1.0
    state = built.state()
    squares = [float(f @ f) for f in flat]
    for path, spec in task.specs().items():
        if path in SHARED:
            combined = (one[path] - product / squares[1] * other[path]) + (
                other[path] - product / squares[0] * one[path]
            )
        else:
            combined = one[path] + other[path]
        want = spec.initial_value(2) - 0.5 * combined
        np.testing.assert_allclose(state[f"weights/{path}"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [PCGrad.Params(), GradDrop.Params()])
def test_accumulation_steps_do_not_change_combined_gradients(gradients: Any) -> None:
    batch = both()
    states = []
    for parts in (1, 2):
        task = small_tasks.multi_task(gradients=gradients).instantiate()
        learner = Learner.Params(
            optimizer=SGD.Params(),
            schedule=Constant.Params(value=0.5),
            accumulation_steps=parts,
        ).instantiate()
        params = DataParallel.Params(towers=1, xla="none")
        built = params.instantiate().build(task, learner, seed=2, batch=signature_of(batch))
        built.initialize()
        built.train_step(batch, 0)
        states.append(built.state())
    for key, value in states[0].items():
        np.testing.assert_allclose(states[1][key], value, rtol=1e-4, atol=1e-6)


def test_pipelines_refuse_to_combine_gradients_before_the_first_step() -> None:
    task = small_tasks.multi_task(gradients=PCGrad.Params()).instantiate()
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.5))
    execution: Any = Pipelined.Params(num_stages=2).instantiate()
    with pytest.raises(ExecutionError, match=r"PCGrad, which needs the gradient of every task"):
        execution.build(task, learner.instantiate(), seed=0, batch=signature_of(both()))
    with pytest.raises(ExecutionError, match=r"PCGrad, which needs the gradient of every task"):
        execution.plan(task, signature_of(both()), parts=1)


def test_evaluation_reports_the_figures_of_one_task() -> None:
    params = small_tasks.task_inputs()
    dev = OneTask.Params(task="virginica", input=HeldOut.Params(batch_size=16)).instantiate(
        train=params, seed=1
    )
    task = small_tasks.multi_task().instantiate()
    built = program(task, batches()[0])
    totals: dict[str, np.ndarray] = {}
    for number in range(dev.num_batches or 0):
        for name, pair in built.eval_step(dev.batch(number)).items():
            totals[name] = totals.get(name, 0.0) + np.array([float(x) for x in pair])
    figures = task.summarize({name: tuple(pair) for name, pair in totals.items()})
    assert totals["loss"][1] == 30  # every held-out flower once, without padding
    assert figures["loss"] == pytest.approx(figures["virginica/loss"])
    assert set(figures) == {"loss", "virginica/loss", "virginica/accuracy"}


class Penalised(Classification):
    """Adds an auxiliary loss and a metric of its layers."""

    class Params(Classification.Params):
        """Params of Penalised."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        """See Task."""
        ctx.collect_loss("penalty", 2.0 * tf.reduce_sum(batch["weights"]))
        ctx.collect_metric("seen", tf.reduce_sum(batch["weights"]), 1.0)
        return super().loss(theta, batch, ctx)


def test_what_layers_collect_gets_the_name_and_the_weight_of_the_task() -> None:
    own = small_tasks.classifier(2)
    tasks = {"a": Penalised.Params(model=own.model, num_classes=2), "b": own}
    task = MultiTask.Params(tasks=tasks, loss_weights={"a": 0.5}).instantiate()
    data = of_task("virginica", both())
    ctx = StepContext(num_examples=8)
    task.loss(task.init(0), {f"{name}/{k}": v for name in "ab" for k, v in data.items()}, ctx)
    losses = ctx.collected.sums["loss"]
    assert {name: float(value) for name, (value, _) in losses.items()} == {"a/penalty": 1.0}
    assert list(ctx.collected.sums["metric"]) == ["a/seen"]


class Normed(Layer):
    """Batch normalization and a linear layer."""

    class Params(Layer.Params):
        """Params of Normed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=4, dims=(None,)))
        self.child("linear", Linear.Params(input_dim=4, output_dim=2, dims=(None, None)))

    def fprop(self, theta: Any, x: Any, ctx: StepContext) -> tf.Tensor:
        """Computes both."""
        return self.linear.fprop(theta.linear, self.norm.fprop(theta.norm, x, ctx), ctx)


def test_statistics_of_shared_layers_are_those_of_both_tasks() -> None:
    own = Classification.Params(model=Normed.Params(), num_classes=2)
    task = MultiTask.Params(
        tasks={"a": own, "b": own}, shared={"b/model/norm": "a/model/norm"}
    ).instantiate()
    x = np.random.default_rng(0).normal(size=(2, 8, 4))
    x[1] += 4.0
    ones, labels = np.ones(8, np.float32), np.zeros(8, np.int32)
    batch = {}
    for name, own_x in zip("ab", x.astype(np.float32), strict=True):
        batch |= {f"{name}/x": own_x, f"{name}/labels": labels, f"{name}/weights": ones}
    built = program(task, batch)
    (mean,) = (key for key in built.specs() if key.endswith("norm/moving_mean"))
    assert mean == "weights/a/model/norm/moving_mean"
    before = built.state()[mean]
    built.train_step(batch, 0)
    change = built.state()[mean] - before
    want = x.reshape(16, 4).mean(0)
    np.testing.assert_allclose(change / want, np.full(4, (change / want)[0]), rtol=1e-3)
    assert (change / want)[0] > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"shared": {"virginica/model/layer": "kind/model/layers/0"}},
            r"no weight is at or below 'virginica/model/layer'; did you mean",
        ),
        (
            {"shared": {"virginica/model/layers/2": "kind/model/layers/2"}},
            r"shape of virginica/model/layers/2/[wb] is \[.*2\] and of kind",
        ),
        ({"loss_weights": {"kind": 0.0}}, r"loss_weights\['kind'\] is 0.0, but must be a positive"),
        ({"loss_weights": {"king": 1.0}}, r"one of the tasks kind, virginica"),
        ({"gradients": GradDrop.Params(leak={"x": 1.0})}, r"leak names 'x', but the tasks are"),
        ({"tasks": {}}, r"task.tasks is empty"),
        ({"tasks.kind.num_classes": 1}, r"^task.tasks.kind.num_classes is 1"),
    ],
)
def test_wrong_settings_are_named_in_one_line(changes: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        small_tasks.multi_task(**changes).instantiate()
    assert "\n" not in str(caught.value)


def test_inputs_that_do_not_fit_are_named_in_one_line() -> None:
    params, given = small_tasks.multi_task(), small_tasks.task_inputs()
    input = given.instantiate()
    one = given.copy().set(inputs={"kind": given.inputs["kind"]}).instantiate()
    with pytest.raises(ValueError, match=r"no input for the task 'virginica': add it to input.in"):
        task_results.complete(params, one)
    alone = params.copy().set(tasks={"kind": params.tasks["kind"]}, shared={})
    with pytest.raises(ValueError, match=r"input.inputs has 'virginica', but the tasks are kind"):
        task_results.complete(alone, input)
    with pytest.raises(ValueError, match=r"the tasks are none: add the task to task.tasks, or"):
        task_results.complete(params.copy().set(tasks={}, shared={}), input)
    with pytest.raises(ValueError, match=r"input is Flowers, but MultiTask needs"):
        task_results.complete(params, given.inputs["kind"].instantiate())
    task = params.instantiate()
    dev = HeldOut.Params().instantiate(train=given.inputs["kind"])
    with pytest.raises(ValueError, match=r"eval_inputs.dev is HeldOut, but .* OneTask.Params"):
        task.check_inputs({"input": input, "eval_inputs.dev": dev})
    combined = small_tasks.multi_task(gradients=PCGrad.Params()).instantiate()
    with pytest.raises(ValueError, match=r"--set input.unit=all_tasks"):
        combined.check_inputs({"input": input})


def test_goals_have_the_names_of_the_tasks() -> None:
    goals = MultiTask.goals_of(small_tasks.multi_task())
    assert goals["virginica/accuracy"] == "max" and goals["kind/loss"] == "min"


def test_int8_of_a_task_is_calibrated_with_the_images_of_its_own_input() -> None:
    pictures = Images.Params(source=Blobs.Params(), image_size=8, batch_size=3)
    one = ImageClassification.Params(model=Mlp.Params(hidden_dims=[4]))
    inputs = {"pictures": pictures, "kind": small_tasks.task_inputs().inputs["kind"]}
    input = TaskInputs.Params(inputs=inputs).instantiate()
    tasks = {"pictures": one, "kind": small_tasks.classifier(3)}
    task = MultiTask.complete(MultiTask.Params(tasks=tasks), input).instantiate()
    quantization = task.exports(input)["pictures_classify"].quantization
    for split, name, count in (("train", "train", 12), ("held_out", "dev", 4)):
        found = [given["images"][0] for given in quantization.examples(input, split, 50)]
        np.testing.assert_array_equal(found, Blobs.Params().instantiate(split=name).images)
        assert len(found) == count
