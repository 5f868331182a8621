"""The graphs of a device, from the definitions of functions that are no longer in the library."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef

from tekso.framework.planning.compiled_step import CompiledStep
from tekso.framework.planning.mesh_graphs import device_graphs

SIZE, LENGTH = 5, 3


def powers(x: tf.Tensor) -> Any:
    return tf.while_loop(lambda i, y: i < LENGTH, lambda i, y: (i + 1, y @ x), (0, x))[1]


def test_the_functions_of_a_loop_may_have_left_the_library() -> None:
    """DTensor removes some at random; these never were in it."""
    spec = tf.TensorSpec([SIZE, SIZE])
    traced = tf.function(powers, autograph=False).get_concrete_function(spec)
    inner = {f.signature.name: f for f in traced.graph.as_graph_def().library.function}
    step = FunctionDef.FromString(traced.function_def.SerializeToString())
    for node in step.node_def:
        for part in ("cond", "body"):
            if part in node.attr:
                node.attr[part].func.name = f"gone_{node.attr[part].func.name}"
    functions = {f"gone_{name}": f for name, f in inner.items()}
    for name, function in functions.items():
        function.signature.name = name
    caller = FunctionDef()
    call = caller.node_def.add(op="StatefulPartitionedCall")
    call.attr["_mesh"].s, call.attr["f"].func.name = b"", "step"
    compiled = CompiledStep({"caller": caller, "step": step, **functions}, {"caller": 1})
    graphs = device_graphs(compiled, variables=1, arrays=1)
    products = LENGTH * 2 * SIZE**3
    assert products <= graphs.flops() < 1.2 * products
