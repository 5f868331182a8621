"""Computes the time of the passes of a piece of a pipeline from the ops of its graph."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from tekso.framework.costs.equal_ops import same_memory
from tekso.framework.costs.graph_time import op_seconds
from tekso.framework.costs.graph_walks import above, after
from tekso.framework.costs.this_machine import MachineSpeed


class PassSeconds(NamedTuple):
    """The time of the ops of a piece for one micro-batch, on a core of this machine.

    Attributes:
      forward: of the forward pass.
      inputs: of the gradients of inputs.
      weights: of the gradients of weights.
    """

    forward: float
    inputs: float
    weights: float


def pass_seconds(
    graph: Any,
    outputs: Sequence[Any],
    gradients: tuple[Sequence[Any], Sequence[Any]],
    given: Set[str],
    machine: MachineSpeed,
) -> PassSeconds:
    """Returns the time of the passes.

    Args:
      graph: graph of the piece and its gradients.
      outputs: outputs of the forward pass.
      gradients: those of weights, and those of inputs.
      given: names of the tensors that exist when the backward pass begins.
      machine: speed of a core.
    """
    same = same_memory(graph)
    of_weights, of_inputs = gradients
    ends = [t.op for t in (*of_weights, *of_inputs, *outputs)]
    # Of equal ops, TensorFlow computes the first one only.
    whole = [
        op for op in above(graph, ends) if all(same[t.name].op.name == op.name for t in op.outputs)
    ]
    backward = {op.name for op in after(graph, [t.op for t in (*of_weights, *of_inputs)], given)}
    inputs = {op.name for op in after(graph, [t.op for t in of_inputs], given)}
    chosen = [
        [op for op in whole if op.name not in backward],
        [op for op in whole if op.name in inputs],
        [op for op in whole if op.name in backward - inputs],
    ]
    of_op = op_seconds(whole, machine)
    return PassSeconds(*(math.fsum(of_op[op.name] for op in ops) for ops in chosen))
