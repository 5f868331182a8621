"""Names of TensorFlow's ops, in groups that the cost model treats alike."""

from __future__ import annotations

SAME_MEMORY = frozenset(
    {"Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"}
)
"""Ops whose output is their input, in the same memory."""

MATRIX_PRODUCTS = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
PRODUCTS = MATRIX_PRODUCTS | {"Conv2D", "Conv3D", "DepthwiseConv2dNative"}
"""Ops that multiply matrices, or convolve."""
INPUT_GRADIENTS = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2"})
"""Transposed convolutions."""
FILTER_GRADIENTS = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"})
CONVOLUTIONS = (PRODUCTS - MATRIX_PRODUCTS) | INPUT_GRADIENTS

SUMS = frozenset({"Sum", "Mean", "Max", "Min", "Prod"})
FUNCTIONS = frozenset(
    {"Exp", "Expm1", "Log", "Log1p", "Tanh", "Sigmoid", "Erf", "Erfc", "Softplus", "Sin", "Cos",
     "Pow", "Softmax", "LogSoftmax", "Rsqrt", "Sqrt", "Elu", "Selu"}
)  # fmt: skip
"""Exponentials and similar functions."""

REORDERINGS = frozenset(
    {"Transpose", "ConcatV2", "Pack", "Unpack", "Split", "SplitV", "GatherV2", "GatherNd",
     "ScatterNd", "Cumsum", "TensorScatterAdd", "UnsortedSegmentSum", "TopKV2"}
)  # fmt: skip
"""Ops that write elements to other places."""
COPIES = REORDERINGS | {
    "Slice", "StridedSlice", "StridedSliceGrad", "Tile", "Pad", "PadV2", "ReverseV2",
    "ResizeBilinear", "TensorListStack", "TensorListFromTensor",
}  # fmt: skip
"""Ops that copy elements."""
SLICES = frozenset({"Slice", "StridedSlice", "GatherV2"})
"""Ops that read only as much of their first input as they write."""
LOOPS = frozenset({"While", "StatelessWhile"})
MOVES = frozenset(
    {"Transpose", "ConcatV2", "Pack", "Unpack", "Split", "SplitV", "Slice", "StridedSlice",
     "GatherV2", "Cast", "Tile", "BroadcastTo", "Pad", "PadV2", "TensorScatterUpdate"}
)  # fmt: skip
"""Ops without arithmetic that write their outputs."""

_CALLER_GIVES = frozenset({"Placeholder", "Const"})
_LIST_ITEMS = frozenset({"TensorListGetItem", "TensorListSetItem"})
FREE = SAME_MEMORY | _CALLER_GIVES | _LIST_ITEMS | {
    "ZerosLike", "OnesLike", "TensorListFromTensor", "TensorListStack",
}  # fmt: skip
"""Ops that compute nothing."""
INSTANT = SAME_MEMORY | _CALLER_GIVES | _LIST_ITEMS | {
    "NoOp", "TensorListReserve", "TensorListPushBack", "TensorListPopBack", "EmptyTensorList",
    "Shape", "BroadcastGradientArgs", "OptionalFromValue",
}  # fmt: skip
"""Ops that take no time worth counting."""
