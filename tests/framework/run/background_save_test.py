"""A checkpoint is written while training continues; a step waits before it needs more memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pipeline_chain import Chain, batch, build

from tekso.framework.execution import shards
from tekso.framework.execution.shards import of_arrays
from tekso.framework.execution.update_gate import UpdateGate
from tekso.framework.run import tensor_files
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.unwritten import Unwritten, grouped

W = np.arange(30, dtype=np.float32).reshape(6, 5)


class Gate(UpdateGate):
    """Records what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def close(self) -> None:
        super().close()
        self.events.append("closed")

    def open(self) -> None:
        super().open()
        self.events.append("opened")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 20)  # a row of W


@pytest.mark.parametrize(("most_bytes", "opened_after"), [(0, 6), (20, 5), (59, 4), (100, 1)])
def test_the_gate_opens_when_few_enough_bytes_are_unwritten(
    rows: None, most_bytes: int, opened_after: int
) -> None:
    gate = Gate()
    parts = Unwritten(grouped(of_arrays({"w": W})), most_bytes=most_bytes, gate=gate)
    assert parts.size_bytes == W.nbytes and gate.events == ["closed"]
    found = []
    for number, ((_, value),) in enumerate(parts, 1):
        found.append(np.asarray(value))
        # The part of this iteration is not written yet.
        assert ("opened" in gate.events) == (number > opened_after)
    np.testing.assert_array_equal(np.concatenate(found), W)
    assert "opened" in gate.events


def test_a_state_that_fits_never_closes_the_gate(rows: None) -> None:
    gate = Gate()
    list(Unwritten(grouped(of_arrays({"w": W})), most_bytes=W.nbytes, gate=gate))
    assert "closed" not in gate.events


def test_a_save_returns_before_the_write_and_keeps_the_values_of_its_step(
    rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may_write = tensor_files.write, threading.Event()

    def write_later(prefix: str, part: Any) -> None:
        assert may_write.wait(60)
        write(prefix, part)

    monkeypatch.setattr(tensor_files, "write", write_later)
    kept = Checkpoints(str(tmp_path), buffer_bytes=0, warn=lambda text: None)
    kept.prepare()
    variable = tf.Variable(W)

    def state() -> Any:
        value = variable.read_value()
        return shards.chunks("weights/w", W.shape, "float32", value.__getitem__)

    kept.save(state, Description(step=1, model="m", params=""))
    variable.assign(-W)  # a later step
    variable.assign_add(W)
    assert kept.steps() == []
    may_write.set()
    kept.gate.wait()
    kept.close()
    good = kept.newest_good()
    assert good is not None
    np.testing.assert_array_equal(good.read("weights/w"), W)


def test_a_write_that_fails_opens_the_gate(
    rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "write", lambda prefix, part: 1 / 0)
    kept = Checkpoints(str(tmp_path), buffer_bytes=0, warn=lambda text: None)
    kept.prepare()
    kept.save(lambda: of_arrays({"w": W}), Description(step=1, model="m", params=""))
    kept.gate.wait()
    with pytest.raises(ZeroDivisionError):
        kept.wait()


def test_a_step_of_a_pipeline_waits_with_its_update_until_the_state_is_written() -> None:
    task = Chain.Params(num_maps=2).instantiate()
    gate, program, other = UpdateGate(), build(task, 2, 4), build(task, 2, 4)
    assert program.hold_updates(gate)
    for each in (program, other):
        each.train_step(batch(), 0)
    before = program.state()
    gate.close()
    thread = threading.Thread(target=program.train_step, args=(batch(), 1))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert all(np.array_equal(before[key], value) for key, value in program.state().items())
    gate.open()
    thread.join(60)
    other.train_step(batch(), 1)
    after = other.state()
    assert any(not np.array_equal(before[key], value) for key, value in after.items())
    for key, value in program.state().items():
        np.testing.assert_array_equal(value, after[key])
