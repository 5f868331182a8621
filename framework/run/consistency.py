"""Checks before training that all processes of a run have the same settings and data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.cluster import ClusterError
from tekso.framework.params import Params
from tekso.framework.run.process_group import ProcessGroup

_DIFFERENCES = 5  # maximum number in a message


def check_settings(group: ProcessGroup, tree: Params, settings: Mapping[str, Any]) -> None:
    """Raises a ClusterError if a process was started with other settings than process 0.

    Args:
      group: the processes.
      tree: the Params of the experiment.
      settings: other values that must be equal, by their names in the message.
    """
    mine = {"TensorFlow": tf.__version__, **settings}
    all_of_them = group.gather([tree.to_text(), {k: str(v) for k, v in mine.items()}])
    params, values = all_of_them[0]
    for process, (other_params, other_values) in enumerate(all_of_them):
        differences = [
            f"{name} is {other_values.get(name)}, not {value}"
            for name, value in values.items()
            if other_values.get(name) != value
        ]
        if other_params != params:
            first, other = Params.from_text(params), Params.from_text(other_params)
            differences += first.diff(other).splitlines() or ["different Params"]
        if differences:
            raise ClusterError(
                f"the settings of {group.name(process)} differ from those of process 0: "
                f"{'; '.join(differences[:_DIFFERENCES])}"
            )


def check_data(group: ProcessGroup, batch: Mapping[str, np.ndarray]) -> None:
    """Raises a ClusterError if the first batch of a process differs from that of process 0."""
    checksum = 0
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        checksum = zlib.crc32(f"{name} {array.shape} {array.dtype}".encode(), checksum)
        checksum = zlib.crc32(array.tobytes(), checksum)
    checksums = group.gather(checksum)
    differing = [p for p, other in enumerate(checksums) if other != checksums[0]]
    if differing:
        raise ClusterError(
            f"the first batch of {group.name(differing[0])} differs from that of process 0: give "
            "all processes the same files and packages"
        )
