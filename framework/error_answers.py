"""What to write instead, by the messages of errors of Python and TensorFlow."""

from __future__ import annotations

import re

TYPES_OF_ARRAYS = (
    "The arrays of a batch have the types that load returned, except for float64, which becomes "
    "float32"
)
ANSWERS = (
    (
        re.compile(r"fprop\(\) got an unexpected keyword argument '(mask|positions)'"),
        "a stack passes mask and positions to each layer: def fprop(self, theta, x, ctx, *, "
        "mask=None, positions=None)",
    ),
    (
        re.compile(r"\.weight\(\) (got an unexpected keyword argument|missing \d+ required)"),
        "declare a weight as self.weight(name, shape, dims=(None, …), init=Normal.Params()): dims "
        "has a name or None for each dim; optional are fan_in, fan_out, trainable, dtype, scale "
        "and most",
    ),
    (
        re.compile(
            r"Dimensions must be equal, but are|must have the same shape, received|"
            r"Incompatible shapes: |Dimension \d+ in both shapes must be equal|"
            r"Dimensions of inputs should match|Shapes of all inputs must match|"
            r"to broadcast a tensor of shape|Input to reshape is a tensor with|"
            r"Cannot reshape a tensor with"
        ),
        "the number of examples in a shape may be below batch_size, because a step computes a "
        "batch in parts",
    ),
    (
        re.compile(r"\.fprop\(\) missing 1 required positional argument: 'ctx'"),
        "theta, the weights of the layer, comes first: self.child.fprop(theta.child, x, ctx)",
    ),
    (
        re.compile(r"^None values not supported|Attempt to convert a value \(None\)"),
        "is a return missing in the fprop of a layer, or in a function?",
    ),
    (
        re.compile(
            r"(Using a symbolic .* as a Python .bool.|Iterating over a symbolic \S+) is not allowed"
        ),
        "the code runs once, before any tensor has a value: write tf.where(condition, a, b) "
        "instead of if, tf.maximum instead of max, and loop over a Python range",
    ),
    (
        re.compile(
            r"'SymbolicTensor' object has no attribute '(numpy|item)'|not '?SymbolicTensor'?$|"
            r"'SymbolicTensor' object cannot be|"
            r"Cannot convert a symbolic \S+ \(.*\) to a numpy array"
        ),
        "the code runs once, before any tensor has a value: compute with ops of TensorFlow, "
        "such as tf.exp and tf.reduce_mean, not with NumPy, float() or .numpy()",
    ),
    (
        re.compile(r"len is not well defined for a symbolic Tensor"),
        "a fixed size is x.shape[0], any other is tf.shape(x)[0]. In loss_weight, sum the weights "
        'of the examples: tf.reduce_sum(batch["weights"])',
    ),
    (
        re.compile(r"to parameter '(\w+)' has DataType \w+ not in list of allowed values: (\w+)"),
        rf"cast it, as in tf.cast(\1, tf.\2). {TYPES_OF_ARRAYS}",
    ),
    (
        re.compile(r"`labels.shape.rank` must equal `logits.shape.rank - 1`"),
        "labels are numbers of classes, without a dim of classes: tf.squeeze(labels, 1) turns "
        "[batch, 1] into [batch]; tf.nn.softmax_cross_entropy_with_logits takes one-hot labels",
    ),
    (
        re.compile(r"Expected u?int\d+, but got \S+ of type 'float'"),
        "the tensor has whole numbers, as a step does: tf.cast(step, tf.float32)",
    ),
    (
        re.compile(r"Tensor' object does not support item assignment"),
        "a tensor cannot be changed: make a new one, by tf.where(mask, value, x), tf.concat, or "
        "tf.tensor_scatter_nd_update(x, places, values)",
    ),
    (
        re.compile(r"'Theta' object is not callable"),
        "theta.name has the weights of the child; the child computes: "
        "self.name.fprop(theta.name, x, ctx)",
    ),
    (
        re.compile(r"tf.function only supports singleton tf.Variables"),
        "a layer creates no variables when it computes: replace a Keras layer by one of Tekso, "
        "which __init__ declares with self.child(name, LayerNorm.Params(…)), and a tf.Variable by "
        "self.weight(name, shape, dims=…, init=…)",
    ),
    (
        re.compile(r"Cannot iterate over a shape with unknown rank|on an unknown TensorShape"),
        "a tensor has no shape, as the result of tf.py_function: compute with ops of TensorFlow, "
        "or give it its shape, y = tf.ensure_shape(y, [None, 10])",
    ),
)
"""[(pattern of a message, advice)]; the advice may refer to groups of the pattern."""
