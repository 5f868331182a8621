"""What the compiler says of a step becomes an error that names every setting."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import processes
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework import graph_errors
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.execution.mesh.step_errors import compiled, explained, with_lines


def failing(message: str, traced: Any = ()) -> Any:
    def step() -> None:
        raise tf.errors.InvalidArgumentError(None, None, message)

    layout = MeshLayout(
        MeshShape.parse("data:2;model:2"), Rules.parse("batch:data"), slots_axis="model"
    )
    return explained(step, f"execution.{layout}", traced=traced)


def test_a_step_that_does_not_compile_names_rules_and_extra_axes() -> None:
    text = "dtensor passes:\nerror: cannot split this op\nerror: 'builtin.module' failed"
    with pytest.raises(ExecutionError) as caught:
        failing(text)()
    assert str(caught.value).startswith(
        "TensorFlow's DTensor cannot compile this step for execution.mesh 'data:2;model:2', "
        "rules 'batch:data', slots_axis 'model': cannot split this op. Remove rules and extra "
        "axes one by one"
    )


def test_a_line_of_a_layer_that_does_not_compile_is_named() -> None:
    text = "dtensor:\n/home/me/layers.py:23:1: error: Concat op is not supported\nmore"
    with pytest.raises(ExecutionError, match=r"'model': /home/me/layers\.py:23: Concat op is not "):
        failing(text)()
    text = "dtensor:\n/lib/tensorflow/python/ops.py:7:1: error: Concat op is not supported"
    with pytest.raises(ExecutionError, match="'model': Concat op is not supported"):
        failing(text)()


def test_a_tensor_that_was_made_outside_of_the_step_is_replaced_by_an_array() -> None:
    text = (
        "The op/function __inference__train_graph_1346 got a regular tensor for input 6 (shape "
        "[64]) but was expecting a DTensor. Currently only scalars and small integer/string tensors"
    )
    with pytest.raises(
        ExecutionError, match=r"^a layer reads a tensor of shape \[64\] .*np\.array"
    ):
        failing(text)()


def nearest(x: tf.Tensor, table: tf.Tensor) -> Any:
    apart = tf.einsum("ad,cd->ac", x, table)
    with tf.GradientTape() as tape:
        tape.watch(apart)
        sums = tf.cumsum(apart, 1)
    other = tf.argmin(table, 1)
    return tf.argmin(apart, 1), other, tape.gradient(sums, apart)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "/bin/main.py:15:1: error: 'tf.ArgMin' op does not implement it. Please file a "
            "feature request to TF DTensor\n/bin/main.py:15:1: note: see current operation: "
            '%1 = "tf.ArgMin"(%0, %4) {_global_shape = [#tf_type.shape<8>]} : t<1> -> t<8>',
            r"step_errors_test\.py:\d+: return tf\.argmin.*: ArgMin: 'tf\.ArgMin' op does not "
            r"implement it\. Write tf\.argmax\(-x, axis\) instead$",
        ),
        (
            '<unknown>:0: error: loc(callsite(fused["Einsum:", "part/einsum/Einsum@run_1"] at '
            'fused["Call:", "op"])): bad\n<unknown>:0: note: see current operation: %39 = '
            '"tf.Einsum"(%38, %2) {_global_shape = [#tf_type.shape<4>]} : t<1> -> t<4>',
            r'step_errors_test\.py:\d+: apart = tf\.einsum\("ad,cd.*: Einsum: bad\. Remove rules',
        ),
        (
            '/bin/main.py:15:1: error: bad\nnote: see current operation: %1 = "tf.Cumsum"(%0, %4) '
            "<{reverse = true}> {_global_shape = [#tf_type.shape<8x3>]} : a -> b",
            r"step_errors_test\.py:\d+: sums = tf\.cumsum.* or the gradient of .*: sums = "
            r"tf\.cumsum.*: Cumsum: bad",
        ),
        (
            '/bin/main.py:15:1: error: bad\nnote: see current operation: %1 = "tf.Qr"(%0) : t -> t',
            r"'model': /bin/main\.py:15: bad",
        ),
    ],
)
def test_the_line_of_the_layer_is_found_in_the_traced_step(text: str, reason: str) -> None:
    specs = [tf.TensorSpec([8, 2]), tf.TensorSpec([3, 2])]
    graph = tf.function(nearest, autograph=False).get_concrete_function(*specs).graph
    with pytest.raises(ExecutionError, match=reason):
        failing(f"dtensor:\n{text}", [weakref.ref(graph)])()


def looked_up(x: tf.Tensor, small: tf.Tensor, large: tf.Tensor) -> Any:
    found = tf.gather(small, x)
    return found, tf.gather(large, x)


def test_the_line_of_a_lookup_without_a_row_is_found_in_the_traced_step() -> None:
    specs = [tf.TensorSpec([2], tf.int32), tf.TensorSpec([3, 2]), tf.TensorSpec([4, 2])]
    graph = tf.function(looked_up, autograph=False).get_concrete_function(*specs).graph
    error = tf.errors.InvalidArgumentError(
        None, None,
        "{{function_node __inference__train_graph_645}} indices[3] = 9 is not in [0, 4)\n"
        "\t [[{{node tf.StatefulPartitionedCall/GatherV2}}]]\n\tEncountered when executing",
    )  # fmt: skip
    with pytest.raises(tf.errors.InvalidArgumentError), with_lines(lambda: [weakref.ref(graph)]):
        raise error
    text, place = graph_errors.parts(error)
    assert text == "indices[3] = 9 is not in [0, 4)"
    assert re.fullmatch(
        r"\n  \(at \S*step_errors_test\.py:\d+, in looked_up\)\n"
        r"    return found, tf\.gather\(large, x\)",
        place,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rules", "code"),
    [
        ("data:2", "batch:data", "return tf.gather(table, ids)"),
        # Each device looks up only ids of its own rows.
        ("data:2;model:2", "batch:data;vocab:model", "unchecked = tf.gather("),
    ],
)
def test_an_id_without_a_row_on_a_mesh_names_array_example_rows_and_line(
    mesh: str, rules: str, code: str
) -> None:
    done = processes.run([Path(__file__).with_name("ids_program.py"), mesh, rules])
    assert done.returncode == 0, done.stderr
    example, first, *place = done.stdout.splitlines()
    assert first.startswith(
        f"IdError: 'x' (example {example} of input.batch(0)) has the id 8, but the table, such as "
        "that of an Embedding, has the rows 0 to 7: "
    )
    # All files of this repository are Tekso's, so that the innermost line counts.
    assert re.fullmatch(r"  \(at \S*vocab\.py:\d+, in \w+\)", place[0])
    assert place[1].startswith(f"    {code}")


def test_other_errors_of_a_step_stay_as_they_are() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="labels out of range"):
        failing("labels out of range")()


def test_loops_of_one_name_are_an_error_of_the_compiler() -> None:
    text = "Cannot add function 'while_body' because a different function with the same name exists"
    with pytest.raises(ExecutionError, match=r"DTensor cannot compile .*Cannot add function"):
        failing(text)()


@pytest.mark.parametrize(
    ("failures", "processes", "traces", "works"),
    [(0, 1, 1, True), (4, 1, 5, True), (5, 1, 5, False), (1, 2, 1, False)],
)
def test_loops_of_one_name_are_traced_again(
    failures: int, processes: int, traces: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtensor, "num_clients", lambda: processes)
    traced: list[int] = []

    def step(x: tf.Tensor) -> tf.Tensor:
        traced.append(1)
        if len(traced) <= failures:
            text = "Cannot add function 'loop_5_body' because a different function exists"
            raise tf.errors.InvalidArgumentError(None, None, text)
        return x + 1

    run = compiled(step, "execution.mesh 'data:2'")
    if not works:
        with pytest.raises(ExecutionError, match="Cannot add function 'loop_5_body'"):
            run(tf.constant(1))
    else:
        assert int(run(tf.constant(1))) == int(run(tf.constant(1))) == 2
    assert len(traced) == traces
