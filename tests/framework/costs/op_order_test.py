"""A chain of products; another op reads each of their results."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tekso.framework.costs.graph_memory import changes, peak_of

BYTES = 40_000  # of the result of a product
COUNT = 4


def peak_results(reader: str, *, on_one_thread: bool) -> float:
    """Returns how many results of products exist at once; the others are too small to count."""

    def function(x: tf.Tensor, w: tf.Tensor, row: tf.Tensor) -> list[tf.Tensor]:
        read = []
        for _ in range(COUNT):
            before, x = x, x @ w  # the first op that reads `before`
            if reader == "product":
                read.append(row @ before)
            elif reader == "rows":
                read.append(tf.gather(before, [3, 5]))
            else:
                read += tf.raw_ops.ShapeN(input=[before, before])
        return [x, *read]

    specs = [tf.TensorSpec(shape) for shape in ([100, 100], [100, 100], [1, 100])]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return peak_of(changes(graph, least=1000, on_one_thread=on_one_thread)) / BYTES


def test_a_busy_executor_ends_a_chain_of_products_before_it_runs_the_other_readers() -> None:
    assert peak_results("product", on_one_thread=False) == 2
    assert peak_results("product", on_one_thread=True) == COUNT


@pytest.mark.parametrize("reader", ["rows", "shapes"])
def test_a_busy_executor_runs_short_readers_at_once(reader: str) -> None:
    assert peak_results(reader, on_one_thread=True) == 2
