"""Compiles the steps of a program whole with XLA, and looks for what a TPU lacks; for tests.

The training step contains loss weight, gradients, the learner's update and all assignments, and the
evaluation step the sums of loss and metrics. Each becomes one XLA program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

NOT_ON_TPU_OPS = (
    r".*PyFunc.*|Print.*|Assert|.*Summary|.*Callback.*|XlaHostCompute|XlaSendToHost|XlaRecvFromHost",
    r"String.*|.*ToString|AsString|DecodeRaw|.*Parse.*|.*HashTable.*|LookupTable.*|.*Dataset.*",
    r"Where|Unique.*|BooleanMask|DynamicPartition|.*Ragged.*|.*NonMaxSuppression.*",
    r"(?!SparseSoftmaxCrossEntropyWithLogits).*Sparse.*",  # that op has dense inputs
    r"Collective.*|_Send|_Recv|_HostSend|_HostRecv",
)
"""Patterns of TensorFlow's ops: host code, strings and tables, dynamic shapes, communication."""

NOT_ON_TPU_HLO = (
    r"custom-call .*|infeed .*|outfeed .*|send.* .*|recv.* .*|rng .*|.* dynamic",
    r".* (c64|c128|f8.*)|get-dimension-size .*",
)
"""Patterns of HLO instructions: host code, the random numbers of a device, dynamic shapes.

XLA lowers tf.math.top_k and tf.argsort with a set-dimension-size of the whole dim, whose result is
not dynamic. XLA removes it.
"""

FLOAT64 = r".* f64"
USES_FLOAT64 = ("lm.one_billion_words.LstmWord",)
"""Sampled softmax draws its classes in float64, which a TPU emulates."""


class CompiledSteps:
    """The training step and the evaluation step of a data-parallel program of one device."""

    def __init__(self, program: Any, batch: Any) -> None:
        self._tensors = {name: tf.convert_to_tensor(x) for name, x in batch.items()}
        self._size = len(next(iter(batch.values())))
        self._train = tf.function(program._train_graph, jit_compile=True, autograph=False)
        self._eval = tf.function(program._eval_graph, jit_compile=True, autograph=False)

    def train_step(self, step: int) -> Any:
        """Returns the metrics of a training step."""
        return self._train(self._tensors, tf.constant(step, tf.int64))

    def eval_step(self) -> Any:
        """Returns the sums of an evaluation step."""
        return self._eval(self._tensors, 0, self._size)

    def contents(self) -> dict[str, list[str]]:
        """Returns the types of the ops, and the `instructions` of the XLA programs."""
        pairs = (
            (self._train, (self._tensors, tf.constant(0, tf.int64))),
            (self._eval, (self._tensors, 0, self._size)),
        )
        return {
            "ops": sorted(set().union(*(_ops(*pair) for pair in pairs))),
            "hlo": sorted(set().union(*(_hlo(*pair) for pair in pairs))),
        }


def problems(key: str, contents: dict[str, list[str]]) -> list[str]:
    """Returns what a TPU lacks of the steps of an experiment, and what should be in them."""
    ops, hlo = contents["ops"], contents["hlo"]
    found = matches(ops, NOT_ON_TPU_OPS) + matches(hlo, NOT_ON_TPU_HLO)
    if "AssignVariableOp" not in ops:
        found.append("the update is not in the program")
    if not any(name.startswith(("dot ", "convolution ")) for name in hlo):
        found.append("no product is in the program")
    if bool(matches(hlo, (FLOAT64,))) != (key in USES_FLOAT64):
        found.append("float64")
    return found


def matches(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Returns the names that one of the patterns matches whole."""
    return [name for name in names if any(re.fullmatch(p, name) for p in patterns)]


def _ops(function: Any, args: Any) -> set[str]:
    """Returns the types of the ops of a function and of all that it calls."""
    graph = function.get_concrete_function(*args).graph.as_graph_def()
    bodies: Iterable[Any] = [graph.node, *(f.node_def for f in graph.library.function)]
    return {node.op for body in bodies for node in body}


def _hlo(function: Any, args: Any) -> set[str]:
    """Returns `instructions` of the XLA program of a function."""
    text = function.experimental_get_compiler_ir(*args)(stage="hlo")
    return instructions(text)


def instructions(hlo: str) -> set[str]:
    """Returns {"opcode type", "custom-call target type", "opcode dynamic"} of a module as text."""
    found = set()
    for line in hlo.splitlines():
        match = re.match(r"\s+(?:ROOT )?[%\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
        if match is None:
            continue
        shape, opcode = match.groups()
        if opcode == "custom-call":
            opcode = "custom-call " + line.partition('custom_call_target="')[2].partition('"')[0]
        found |= {f"{opcode} {dtype}" for dtype in re.findall(r"\b([a-z]+\d*\w*)\[", shape)}
        if "<=" in shape:
            found.add(f"{opcode} dynamic")
    return found
