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
    "MaxPool": "window_ops.max_pool of tekso.framework",
    "MaxPoolGrad": "window_ops.max_pool of tekso.framework",
    "ReverseV2": "workarounds.reverse(ctx, x, axis) of tekso.framework",
    "Roll": "tf.gather with constant indices",
    "SegmentSum": "tf.math.unsorted_segment_sum",
    "TensorListReserve": _LOOP,
}
"""{type of an op that DTensor cannot partition, or not in all layouts: what to write instead}."""

_ELSEWHERE = "--execution=data_parallel or pipelined: it has no substitute"
_MOVED = "tf.reshape and tf.transpose"
_WITHOUT_SUBSTITUTE = """
    ApproxTopK BesselI0 BesselI1 BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0
    BesselY1 CropAndResize Dawsn Dilation2D Expint ExtractImagePatches FractionalAvgPool
    FractionalMaxPool FresnelCos FresnelSin HSVToRGB LRN RGBToHSV ResizeBicubic ReverseSequence
    ScaleAndTranslate SegmentMax SegmentMin SegmentProd Spence TridiagonalMatMul TridiagonalSolve
    UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd
"""

WITHOUT_LAYOUTS = dict.fromkeys(_WITHOUT_SUBSTITUTE.split(), _ELSEWHERE) | {
    "Cross": (
        "tf.gather(x, [1, 2, 0], axis=…) * tf.gather(y, [2, 0, 1], axis=…) minus the same product "
        "with x and y exchanged"
    ),
    "CumulativeLogsumexp": "tf.math.log(tf.cumsum(tf.exp(x), axis)) of moderate numbers",
    "DepthToSpace": _MOVED,
    "Diag": "tf.expand_dims(x, -1) * tf.eye(size)",
    "Eig": _ELSEWHERE,
    "EuclideanNorm": "tf.norm(x, axis=axis)",
    "LogMatrixDeterminant": _ELSEWHERE,
    "Lu": _ELSEWHERE,
    "MatrixBandPart": "x * mask, with a constant mask such as np.tril(…)",
    "MatrixDeterminant": _ELSEWHERE,
    "MatrixDiagPartV3": "tf.reduce_sum(x * tf.eye(size), -1)",
    "MatrixDiagV3": "tf.expand_dims(x, -1) * tf.eye(size)",
    "MatrixInverse": _ELSEWHERE,
    "MatrixSetDiagV3": "tf.where(tf.eye(size) > 0, tf.expand_dims(diagonal, -1), x)",
    "MatrixSolve": _ELSEWHERE,
    "MatrixSolveLs": _ELSEWHERE,
    "MatrixSquareRoot": _ELSEWHERE,
    "MatrixTriangularSolve": _ELSEWHERE,
    "MirrorPad": "tf.gather with constant indices, such as np.pad(np.arange(n), …)",
    "SegmentMean": "tf.math.unsorted_segment_mean",
    "SelfAdjointEigV2": _ELSEWHERE,
    "SoftsignGrad": "x / (1 + tf.abs(x)) instead of tf.math.softsign",
    "SpaceToDepth": _MOVED,
    "Svd": _ELSEWHERE,
}
"""{type of an op that DTensor cannot compile on any mesh: what to use instead}.

Defect: the gradient of MatrixDiagPartV3 is a MatrixDiagV3 whose shape TensorFlow cannot infer while
DTensor reads the graph. DTensor raises that as a C++ exception without Python's lock: the process
crashes. The other ops are errors of the compiler, which a plan for devices that this machine does
not have would not find. Constants, such as a mask, are computed before.
"""
