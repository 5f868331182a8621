"""What to write instead of ops that DTensor cannot partition."""

from __future__ import annotations

_LOOP = "ops.scan of tekso.framework, which is differentiated without lists of tensors,"
_DEPTHWISE = "window_ops.depthwise_convolution of tekso.framework"
_CONVOLUTION = "window_ops.convolution of tekso.framework"

SUBSTITUTES = {
    "ArgMin": "tf.argmax(-x, axis)",
    "Conv2D": _CONVOLUTION,
    "Conv2DBackpropFilter": _CONVOLUTION,
    "Conv2DBackpropInput": _CONVOLUTION,
    "Conv3D": _CONVOLUTION,
    "Conv3DBackpropFilterV2": _CONVOLUTION,
    "Conv3DBackpropInputV2": _CONVOLUTION,
    "DepthwiseConv2dNative": _DEPTHWISE,
    "DepthwiseConv2dNativeBackpropFilter": _DEPTHWISE,
    "DepthwiseConv2dNativeBackpropInput": _DEPTHWISE,
    "EmptyTensorList": _LOOP,
    "TensorListReserve": _LOOP,
}
"""{type of an op that DTensor cannot partition, or not in all layouts: what to write instead}."""
