"""What devices of a mesh tell each other in a training step."""

from __future__ import annotations

import dataclasses

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute", "broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one axis in a step.

    Attributes:
      kind: one of KINDS.
      axis: the mesh axis along which devices exchange; "data+model" for two at once.
      count: how many tensors are exchanged so in a step.
      bytes: of these tensors, on one device. all-reduce: of the tensor that is reduced; all-gather:
        of what is gathered; reduce-scatter: of what is reduced and scattered; all-to-all and
        permute: of the device's own part.
    """

    kind: str
    axis: str
    count: int
    bytes: int
