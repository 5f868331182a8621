"""How many tensors the stages of a pipeline hold between its actions."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from pipeline_chain import DIM, EXAMPLES, batch, build, chain, learner
from sampling import sample

from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.execution.pipeline import program as program_module
from tekso.framework.execution.pipeline import stage_evaluation
from tekso.framework.planning.saved_bytes import saved_bytes
from tekso.framework.planning.simulator import simulate
from tekso.framework.planning.stage_figures import figures_of


class Watched(program_module.ScheduleRun):
    """Notes after every action what its stage holds: {(stage, micro-batch): its tensors}."""

    notes: ClassVar[list[tuple[Any, dict[tuple[int, int], list[Any]]]]] = []
    runs: ClassVar[list[Any]] = []

    def perform(self, worker: Any, action: Any) -> None:
        super().perform(worker, action)
        with self._lock:
            held = {
                (stage, m): list(self._saved[replica, stage, m].values())
                for replica, stage, m in list(self._saved)
                if stage % self._plan.num_devices == action.device
            }
        self.notes.append((action, held))
        self.runs.append(self)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr(program_module, "ScheduleRun", Watched)
    Watched.notes, Watched.runs = [], []
    return Watched


def num_bytes(held: dict[Any, list[Any]]) -> int:
    """Scalars, such as the seed of a loss, do not count."""
    tensors = (t for each in held.values() for t in each if t.shape.rank)
    return sum(t.shape.num_elements() * t.dtype.size for t in tensors)


@pytest.mark.parametrize("rematerialize", sample(["none", "all"], quick=["none"]))
@pytest.mark.parametrize(
    ("schedule", "stages", "most"),
    [
        ("gpipe", 3, [8, 8, 8]),
        ("1f1b", 3, [3, 2, 1]),
        ("interleaved_1f1b", 2, [5, 3]),  # halves of a micro-batch: two stages a device
        ("zero_bubble_h1", 3, [3, 3, 3]),
    ],
)
def test_as_many_micro_batches_are_held_as_the_schedule_says(
    watched: type[Watched], schedule: str, stages: int, most: list[int], rematerialize: str
) -> None:
    program = build(chain(), stages, 8, schedule=schedule, rematerialize=rematerialize)
    program.train_step(batch(), 0)
    found = [
        max(len(held) for action, held in watched.notes if action.device == device)
        for device in range(stages)
    ]
    assert found == most
    plan = program.plan
    timeline = simulate(
        plan.actions,
        num_devices=stages,
        durations=lambda stage, kind: 1.0,
    )
    share = len(plan.stage_plan.stages) // stages
    assert [share * each for each in timeline.held] == most
    for run in watched.runs:  # nothing is left behind
        assert (run._saved, run._values, run._gradients) == ({}, {}, {})


def test_stages_hold_inputs_and_outputs_of_products_and_no_weight_of_another_type(
    watched: type[Watched],
) -> None:
    of = batch(dtype="float32")
    program = build(chain(weight_dtype="float64"), 2, 4, of=of, schedule="gpipe", balance=[2, 3])
    program.train_step(of, 0)
    x = EXAMPLES // 4 * DIM * 4  # bytes of what a map is given, or makes, of a micro-batch
    for action, held in watched.notes:
        if action.kind == "forward":
            # The first map of a stage its input, and each its output, that of tanh.
            assert num_bytes(held) == len(held) * 3 * x, action


def forks(number: int, x: Any) -> Any:
    """A product with itself, and a view: what a piece is given is kept, and is what it was."""
    return tf.reshape(x * x, x.shape) if number % 2 else tf.identity(x)


@pytest.mark.parametrize("balance", sample([[1, 4], [2, 3], [3, 2]], quick=[[2, 3]]))
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_h1"])
def test_what_pieces_of_a_stage_share_is_held_and_counted_once(
    watched: type[Watched], schedule: str, balance: list[int]
) -> None:
    task, of = chain(forks), batch()
    program = build(task, 2, 4, schedule=schedule, balance=balance)
    program.train_step(of, 0)
    micro = {"x": ((EXAMPLES // 4, DIM), "float64")}
    pieces, specs = task.pieces(), task.specs()
    kept = saved_bytes(pieces, trace_all(pieces, specs, micro), specs, set(specs), micro)
    for own in figures_of(schedule, program.plan, learner(), specs, kept).stages:
        stage, counted = (
            own.stage.index,
            {"forward": own.saved_bytes, "backward": own.memory.between},
        )
        for action, held in watched.notes:
            if action.stage == stage and (stage, action.micro_batch) in held:
                tensors = held[stage, action.micro_batch]
                memory = {t.numpy().tobytes() for t in tensors if t.shape.rank}  # views are one
                assert sum(map(len, memory)) == counted[action.kind], action


def test_between_the_gradients_only_what_that_of_the_weights_needs_is_held(
    watched: type[Watched],
) -> None:
    def between(number: int, x: Any) -> Any:
        return tf.sin(tf.sin(x))  # its derivative needs what it was given

    program = build(chain(between), 2, 4, schedule="zero_bubble_h1", balance=[2, 3])
    program.train_step(batch(), 0)
    x = EXAMPLES // 4 * DIM * 8
    after = [
        (held[action.stage, action.micro_batch], action)
        for action, held in watched.notes
        if action.kind == "backward" and action.stage == 1
    ]
    assert len(after) == 4
    for tensors, action in after:  # of both maps: what is multiplied, and the product's gradient
        assert num_bytes({0: tensors}) == 2 * 2 * x, action
        assert len(tensors) <= 2 * 2 + 1


def test_evaluation_holds_few_micro_batches_however_large_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most_at_once = []
    ahead = threading.Event()

    class Counted(stage_evaluation._Pass):
        def perform(self, worker: Any, action: Any) -> None:
            if (action.stage, action.micro_batch) == (0, 2):
                ahead.set()
            elif action.stage == 1:  # the last stage is slow: the first one goes as far as it may
                ahead.wait(60)
            super().perform(worker, action)
            most_at_once.append(len(self.flows))
            if action.stage == 1:
                assert action.micro_batch not in self.flows

    monkeypatch.setattr(stage_evaluation, "_Pass", Counted)
    task = chain()
    program = build(task, 2, 8)
    of = {"x": np.tile(batch()["x"], [3, 1])[:-1]}
    sums = program.eval_step(of)
    assert len(most_at_once) == 2 * 23 and max(most_at_once) == 3
    x = of["x"]
    for i in range(4):
        x = np.tanh(x @ program.state()[f"weights/maps/{i}/w"])
    np.testing.assert_allclose([float(s) for s in sums["loss"]], [np.sum(x**2), 23], rtol=1e-12)
