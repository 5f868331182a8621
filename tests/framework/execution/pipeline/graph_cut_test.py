"""Functions that are cut from one graph."""

from __future__ import annotations

import tensorflow as tf

from tekso.framework.execution.pipeline.graph_cut import GraphCut


def test_functions_with_the_same_loop_have_loops_of_different_names() -> None:
    """DTensor names the functions of a loop after its op, and refuses two of the same name."""

    def doubled_until_large(x: tf.Tensor, gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        (y,) = tf.while_loop(lambda y: y < 10.0, lambda y: [2.0 * y], [x], name="loop")
        return y, y * gradient

    scalar = tf.TensorSpec([], tf.float32)
    concrete = tf.function(doubled_until_large, autograph=False).get_concrete_function(
        scalar, scalar
    )
    cut = GraphCut(concrete, num_late=1, num_lasting=0)
    output, late = concrete.outputs
    functions = [cut.function(cut.early, [output]), cut.function([*cut.early, *cut.late], [late])]
    x, gradient = (t.name for t in concrete.inputs)
    values = {x: tf.constant(3.0), gradient: tf.constant(0.5)}
    assert [float(function(values)[0][0]) for function in functions] == [12.0, 6.0]
    names = [
        op.name
        for function in functions
        for op in function._concrete.graph.get_operations()
        if op.type in ("While", "StatelessWhile")
    ]
    assert len(names) == len(set(names)) == 2
