"""Tests of errors at the command line: message, place, and the file with the traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import error_advice, out_of_memory, registry
from tekso.framework.context import StepContext
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.models.layers.linear import Linear
from tekso.tools import command_errors


def written(folder: Path, module: str, source: str) -> dict[str, Any]:
    """Returns the globals of a module of that name, whose file is there."""
    file = folder / "code.py"
    file.write_text(source)
    names: dict[str, Any] = {"__name__": module, "Layer": Layer, "Linear": Linear, "tf": tf}
    names |= {"param": param, "REQUIRED": REQUIRED}
    exec(compile(source, str(file), "exec"), names)
    return names


def shown(action: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    act: Any = eval("lambda action: lambda: action()", {"__name__": "tekso.tools.some"})
    assert command_errors.run("tekso-some", act(action)) == 1
    return capsys.readouterr().err.splitlines()


def assert_unexpected(lines: list[str], code: Path) -> None:
    assert lines[:3] == [
        "tekso-some: KeyError: 'a'",
        f"  (at {code}:2, in f)",
        "    return {}['a']",
    ]
    assert len(lines) == 4
    file = Path(lines[3].removeprefix("  the whole traceback is in "))
    text = file.read_text().splitlines()
    file.unlink()
    assert text[0].startswith("Traceback") and text[-1] == "KeyError: 'a'"


def test_the_traceback_of_a_bug_is_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = written(tmp_path, "tekso.framework.some", "def f():\n    return {}['a']\n")
    assert_unexpected(shown(names["f"], capsys), tmp_path / "code.py")


def test_a_bug_that_user_code_meets_shows_the_line_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ours = written(tmp_path / "ours", "tekso.framework.some", "def f():\n    return {}['a']\n")
    source = "def g(f):\n    return f()\n"
    theirs = written(tmp_path / "theirs", "mine.layers", source)
    lines = shown(lambda: theirs["g"](ours["f"]), capsys)
    assert lines[1] == f"  (at {tmp_path}/theirs/code.py:2, in g)"
    assert lines[-1].startswith("  the whole traceback is in ")
    Path(lines[-1].rpartition(" ")[2]).unlink()


def test_a_mistake_of_a_user_is_shown_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = written(tmp_path, "mine.layers", "def f():\n    return {}['a']\n")
    assert shown(names["f"], capsys) == [
        "tekso-some: KeyError: 'a'",
        f"  (at {tmp_path}/code.py:2, in f)",
        "    return {}['a']",
        "  --traceback prints the whole traceback",
    ]


def test_an_error_that_a_command_started_by_python_m_raises_on_purpose_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = written(tmp_path, "__main__", "def f():\n    raise OverflowError('too many trials')\n")
    names["__spec__"] = SimpleNamespace(name="tekso.tools.some")
    assert shown(names["f"], capsys) == ["tekso-some: too many trials"]


def test_too_little_memory_is_one_line_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import numpy\ndef f():\n    return numpy.zeros(2**57)\n"
    theirs = written(tmp_path, "mine.layers", source)
    place = f"  (at {tmp_path}/code.py:3, in f)"
    lines = shown(theirs["f"], capsys)
    assert lines[0].startswith(
        "tekso-some: out of memory: Unable to allocate 1.00 EiB for an array"
    )
    assert lines[1:] == [place, "    return numpy.zeros(2**57)"]

    def explained() -> None:
        with out_of_memory.explaining(lambda: "after step 3", lambda: ", which resumes"):
            theirs["f"]()

    lines = shown(explained, capsys)
    assert lines[0].startswith("tekso-some: out of memory after step 3: Unable to allocate 1.00")
    assert lines[1] == place


OWN = """
class Own(Layer):
    def __init__(self, params):
        super().__init__(params)
        self.child("first", Linear.Params(input_dim=3, output_dim=4, dims=("a", "b")))
        self.child("second", Linear.Params(input_dim=5, output_dim=2, dims=("b", "c")))

    def fprop(self, theta, x, ctx):
        h = self.first.fprop(theta.first, x, ctx)
        return self.second.fprop(theta.second, h, ctx)
"""


def test_a_shape_that_does_not_fit_is_shown_with_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer: Any = written(tmp_path, "mine.layers", OWN)["Own"].Params().instantiate()
    lines = shown(lambda: layer.fprop(layer.init(), tf.ones([2, 3]), StepContext()), capsys)
    assert lines[0].startswith("tekso-some: project: the last 1 dims of x (2, 4) are not the first")
    assert f"  (at {tmp_path}/code.py:10, in fprop)" in lines
    assert "  (in the layer second (Linear))" in lines


LOOKUP = """
def lookup(table, ids):
    return tf.gather(table, ids)
"""


def test_an_op_that_fails_when_it_runs_is_shown_with_the_line_that_made_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lookup = written(tmp_path, "mine.layers", LOOKUP)["lookup"]

    @tf.function(autograph=False)
    def step(ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(lookup(tf.ones([8, 2]), ids))

    lines = shown(lambda: step(tf.constant([100])), capsys)
    assert lines == [
        "tekso-some: InvalidArgumentError: indices[0] = 100 is not in [0, 8); the data has the id "
        "100, but the table, such as that of an Embedding, has the rows 0 to 7: set its size "
        "(vocab_size) to the largest id of all splits + 1, or replace unknown ids in the input",
        f"  (at {tmp_path}/code.py:3, in lookup)",
        "    return tf.gather(table, ids)",
        "  --traceback prints the whole traceback",
    ]


def test_the_errors_of_several_devices_are_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        stack = 'defined at (most recent call last):\n  File "/home/me/net.py", line 5, in fprop\n'
        raise tf.errors.InvalidArgumentError(
            None,
            None,
            f"Graph execution error:\n\nDetected at node GatherV2 {stack}\n"
            f"Detected at node GatherV2 {stack}\n2 root error(s) found.\n"
            "  (0) INVALID_ARGUMENT:  indices[14] = 9 is not in [0, 4)\n"
            "\t [[{{node GatherV2}}]]\n\t [[Other/_46]]\n  (1) CANCELLED:  Operation was",
        )

    lines = shown(failing, capsys)
    assert lines[0].startswith(
        "tekso-some: InvalidArgumentError: indices[14] = 9 is not in [0, 4); the data has the id 9"
    )
    assert lines[1] == "  (at /home/me/net.py:5, in fprop)"


def test_an_id_without_a_row_has_advice_under_every_execution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "indices[2] = 9 is not in [0, 4)"
    name = "{{function_node __inference_1}}"
    on_a_mesh: Future[None] = Future()  # `result` raises in a library, as an op of TensorFlow
    on_a_mesh.set_exception(
        tf.errors.InvalidArgumentError(None, None, f"{name} {reason}\n\t [[{{{{node Gather}}}}]]")
    )
    source = (
        "def mesh(one):\n    return one.result()\n"
        f"def pipeline(error):\n    raise error('stage 0 failed: InvalidArgumentError: {reason}')\n"
    )
    names = written(tmp_path, "tekso.framework.some", source)
    for failing in (
        functools.partial(names["mesh"], on_a_mesh),
        functools.partial(names["pipeline"], ExecutionError),
    ):
        lines = shown(failing, capsys)
        assert f"InvalidArgumentError: {reason}; the data has the id 9, but the tab" in lines[0]
        assert "the whole traceback is in" not in " ".join(lines)


def test_a_missing_file_is_named_with_a_similar_one_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "houses.csv").touch()
    (tmp_path / "data").mkdir()
    for name, hint in {
        "house.csv": "; did you mean 'houses.csv'?",
        f"{tmp_path}/house.csv": f"; did you mean '{tmp_path}/houses.csv'?",
        "date/x.csv": "; did you mean 'data'?",
        "other": f" (relative to {tmp_path})",
        "none/x.csv": f" (relative to {tmp_path})",
        f"{tmp_path}/other": "",
    }.items():
        lines = shown(functools.partial(open, name), capsys)
        assert lines[0] == f"tekso-some: {name}: No such file or directory{hint}"


READS = """
class Reads(Layer):
    class Params(Layer.Params):
        folder: str = param("Folder.", default="")
        other: str = param("Nothing.", default=REQUIRED)

    def __init__(self, params):
        super().__init__(params)
        open(f"{self.params.folder}/words.txt")
"""


def test_a_missing_file_is_named_with_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reads = written(tmp_path, "mine.layers", READS)["Reads"]
    for folder, said in ((f"{tmp_path}/no", ", from folder"), (f"{tmp_path}/no/", ", from folder")):
        params = reads.Params(folder=folder, other="no")
        lines = shown(params.instantiate, capsys)
        assert lines[0] == f"tekso-some: {folder}/words.txt: No such file or directory{said}"
    assert lines[1] == f"  (at {tmp_path}/code.py:9, in __init__)"


def test_a_layer_that_returned_before_an_error_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
def f():
    error = ValueError("shapes")
    error.add_note("before that, windows/0 (Half) returned the shape [2, 16] for inputs [2, 32]")
    error.add_note("in the piece 'head', whose inputs are h, x")
    error.add_note("in the piece 'head', whose inputs are h, x")
    error.add_note("another note")
    raise error
"""
    lines = shown(written(tmp_path, "mine.layers", source)["f"], capsys)
    assert lines[3:5] == [
        "  (before that, windows/0 (Half) returned the shape [2, 16] for inputs [2, 32])",
        "  (in the piece 'head', whose inputs are h, x)",
    ]
    assert sum("in the piece" in line for line in lines) == 1
    assert "another note" not in "".join(lines)


def test_an_array_that_predict_reads_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def predict(batch):\n    return batch['city']\n"
    predict = error_advice.naming_missing_arrays(written(tmp_path, "mine.tasks", source)["predict"])
    lines = shown(functools.partial(predict, {"x": 1}), capsys)
    assert lines[0] == (
        "tekso-some: predict reads the array 'city', which is not given; given: 'x'"
    )


def test_another_error_of_a_mesh_is_shown_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: Future[None] = Future()
    text = "{{function_node __inference_1}} the ring is broken\n\t [[{{node AllReduce}}]]"
    failed.set_exception(tf.errors.InternalError(None, None, text))
    source = "def mesh(one):\n    return one.result()\n"
    names = written(tmp_path, "tekso.framework.some", source)
    lines = shown(functools.partial(names["mesh"], failed), capsys)
    assert "the ring is broken" in lines[0]
    assert any("the whole traceback is in" in line for line in lines)


def test_common_mistakes_are_answered_with_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "class Net(Layer):\n    def __init__(self, params):\n        pass\n"
        "linear = Linear.Params(input_dim=2, output_dim=3).instantiate()\n"
        "def made():\n    return Net()\n"
        "def called():\n    return linear(tf.ones([1, 2]))\n"
        "def mixed():\n    return tf.ones([2], tf.bfloat16) * tf.ones([2])\n"
        "def traced():\n    return tf.function(mixed, autograph=False)()\n"
        "def order():\n    return linear.fprop(tf.ones([1, 2]), None)\n"
        "def swapped():\n    return linear.fprop(tf.ones([1, 2]), linear.init(), None)\n"
        "def nothing():\n    return tf.ones([2]) + tf.constant(None)\n"
        "def named():\n    batch = {'x': 1, 'labels': 2}\n    return batch['y']\n"
        "def sizes():\n    return tf.ones([2, 3]) @ tf.ones([5, 7])\n"
        "def row():\n    return tf.gather(tf.ones([2, 3]), [0, -1])\n"
        "def other():\n    return 'a'()\n"
    )
    names = written(tmp_path, "their_package.code", source)
    for function, answer in (
        ("made", "; Net is built from its Params: write Net.Params() for a field or a child"),
        (
            "called",
            "Linear is not called: its weights are an argument, so write layer.fprop(theta, x",
        ),
        ("order", "; theta, the weights of the layer, comes first: self.child.fprop(theta.child"),
        ("swapped", "; Linear.fprop was given a tensor as theta: the weights of the layer come fi"),
        ("nothing", "; is a return missing"),
        ("named", "KeyError: 'y'; the batch has 'x', 'labels'"),
        ("row", "indices[1] = -1 is not in [0, 2); the data has the id -1, but the table,"),
        ("sizes", "InvalidArgumentError: Matrix size-incompatible: In[0]: [2,3], In[1]: [5,7]"),
        ("mixed", "compute the loss in float32, logits = tf.cast(logits, tf.float32)"),
        ("traced", "compute the loss in float32, logits = tf.cast(logits, tf.float32)"),
    ):
        lines = shown(names[function], capsys)
        assert answer in lines[0] and str(tmp_path / "code.py") in lines[1], lines
    lines = shown(tf.function(names["sizes"], autograph=False), capsys)
    assert "but are 3 and 5 for MatMul with input shapes: [2,3], [5,7]; the nu" in lines[0]
    assert shown(names["other"], capsys)[0].endswith("TypeError: 'str' object is not callable")


def test_a_syntax_error_of_a_module_of_a_user_is_shown_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "misspelt.py").write_text("x = 1\n\n\ndef f()\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = shown(lambda: registry.import_package("misspelt"), capsys)
    assert lines[0].startswith("tekso-some: SyntaxError: expected ':'")
    assert lines[1:3] == [f"  (at {tmp_path}/misspelt.py:4)", "    def f()"]
    assert len(lines) == 4 and "--traceback" in lines[3]
    lines = shown(lambda: compile("def", "<string>", "exec"), capsys)
    assert "invalid syntax" in lines[0]


def test_the_example_that_an_input_was_building_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
def f():
    error = ValueError("shapes")
    error.add_note("while building index 3 of the data, by Cells.examples")
    raise error
"""
    lines = shown(written(tmp_path, "mine.inputs", source)["f"], capsys)
    assert lines[3] == "  (while building index 3 of the data, by Cells.examples)"


def test_shapes_of_parts_of_a_batch_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (
        "def weighted():\n"
        "    x, y = tf.ones([20, 3]), tf.ones([20])\n"
        "    return tf.nn.weighted_cross_entropy_with_logits(y, x, 2.0)\n"
        "def sigmoid():\n"
        "    return tf.nn.sigmoid_cross_entropy_with_logits(tf.ones([20]), tf.ones([20, 3]))\n"
        "def added():\n    return tf.ones([20, 3]) + tf.ones([20, 4])\n"
        "def joined():\n    return tf.concat([tf.ones([20, 3]), tf.ones([10, 3])], 1)\n"
        "def stacked():\n    return tf.stack([tf.ones([20, 3]), tf.ones([10, 3])])\n"
        "def cast():\n    return tf.broadcast_to(tf.ones([20, 3]), [20, 4])\n"
        "def reshaped():\n    return tf.reshape(tf.ones([20, 3]), [40, 3])\n"
    )
    names = written(tmp_path, "mine.losses", source)
    for name in ("weighted", "sigmoid", "added", "joined", "stacked", "cast", "reshaped"):
        for function in (names[name], tf.function(names[name], autograph=False)):
            lines = shown(function, capsys)
            assert "because a step computes a batch in parts" in "".join(lines[:2]), lines


@pytest.mark.parametrize(
    ("module", "code", "last"),
    [
        ("tekso.framework.some", "raise ValueError('no')", None),
        ("users", "raise ValueError('no')", "  --traceback prints the whole traceback"),
        ("users", "tf.gather([1, 2], 7)", "  --traceback prints the whole traceback"),
    ],
)
def test_every_error_says_from_which_step_a_run_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, code: str, last: str | None
) -> None:
    source = f"""
def f():
    try:
        {code}
    except Exception as error:
        error.add_note("the same command resumes from step 3")
        error.add_note("of a library")
        raise
"""
    lines = shown(written(tmp_path, module, source)["f"], capsys)
    wanted = ["  (the same command resumes from step 3)", *([last] if last is not None else [])]
    assert lines[-len(wanted) :] == wanted and "of a library" not in str(lines)
