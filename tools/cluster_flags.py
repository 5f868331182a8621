"""Finds the cluster of a run by the flags of tekso-trainer, or by variables of the environment."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from tekso.tools import flag_modes
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.cluster import Cluster


def find(values: Any) -> Cluster | None:
    """Returns the cluster of the run; None if it has one process.

    Args:
      values: the parsed flags of tekso-trainer.

    Raises:
      UsageError: the flags or variables do not describe a cluster.
    """
    from tekso.framework import cluster, exposure

    if values.mode == "follow":  # a process of its own, beside those that train
        return None

    try:
        found = cluster.find(values.cluster, values.process, os.environ)
        if found is not None:
            allowed = values.allow_unauthenticated_network
            found = dataclasses.replace(found, allows_network=allowed)
            exposure.check(
                found.address, source=found.source, allowed=allowed, others=found.addresses
            )
    except (cluster.ClusterError, exposure.ExposureError) as error:
        raise UsageError(str(error)) from None
    if (
        found is None
        and values.cluster is None
        and flag_modes.is_given(values["cluster_timeout_s"])
    ):
        raise UsageError(
            "--cluster_timeout_s requires several processes, but this run has one: list them "
            "all in --cluster=host:port,host:port"
        )
    return found
