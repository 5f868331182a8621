"""Products are compared with the programs that DTensor compiled, here written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.execution import ExecutionError
from tekso.framework.execution.workarounds import repeated_sums
from tekso.framework.execution.workarounds.repeated_sums import refuse_repeated_sums


def compiled(equation: str, *shapes: tuple[int, ...], devices: int) -> Any:
    """Returns a function of one device that sums an einsum of local shapes over devices."""
    with tf.Graph().as_default() as graph:
        operands = [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]
        tf.einsum(equation, *operands)
    definition = tf.compat.v1.GraphDef.FromString(
        graph.as_graph_def(add_shapes=True).SerializeToString()
    )
    size = definition.node.add(name="size", op="Const")
    size.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(devices))
    definition.node.add(
        name="sum", op="CollectiveReduceV2", input=["einsum/Einsum:output:0", "size:output:0"]
    )
    function = SimpleNamespace(node_def=definition.node, arg_attr={})
    return SimpleNamespace(**vars(function), signature=SimpleNamespace(input_arg=[]))


def products(equation: str, *shapes: tuple[int, ...]) -> list[tf.Operation]:
    with tf.Graph().as_default() as graph:
        tf.einsum(equation, *(tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes))
    found: list[tf.Operation] = graph.get_operations()
    return found


def check(monkeypatch: pytest.MonkeyPatch, function: Any, ops: list[tf.Operation]) -> None:
    library = SimpleNamespace(
        list_function_names=lambda: ["partitioned"], get_function_def=lambda _: function
    )
    monkeypatch.setattr(repeated_sums, "context", SimpleNamespace(context=lambda: library))
    monkeypatch.setattr(repeated_sums, "_known", set())
    refuse_repeated_sums(ops)


def test_a_product_with_a_smaller_share_on_each_device_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = products("abc,bcd->ad", (8, 4, 2), (4, 2, 6))
    check(monkeypatch, compiled("abc,bcd->ad", (8, 2, 2), (2, 2, 6), devices=2), ops)
    with pytest.raises(ExecutionError, match="multiplies this einsum by 2"):
        check(monkeypatch, compiled("abc,bcd->ad", (8, 4, 2), (4, 2, 6), devices=2), ops)


def test_another_einsum_with_the_same_name_is_not_mistaken_for_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In each function, as in the body of a loop, the first einsum has the same name."""
    ops = products("ab,ab->", (4, 2), (4, 2))
    check(monkeypatch, compiled("ab,bc->ac", (8, 2), (2, 8), devices=4), ops)
