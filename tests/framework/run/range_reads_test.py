"""A process that stores a part of each tensor reads about this part of a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tekso.framework.execution import shards
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.shards import Shard, Slices
from tekso.framework.execution.state import ReadKey
from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.run import checkpoint_files, initial_weights, weight_files
from tekso.framework.run.checkpoints import Checkpoints, Description
from tekso.framework.run.restore import restore
from tekso.framework.warm_start import WarmStart
from tekso.framework.weight_spec import WeightSpec

ROWS, COLUMNS, PIECE = 512, 2048, 1 << 20  # 4 MB, in pieces of 128 rows
STATE = {
    f"weights/w{i}": np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + i
    for i in range(2)
}
SIZE_BYTES = sum(array.nbytes for array in STATE.values())


class Tables(Layer):
    """Weights w0 and w1."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for key in STATE:
            name, dims = key.removeprefix("weights/"), ("rows", None)
            self.weight(name, [ROWS, COLUMNS], dims=dims, init=Zeros.Params())


class Half(ExecutionProgram):
    """Stores the last half of the rows of each tensor."""

    def __init__(self) -> None:
        layer = Tables.Params().instantiate()
        self._specs = {f"weights/{path}": spec for path, spec in layer.specs().items()}
        self.found: dict[str, np.ndarray] = {}

    def specs(self) -> dict[str, WeightSpec]:
        return self._specs

    def initial_value(self, key: str, where: Slices) -> np.ndarray:
        return self._specs[key].initial_value(7, where)

    def assign(self, value: ReadKey, keys: Set[str] | None = None) -> None:
        where = (slice(ROWS // 2, ROWS), slice(0, COLUMNS))
        self.found = {key: np.asarray(value(key, where)) for key in keys or self._specs}

    def state(self, keys: Set[str] | None = None) -> dict[str, np.ndarray]:
        raise AssertionError("a restore must not copy the state")

    def shards(self) -> Iterator[Shard]:
        raise NotImplementedError

    def train_step(self, batch: Any, step: int) -> dict[str, Any]:
        raise NotImplementedError

    def eval_step(self, batch: Any) -> dict[str, tuple[Any, Any]]:
        raise NotImplementedError

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        raise NotImplementedError


def bytes_read() -> int:
    """Returns how many bytes this process has read from files, cached or not."""
    return int(Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0])


def check_half(before: int) -> None:
    assert 0.5 * SIZE_BYTES <= bytes_read() - before < 0.55 * SIZE_BYTES


def check(program: Half) -> None:
    assert program.found.keys() == STATE.keys()
    for key, array in STATE.items():
        np.testing.assert_array_equal(program.found[key], array[ROWS // 2 :])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shards, "CHUNK_BYTES", PIECE)
    kept = Checkpoints(str(tmp_path / "run" / "checkpoints"))
    kept.prepare()
    description = Description(step=1, model="a.B", params="")
    kept.save(lambda: shards.of_arrays(STATE), description)
    kept.close()
    return tmp_path / "run"


def test_a_restore_reads_the_part_that_the_process_stores(run: Path) -> None:
    program, before = Half(), bytes_read()
    good = Checkpoints(str(run / "checkpoints")).newest_good(unread=True)
    assert good is not None
    restore(program, good)
    check_half(before)
    check(program)


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors"])
def test_a_warm_start_reads_the_part_that_the_process_stores(run: Path, kind: str) -> None:
    source = str(run)
    if kind == "safetensors":
        source = str(run / "other.safetensors")
        weights = {key.removeprefix("weights/"): array for key, array in STATE.items()}
        save_file(weights, source)
    program, before = Half(), bytes_read()
    begun = initial_weights.plan(
        Tables.Params().instantiate().specs(),
        {"main": WarmStart.Params(checkpoint=source)},
        assets=str(run / "assets"),
        warn=pytest.fail,
    )
    begun.restore(program)
    if kind == "checkpoint":  # safetensors are mapped into memory, not read
        check_half(before)
    check(program)


def test_the_bytes_of_a_warm_start_are_verified_when_they_are_read(run: Path) -> None:
    file = sorted((run / "checkpoints" / "step_00000001").glob("tensors.data-*"))[-1]
    content = bytearray(file.read_bytes())
    content[7] ^= 16
    file.write_bytes(content)
    begun = initial_weights.plan(
        Tables.Params().instantiate().specs(),
        {"main": WarmStart.Params(checkpoint=str(run))},
        assets=str(run / "assets"),
        warn=pytest.fail,
    )
    message = (
        r"run\.warm_start\.main\.checkpoint: .*step_00000001 is damaged: weights/w1 cannot be "
        r"read: the bytes of tensors\.data-.* have changed\. Name an earlier checkpoint"
    )
    with pytest.raises(checkpoint_files.DamagedCheckpointError, match=message):
        begun.restore(Half())


def test_the_checksum_of_a_file_is_computed_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a.safetensors")
    arrays = {key.removeprefix("weights/"): value[:3] for key, value in STATE.items()}
    weight_files.write_weights(path, arrays, {})
    alive: list[Any] = []
    read = weight_files.WeightFile.read

    def counted(self: Any, key: str) -> np.ndarray:
        array = read(self, key).copy()
        assert not any(reference() is not None for reference in alive)
        alive.append(weakref.ref(array))
        return array

    monkeypatch.setattr(weight_files.WeightFile, "read", counted)
    opened = weight_files.open_weights(path)
    assert len(alive) == len(STATE)
    where = (slice(0, 3), slice(5, 9))
    found = opened.read_slice(next(iter(STATE)), where)
    np.testing.assert_array_equal(found, next(iter(STATE.values()))[:3, 5:9])
