"""Warm start: which weight comes from where, in which shape, and what is an error."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_pictures import write_folders

from tekso.framework.execution.shards import Slices
from tekso.framework.initializers import Normal, Zeros
from tekso.framework.input import assets
from tekso.framework.input.arrays import Arrays
from tekso.framework.layer import Layer
from tekso.framework.run import checkpoint_files, initial_weights, weight_files
from tekso.framework.run.checkpoints import CheckpointError, Description
from tekso.framework.run.warm_start_sources import WarmStartError
from tekso.framework.warm_start import WarmStart
from tekso.tasks.image.files import ImageFolders
from tekso.tasks.image.input import Images


class Leaf(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [2, 3], dims=("embed", "mlp"), init=Normal.Params(stddev=1.0))
        self.weight("mean", [3], dims=("mlp",), init=Zeros.Params(), trainable=False)


class Head(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("table", [4, 2], dims=("vocab", "embed"), init=Normal.Params(stddev=1.0))


class Repeated(Layer):
    """Weights body/w [3, 2, 3], body/mean [3, 3] and head/table."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_stack("body", Leaf.Params(), 3)
        self.child("head", Head.Params())


class Unrolled(Layer):
    """Weights body/0/w to body/2/mean and head/table."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("body", [Leaf.Params()] * 3)
        self.child("head", Head.Params())


class Program:
    """Holds a state; takes another as an execution does."""

    def __init__(self, layer: Layer) -> None:
        self._specs = {f"weights/{path}": spec for path, spec in layer.specs().items()}
        self._state = {key: spec.initial_value(7) for key, spec in self._specs.items()}
        self._state["learner/body/w/momentum"] = np.full(3, 5.0, np.float32)

    def state(self) -> dict[str, np.ndarray]:
        return dict(self._state)

    def initial_value(self, key: str, where: Slices) -> np.ndarray:
        return self._specs[key].initial_value(7, where)

    def assign(self, value: Callable[[str, Slices], np.ndarray], keys: Set[str]) -> None:
        for key in keys:
            array = np.empty_like(self._state[key])
            for where in self.slices_of(array):
                array[where] = value(key, where)
            self._state[key] = array

    def slices_of(self, array: np.ndarray) -> list[Slices]:
        """Each of four devices has some rows and columns."""
        rows = (slice(0, 1), slice(1, array.shape[0]))
        columns = (slice(0, array.shape[-1] - 1), slice(array.shape[-1] - 1, array.shape[-1]))
        if array.ndim == 1:
            return [(one,) for one in rows]
        inner = tuple(slice(0, n) for n in array.shape[1:-1])
        return [(r, *inner, c) for r in rows for c in columns]


def run_with(folder: Path, weights: Mapping[str, np.ndarray], **others: Any) -> str:
    """Writes the folder of a run with one checkpoint of float32 weights."""
    path = folder / "checkpoints" / "step_00000009"
    path.parent.mkdir(parents=True)
    tensors = {f"weights/{name}": np.asarray(w, np.float32) for name, w in weights.items()}
    tensors |= {key.replace("__", "/"): np.asarray(value) for key, value in others.items()}
    checkpoint_files.write(str(path), tensors, Description(step=9, model="a.B", params=""))
    return str(folder)


def repeated() -> dict[str, np.ndarray]:
    numbers = np.arange(100, dtype=np.float32)
    return {
        "body/w": numbers[:18].reshape(3, 2, 3),
        "body/mean": numbers[18:27].reshape(3, 3),
        "head/table": numbers[27:35].reshape(4, 2),
    }


def unrolled() -> dict[str, np.ndarray]:
    whole = repeated()
    layers = {f"body/{i}/{n}": whole[f"body/{n}"][i] for i in range(3) for n in ("w", "mean")}
    return {**layers, "head/table": whole["head/table"]}


def begin(
    layer: Layer, folder: Path, **sources: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the state after a warm start, and the lines of its table."""
    given = {name: WarmStart.Params().set(fields) for name, fields in sources.items()}
    begun = initial_weights.plan(
        layer.specs(), given, assets=str(folder / "own_assets"), warn=pytest.fail
    )
    program: Any = Program(layer)
    begun.restore(program)
    return program.state(), begun.lines()


def check_equal(state: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]) -> None:
    for path, value in weights.items():
        np.testing.assert_array_equal(state[f"weights/{path}"], value)


def test_weights_and_statistics_are_taken_and_slots_are_not(tmp_path: Path) -> None:
    slots = {"learner__body__w__momentum": np.zeros(3, np.float32)}
    run = run_with(tmp_path / "a", repeated(), **slots)
    state, lines = begin(Repeated.Params().instantiate(), tmp_path, main={"checkpoint": run})
    check_equal(state, repeated())
    np.testing.assert_array_equal(state["learner/body/w/momentum"], 5.0)
    assert lines[0] == (
        f"warm start from {run}/checkpoints/step_00000009 (step 9, evaluation weights): "
        "3 of 3 weights"
    )
    assert lines[1] == "  body/w      3 x 2 x 3"


@pytest.mark.parametrize(("kind", "given"), [(Repeated, unrolled), (Unrolled, repeated)])
def test_a_stack_may_be_repeated_in_one_and_unrolled_in_the_other(
    tmp_path: Path, kind: Any, given: Any
) -> None:
    run = run_with(tmp_path / "a", given())
    state, lines = begin(kind.Params().instantiate(), tmp_path, main={"checkpoint": run})
    check_equal(state, repeated() if kind is Repeated else unrolled())
    want = "body/*/w … " if kind is Repeated else "body/w[*]"
    assert any(want.strip() in line for line in lines), lines


def test_layers_of_which_only_some_are_taken_are_shown_by_number(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", unrolled())
    source = {"checkpoint": run, "ignore": ["body/1/.*"]}
    _, lines = begin(Unrolled.Params().instantiate(), tmp_path, main=source)
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "body/0,2/w 2 x 3, 2 layers",
        "body/0,2/mean 3, 2 layers",
        "head/table 4 x 2",
        "not used of the checkpoint: body/1/mean, body/1/w",
        "keep their initial values: body/1/w, body/1/mean",
    ]


def test_weights_that_are_missing_have_the_setting_that_ignores_them(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", {"body/w": repeated()["body/w"]})
    with pytest.raises(WarmStartError) as caught:
        begin(Repeated.Params().instantiate(), tmp_path, main={"checkpoint": run})
    want = """--set 'run.warm_start.main.ignore=[".*/mean", ".*/table"]'"""
    assert "and 1 more weight not in" in str(caught.value) and want in str(caught.value)


def test_rules_name_paths_in_the_checkpoint_of_unrolled_layers_too(tmp_path: Path) -> None:
    old = {path.replace("body", "trunk/block"): value for path, value in unrolled().items()}
    run = run_with(tmp_path / "a", old)
    rules = {r"body/(\d+)/(.*)": r"trunk/block/\1/\2"}
    source = {"checkpoint": run, "rules": rules}
    state, _ = begin(Unrolled.Params().instantiate(), tmp_path, main=source)
    check_equal(state, unrolled())
    rules = {r"body(/\d+)?/(.*)": r"trunk/block\1/\2"}
    source = {"checkpoint": run, "rules": rules}
    state, lines = begin(Repeated.Params().instantiate(), tmp_path, main=source)
    check_equal(state, repeated())
    assert any("<- trunk/block/*/w …" in line for line in lines), lines


def test_several_checkpoints_and_weights_that_keep_their_initial_values(tmp_path: Path) -> None:
    first = run_with(tmp_path / "a", {"body/w": repeated()["body/w"], "more": np.ones(2)})
    second = run_with(tmp_path / "b", {"table": repeated()["head/table"]})
    layer = Repeated.Params().instantiate()
    state, lines = begin(
        layer,
        tmp_path,
        body={"checkpoint": first, "only": ["body/.*"], "ignore": [".*/mean"]},
        head={"checkpoint": second, "only": ["head/.*"], "rules": {"head/(.*)": r"\1"}},
    )
    check_equal(state, {k: v for k, v in repeated().items() if k != "body/mean"})
    np.testing.assert_array_equal(state["weights/body/mean"], 0.0)
    assert "  not used of the checkpoint: more" in lines
    assert lines[-1] == "  keep their initial values: body/mean"


@pytest.mark.parametrize("rows", [3, 1])  # of 1 row, the devices with the last rows get nothing
def test_a_larger_vocabulary_takes_the_common_rows(tmp_path: Path, rows: int) -> None:
    small = {**repeated(), "head/table": np.ones([rows, 2])}
    source = {"checkpoint": run_with(tmp_path / "a", small), "partial": ["head/table"]}
    layer = Repeated.Params().instantiate()
    state, lines = begin(layer, tmp_path, main=source)
    np.testing.assert_array_equal(state["weights/head/table"][:rows], 1.0)
    initial = layer.specs()["head/table"].initial_value(7)
    np.testing.assert_array_equal(state["weights/head/table"][rows:], initial[rows:])
    assert any(f"4 x 2, of which {rows} x 2 are copied" in line for line in lines)


def test_moving_averages_or_what_training_continues_from(tmp_path: Path) -> None:
    average = repeated()["body/w"] + 1
    slots = {"learner__body__w__ema": average, "learner__updates__applied": np.int64(2)}
    run, layer = run_with(tmp_path / "a", repeated(), **slots), Repeated.Params().instantiate()
    state, _ = begin(layer, tmp_path, main={"checkpoint": run})
    check_equal(state, {**repeated(), "body/w": average})
    state, _ = begin(layer, tmp_path, main={"checkpoint": run, "use": "training"})
    check_equal(state, repeated())


@pytest.mark.parametrize(
    ("changes", "fields", "said"),
    [
        (
            {"body/w": None, "body/v": np.zeros([3, 2, 3])},
            {},
            r"body/w not in .*step_00000009. It has body/v.* Give their paths there in run.warm_st",
        ),
        (
            {"head/table": np.ones([5, 2])},
            {},
            r"is \[5, 2\] in .* is \[4, 2\]: to keep .* add it to run.warm_start.main.ignore; to",
        ),
        (
            {"head/table": np.ones([4, 2, 1])},
            {"partial": ["head/table"]},
            "the number of dims differs",
        ),
        ({}, {"only": ["head/.*"]}, "body/w is in no `only` of run.warm_start"),
        ({}, {"rules": {"feet/.*": "x"}}, r"run.warm_start.main.rules: 'feet/.\*' matches no we"),
        ({}, {"ignore": ["table"]}, r"main.ignore: 'table' matches no weight as a whole"),
        (
            {},
            {"rules": {"head/table": r"\1"}},
            r"'\\\\1' is not a valid replacement for 'head/table'",
        ),
        ({}, {"rules": {"head/(": "x"}}, "is not a valid regular expression"),
        ({"head/table": np.full([4, 2], np.nan)}, {}, "has values that are not finite"),
    ],
    ids=["missing", "shape", "rank", "only", "rule", "ignore", "group", "regex", "nan"],
)
def test_what_does_not_fit_is_an_error(
    tmp_path: Path, changes: Mapping[str, Any], fields: Mapping[str, Any], said: str
) -> None:
    weights = {k: v for k, v in {**repeated(), **changes}.items() if v is not None}
    source = {"checkpoint": run_with(tmp_path / "a", weights), **fields}
    with pytest.raises(ValueError, match=said):
        begin(Repeated.Params().instantiate(), tmp_path, main=source)


def test_two_checkpoints_for_one_weight_and_none_at_all(tmp_path: Path) -> None:
    run, layer = run_with(tmp_path / "a", repeated()), Repeated.Params().instantiate()
    with pytest.raises(WarmStartError, match=r"body/w comes from run.warm_start.one and run\.wa"):
        begin(layer, tmp_path, one={"checkpoint": run}, two={"checkpoint": run})
    missing = r"^run.warm_start.main.checkpoint is '.*nowhere': there is no checkpoint in"
    with pytest.raises(CheckpointError, match=missing):
        begin(layer, tmp_path, main={"checkpoint": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("name", ["vectors.npz", "model.bin"])
def test_a_file_of_another_format_is_no_folder_of_a_run(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"x")
    said = rf"{name} is a file, but a checkpoint is the folder .*, or a safetensors file"
    with pytest.raises(CheckpointError, match=said) as raised:
        begin(Repeated.Params().instantiate(), tmp_path, main={"checkpoint": str(file)})
    assert ("save_file" in str(raised.value)) == name.endswith(".npz")


# --- tokenizers ---


class Three(Arrays):
    """Three numbers."""

    def load(self, split: str) -> dict[str, np.ndarray]:
        return {"x": np.arange(3.0)}


def learned(folder: Path, data: bytes) -> str:
    """Makes an asset as a run learns it."""

    class Text:
        name, verify = "text", True

        def texts(self) -> list[str]:
            return [data.decode()]

        def fingerprint(self) -> str:
            return data.decode()

    folder.mkdir(parents=True, exist_ok=True)
    training: Any = Text()
    made = assets.obtain(
        "vocab.txt",
        assets_dir=str(folder),
        settings={},
        training=training,
        make=lambda texts: "".join(texts).encode(),
    )
    return made.decode()


def test_a_new_run_uses_the_tokenizer_of_the_other(tmp_path: Path) -> None:
    run = run_with(tmp_path / "a", repeated())
    learned(tmp_path / "a" / "assets", b"abc")
    sources = {"main": WarmStart.Params(checkpoint=run)}
    own = tmp_path / "own_assets"
    initial_weights.take_tokenizers(sources, assets=str(own), warn=pytest.fail)
    assert learned(own, b"other text") == "abc"
    begin(Repeated.Params().instantiate(), tmp_path, main={"checkpoint": run})


def test_digests_and_class_names_of_a_run_are_no_tokenizers(tmp_path: Path) -> None:
    run, theirs = run_with(tmp_path / "a", repeated()), str(tmp_path / "a" / "assets")
    write_folders(tmp_path / "images", {"cat": 2, "dog": 2})
    source = ImageFolders.Params(folder=str(tmp_path / "images"), dev_fraction=0.0)
    for params in (
        Images.Params(source=source, image_size=4, batch_size=2),
        Three.Params(batch_size=2),
    ):
        params.instantiate(assets_dir=theirs).check_unchanged()
    sources = {"main": WarmStart.Params(checkpoint=run)}
    own = tmp_path / "own_assets"
    initial_weights.take_tokenizers(sources, assets=str(own), warn=pytest.fail)
    assert not own.exists() and len(os.listdir(theirs)) == 3
    begin(Repeated.Params().instantiate(), tmp_path, main={"checkpoint": run})


def test_weights_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    run, layer = run_with(tmp_path / "a", repeated()), Repeated.Params().instantiate()
    learned(tmp_path / "a" / "assets", b"abc")
    source = {"checkpoint": run, "tokenizers": False}
    sources = {"main": WarmStart.Params().set(source)}
    own = tmp_path / "own_assets"
    initial_weights.take_tokenizers(sources, assets=str(own), warn=pytest.fail)
    assert learned(own, b"other text") == "other text"
    with pytest.raises(WarmStartError, match="rows of head/table would mean other tokens"):
        begin(layer, tmp_path, main=source)
    begin(layer, tmp_path, main={**source, "ignore": ["head/.*"]})
    other = run_with(tmp_path / "b", repeated())
    learned(tmp_path / "b" / "assets", b"xyz")
    both = {**sources, "two": WarmStart.Params(checkpoint=other)}
    both["main"].tokenizers = True
    with pytest.raises(WarmStartError, match=r"set run.warm_start.two.tokenizers=False"):
        initial_weights.take_tokenizers(both, assets=str(own), warn=pytest.fail)


def test_a_safetensors_file_is_a_source_like_any_other(tmp_path: Path) -> None:
    path = str(tmp_path / "all.safetensors")
    others = {f"net.{name}": value for name, value in repeated().items()}
    weight_files.write_weights(path, {**others, "spare": np.ones(2)}, {})
    state, lines = begin(
        Unrolled.Params().instantiate(),
        tmp_path,
        main={
            "checkpoint": path,
            "rules": {r"body/\d+/(.*)": r"net.body/\1", r"(head/.*)": r"net.\1"},
            "only": ["head/.*"],
            "ignore": ["body/.*"],
        },
    )
    np.testing.assert_array_equal(state["weights/head/table"], repeated()["head/table"])
    assert f"warm start from {path} (step 0" in lines[0]
    assert "not used of the checkpoint: net.body/mean, net.body/w, spare" in "\n".join(lines)


def test_a_damaged_file_ends_a_warm_start(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    weight_files.write_weights(str(path), repeated(), {})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"all.safetensors is truncated"):
        begin(Repeated.Params().instantiate(), tmp_path, main={"checkpoint": str(path)})


def test_base_and_adapters_come_from_two_files(tmp_path: Path) -> None:
    run = run_with(tmp_path / "base", repeated())
    path = str(tmp_path / "head.safetensors")
    weight_files.write_weights(path, {"head/table": np.full((4, 2), 3, np.float32)}, {})
    state, _ = begin(
        Repeated.Params().instantiate(),
        tmp_path,
        base={"checkpoint": run, "only": ["body/.*"]},
        adapters={"checkpoint": path, "only": ["head/.*"]},
    )
    np.testing.assert_array_equal(state["weights/body/w"], repeated()["body/w"])
    np.testing.assert_array_equal(state["weights/head/table"], np.full((4, 2), 3))


def test_a_warm_start_without_a_checkpoint_names_the_setting() -> None:
    sources = {"teacher": WarmStart.Params()}
    with pytest.raises(WarmStartError, match=r"^run.warm_start.teacher.checkpoint is not set"):
        initial_weights.take_tokenizers(sources, assets="", warn=pytest.fail)
