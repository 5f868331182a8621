"""Probes of elementwise functions, one by one: some take 200 times as long as others.

Each gets arguments for which it is defined, of different sizes. The measurements are short, since
there are many. XLA computes the functions of a cluster in its own way: there, a sine takes as long
as 20 exponentials. Compiling takes time, so of those that take about as long, one is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tekso.framework.costs.probe_runs import ProbeRuns, Seconds, array, rest

Function = Callable[[Any, Any], Any]
"""Returns what an op makes of two tensors; of one argument, it is the second."""

_SHAPE = (256, 128)  # of fewer numbers, a processor learns which branches they take
_TIMES, _FEW_TIMES = 8, 2
_RUN_S = 0.002  # CPU time of a measurement

_OF_REALS = (
    "Asinh", "Atan", "BesselI0e", "BesselI1e", "Cos", "Cosh", "Erf", "Erfc", "Exp", "Expm1",
    "Sigmoid", "Sin", "Sinh", "Tan", "Tanh",
)  # fmt: skip
_OF_POSITIVES = ("Digamma", "Lgamma", "Log", "Log1p")
_OF_SHARES = ("Acos", "Asin", "Atanh", "Erfinv", "Ndtri")
_OF_FEATURES = ("Elu", "Selu", "Softplus")
_OF_LOGITS = ("LogSoftmax", "Softmax")

_RANDOM: dict[str, tuple[str, ...]] = {
    "StatelessRandomNormalV2": ("RandomStandardNormal", "StatelessRandomNormal"),
    "StatelessRandomUniformV2": ("RandomUniform", "StatelessRandomUniform"),
    "StatelessTruncatedNormalV2": ("StatelessTruncatedNormal", "TruncatedNormal"),
}
"""{op: others that draw the same numbers}."""

_SLOW = frozenset(
    {"Acosh", "Asinh", "Betainc", "Cosh", "CumulativeLogsumexp", "Digamma", "Erfinv", "FloorMod",
     "Igamma", "IgammaGradA", "Igammac", "Lgamma", "Ndtri", "Polygamma", "Pow", "Sinh", "Tan",
     "Zeta", *_RANDOM}
)  # fmt: skip
"""Those that are measured with few arrays."""

_CLUSTERED = {
    "Asinh": ("Acosh", "Asinh", "Atanh", "BesselI0e", "BesselI1e", "Erfinv", "Sinh", "Softplus"),
    "Atan": ("Asin", "Atan", "Tan"),
    "Atan2": ("Acos", "Atan2", "FloorMod"),
    "Lgamma": ("Digamma", "Lgamma"),
    "Log1p": ("Erfc", "Expm1", "Log1p"),
    "Pow": ("Pow",),
    "Sin": ("Cos", "Sin"),
}
"""{function: those that take about as long in a cluster}."""


def speeds(probes: ProbeRuns) -> dict[str, Any]:
    """Returns fields of `MachineSpeed`: [(op, elements per second)]."""
    import tensorflow as tf

    arguments, elements = _arguments(), float(math.prod(_SHAPE))

    def seconds(function: Function, a: Any, b: Any, times: int) -> Seconds:
        return probes.of_each(function, a, b, times=times, run_s=_RUN_S, paused=False)

    def rate(function: Function, first: str, second: str, times: int, less: Seconds) -> Seconds:
        whole = seconds(function, arguments[first], arguments[second], times)
        return elements / rest(whole, less, least=0.2)

    # A measurement also contains parts of a call, and the starts of ops.
    tiny = arguments[""]
    starts = {n: seconds(lambda a, b: tf.negative(b), tiny, tiny, n) for n in (_TIMES, _FEW_TIMES)}
    found: dict[str, Seconds] = {}
    for kind, of in _functions().items():
        times = _FEW_TIMES if kind in _SLOW else _TIMES
        found[kind] = rate(*of, times, starts[times])
    for kind, others in _RANDOM.items():
        found |= dict.fromkeys(others, found[kind])
    simple = probes.compiled(lambda a, b: b * 0.5 + 1.0)
    simple_s = seconds(simple, tiny, arguments["real"], _TIMES)
    in_cluster: dict[str, Seconds] = {}
    for kind, others in _CLUSTERED.items():
        function, first, second = _functions()[kind]
        speed = rate(probes.compiled(function), first, second, _TIMES, simple_s)
        in_cluster |= dict.fromkeys(others, speed)
    return {"functions": sorted(found.items()), "cluster_functions": sorted(in_cluster.items())}


def _arguments() -> dict[str, Any]:
    """Returns {what they are: arguments}."""
    import tensorflow as tf

    real = array(*_SHAPE)
    positive, share = tf.exp(real), 0.4 + 0.3 * tf.tanh(real)
    return {
        "": array(4),
        "real": real,
        "positive": positive,
        "share": share,
        "above 1": 1 + positive,
    }


def _functions() -> dict[str, tuple[Function, str, str]]:
    """Returns {op: (function, what its first and its second argument are)}."""
    import tensorflow as tf

    ops = tf.raw_ops

    def of(kind: str, argument: str) -> Function:
        return lambda a, b: getattr(ops, kind)(**{argument: b})

    def drawn(kind: str) -> Function:
        """Returns a function of a key, which is not constant."""

        def draw(key: Any, x: Any) -> Any:
            bits = tf.bitcast(tf.reshape(key, [2, 2]), tf.uint64)
            return getattr(ops, kind)(shape=x.shape, key=bits[:1], counter=bits, alg=1)

        return draw

    return {
        **{kind: (of(kind, "x"), "", "real") for kind in _OF_REALS},
        **{kind: (of(kind, "x"), "", "positive") for kind in _OF_POSITIVES},
        **{kind: (of(kind, "x"), "", "share") for kind in _OF_SHARES},
        **{kind: (of(kind, "features"), "", "real") for kind in _OF_FEATURES},
        **{kind: (of(kind, "logits"), "", "real") for kind in _OF_LOGITS},
        **{kind: (drawn(kind), "", "real") for kind in _RANDOM},
        "Acosh": (of("Acosh", "x"), "", "above 1"),
        "Atan2": (lambda a, b: ops.Atan2(y=a, x=b), "positive", "real"),
        "Betainc": (
            lambda a, b: ops.Betainc(a=a, b=b, x=tf.fill(b.shape, 0.4)), "positive", "positive"
        ),
        "CumulativeLogsumexp": (
            lambda a, b: ops.CumulativeLogsumexp(x=b, axis=1), "", "real"
        ),
        "FloorMod": (lambda a, b: ops.FloorMod(x=a, y=b), "real", "positive"),
        "Igamma": (lambda a, b: ops.Igamma(a=a, x=b), "positive", "positive"),
        "Igammac": (lambda a, b: ops.Igammac(a=a, x=b), "positive", "positive"),
        "IgammaGradA": (lambda a, b: ops.IgammaGradA(a=a, x=b), "positive", "positive"),
        "Polygamma": (lambda a, b: ops.Polygamma(a=tf.math.ceil(a), x=b), "share", "positive"),
        "Pow": (lambda a, b: ops.Pow(x=a, y=b), "positive", "real"),
        "SoftplusGrad": (
            lambda a, b: ops.SoftplusGrad(gradients=a, features=b), "real", "real"
        ),
        "Xlog1py": (lambda a, b: ops.Xlog1py(x=a, y=b), "real", "positive"),
        "Xlogy": (lambda a, b: ops.Xlogy(x=a, y=b), "real", "positive"),
        "Zeta": (lambda a, b: ops.Zeta(x=a, q=b), "above 1", "positive"),
    }  # fmt: skip
