"""Workarounds for defects of TensorFlow 2.21, most of them of DTensor, until they are mended.

    file               workarounds
    compiler.py        compiler passes to disable, long error messages, calls from several threads
    call_counts.py     warnings about retracing if there are several programs (all executions)
    retracing.py       names of loops that are in use, loops of another trace
    forms.py           primitives of layers: rows of stacked tensors, concatenation, loops, buffers
    tensors.py         inputs of loops, layouts that influence each other, gradients of
                       resharding, small integers, names of variables
    unsupported_ops.py ops that crash or give wrong values: rejected before the first step
    repeated_sums.py   einsums that DTensor multiplies by a number of devices: rejected
    op_places.py       errors that name no line of a layer; op_substitutes.py: what to write
    ordered_sums.py    sums whose order depends on time (all executions)
    unlocked_start.py  a start of several processes that blocks all threads (all executions)

Every function says which defect it avoids. `tests/framework/execution/workarounds/` reproduces the
defects in a few lines, with the workaround and without, and fails as soon as TensorFlow no longer
has one of them: then remove the workaround. Not reproduced there: data races (`compiler.SERIAL`),
and defects that need a whole model (`resharded_both_ways`, combined all-reduces, a vectorized
`tf.gather_nd`); nor `cut_messages` and `new_variable`, since they avoid only waiting.

Sharding constraints that steer layout propagation, and forms of primitives that need fewer
collectives (`mesh/forms.py`), are not workarounds: they stay where they are used.
"""
