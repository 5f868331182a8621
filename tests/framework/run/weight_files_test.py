"""Safetensors files: bit-exact round trips, shards, and a sentence for every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tekso.framework.run import weight_files
from tekso.framework.run.checkpoints import CheckpointError, Description

ARRAYS = {
    "model/w": np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32),
    "model/half": np.array([1.0078125, -0.0, np.inf], ml_dtypes.bfloat16),
    "model/turned": np.arange(6, dtype=np.float16).reshape(2, 3).T,
    "scalar": np.asarray(np.float64(2.5)),
    "count": np.array([2**40], np.int64),
}
ABOUT = Description(step=7, model="a.B", params="…", averaged=[])


def written(folder: Path, name: str = "a.safetensors", **arrays: np.ndarray) -> Path:
    path = folder / name
    weight_files.write_weights(str(path), arrays or ARRAYS, {"format": "np"}, description=ABOUT)
    return path


def test_a_round_trip_keeps_every_bit_dtype_and_the_description(tmp_path: Path) -> None:
    found = weight_files.open_weights(str(written(tmp_path)))
    assert found.keys == {f"weights/{name}" for name in ARRAYS}
    for name, array in ARRAYS.items():
        read = found.read(f"weights/{name}")
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.tobytes()
        assert found.shape(f"weights/{name}") == array.shape
    assert found.description == ABOUT
    assert found.step == 7
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_other_programs_read_and_write_the_files(tmp_path: Path) -> None:
    read = load_file(str(written(tmp_path, w=ARRAYS["model/w"])))
    np.testing.assert_array_equal(read["w"], ARRAYS["model/w"])
    save_file({"w": ARRAYS["model/w"]}, str(tmp_path / "theirs.safetensors"))
    theirs = weight_files.open_weights(str(tmp_path / "theirs.safetensors"))
    np.testing.assert_array_equal(theirs.read("weights/w"), ARRAYS["model/w"])
    assert theirs.description is None
    assert theirs.step == 0


def test_shards_of_a_folder_are_one(tmp_path: Path) -> None:
    for name in ("w", "v"):
        save_file({name: np.ones(2)}, str(tmp_path / f"{name}.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "w.safetensors", "v": "v.safetensors"}}))
    assert weight_files.is_weight_file(str(tmp_path))
    assert weight_files.open_weights(str(tmp_path)).keys == {"weights/w", "weights/v"}
    save_file({"w": np.ones(2)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(CheckpointError, match=r"w.safetensors and .*x.safetensors both have"):
        weight_files.open_weights(str(tmp_path))
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names w.safetensors, but the folder does not"):
        weight_files.open_weights(str(tmp_path))
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"index.json is damaged: it has no weight_map"):
        weight_files.open_weights(str(tmp_path))


def test_runs_and_checkpoints_are_no_weight_files(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    written(tmp_path / "run")
    assert not weight_files.is_weight_file(str(tmp_path / "run"))
    assert not weight_files.is_weight_file(str(tmp_path / "nowhere"))
    assert weight_files.is_weight_file("nowhere.safetensors")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_reported(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"a.safetensors is truncated, damaged or not"):
        weight_files.open_weights(str(path))


def test_a_changed_byte_is_found_by_the_checksum(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: the bytes .* \(sha256 differs\)"):
        weight_files.open_weights(str(path))


def test_a_missing_file_and_an_empty_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file .*no.safetensors"):
        weight_files.open_weights(str(tmp_path / "no.safetensors"))
    with pytest.raises(CheckpointError, match=r"has no file \*.safetensors"):
        weight_files.open_weights(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"gs://a/b.safetensors: copy it to a local disk"):
        weight_files.open_weights("gs://a/b.safetensors")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*a.safetensors"):
        written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
