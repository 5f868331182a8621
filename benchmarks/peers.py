"""What is compared: each peer is a framework in one of its usual forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "pytorch": ("torch==2.13.0", "numpy"),
    "keras": ("keras==3.15.1", "tensorflow-cpu==2.21.0"),
    "flax": ("flax==0.12.8", "jax==0.10.2", "optax"),
}
"""{environment: what pip installs in it}."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """A framework and how it runs.

    Attributes:
      title: name in tables.
      framework: the module benchmarks/frameworks/of_<framework>.py.
      environment: key of ENVIRONMENTS; None: the one that runs this program.
      variant: passed to the framework's `build`.
      variables: environment variables of its processes.
    """

    title: str
    framework: str
    environment: str | None
    variant: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


# glibc then keeps freed memory instead of returning it to the system and clearing it again.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
_KERAS = {"KERAS_BACKEND": "tensorflow"}

TEKSO = "tekso"

PEERS: dict[str, Peer] = {
    TEKSO: Peer("Tekso", "tekso", None),
    "pytorch": Peer("PyTorch", "pytorch", "pytorch", "eager"),
    "pytorch_malloc": Peer("PyTorch, tuned malloc", "pytorch", "pytorch", "eager", _MALLOC),
    "pytorch_compile": Peer("PyTorch, torch.compile", "pytorch", "pytorch", "compile"),
    "keras": Peer("Keras on TensorFlow", "keras", "keras", "graph", _KERAS),
    "keras_xla": Peer("Keras on TensorFlow, XLA", "keras", "keras", "xla", _KERAS),
    "flax": Peer("Flax", "flax", "flax"),
}
"""The registered peers by name. The first is the one that the others are compared with."""
