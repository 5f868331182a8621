"""Checkpoints: what is written is read back; what is damaged is found, reported and passed over."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import processes
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import sample

from tekso.framework import watchdog
from tekso.framework.execution.shards import Shard, of_arrays
from tekso.framework.run import checkpoint_files, tensor_files
from tekso.framework.run.checkpoints import (
    CheckpointError,
    Checkpoints,
    Description,
    DiskFullError,
)

TENSORS = {
    "weights/ffn/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "weights/ffn/half": np.arange(5).astype(ml_dtypes.bfloat16),
    "learner/ffn/w/second_moment": np.full((3, 5), 0.5, np.float32),
    "learner/nonfinite/total": np.int64(2**40),
}
TENSOR_FILES = ["tensors.index", "tensors.data-00000-of-00001"]


def describe(step: int, **metrics: float) -> Description:
    metrics = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Description(step=step, model="lm.some.Model", params=". : text\n", metrics=metrics)


def tensors_at(step: int) -> dict[str, np.ndarray]:
    return {**TENSORS, "learner/step": np.int64(step)}


def state_at(step: int) -> Callable[[], Iterator[Shard]]:
    return lambda: of_arrays(tensors_at(step))


def store(path: Path, warnings: list[str] | None = None, **options: object) -> Checkpoints:
    heard = warnings if warnings is not None else []
    checkpoints = Checkpoints(str(path), warn=heard.append, **options)  # type: ignore[arg-type]
    checkpoints.prepare()
    return checkpoints


def saved(path: Path, *steps: int) -> Checkpoints:
    checkpoints = store(path, keep_last=len(steps) + 1)
    for step in steps:
        checkpoints.save(state_at(step), describe(step))
    checkpoints.wait()
    return checkpoints


def test_the_start_of_the_thread_that_writes_is_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []

    @contextlib.contextmanager
    def waiting(name: str, **_: Any) -> Iterator[None]:
        waits.append(name)
        yield
        waits.pop()

    monkeypatch.setattr(watchdog, "waiting", waiting)
    checkpoints, started = store(tmp_path), []
    submit = checkpoints._writer.submit
    monkeypatch.setattr(
        checkpoints._writer, "submit", lambda *args: started.append(list(waits)) or submit(*args)
    )
    checkpoints.save(state_at(1), describe(1))
    checkpoints.wait()
    assert started == [["the start of the thread that writes checkpoints"]]


def test_every_tensor_is_read_back_with_its_shape_dtype_and_bits(tmp_path: Path) -> None:
    good = saved(tmp_path, 7).newest_good()
    assert good is not None and good.step == 7
    assert good.keys == tensors_at(7).keys()
    for key, array in tensors_at(7).items():
        found = good.read(key)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()


def test_tensorflow_reads_the_files_without_us(tmp_path: Path) -> None:
    saved(tmp_path, 7)
    reader = tf.train.load_checkpoint(str(tmp_path / "step_00000007" / "tensors"))
    np.testing.assert_array_equal(reader.get_tensor("weights/ffn/w"), TENSORS["weights/ffn/w"])


def test_the_json_beside_it_describes_it(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    table = {"weights/w": {"shape": [2, 3], "dims": ["embed", None], "dtype": "float32"}}
    description = Description(
        step=3, model="lm.some.Model", params="text", tensors=table, input={"position": 3}
    )
    checkpoints.save(lambda: of_arrays({"weights/w": np.zeros((2, 3), np.float32)}), description)
    checkpoints.wait()
    stored = json.loads((tmp_path / "step_00000003" / "checkpoint.json").read_text())
    assert stored["step"] == 3 and stored["model"] == "lm.some.Model" and stored["params"] == "text"
    assert stored["tensors"] == table and stored["input"] == {"position": 3}
    assert {"python", "tensorflow", "numpy"} <= stored["versions"].keys()
    sizes = {name: file["size_bytes"] for name, file in stored["files"].items()}
    assert sizes == {
        path.name: path.stat().st_size
        for path in (tmp_path / "step_00000003").iterdir()
        if path.name != "checkpoint.json"
    }


def test_no_checkpoint_yet_is_no_error(tmp_path: Path) -> None:
    assert Checkpoints(str(tmp_path / "absent")).newest_good() is None


def test_save_returns_before_the_files_are_there_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, order, write = threading.Event(), [], checkpoint_files.write_shards

    def slow_write(path: str, *args: Any, **options: Any) -> object:
        may_write.wait(20)
        order.append(path[-1])
        return write(path, *args, **options)

    monkeypatch.setattr(checkpoint_files, "write_shards", slow_write)
    checkpoints = store(tmp_path)
    checkpoints.save(state_at(1), describe(1))
    assert checkpoints.steps() == []
    checkpoints.check()  # nothing has failed, and it does not wait
    threading.Timer(0.05, may_write.set).start()
    checkpoints.save(state_at(2), describe(2))
    assert checkpoints.steps()[0] == 1
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2] and order == ["1", "2"]


def test_one_step_is_saved_once(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 4)
    checkpoints.save(lambda: of_arrays({"weights/other": np.zeros(2)}), describe(4))
    checkpoints.wait()
    good = checkpoints.newest_good()
    assert good is not None and good.keys == tensors_at(4).keys()


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep_last=2, keep_best=1, metric="dev/loss")
    for step, loss in enumerate([3.0, 1.0, 2.0, math.nan, 4.0], start=1):
        checkpoints.save(state_at(step), describe(step, dev__loss=loss))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    assert checkpoints.would_be_best({"dev/loss": 0.5})
    assert not checkpoints.would_be_best({"dev/loss": 1.5})
    assert not checkpoints.would_be_best({"dev/loss": math.nan})
    assert not checkpoints.would_be_best({"test/loss": 0.5})


def test_the_best_of_an_earlier_process_stays_the_best(tmp_path: Path) -> None:
    options = {"keep_last": 1, "keep_best": 1, "metric": "dev/accuracy", "goal": "max"}
    first = store(tmp_path, **options)
    for step, accuracy in enumerate([0.1, 0.9, 0.2], start=1):
        first.save(state_at(step), describe(step, dev__accuracy=accuracy))
    first.wait()
    second = store(tmp_path, **options)
    assert not second.would_be_best({"dev/accuracy": 0.5})
    second.save(state_at(4), describe(4, dev__accuracy=0.5))
    second.wait()
    assert second.steps() == [2, 4]
    assert Checkpoints(str(tmp_path)).best("dev/accuracy", "max").step == 2
    assert Checkpoints(str(tmp_path)).best("dev/accuracy", "min").step == 4
    with pytest.raises(CheckpointError, match=r"by dev/bleu.*step_00000002, step_00000004"):
        Checkpoints(str(tmp_path)).best("dev/bleu", "max")
    with pytest.raises(CheckpointError, match=r"any metric.*the best one is unknown"):
        Checkpoints(str(tmp_path)).best("", "max")


def test_the_best_of_each_meaning_of_the_metric_is_kept(tmp_path: Path) -> None:
    options = {"keep_last": 1, "keep_best": 1, "metric": "dev/loss"}
    first = store(tmp_path, **options)
    for step, loss in enumerate([3.0, 1.0, 2.0], start=1):
        first.save(state_at(step), describe(step, dev__loss=loss))
    first.wait()
    assert first.steps() == [2, 3]
    input = {"comparable_since": 3}  # the metric changed, and steps 1 to 3 have the old one
    second = store(tmp_path, **options)
    second.compare_since(3)
    for step, loss in enumerate([60.0, 50.0, 70.0, 80.0], start=4):
        assert second.would_be_best({"dev/loss": loss}) == (loss <= 60.0)
        found = dataclasses.replace(describe(step, dev__loss=loss), input=input)
        second.save(state_at(step), found)
    second.wait()
    assert second.steps() == [2, 5, 7]
    third = store(tmp_path, **options)  # knows it from the files
    assert third.best_step() == 5
    third.save(state_at(8), dataclasses.replace(describe(8, dev__loss=90.0), input=input))
    third.wait()
    assert third.steps() == [2, 5, 8]


@pytest.mark.parametrize("name", [*TENSOR_FILES, "checkpoint.json"])
@pytest.mark.parametrize("damage", ["delete", "truncate", "empty", "flip"])
def test_a_damaged_checkpoint_is_passed_over_named_and_kept(
    tmp_path: Path, name: str, damage: str
) -> None:
    saved(tmp_path, 10, 20)
    file = tmp_path / "step_00000020" / name
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    if name == "checkpoint.json":
        middle = content.index(b'"sha256": "') + 15
    match damage:
        case "delete":
            file.unlink()
        case "truncate":
            file.write_bytes(content[:middle])
        case "empty":
            file.write_bytes(b"")
        case "flip":
            content[middle] ^= 1
            file.write_bytes(content)
    warnings: list[str] = []
    checkpoints = store(tmp_path, warnings)
    good = checkpoints.newest_good(set_aside=True)
    assert good is not None and good.step == 10
    (warning,) = warnings
    assert "step_00000020" in warning and "damaged_step_00000020.1" in warning
    assert (tmp_path / "damaged_step_00000020.1").is_dir()
    checkpoints.save(state_at(20), describe(20))  # its name is free again
    checkpoints.wait()
    assert checkpoints.steps() == [10, 20] and (tmp_path / "damaged_step_00000020.1").is_dir()


@settings(max_examples=40)
@given(data=st.data())
def test_no_single_changed_byte_of_the_tensors_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("run")
    saved(path, 10, 20)
    file = path / "step_00000020" / data.draw(st.sampled_from(TENSOR_FILES))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    good = store(path).newest_good()
    assert good is not None and good.step == 10


def test_reading_alone_renames_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    (tmp_path / "step_00000020" / "tensors.index").unlink()
    good = Checkpoints(str(tmp_path), warn=lambda text: None).newest_good()
    assert good is not None and good.step == 10
    assert (tmp_path / "step_00000020").is_dir()


def test_all_damaged_is_an_error_that_names_them_and_deletes_nothing(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / f"step_000000{step}" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000020.*step_00000010.*Nothing was deleted"):
        checkpoints.newest_good(set_aside=True)
    assert checkpoints.steps() == [10, 20]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"step": "10"}, "step must be an integer"),
        ({"step": True}, "step must be an integer"),
        ({"params": None}, "params must be a text"),
        ({"files": ["tensors.index"]}, "files must be an object"),
        ({"files": {"tensors.index": None}}, "files: tensors.index must be an object"),
        ({"files": {"tensors.index": {"size_bytes": "9"}}}, "tensors.index has no size_bytes"),
        ({"tensors": 1}, "tensors must be an object"),
        ({"metrics": {"dev/loss": []}}, "metrics: dev/loss must be a number"),
        ({"input": {"seed": "1"}}, "input: seed must be an integer"),
        ({"input": {"position": [3]}}, "input: position must be an integer"),
        ({"input": {"skipped_batches": 5}}, "input: skipped_batches must be a list of"),
        ({"input": {"skipped_batches": [[1, 2]]}}, "input: skipped_batches must be a list of"),
        ({"input": {"skipped_batches": [[1, 2, "3"]]}}, "skipped_batches must be a list of"),
        ({"input": {"skipped_batches": [[1, 3, 3]]}}, "skipped_batches must be a list of"),
        ({"input": {"skipped_batches": [[9, 2, 3], [1, 2, 3]]}}, "in ascending order of step"),
        ({"input": {"rollbacks": None}}, "input: rollbacks must be an integer"),
    ],
)
def test_a_description_with_values_of_other_types_is_damaged(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    saved(tmp_path, 10)
    file = tmp_path / "step_00000010" / "checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    checkpoints = store(tmp_path, metric="dev/loss", keep_best=1)  # `prepare` reads it too
    with pytest.raises(CheckpointError, match=f"checkpoint.json is damaged: .*{expected}"):
        checkpoints.newest_good()


def test_a_checkpoint_under_another_step_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    (tmp_path / "step_00000020").rename(tmp_path / "step_00000030")
    good = Checkpoints(str(tmp_path), warn=lambda text: None).newest_good()
    assert good is not None and good.step == 10


def test_what_an_ended_process_left_unfinished_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    (tmp_path / ".unfinished_step_00000020").mkdir()
    (tmp_path / ".unfinished_step_00000020" / "tensors.index").write_bytes(b"half")
    (tmp_path / ".deleted_step_00000005").mkdir()
    assert store(tmp_path).steps() == [10]
    assert sorted(os.listdir(tmp_path)) == ["step_00000010"]


def test_open_takes_a_path_or_a_step_and_names_what_there_is(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 10, 20)
    for name in ("10", "step_00000010", str(tmp_path / "step_00000010") + "/"):
        assert checkpoints.open(name).step == 10
    with pytest.raises(CheckpointError, match=r"step_00000015.*step_00000010, step_00000020"):
        checkpoints.open("15")
    (tmp_path / "step_00000010" / "tensors.index").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step_00000010 is damaged: tensors.index has 0 b"):
        checkpoints.open("10")


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saved(tmp_path, 10)
    usage = types.SimpleNamespace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    checkpoints.save(lambda: of_arrays({"weights/w": np.zeros((30, 50), np.float32)}), describe(20))
    with pytest.raises(DiskFullError, match=r"step_00000020: it needs 6,000 bytes, 100 are free"):
        checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["step_00000010"]
    monkeypatch.undo()
    checkpoints.save(state_at(20), describe(20))  # there is room again
    checkpoints.wait()
    assert checkpoints.steps() == [10, 20]


FULL_DISK = """
import resource, sys
import numpy as np
from tekso.framework.execution.shards import of_arrays
from tekso.framework.run.checkpoints import Checkpoints, Description, DiskFullError

checkpoints = Checkpoints(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
checkpoints.save(
    lambda: of_arrays({"weights/w": np.zeros((300, 500), np.float32)}),
    Description(step=20, model="m", params="p"),
)
try:
    checkpoints.wait()
except DiskFullError as error:
    print(error)
"""


# The tensors do not fit, the JSON neither.
@pytest.mark.parametrize("limit_bytes", sample([50_000, 100], quick=[50_000]))
def test_a_disk_that_fills_up_while_writing_leaves_the_earlier_ones(
    tmp_path: Path, limit_bytes: int
) -> None:
    saved(tmp_path, 10)
    # Its output is a pipe, because the limit would cut a file.
    process = processes.start(["-c", FULL_DISK, str(tmp_path), str(limit_bytes)], live=True)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    limit = f"the file exceeds the size limit of {limit_bytes:,} bytes (ulimit -f)"
    assert f"step_00000020: {limit}. Earlier checkpoints are unchanged" in output
    assert sorted(os.listdir(tmp_path)) == ["step_00000010"]
    assert Checkpoints(str(tmp_path)).open("10").step == 10


def test_another_error_of_writing_surfaces_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = store(tmp_path)

    def fail(*args: object) -> None:
        raise tf.errors.UnavailableError(None, None, "the disk is away\nand more")

    monkeypatch.setattr(tensor_files, "write", fail)
    checkpoints.save(state_at(1), describe(1))
    with pytest.raises(CheckpointError, match=r"step_00000001: the disk is away$"):
        checkpoints.save(state_at(2), describe(2))
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_renames_is_sealed_by_the_json() -> None:
    warnings: list[str] = []
    checkpoints = Checkpoints("ram://checkpoint_test/run", warn=warnings.append, keep_last=2)
    checkpoints.prepare()
    for step in (1, 2, 3):
        checkpoints.save(state_at(step), describe(step))
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    tf.io.gfile.remove("ram://checkpoint_test/run/step_00000003/checkpoint.json")
    good = checkpoints.newest_good()
    assert good is not None and good.step == 2 and len(warnings) == 1
    np.testing.assert_array_equal(good.read("weights/ffn/w"), TENSORS["weights/ffn/w"])
