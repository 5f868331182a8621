"""The job of a trainer process: an experiment, its logdir, and the processes of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tekso.framework import exposure, files, watchdog
from tekso.framework.cluster import Cluster
from tekso.framework.experiment import Tree
from tekso.framework.params import Params
from tekso.framework.run import batch_kinds, cluster_token, param_changes, training_data
from tekso.framework.run.assembly import Assembly, assemble
from tekso.framework.run.checkpoints import Checkpoint, Checkpoints, Description
from tekso.framework.run.consistency import check_settings
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.loss_check import Findings
from tekso.framework.run.metric_choice import goal_of, metric_of
from tekso.framework.run.process_group import ConnectedProcessGroup, LostProcessError, ProcessGroup
from tekso.framework.run.report.console import Console

C = TypeVar("C", bound=Checkpoints)


@dataclasses.dataclass(frozen=True)
class Job:
    """The job of the trainer.

    Attributes:
      model: key of the experiment.
      tree: Params of the experiment, with all settings.
      registered: Params of the experiment as registered.
      logdir: logdir of the run.
      console: shows lines.
      command: the command as typed.
      imports: packages of the user that the experiment needs.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices.
      cluster: the processes of the run, if there are several.
      cluster_timeout_s: how long to wait for all processes to connect.
      cluster_token_file: file with the secret that they share; see `cluster_token`.
      wait_limit_s: limit of a wait, after which the watchdog ends the process; 0: none.
      shows_step: whether to show the timeline of the devices in a training step, if the execution
        records it.
      profile_steps: first and last step to record TensorFlow's profile of; None: none.
      begin: when the command began, in seconds of `time.perf_counter`.
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
    cluster_token_file: str | None = None
    wait_limit_s: float = 0.0
    shows_step: bool = False
    profile_steps: tuple[int, int] | None = None
    begin: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.cluster is None or self.cluster.process == 0

    @contextlib.contextmanager
    def meet(
        self, resumption: Callable[[], str] | None = None, **settings: Any
    ) -> Iterator[ProcessGroup]:
        """Connects the processes of the run for a block that all of them run.

        Args:
          resumption: returns text for errors: from where the same command resumes.
          settings: values that must be equal in all processes, in addition to the Params.

        Raises:
          ClusterError: a process does not connect, or was started with different settings.
          LostProcessError: a process is lost.
          StalledError: a wait lasted too long.
        """
        with self._watched(resumption):
            if self.cluster is None:
                yield ProcessGroup()
            else:
                with self._connected(self.cluster, resumption, settings) as group:
                    yield group

    def _watched(self, resumption: Any) -> contextlib.AbstractContextManager[None]:
        """Watches the waits of this process."""
        process = self.cluster.process if self.cluster is not None else 0
        name = f"stalled_{process}.txt" if process else "stalled.txt"
        folder = self.logdir.path if files.is_local(self.logdir.path) else tempfile.gettempdir()
        again = "repeat the same command" if self.cluster is None else "start all processes again"
        return watchdog.watching(
            limit_s=self.wait_limit_s,
            program=self.command[0] if self.command else "tekso",
            path=files.join(folder, name),
            advice=f"{again}, which resumes from the last checkpoint" if resumption else again,
        )

    @contextlib.contextmanager
    def _connected(
        self, cluster: Cluster, resumption: Callable[[], str] | None, settings: Mapping[str, Any]
    ) -> Iterator[ProcessGroup]:
        """Connects the processes of the run; see `meet`."""
        batch_kinds.execution_of(self.tree).join(cluster)  # checks before waiting for others
        self.console.line(exposure.describe(cluster.address), "good")

        def with_advice(text: str) -> str:
            where = resumption() if resumption is not None else ""
            return f"{text}; start all processes again with the same command{where}"

        try:
            with ConnectedProcessGroup(
                cluster,
                token=cluster_token.find(self.cluster_token_file, os.environ, self.logdir.path),
                timeout_s=self.cluster_timeout_s,
                log=lambda text: self.console.line(text, "warning"),
                last_words=lambda text: print(
                    f"{self.command[0]}: {with_advice(text)}", file=sys.stderr, flush=True
                ),
            ) as group:
                settings = {"the model": self.model, "--cpu_devices": self.cpu_devices, **settings}
                check_settings(group, self.tree, settings)
                self._introduce(cluster)
                with group.explaining():
                    yield group
        except LostProcessError as error:
            raise LostProcessError(with_advice(str(error))) from error

    def _introduce(self, cluster: Cluster) -> None:
        if self.is_first:
            others = ", ".join(cluster.addresses)
            self.console.line(f"{cluster.size} processes by {cluster.source}: {others}")
        else:
            text = f"one of {cluster.size} processes; {cluster.name(0)} reports the run"
            self.console.line(text, "good")

    def resumption(self) -> str:
        """Returns text for errors: from which step the same command resumes training."""
        steps = self.checkpoints().steps()
        where = f"step {steps[-1]}" if steps else "the beginning, since nothing was saved yet"
        return f", which resumes from {where}"

    def assemble(
        self,
        group: ProcessGroup,
        *,
        reads_data: bool = True,
        trains: bool = True,
        one_task: str | None = None,
        checks_metrics: bool = False,
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
            one_task=one_task,
            checks_metrics=checks_metrics,
        )

    def changes_since(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the differences of the tree from the Params of a checkpoint, a line for each."""
        return param_changes.since(checkpoint.description, self.tree)

    def settings_not_repeated(self, checkpoint: Checkpoint) -> list[str]:
        """Returns the settings of a checkpoint that a command with --model has reset."""
        if not any(word.partition("=")[0] == "--model" for word in self.command):
            return []
        try:
            before = Params.from_text(checkpoint.description.params)
            reset = param_changes.reset(before, self.tree, self.registered)
            given = self.logdir.settings() if reset else set()
            return [path for path in reset if path in given]
        except (ValueError, ImportError, AttributeError, TypeError):
            return []  # as `changes_since` reports

    def try_task(self, parts: Assembly, *, is_new: bool, trains: bool = True) -> Findings:
        """Checks the task and prints warnings; see `Assembly.try_task`."""
        found = parts.try_task(is_new=is_new, trains=trains)
        self.warn(found.warnings)
        return found

    def warn_of_data(self, parts: Assembly, trained: Description, *, trains: bool = True) -> None:
        """Warns if the training data is not that of a checkpoint; see `training_data`."""
        text = training_data.warning(trained, self.tree, parts.input, trains=trains)
        self.warn([text] if text else [])

    def warn(self, lines: Iterable[str]) -> None:
        """Prints warnings."""
        for line in lines:
            self.console.line(line, "warning")

    def show_text(self, text: str) -> None:
        """Prints decoded text."""
        for line in text.splitlines():
            self.console.line(line, "dim")

    def checkpoints(self) -> Checkpoints:
        """Returns the checkpoints of the run."""
        return self.checkpoints_as(Checkpoints)

    def checkpoints_as(self, kind: type[C], group: ProcessGroup | None = None) -> C:
        """Returns the checkpoints of the run as an instance of `kind`, written by a group."""
        warn = functools.partial(self.console.line, style="warning")
        return checkpoints_of(kind, self.tree, self.logdir, warn=warn, group=group)


def checkpoints_of(
    kind: type[C],
    tree: Any,
    logdir: Logdir,
    *,
    warn: Callable[[str], None],
    group: ProcessGroup | None = None,
) -> C:
    """Returns the checkpoints of a run; its Params set how many are kept.

    Args:
      kind: class of the result.
      tree: the Params of the experiment.
      logdir: logdir of the run.
      warn: called with the text of a warning.
      group: the processes that write checkpoints.
    """
    run, metric = tree.run, metric_of(tree, "keep_best")
    keep_best = run.keep_best.count if metric else 0
    return kind(
        logdir.checkpoints,
        keep_last=run.keep_last_checkpoints,
        buffer_bytes=run.checkpoint_buffer_mb << 20,
        keep_best=keep_best,
        metric=metric if keep_best else "",
        check=logdir.check,
        goal=goal_of(tree, "keep_best") if keep_best else "min",
        warn=warn,
        group=group,
    )
