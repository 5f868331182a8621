"""Finds the copies that TensorFlow's Einsum makes around its product.

Its product is one of many matrices, [batch, free, summed] of both inputs:

batch    dims of both inputs and of the output
free     dims of one input and of the output
summed   dims of both inputs only
lone     dims of one input only, which are summed first

An input whose dims have another order is copied into this one, unless only free and summed dims
have changed places: the product can read a matrix as its transpose. The result has the batch dims,
the free dims of the first input and those of the second; if the output has another order, it is a
copy too. Dims of a kind are in the order in which the equation has them first. For example, of
attention, "btgh,bsgh->bgts" copies both inputs, and "btgh,bsgh->btgs" the result too.

Source:
  einsum_op_impl.h of TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tekso.framework.costs import graph_work

_BATCH, _FREE, _SUMMED, _LONE = range(4)
_READ_AS_TRANSPOSE = (_BATCH, _SUMMED, _FREE, _LONE)


class Copy(NamedTuple):
    """A tensor whose dims are copied into another order.

    Attributes:
      bytes: of the tensor.
      turns: whether another dim comes last.
      input: number of the input that is copied; None: the result is.
    """

    bytes: float
    turns: bool
    input: int | None


def copies(op: Any) -> list[Copy]:
    """Returns the copies that an Einsum makes: of inputs, then of its result."""
    *terms, output = graph_work.einsum_terms(op)
    first_at = {letter: at for at, letter in enumerate(dict.fromkeys("".join(terms)))}
    kinds = {letter: _kind(letter, terms, output) for letter in first_at}

    def in_order(letters: Iterable[str], order: Sequence[int] = range(4)) -> str:
        """Returns dims by kind; those of a kind as the equation has them first."""
        return "".join(sorted(letters, key=lambda x: (order.index(kinds[x]), first_at[x])))

    found = [
        Copy(graph_work.size_bytes(tensor), not in_order(term).endswith(term[-1:]), number)
        for number, (term, tensor) in enumerate(zip(terms, op.inputs, strict=True))
        if term not in (in_order(term), in_order(term, _READ_AS_TRANSPOSE))
    ]
    result = in_order(x for x in kinds if kinds[x] == _BATCH)
    result += "".join(in_order(x for x in term if kinds[x] == _FREE) for term in terms)
    if output != result:
        size = graph_work.size_bytes(op.outputs[0])
        found.append(Copy(size, not result.endswith(output[-1:]), None))
    return found


def _kind(letter: str, terms: Sequence[str], output: str) -> int:
    if all(letter in term for term in terms):
        return _BATCH if letter in output else _SUMMED
    return _FREE if letter in output else _LONE
