"""Checkpoints in pieces: several processes write one, and a slice reads only what it needs."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.execution import shards
from tekso.framework.execution.pipeline.stage_state import storable
from tekso.framework.execution.shards import Shard, chunks, cut_out, of_arrays, whole
from tekso.framework.run import checkpoint_files, tensor_files
from tekso.framework.run.checkpoint_files import (
    CheckpointError,
    DamagedCheckpointError,
    Description,
)
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.following import FollowingCheckpoints
from tekso.framework.run.process_group import LostProcessError, ProcessGroup

W = np.arange(30, dtype=np.float32).reshape(6, 5)
HALF = np.arange(12).astype(np.float16).reshape(4, 3)
STATE = {"weights/w": W, "weights/half": HALF, "learner/count": np.int64(7)}


class Meeting:
    """Where the threads that stand for processes exchange values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)


class Thread(ProcessGroup):
    """A process of a group, as a thread; it may be lost at one of its exchanges."""

    def __init__(self, process: int, meeting: Meeting, lost_at: int | None = None) -> None:
        self.process, self.size = process, len(meeting.values)
        self._meeting, self._lost_at, self._count = meeting, lost_at, 0

    def gather(self, value: Any, *, exchange: str = "") -> list[Any]:
        self._count += 1
        if self._count == self._lost_at:
            raise LostProcessError("process 1 was lost")
        self._meeting.values[self.process] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values


def together(
    function: Callable[[ProcessGroup], Any], *, lost_at: int | None = None
) -> list[BaseException | None]:
    """Runs a function in two processes; returns their errors."""
    meeting = Meeting(2)
    errors: list[BaseException | None] = [None, None]

    def run(process: int) -> None:
        try:
            function(Thread(process, meeting, lost_at))
        except BaseException as error:
            errors[process] = error

    threads = [threading.Thread(target=run, args=(process,)) for process in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def own(process: int) -> Iterator[Shard]:
    """The first rows of w are in process 0, the others and all else in process 1."""
    rows = (slice(0, 4), slice(4, 6))[process]
    where = (rows, slice(0, 5))
    yield from chunks("weights/w", W.shape, "float32", W.__getitem__, where)
    if process:
        yield from of_arrays({key: value for key, value in STATE.items() if key != "weights/w"})


def save(folder: Path, group: ProcessGroup, state: Callable[[int], Any], step: int = 10) -> None:
    kind = Checkpoints if group.is_first else FollowingCheckpoints
    checkpoints = kind(str(folder), group=group, warn=lambda text: None)
    checkpoints.prepare()
    group.gather(None)
    try:
        checkpoints.save(
            functools.partial(state, group.process), Description(step=step, model="m", params="")
        )
        checkpoints.wait()
    finally:
        checkpoints.close()


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 24)  # a row of w is cut into 3 and 2 columns


def test_shards_of_two_processes_are_one_checkpoint(tmp_path: Path, tiny_pieces: None) -> None:
    assert together(lambda group: save(tmp_path, group, own)) == [None, None]
    assert os.listdir(tmp_path) == ["step_00000010"]
    found = checkpoint_files.open_verified(str(tmp_path / "step_00000010"))
    for key, value in STATE.items():
        assert found.dtype(key).as_numpy_dtype == np.asarray(value).dtype
        np.testing.assert_array_equal(found.read(key), value)
    reader = tf.train.load_checkpoint(str(tmp_path / "step_00000010" / "tensors"))
    np.testing.assert_array_equal(reader.get_tensor("weights/w"), W)


@pytest.mark.parametrize(
    "where",
    [
        (slice(0, 6), slice(0, 5)),
        (slice(2, 3), slice(0, 5)),
        (slice(1, 5), slice(2, 4)),
        (slice(5, 6), slice(4, 5)),
    ],
)
def test_every_slice_is_read(tmp_path: Path, tiny_pieces: None, where: Any) -> None:
    checkpoint_files.write(str(tmp_path / "one"), STATE, Description(step=1, model="", params=""))
    good = checkpoint_files.open_verified(str(tmp_path / "one"))
    np.testing.assert_array_equal(good.stored("weights/w")[where], W[where])
    half = tuple(slice(min(s.start, 1), min(s.stop, 3)) for s in where)
    np.testing.assert_array_equal(good.stored("weights/half")[half], HALF[half])
    assert good.stored("learner/count")[()] == 7


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    tf.raw_ops.SaveV2(  # every tensor in one piece, and all in one file
        prefix=str(folder / "tensors"),
        tensor_names=list(STATE),
        shape_and_slices=[""] * len(STATE),
        tensors=list(STATE.values()),
    )
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    sums = {
        name: {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    about = {"format": 1, "step": 3, "model": "m", "params": "", "task": "", "metrics": {}}
    about |= {"input": {}, "tensors": {}, "versions": {}, "created": "", "files": sums}
    (folder / "checkpoint.json").write_text(json.dumps(about | {"averaged": []}))
    good = Checkpoints(str(tmp_path)).newest_good()
    assert good is not None and good.step == 3 and good.keys == STATE.keys()
    where = (slice(1, 3), slice(2, 5))
    np.testing.assert_array_equal(good.stored("weights/w")[where], W[where])


def data_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("tensors.data-*"))


def rows_of_files(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Saves w with a row in each data file."""
    kept = Checkpoints(str(tmp_path), warn=lambda text: None)
    kept.prepare()
    kept.save(lambda: of_arrays({"weights/w": W}), Description(step=1, model="m", params=""))
    kept.close()
    folder = tmp_path / "step_00000001"
    return folder, data_files(folder)


def test_a_slice_reads_only_the_files_that_it_overlaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 20)
    folder, found = rows_of_files(tmp_path)
    assert len(found) == 6
    opened = checkpoint_files.open_unread(str(folder))
    for number in (0, 1, 4, 5):
        found[number].unlink()
    where = (slice(2, 4), slice(1, 5))
    np.testing.assert_array_equal(opened.stored("weights/w")[where], W[where])
    with pytest.raises(DamagedCheckpointError, match=r"weights/w cannot be read: .*data-00004-of"):
        _ = opened.stored("weights/w")[slice(3, 5), slice(0, 5)]


def test_a_flipped_bit_is_found_by_whoever_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 20)
    folder, found = rows_of_files(tmp_path)
    content = bytearray(found[3].read_bytes())
    content[7] ^= 16
    found[3].write_bytes(content)
    opened = checkpoint_files.open_unread(str(folder))
    np.testing.assert_array_equal(opened.stored("weights/w")[slice(0, 3), slice(0, 5)], W[:3])
    message = "weights/w cannot be read: the bytes of tensors.data-00003-of-00006 have changed"
    with pytest.raises(DamagedCheckpointError, match=message):
        _ = opened.stored("weights/w")[slice(2, 4), slice(0, 5)]
    with pytest.raises(DamagedCheckpointError, match=message):
        opened.read("weights/w")
    damage: list[DamagedCheckpointError] = []
    zeros = opened.stored("weights/w", damaged=damage.append)[slice(2, 4), slice(0, 2)]
    assert zeros.numpy().tolist() == [[0, 0], [0, 0]] and message in str(damage[0])
    with pytest.raises(DamagedCheckpointError, match=r"bytes of tensors\.data-00003-of-00006"):
        checkpoint_files.open_verified(str(folder))


def test_an_error_in_one_process_ends_the_write_in_all(tmp_path: Path) -> None:
    def failing(process: int) -> Iterator[Shard]:
        yield from own(process)
        if process:
            yield from chunks("weights/bad", [2], "float32", lambda where: 1 / 0)

    first, second = together(lambda group: save(tmp_path, group, failing))
    assert isinstance(first, CheckpointError)
    assert str(first).startswith("process 1 cannot write its shards: division by zero")
    assert isinstance(second, ZeroDivisionError)
    assert os.listdir(tmp_path) == []


def test_a_shard_that_nobody_writes_is_an_error(tmp_path: Path) -> None:
    def without_last_row(process: int) -> Iterator[Shard]:
        yield from (s for s in own(process) if process == 0 or s.key != "weights/w")

    first, _ = together(lambda group: save(tmp_path, group, without_last_row))
    assert isinstance(first, CheckpointError)
    assert "the processes wrote 20 of 30 elements of weights/w" in str(first)
    assert os.listdir(tmp_path) == []


# Exchanges: None before the save, sizes, the folder, the files, their checksums.
@pytest.mark.parametrize("lost_at", [4, 5])
def test_what_a_lost_process_leaves_is_no_checkpoint(tmp_path: Path, lost_at: int) -> None:
    assert together(lambda group: save(tmp_path, group, own)) == [None, None]
    errors = together(lambda group: save(tmp_path, group, own, step=20), lost_at=lost_at)
    assert [type(error) for error in errors] == [LostProcessError] * 2
    unfinished = tmp_path / ".unfinished_step_00000020"
    left = {path.name.partition(".data")[0] for path in unfinished.glob("*.data-*")}
    assert left == {"tensors_part_0_0", "tensors_part_1_0"}
    after = Checkpoints(str(tmp_path), warn=lambda text: None)
    after.prepare()
    good = after.newest_good()
    assert good is not None and good.step == 10 and os.listdir(tmp_path) == ["step_00000010"]


def test_a_save_has_two_parts_in_memory_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 20)
    read, written, ahead = 0, 0, []
    write = tensor_files.write

    def counted_read(where: Any) -> np.ndarray:
        nonlocal read
        read += 1
        ahead.append(read - written)
        return cut_out(W, where, whole(W.shape))

    def counted_write(prefix: str, part: Sequence[Any]) -> None:
        nonlocal written
        write(prefix, part)
        written += len(part)

    monkeypatch.setattr(tensor_files, "write", counted_write)
    kept = Checkpoints(str(tmp_path), warn=lambda text: None)
    kept.prepare()
    state = chunks("weights/w", W.shape, "float32", counted_read)
    kept.save(lambda: state, Description(step=1, model="m", params=""))
    kept.close()
    assert read == 6 and max(ahead) <= 2
    good = kept.newest_good()
    assert good is not None
    np.testing.assert_array_equal(good.read("weights/w"), W)


def test_a_write_that_fails_early_ends_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 20)
    monkeypatch.setattr(tensor_files, "write", lambda prefix, part: 1 / 0)
    kept = Checkpoints(str(tmp_path), warn=lambda text: None)
    kept.prepare()
    description = Description(step=1, model="m", params="")
    kept.save(lambda: of_arrays({"weights/w": W}), description)  # does not wait for ever
    with pytest.raises(ZeroDivisionError):
        kept.wait()
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    kept.save(lambda: of_arrays({"weights/w": W}), description)  # the same step again
    kept.close()
    assert kept.steps() == [1]


def test_pieces_cover_a_tensor_once_and_are_small(tiny_pieces: None) -> None:
    for shape in [(), (0, 3), (7,), (2, 3, 5), (1, 1, 40), (9, 1, 2)]:
        seen = np.zeros(shape, int)
        for shard in chunks("k", shape, "float32", lambda where: None):
            assert shard.size_bytes <= 24 and shard.shape == shape
            seen[shard.where] += 1
        assert (seen == 1).all()
    (only,) = chunks("k", (4, 3, 5), "float16", lambda where: None)
    assert only.is_whole


def test_tensors_that_cannot_be_sliced_are_joined() -> None:
    halves = [(slice(i, i + 2), slice(0, 3)) for i in (0, 2)]
    apart = [s for w in halves for s in chunks("h", (4, 3), "float16", HALF.__getitem__, w)]
    (joined,) = storable(apart)
    assert joined.is_whole
    np.testing.assert_array_equal(joined.read(), HALF)
