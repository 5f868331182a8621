"""Averages of checkpoints: the mean, what is not averaged, and how much is in memory."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.run import averaging, checkpoint_files, tensor_files
from tekso.framework.run.checkpoint_files import Checkpoint, CheckpointError, Description

PARAMS = "task.dim : 3\nrun.seed : 1\n"


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "weights/a/w": rng.normal(size=(2, 3)).astype(np.float32),
        "weights/a/half": rng.normal(size=5).astype(ml_dtypes.bfloat16),
        "weights/norm/variance": rng.random(3).astype(np.float32),
        "weights/count": np.int64(10 + seed),
        "learner/a/w/ema": rng.normal(size=(2, 3)).astype(np.float32),
        "learner/a/w/second_moment": rng.random((2, 3)).astype(np.float32),
        "learner/updates/applied": np.int64(100 * seed),
    }


def saved(
    path: Path,
    step: int,
    tensors: dict[str, np.ndarray],
    model: str = "lm.Some",
    params: str = PARAMS,
) -> Checkpoint:
    path.parent.mkdir(exist_ok=True)
    checkpoint_files.write(
        str(path),
        tensors,
        Description(step=step, model=model, params=params, metrics={"d/loss": 1}),
    )
    return checkpoint_files.open_verified(str(path))


def three(tmp_path: Path) -> list[Checkpoint]:
    return [saved(tmp_path / f"c{seed}", 10 * seed, arrays(seed)) for seed in (1, 2, 3)]


def test_weights_and_their_moving_averages_are_means_and_the_rest_is_the_last(
    tmp_path: Path,
) -> None:
    averaging.write_average(str(tmp_path / "mean"), three(tmp_path))
    mean = checkpoint_files.open_verified(str(tmp_path / "mean"))
    all_three = [arrays(seed) for seed in (1, 2, 3)]
    assert mean.keys == all_three[0].keys()
    for key, last in all_three[-1].items():
        is_mean = key.endswith(("/w", "/half", "/variance", "/ema"))
        stack = np.stack([one[key].astype(np.float64) for one in all_three])
        expected = stack.mean(axis=0).astype(last.dtype) if is_mean else last
        found = mean.read(key)
        assert found.dtype == last.dtype
        np.testing.assert_array_equal(found, expected, err_msg=key)


def test_a_weight_replaces_the_moving_average_that_has_no_updates_yet(tmp_path: Path) -> None:
    new, old = arrays(0), arrays(1)
    assert new["learner/updates/applied"] == 0
    new["learner/a/w/ema"] = np.zeros((2, 3), np.float32)  # its initial value
    new["learner/a/w/ema"][0] = np.nan
    checkpoints = [saved(tmp_path / "c0", 0, new), saved(tmp_path / "c1", 1, old)]
    found = averaging.average("learner/a/w/ema", checkpoints)
    expected = (new["weights/a/w"].astype(np.float64) + old["learner/a/w/ema"]) / 2
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_sums_are_float64(tmp_path: Path) -> None:
    values = [1.0, 2.0**-24, 2.0**-24, 2.0**-24]  # each lost if added to 1 in float32
    checkpoints = [
        saved(tmp_path / str(i), i, {"weights/w": np.array([x], np.float32)})
        for i, x in enumerate(values)
    ]
    found = averaging.average("weights/w", checkpoints)
    assert found[0] == np.float32((1 + 3 * 2.0**-24) / 4) != np.float32(0.25)


def test_the_description_is_of_the_last_without_metrics_and_names_all(tmp_path: Path) -> None:
    averaging.write_average(str(tmp_path / "mean"), three(tmp_path))
    description = json.loads((tmp_path / "mean" / "checkpoint.json").read_text())
    assert (description["step"], description["model"], description["params"]) == (
        30,
        "lm.Some",
        PARAMS,
    )
    assert description["metrics"] == {}
    assert [name.rpartition("/")[2] for name in description["averaged"]] == [
        "c1 (step 10)",
        "c2 (step 20)",
        "c3 (step 30)",
    ]


def test_parts_are_one_file_set_that_tensorflow_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = three(tmp_path)
    averaging.write_average(str(tmp_path / "whole"), checkpoints)
    monkeypatch.setattr(averaging, "_PART_BYTES", 20)
    averaging.write_average(str(tmp_path / "parts"), checkpoints)
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names[0] == "checkpoint.json" and names[-1] == "tensors.index"
    assert len(names) == 2 + 5  # 24, 24, 8 + 10, 24 and 8 + 12 bytes
    reader = tf.train.load_checkpoint(str(tmp_path / "parts" / "tensors"))
    whole = checkpoint_files.open_verified(str(tmp_path / "whole"))
    for key in whole.keys:
        np.testing.assert_array_equal(reader.get_tensor(key), whole.read(key))


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = three(tmp_path)
    monkeypatch.setattr(averaging, "_PART_BYTES", 1)
    sizes: list[int] = []
    write = tensor_files.write
    monkeypatch.setattr(
        tensor_files,
        "write",
        lambda p, t: (sizes.append(len(t)), write(p, t))[1],
    )
    averaging.write_average(str(tmp_path / "mean"), checkpoints)
    assert sizes == [1] * len(checkpoints[0].keys)


def test_what_has_no_average_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    one, two, _ = three(tmp_path)
    other = saved(tmp_path / "other", 7, arrays(1), model="lm.Other")
    wide = saved(tmp_path / "wide", 8, arrays(1) | {"weights/a/w": np.zeros((3, 2), np.float32)})
    more = saved(tmp_path / "more", 9, arrays(1) | {"weights/b": np.zeros(1, np.float32)})
    bad = saved(tmp_path / "bad", 6, arrays(1) | {"weights/a/w": np.full((2, 3), np.nan, "f4")})
    for checkpoints, message in (
        ([other, two], "lm.Other, and .*lm.Some: only checkpoints of one experiment"),
        ([wide, two], r"weights/a/w has shape \[3, 2\] in .*wide and \[2, 3\] in .*c2"),
        ([more, two], "weights/b is only in .*more"),
        ([two, more], "weights/b is only in .*more"),
        ([bad, one], "weights/a/w of .*bad has values that are not finite"),
    ):
        with pytest.raises(CheckpointError, match=message):
            averaging.write_average(str(tmp_path / "mean"), checkpoints)
        names = {path.name for path in tmp_path.iterdir()}
        assert "mean" not in names and not any("unfinished" in name for name in names)


def test_other_params_are_reported(tmp_path: Path) -> None:
    one, two, _ = three(tmp_path)
    seeded = saved(tmp_path / "seeded", 5, arrays(1), params=PARAMS.replace(": 1", ": 2"))
    assert averaging.differences([one, two]) == []
    (text,) = averaging.differences([seeded, two])
    assert "-run.seed : 2; +run.seed : 1" in text
