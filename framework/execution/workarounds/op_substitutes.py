"""What to write instead of ops that DTensor cannot partition."""

from __future__ import annotations

_LOOP = "ops.scan of tekso.framework, which is differentiated without lists of tensors,"
_DEPTHWISE = "window_ops.depthwise_convolution of tekso.framework"
_CONVOLUTION = "window_ops.convolution of tekso.framework"

SUBSTITUTES = {
    "ArgMin": "tf.argmax(-x, axis)",
    "AvgPool": "window_ops.average_pool of tekso.framework",
    "AvgPoolGrad": "window_ops.average_pool of tekso.framework",
    "Conv2D": _CONVOLUTION,
    "Conv2DBackpropFilter": _CONVOLUTION,
    "Conv2DBackpropInput": _CONVOLUTION,
    "Conv3D": _CONVOLUTION,
    "Conv3DBackpropFilterV2": _CONVOLUTION,
    "Conv3DBackpropInputV2": _CONVOLUTION,
    "Cumprod": "tf.exp(tf.cumsum(tf.math.log(x))) of positive numbers",
    "DepthwiseConv2dNative": _DEPTHWISE,
    "DepthwiseConv2dNativeBackpropFilter": _DEPTHWISE,
    "DepthwiseConv2dNativeBackpropInput": _DEPTHWISE,
    "EmptyTensorList": _LOOP,
    "MatrixBandPart": "a product with a constant mask",
    "MaxPool": "window_ops.max_pool of tekso.framework",
    "MaxPoolGrad": "window_ops.max_pool of tekso.framework",
    "ReverseV2": "workarounds.reverse(ctx, x, axis) of tekso.framework",
    "Roll": "tf.gather with constant indices",
    "SegmentSum": "tf.math.unsorted_segment_sum",
    "TensorListReserve": _LOOP,
}
"""{type of an op that DTensor cannot partition, or not in all layouts: what to write instead}."""
