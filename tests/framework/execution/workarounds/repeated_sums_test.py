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


class Library:
    """The functions of a process."""

    def __init__(self, **functions: Any) -> None:
        self.functions = functions

    def context(self) -> Library:
        return self

    def list_function_names(self) -> list[str]:
        return list(self.functions)

    def get_function_def(self, name: str) -> Any:
        if name not in self.functions:
            raise tf.errors.NotFoundError(None, None, f"Unable to find FunctionDef: {name}")
        return self.functions[name]


def check(monkeypatch: pytest.MonkeyPatch, function: Any, ops: list[tf.Operation]) -> None:
    monkeypatch.setattr(repeated_sums, "context", Library(partitioned=function))
    monkeypatch.setattr(repeated_sums, "_known", set())
    refuse_repeated_sums(ops)


def loop(body: str) -> Any:
    """Returns a function of one device that has only a loop."""
    node = tf.compat.v1.NodeDef(name="while", op="While")
    node.attr["body"].func.name = body
    return SimpleNamespace(node_def=[node], arg_attr={}, signature=SimpleNamespace(input_arg=[]))


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


def test_each_program_is_searched_with_its_own_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor gives a new loop the name of an old one, which was removed from the library."""
    ops = products("abc,bcd->ad", (8, 4, 2), (4, 2, 6))
    right = compiled("abc,bcd->ad", (8, 2, 2), (2, 2, 6), devices=2)
    wrong = compiled("abc,bcd->ad", (8, 4, 2), (4, 2, 6), devices=2)
    library = Library(partitioned_1=loop("while1_body"), while1_body=right)
    monkeypatch.setattr(repeated_sums, "context", library)
    monkeypatch.setattr(repeated_sums, "_known", set())
    refuse_repeated_sums(ops)

    library.functions |= {"partitioned_2": loop("while1_body"), "while1_body": wrong}
    with pytest.raises(ExecutionError, match="multiplies this einsum by 2"):
        refuse_repeated_sums(ops)


def test_a_program_that_was_not_compiled_to_its_end_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The functions of its loops are removed from the library, so that the next trial succeeds."""
    ops = products("abc,bcd->ad", (8, 4, 2), (4, 2, 6))
    monkeypatch.setattr(repeated_sums, "context", Library(partitioned=loop("while1_body")))
    monkeypatch.setattr(repeated_sums, "_known", set())
    refuse_repeated_sums(ops)
