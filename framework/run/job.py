"""Job: what the trainer is asked to do with an experiment, and where; alone or with others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tekso.framework.execution.mesh.cluster import Cluster
from tekso.framework.experiment import Tree
from tekso.framework.run.assembly import Assembly, assemble
from tekso.framework.run.best_checkpoint import goal_of_best, metric_of_best
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.consistency import check_settings
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.process_group import ConnectedProcessGroup, LostProcessError, ProcessGroup
from tekso.framework.run.report.console import Console

C = TypeVar("C", bound=Checkpoints)


@dataclasses.dataclass(frozen=True)
class Job:
    """What the trainer is asked to do.

    Attributes:
      model: key of the experiment.
      tree: its Params, with all that was set.
      registered: its Params as registered.
      logdir: of the run.
      console: where lines go.
      command: as typed.
      imports: packages of the user's own that the experiment needs.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices.
      cluster: the processes of the run, if there are several.
      cluster_timeout_s: how long to wait for all of them to come.
      shows_step: show what the devices did in a training step, where the execution knows.
    """

    model: str
    tree: Tree.Params
    registered: Tree.Params
    logdir: Logdir
    console: Console
    command: Sequence[str] = ()
    imports: Sequence[str] = ()
    tpu: str | None = None
    cpu_devices: int | None = None
    cluster: Cluster | None = None
    cluster_timeout_s: float = 120.0
    shows_step: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.cluster is None or self.cluster.process == 0

    @contextlib.contextmanager
    def meet(
        self, goes_on: Callable[[], str] = lambda: "", **settings: Any
    ) -> Iterator[ProcessGroup]:
        """Brings the processes of the run together, for a block in which all do the same.

        Args:
          goes_on: says how the same command goes on after a process was lost.
          settings: what has to be equal in all, besides the Params.

        Raises:
          ClusterError: not all come, or they were started with different settings.
          LostProcessError: one is lost.
        """
        if self.cluster is None:
            yield ProcessGroup()
            return
        self.tree.execution.instantiate().join(self.cluster)  # before waiting for anybody

        def with_advice(text: str) -> str:
            return f"{text}; start all processes again with the same command{goes_on()}"

        try:
            with ConnectedProcessGroup(
                self.cluster,
                timeout_s=self.cluster_timeout_s,
                tell=lambda text: self.console.line(text, "warning"),
                last_words=lambda text: print(
                    f"{self.command[0]}: {with_advice(text)}", file=sys.stderr, flush=True
                ),
            ) as group:
                settings = {"the model": self.model, "--cpu_devices": self.cpu_devices, **settings}
                check_settings(group, self.tree, settings)
                self._introduce(self.cluster)
                with group.explaining():
                    yield group
        except LostProcessError as error:
            raise LostProcessError(with_advice(str(error))) from error

    def _introduce(self, cluster: Cluster) -> None:
        if self.is_first:
            others = ", ".join(cluster.addresses)
            self.console.line(f"{cluster.size} processes by {cluster.source}: {others}")
        else:
            text = f"one of {cluster.size}; {cluster.name(0)} tells how the run goes"
            self.console.line(text, "good")

    def goes_on(self) -> str:
        """Returns where the training goes on with the same command."""
        steps = self.checkpoints().steps()
        where = f"step {steps[-1]}" if steps else "the beginning, since nothing was saved yet"
        return f", which goes on from {where}"

    def assemble(
        self, group: ProcessGroup, *, reads_data: bool = True, trains: bool = True
    ) -> Assembly:
        """Builds the parts of the experiment; see `assemble`."""
        return assemble(
            self.tree,
            assets_dir=self.logdir.assets,
            tpu=self.tpu,
            cpu_devices=self.cpu_devices,
            group=group,
            reads_data=reads_data,
            trains=trains,
        )

    def checkpoints(self) -> Checkpoints:
        """Returns the checkpoints of the run."""
        return self.checkpoints_as(Checkpoints)

    def checkpoints_as(self, kind: type[C]) -> C:
        """Returns the checkpoints of the run as the class `kind` handles them."""
        warn = functools.partial(self.console.line, style="warning")
        return checkpoints_of(kind, self.tree, self.logdir, warn=warn)


def checkpoints_of(kind: type[C], tree: Any, logdir: Logdir, *, warn: Callable[[str], None]) -> C:
    """Returns the checkpoints of a run, of which as many are kept as its Params say.

    Args:
      kind: the class that handles them.
      tree: the Params of the experiment.
      logdir: of the run.
      warn: takes the text of a warning.
    """
    run, metric = tree.run, metric_of_best(tree)
    keep_best = run.keep_best.count if metric else 0
    return kind(
        logdir.checkpoints,
        keep_last=run.keep_last_checkpoints,
        keep_best=keep_best,
        metric=metric,
        goal=goal_of_best(tree) if keep_best else "min",
        warn=warn,
    )
