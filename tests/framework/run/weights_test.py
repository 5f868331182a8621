"""Weights from a checkpoint: repeated layers, averages, and what does not fit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework.initializers import Normal
from tekso.framework.layer import Layer
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoints import CheckpointError, Description
from tekso.framework.run.opened import open_run
from tekso.framework.run.weights import load_task, load_weights


class Leaf(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [2, 3], dims=("embed", "mlp"), init=Normal.Params(stddev=1.0))


class Root(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_stack("layer", Leaf.Params(), 5)


W = np.arange(30, dtype=np.float32).reshape(5, 2, 3)


def saved(folder: Path, **others: Any) -> str:
    path = folder / "checkpoints" / "step_00000001"
    path.parent.mkdir()
    arrays = {key.replace("__", "/"): value for key, value in others.items()}
    tensors = {"weights/layer/w": W, **arrays}
    checkpoint_files.write(str(path), tensors, Description(step=1, model="a.B", params=""))
    return str(folder)


def test_a_stack_is_loaded_whole_and_a_repeated_layer_by_its_index(tmp_path: Path) -> None:
    run, root = saved(tmp_path), Root.Params().instantiate()
    np.testing.assert_array_equal(load_weights(root, run).layer.w, W)
    np.testing.assert_array_equal(load_weights(root.layer, run, index=3).w, W[3])
    alone = Leaf.Params().instantiate()
    path = f"{run}/checkpoints/step_00000001"
    np.testing.assert_array_equal(load_weights(alone, path, prefix="layer", index=1).w, W[1])
    with pytest.raises(ValueError, match="set index to its number, from 0 to 4"):
        load_weights(root.layer, run)
    with pytest.raises(ValueError, match="layer/w is repeated 5 times"):
        load_weights(root.layer, run, index=5)
    index: Any = np.int64(3)
    np.testing.assert_array_equal(load_weights(root.layer, run, index=index).w, W[3])
    with pytest.raises(ValueError, match="index is True, but must be an integer"):
        load_weights(root.layer, run, index=True)


def test_a_checkpoint_is_found_by_a_relative_path_and_an_average_below_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path)
    (tmp_path / "params.txt").write_text("# model: a.B\n")
    shutil.copytree(tmp_path / "checkpoints" / "step_00000001", tmp_path / "averaged")
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert open_run("step_00000001").logdir.path == run
    assert open_run("../averaged/").logdir.path == run
    assert open_run("..").checkpoint.step == open_run("..", "1").checkpoint.step == 1


def test_averages_count_from_the_first_update(tmp_path: Path) -> None:
    average = {"learner__layer__w__ema": W + 1, "learner__updates__applied": np.int64(0)}
    for applied, use, want in ((0, "evaluation", W), (2, "evaluation", W + 1), (2, "training", W)):
        folder = tmp_path / f"{applied}{use}"
        folder.mkdir()
        run = saved(folder, **{**average, "learner__updates__applied": np.array(applied, np.int64)})
        found = load_weights(Root.Params().instantiate(), run, use=use)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found.layer.w, want)


@pytest.mark.parametrize("run", [None, 3, ""])
def test_a_run_that_is_no_path_is_named(run: Any) -> None:
    message = f"its folder, or of one of its checkpoints, given {run!r}$"
    with pytest.raises(CheckpointError, match=message):
        load_task(run)
    with pytest.raises(CheckpointError, match=message):
        load_weights(Root.Params().instantiate(), run)


def test_a_layer_that_is_none_is_named() -> None:
    layer: Any = None
    with pytest.raises(TypeError, match=r"expects a layer, such as task or .*, given None$"):
        load_weights(layer, "run")


def test_what_does_not_fit_is_named_by_its_path(tmp_path: Path) -> None:
    run = saved(tmp_path, weights__layer__b=np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match="unknown layer/b"):
        load_weights(Root.Params().instantiate(), run)
    with pytest.raises(
        CheckpointError, match=r"layer/w has the shape \[5, 2, 3\], in the layer \[2, 3\]"
    ):
        load_weights(Leaf.Params().instantiate(), run, prefix="layer")
    with pytest.raises(CheckpointError, match=r"missing w; .*at prefix='layer'"):
        load_weights(Leaf.Params().instantiate(), run)
    with pytest.raises(CheckpointError, match=r"Root at the root: unknown layer/b$"):
        load_weights(Root.Params().instantiate(), run)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*/no/checkpoints"):
        load_weights(Leaf.Params().instantiate(), f"{run}/no")
    with pytest.raises(ValueError, match="use is 'mean'"):
        load_weights(Leaf.Params().instantiate(), run, use="mean")  # type: ignore[arg-type]
