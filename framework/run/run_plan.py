"""Plans a run before its first step: memory, time, checkpoints, what it would resume.

Nothing is allocated, no device is needed, and data is read only if the Params do not determine the
shapes of a batch or their shares. On several devices, tasks that couple examples are an exception:
see `divided_plan.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from collections.abc import Mapping

from tekso.framework import files, schedules
from tekso.framework.costs import stored_speeds, this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.costs.stored_speeds import Condition
from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.experiment import Tree
from tekso.framework.run import (
    batch_kinds,
    checkpoint_size,
    divided_plan,
    input_globs,
    inspection,
    metric_names,
    run_start,
)
from tekso.framework.run.divided_losses import division_of
from tekso.framework.run.early_stopping import early_stopping_of
from tekso.framework.run.execution_search import other_plans
from tekso.framework.run.fitting_steps import fits
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.metric_choice import goal_of, metric_of
from tekso.framework.run.step_parts import StepParts, StepPlan
from tekso.framework.run.step_plan import step_plan
from tekso.framework.state import State
from tekso.framework.units import bytes_text


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
      model: key of the experiment.
      device: type of the devices.
      weights: number of elements of all weights.
      step: the step under the execution of the experiment; None: it is impossible.
      problem: why the step is impossible, or computes another loss than on one device, or "".
      run_problems: why the run cannot start or resume, see `run_start.py`.
      warnings: of damaged checkpoints that the run skips, and of what could not be checked.
      changes: what differs from the Params of the checkpoint that the run resumes from.
      others: steps under other executions, the fastest that fits first.
      rejected: {execution: why it is impossible, or refused}.
      checkpoint_bytes: bytes of a checkpoint, see `checkpoint_size.py`.
      checkpoints: largest number of checkpoints on the disk, with one that is being written.
      existing_checkpoints: number of checkpoints that are in the logdir already, without damaged
        ones that the run sets aside.
      free_bytes: free bytes of the disk of the logdir; None: unknown.
      logdir: the logdir.
      resumes_from: step of the newest good checkpoint in the logdir; None: a new run.
      steps: steps of the whole run.
      condition: how far the measured speeds of this machine apply to it as it is now.
      forward_flops: {part of the model: floating-point operations of the forward pass over the
        global batch}, see `forward_flops.py`; empty: not known.
    """

    model: str
    device: DeviceType
    weights: int
    step: StepPlan | None
    problem: str
    run_problems: tuple[str, ...]
    warnings: tuple[str, ...]
    changes: tuple[str, ...]
    others: tuple[StepPlan, ...]
    rejected: Mapping[str, str]
    checkpoint_bytes: int
    checkpoints: int
    existing_checkpoints: int
    free_bytes: int | None
    logdir: str
    resumes_from: int | None
    steps: int
    condition: Condition
    forward_flops: Mapping[str, float]

    def fits(self, step: StepPlan) -> bool:
        """Whether a step fits into the memory of a device."""
        return fits(step, self.device)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return self.checkpoint_bytes * self.checkpoints

    @property
    def new_disk_bytes(self) -> int:
        """Bytes of the checkpoints that are not in the logdir yet, at least one."""
        return self.checkpoint_bytes * max(1, self.checkpoints - self.existing_checkpoints)

    @property
    def problems(self) -> list[str]:
        """Why the run would fail; empty if it would not."""
        found = [text for text in (self.problem, *self.run_problems) if text]
        if self.step is not None and not self.fits(self.step):
            own, sharing = bytes_text(self.step.total_bytes), self.step.sharing_devices
            all_bytes = bytes_text(self.step.bytes_together)
            shared = f", {all_bytes} for the {sharing} devices that share it" if sharing > 1 else ""
            found.append(
                f"a step needs {own} of memory per device{shared}, but "
                f"{self.device.name} has {bytes_text(self.device.memory_bytes)}"
            )
        if self.free_bytes is not None and self.new_disk_bytes > self.free_bytes:
            found.append(
                f"{self.checkpoints} checkpoints need {bytes_text(self.new_disk_bytes)}"
                f"{' more' if self.existing_checkpoints else ''}, but "
                f"{bytes_text(self.free_bytes)} are free on the disk of {self.logdir}; "
                "run.keep_last_checkpoints sets how many are kept"
            )
        return found


def plan(
    model: str,
    tree: Tree.Params,
    *,
    logdir: str,
    assets_dir: str | None = None,
    device: str,
    num_devices: int | None = None,
    searches: bool = False,
) -> RunPlan:
    """Returns the plan of a run.

    Args:
      model: key of the experiment.
      tree: its Params.
      logdir: the logdir of the run, which may not exist.
      assets_dir: folder of the assets of a run, if there was one.
      device: type of the devices, see `device_types`.
      num_devices: number of devices; None: one, or as many as the execution needs.
      searches: whether to plan other executions over as many devices too.

    Raises:
      ExecutionError: the device type is unknown.
      ValueError: Params of the task or the learner are invalid.
    """
    invalid = run_start.params_problems(tree)
    parts = StepParts(
        tree,
        inspection.task_of(tree, assets_dir=assets_dir),
        schedules.end_with_run(tree.learner, tree.run.steps).instantiate(),
        {} if invalid else inspection.batch_of(tree, assets_dir=assets_dir),
        this_machine.find(device),
        batch_kinds.ONE_KIND if invalid else batch_kinds.of_experiment(tree, assets_dir=assets_dir),
    )
    step, problem = None, ""
    try:
        step = None if invalid else step_plan(parts, num_devices)
    except ExecutionError as error:
        problem = str(error)
    of_division = functools.cache(
        functools.partial(divided_plan.find, tree, parts.task, assets_dir=assets_dir)
    )
    divided = divided_plan.DividedStep()
    if step is not None:
        accumulation = parts.learner.params.accumulation_steps
        division = division_of(tree.execution, step.devices, accumulation=accumulation)
        divided = of_division(division)
    others: list[StepPlan] = []
    rejected: dict[str, str] = {}
    if searches and not invalid:
        devices = num_devices or (step.devices if step else 1)
        others, rejected = other_plans(parts, devices, of_division)
    specs = parts.task.specs()
    state = State(specs, parts.learner.slots(specs))
    start = run_start.find(tree, state, Logdir(logdir))
    problems = [*invalid, *input_globs.unset(tree), *run_start.missing_files(tree)]
    problems += start.problems
    problems.append(_metric_problem(parts, is_valid=not invalid))
    return RunPlan(
        model,
        parts.device,
        sum(spec.size for spec in specs.values()),
        step,
        problem or divided.problem,
        tuple(dict.fromkeys(filter(None, problems))),
        (*start.warnings, *divided.warnings),
        start.changes,
        tuple(sorted(others, key=lambda s: (not fits(s, parts.device), s.seconds))),
        rejected,
        checkpoint_size.size_bytes(model, tree, parts.task, state.keyed()),
        tree.run.keep_last_checkpoints + start.best + 1,
        start.checkpoints,
        _free_bytes(logdir),
        logdir,
        start.resumes_from,
        tree.run.steps,
        stored_speeds.condition() if parts.device.name == THIS_MACHINE else Condition(),
        {} if invalid else parts.forward_flops,
    )


def _metric_problem(parts: StepParts, *, is_valid: bool) -> str:
    """Returns why early stopping or the best checkpoint has no metric, or "".

    Args:
      parts: the parts of the experiment.
      is_valid: whether its inputs are valid; otherwise only the Params are checked.
    """
    tree = parts.tree
    try:
        early_stopping_of(tree)
        if metric_of(tree, "keep_best") and tree.run.keep_best.count:
            goal_of(tree, "keep_best")
        return metric_names.problem(tree, parts.task, parts.batch) if is_valid else ""
    except ValueError as error:
        return str(error)


def _free_bytes(path: str) -> int | None:
    """Returns the free bytes of the disk on which a folder is or would be; None: unknown."""
    if not files.is_local(path):
        return None
    folder = os.path.abspath(path)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    try:
        found = shutil.disk_usage(folder)
        return found.free if found.total else None
    except OSError:
        return None
