"""Names of TensorFlow's ops, in groups that the cost model treats alike.

Each name is written once, in the smallest group that it belongs to; larger groups are unions.
"""

from __future__ import annotations

SAME_MEMORY = frozenset(
    {"Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"}
)
"""Ops whose output is their input, in the same memory."""

BATCH_PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"})
"""Products of many matrices; an Einsum is one of them, also if it multiplies only two."""
MATRIX_PRODUCTS = BATCH_PRODUCTS | {"MatMul"}
_FORWARD_CONVOLUTIONS = frozenset({"Conv2D", "Conv3D", "DepthwiseConv2dNative"})
PRODUCTS = MATRIX_PRODUCTS | _FORWARD_CONVOLUTIONS
"""Ops that multiply matrices, or convolve."""
_DEPTHWISE_INPUT, _DEPTHWISE_FILTER = (
    f"DepthwiseConv2dNativeBackprop{of}" for of in ("Input", "Filter")
)
DEPTHWISE = frozenset({"DepthwiseConv2dNative", _DEPTHWISE_INPUT, _DEPTHWISE_FILTER})
"""Convolutions of each channel with filters of its own, and their gradients."""
INPUT_GRADIENTS = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2", _DEPTHWISE_INPUT})
"""Transposed convolutions."""
FILTER_GRADIENTS = frozenset({"Conv2DBackpropFilter", "Conv3DBackpropFilterV2", _DEPTHWISE_FILTER})
CONVOLUTIONS = _FORWARD_CONVOLUTIONS | INPUT_GRADIENTS

SLICE_GRADIENTS = frozenset({"StridedSliceGrad"})
CROSS_ENTROPIES = frozenset(
    {"SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"}
)
SUMS = frozenset({"Sum", "Mean", "Max", "Min", "Prod"})
FUNCTIONS = frozenset(
    {"Acos", "Acosh", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BesselI0e", "BesselI1e",
     "Betainc", "Cos", "Cosh", "Digamma", "Elu", "Erf", "Erfc", "Erfinv", "Exp", "Expm1",
     "FloorMod", "Igamma", "IgammaGradA", "Igammac", "Lgamma", "Log", "Log1p", "LogSoftmax",
     "Ndtri", "Polygamma", "Pow", "Rsqrt", "Selu", "Sigmoid", "Sin", "Sinh", "Softmax",
     "Softplus", "SoftplusGrad", "Sqrt", "Tan", "Tanh", "Xlog1py", "Xlogy", "Zeta"}
)  # fmt: skip
"""Exponentials and other functions that take longer than a few operations."""
RUNNING_SUMS = frozenset({"Cumsum", "Cumprod"})
TRANSFORMS = frozenset(
    f"{kind}FFT{dims}" for kind in ("", "I", "R", "IR") for dims in ("", "2D", "3D")
)
"""Fourier transforms."""

BROADCASTS = frozenset(
    {"Add", "AddV2", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "SquaredDifference", "SelectV2",
     "DivNoNan", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"}
)  # fmt: skip
"""Elementwise ops that take tensors of different shapes."""

_ROWS = frozenset({"GatherV2"})
_ITEMS = frozenset({"GatherNd"})
_PARTS = frozenset({"Slice", "StridedSlice"})
_PLACES = _ROWS | {"Transpose", "ConcatV2", "Pack", "Unpack", "Split", "SplitV"}
_LARGER = frozenset({"Tile", "Pad", "PadV2"})
_LIST_COPIES = frozenset({"TensorListStack", "TensorListFromTensor"})

REORDERINGS = _PLACES | _ITEMS | {
    "ScatterNd", "Cumsum", "TensorScatterAdd", "UnsortedSegmentSum", "TopKV2",
}  # fmt: skip
"""Ops that write elements to other places."""
COPIES = REORDERINGS | _PARTS | _LARGER | _LIST_COPIES | SLICE_GRADIENTS | {
    "ReverseV2", "ResizeBilinear",
}  # fmt: skip
"""Ops that copy elements."""
SLICES = _PARTS | _ROWS | _ITEMS
"""Ops that read only as much of their first input as they write."""
MOVES = _PLACES | _PARTS | _LARGER | {"Cast", "BroadcastTo", "TensorScatterUpdate"}
"""Ops without arithmetic that write their outputs."""
LOOPS = frozenset({"While", "StatelessWhile"})
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})

COLLECTIVES = frozenset(
    {"CollectiveReduceV2", "CollectiveGatherV2", "CollectiveReduceScatterV2",
     "CollectiveAllToAllV2", "CollectiveAllToAllV3"}
)  # fmt: skip
"""Ops that exchange tensors with other devices."""

_CALLER_GIVES = frozenset({"Placeholder", "Const"})
EXISTING_MEMORY = SAME_MEMORY | _CALLER_GIVES | {"ReadVariableOp", "VarHandleOp"}
"""Ops whose output is in memory that exists before: that of an input, a variable or the caller."""
_LIST_ITEMS = frozenset({"TensorListGetItem", "TensorListSetItem"})
FREE = SAME_MEMORY | _CALLER_GIVES | _LIST_ITEMS | _LIST_COPIES | {"ZerosLike", "OnesLike"}
"""Ops that compute nothing."""
INSTANT = SAME_MEMORY | _CALLER_GIVES | _LIST_ITEMS | {
    "NoOp", "TensorListReserve", "TensorListPushBack", "TensorListPopBack", "EmptyTensorList",
    "Shape", "BroadcastGradientArgs", "OptionalFromValue",
} | COLLECTIVES  # fmt: skip
"""Ops that take no time worth counting, or whose time depends on other devices."""
