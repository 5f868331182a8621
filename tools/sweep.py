"""tekso-sweep: trains an experiment with several settings and seeds, one run after the other."""

from __future__ import annotations

import functools
import math
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

from absl import flags

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.framework.counting import counted
from tekso.framework.exit_codes import ExitCode, signal_of
from tekso.framework.run.report.lines import number
from tekso.tools import command_flags, experiment_flags
from tekso.tools.command_errors import OK, UsageError
from tekso.tools.sweeping import description, ignored_flags, metric_check, search, space
from tekso.tools.sweeping.halving import Judge
from tekso.tools.sweeping.metric_check import MetricCheck
from tekso.tools.sweeping.trials import ENDS, TRIALS, SweepTrial, Trainer, best_of, folder_name

PROGRAM = "tekso-sweep"
USAGE = (
    "--model=lm.python_source.Tiny --logdir=runs/rates "
    "--sweep 'learner.schedule.initial_value=1e-3,3e-3' --seeds=3"
)

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


class StoppedSweepError(Exception):
    """A trial ended without a result; the same command resumes the sweep."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = ExitCode(code) if code in set(ExitCode) else code


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("model", None, "Key of the experiment.", flag_values=f)
    flags.DEFINE_string(
        "logdir", None, "Folder of the sweep; its trials are in trials/.", flag_values=f
    )
    flags.DEFINE_multi_string(
        "sweep",
        [],
        "path=value,value: a setting to vary; can be repeated, for all combinations. With "
        "--search, also a range: path=1e-4:1e-2, path=1e-4:1e-2:log.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "seeds", 1, "Runs of each setting, with seeds from 0.", lower_bound=1, flag_values=f
    )
    flags.DEFINE_multi_string(
        "set", [], "path=value, a setting of all trials; can be repeated.", flag_values=f
    )
    flags.DEFINE_string("execution", None, "Execution of all trials.", flag_values=f)
    flags.DEFINE_integer("steps", None, "Number of training steps.", flag_values=f)
    flags.DEFINE_multi_string("import", [], "Package with your own experiments.", flag_values=f)
    flags.DEFINE_enum(
        "search",
        "grid",
        ("grid", *search.SEARCHES),
        "grid: all combinations. Optuna chooses settings at random, by TPE (tpe), or at random and "
        "ends bad trials early, by successive halving (halving).",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "trials", None, "With a search by Optuna: number of settings to try.", lower_bound=1,
        flag_values=f,
    )  # fmt: skip
    flags.DEFINE_string(
        "metric", None, "Metric of an evaluation, such as dev/loss, to search or compare by.",
        flag_values=f,
    )  # fmt: skip
    flags.DEFINE_enum(
        "goal", None, ("min", "max"), "Whether the smallest or the largest metric is best in a "
        "search by Optuna; by default as the task declares.", flag_values=f,
    )  # fmt: skip
    command_flags.define_common(f)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code, one of `ExitCode`."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _help() -> str:
    return command_flags.help_text(
        FLAGS,
        usage=f"{typed(PROGRAM)} {USAGE}",
        purpose="Trains an experiment with several settings and seeds, one run after the other, "
        "and compares them. The same command resumes a sweep that was stopped or killed. If a "
        "signal ends a trial, the exit code of the sweep is 128 + the number of the signal.",
        value_names={"sweep": "path=values", "metric": "name"},
    )


def _run(words: list[str]) -> int:
    if words:
        raise UsageError(f"{words[0]!r} is not a flag: flags begin with --")
    for name in ("model", "logdir"):
        if not FLAGS[name].value:
            raise UsageError(f"--{name} is missing, as in {typed(PROGRAM)} {USAGE}")
    is_grid = FLAGS.search == "grid"
    _check_search(is_grid=is_grid)
    varied = [space.parse(text) for text in FLAGS.sweep]
    if len({one.path for one in varied}) < len(varied):
        raise UsageError("--sweep gives a path twice: list all its values in one --sweep")
    if not varied and not is_grid:
        raise UsageError("a search requires a setting to choose: --sweep path=low:high")
    combinations = space.grid(varied) if is_grid else []
    experiment_flags.load(FLAGS.model, FLAGS["import"].value or [])
    registered = experiment_flags.experiment(FLAGS.model)().tree()
    steps = _check_settings(registered, varied)
    ignored_flags.check(
        _tree(registered, {}), [one.path for one in varied], settings=FLAGS.set, steps=FLAGS.steps
    )
    check = _check_parts(registered, varied)
    folder = os.path.expanduser(FLAGS.logdir)
    if not files.is_local(folder):
        raise UsageError(f"--logdir={folder}: a sweep requires a folder on a local file system")
    goal = None
    if not is_grid:
        goal = FLAGS.goal or metric_check.goal_of(_tree(registered, {}), FLAGS.metric)
    _describe(folder, goal)
    trainer = Trainer(files.join(folder, TRIALS), _flags_of_trials())
    study: search.Study | None = None
    if goal is None:
        trials = [
            SweepTrial(folder_name(i, seed, settings), settings, seed)
            for i, settings in enumerate(combinations)
            for seed in range(FLAGS.seeds)
        ]
        failed = [
            trial
            for number, trial in enumerate(trials, start=1)
            if not _train(trainer, trial, f"{number}/{len(trials)}", Judge(), check)
        ]
    else:
        study = search.Study(folder, FLAGS.search, varied, goal=goal, seed=0, steps=steps)
        trials, failed = _search(trainer, study, registered, check)
    code = _compare(folder, trainer, trials, failed, study)
    if study is not None and study.best is not None:
        _show_best(folder, trainer, study.goal, *study.best)
    return code


def _show_best(
    folder: str, trainer: Trainer, goal: str, settings: Mapping[str, str], value: float
) -> None:
    """Prints the best setting of a search, and how to train with it."""
    texts = [f"{path}={text}" for path, text in settings.items()]
    mean = f"; the mean of {counted(FLAGS.seeds, 'seed')}" if FLAGS.seeds > 1 else ""
    found = f"{FLAGS.metric} {number(value)} ({ENDS[goal]} is best{mean})"
    print(f"\nbest setting: {', '.join(texts)}\n  {found}")
    words = [*trainer.flags, *(f"--set={text}" for text in texts)]
    logdir = f"--logdir={files.join(folder, 'best')}"
    print(f"train with it:\n  {typed('tekso-trainer')} {shlex.join([*words, logdir])}", flush=True)


def _check_search(*, is_grid: bool) -> None:
    """Checks the flags that only a search by Optuna uses."""
    if is_grid:
        for name in ("trials", "goal"):
            if FLAGS[name].value is not None:
                raise UsageError(f"--{name} requires --search=random, tpe or halving")
        return
    search.check_installed()
    for name in ("trials", "metric"):
        if FLAGS[name].value is None:
            raise UsageError(f"--search={FLAGS.search} requires --{name}")
    if FLAGS.search == "halving" and FLAGS.seeds > 1:
        raise UsageError("--search=halving ends trials by one curve each: it requires --seeds=1")


def _check_settings(registered: Any, varied: Sequence[space.Varied]) -> int:
    """Checks every value before the first trial; returns the most training steps of a trial."""
    steps = 0
    for path, value in [("", ""), *((one.path, v) for one in varied for v in one.examples)]:
        tree = registered.copy()
        flags: dict[str, tuple[str, Any]] = {"steps": ("run.steps", FLAGS.steps)}
        if path:
            flags[f"sweep {path}"] = path, value  # errors begin with "--sweep path=value"
        experiment_flags.change(tree, execution=FLAGS.execution, settings=FLAGS.set, flags=flags)
        if tree.run.seed != registered.run.seed:
            raise UsageError("the seeds of a sweep are set by --seeds, not by run.seed")
        metric_check.check_split(FLAGS.metric, list(tree.eval_inputs))
        steps = max(steps, tree.run.steps)
    return steps


def _tree(registered: Any, settings: Mapping[str, str]) -> Any:
    """Returns the Params of a trial."""
    changed = registered.copy()
    texts = [*FLAGS.set, *(f"{path}={value}" for path, value in settings.items())]
    flags: dict[str, tuple[str, Any]] = {"steps": ("run.steps", FLAGS.steps)}
    experiment_flags.change(changed, execution=FLAGS.execution, settings=texts, flags=flags)
    return changed


def _check_parts(registered: Any, varied: Sequence[space.Varied]) -> MetricCheck:
    """Checks --metric, and that the parts accept every value, in one combination at least."""
    from tekso.tools.sweeping import value_checks

    tree = functools.partial(_tree, registered)
    single = ({one.path: value} for one in varied for value in one.examples)
    metric = MetricCheck(FLAGS.metric, (tree(settings) for settings in ({}, *single)))
    checks = value_checks.checks_of(tree({})) if varied else []
    for one in varied:
        others = [other for other in varied if other is not one]
        for value in one.examples:
            reason = value_checks.rejection(tree, {one.path: value}, others, checks)
            if reason:
                raise UsageError(f"--sweep {one.path}={value}: {reason}")
    return metric


def _flags_of_trials() -> list[str]:
    named = {"model": FLAGS.model, "execution": FLAGS.execution, "steps": FLAGS.steps}
    found = [f"--{name}={value}" for name, value in named.items() if value is not None]
    found += [f"--import={package}" for package in FLAGS["import"].value or []]
    return found + [f"--set={setting}" for setting in FLAGS.set]


def _describe(folder: str, goal: str | None) -> None:
    """Writes what the sweep does, or checks that the sweep in the folder does the same."""
    # More trials, or seeds of a grid, continue a sweep, and so does a search with another metric
    # until it has judged a trial; other changes would mix up trials.
    names = ["model", "sweep", "set", "execution", "steps", "search"]
    if FLAGS.search != "grid":  # a grid uses the metric for its comparison only
        names += ["metric", "goal", "seeds"]
    flags = {name: goal if name == "goal" else FLAGS[name].value for name in names}

    def may_change(changed: Set[str]) -> bool:
        return changed <= {"metric", "goal"} and search.begin_again(folder)

    description.check_or_write(folder, flags, may_change=may_change)


def _train(
    trainer: Trainer, trial: SweepTrial, number: str, judge: Judge, check: MetricCheck
) -> bool:
    """Trains a trial that is not finished; returns False if its settings fail (exit code 1).

    Args:
      trainer: trains it.
      trial: the trial.
      number: its number, "3/8".
      judge: may end it early.
      check: checks that it reports --metric.

    Raises:
      UsageError: it does not report --metric.
      StoppedSweepError: the trial was stopped, or another trial would end in the same way.
    """
    read = functools.partial(trainer.records, trial)
    if trainer.code(trial) is not None:
        print(f"trial {number}: {trial.title}: finished before", flush=True)
        check.check(read, is_over=trainer.code(trial) == OK)
        return True
    print(f"trial {number}: {trial.title}: {trainer.logdir(trial)}", flush=True)

    def ends() -> bool:
        check.check(read, is_over=False)
        return judge.ends(functools.partial(trainer.evaluations, trial, FLAGS.metric))

    code = trainer.train(trial, ends)
    if code == ExitCode.NOT_FINITE:
        print("  diverged: too many steps were not finite", flush=True)
    elif code == ExitCode.FAILED:
        print(f"  failed: {trainer.last_words(trial)}", flush=True)
        return False
    elif code != OK:
        ending = _ending(trainer, trial, number, code)
        raise StoppedSweepError(
            f"{ending}\nto continue, repeat the command: it resumes the sweep", code
        )
    check.check(read, is_over=code == OK)
    return True


def _ending(trainer: Trainer, trial: SweepTrial, number: str, code: int) -> str:
    """Returns a text about a trial that ended without a result."""
    what = f"trial {number} ({trial.title}; {trainer.logdir(trial)})"
    killed_by = signal_of(code)
    if killed_by is None:
        return f"{what} ended with exit code {code}: {trainer.last_words(trial)}"
    if killed_by == signal.SIGKILL:
        return f"{what} was killed by SIGKILL, for example because the memory ran out"
    return f"{what} was ended by {killed_by.name}"


def _search(
    trainer: Trainer, study: search.Study, registered: Any, check: MetricCheck
) -> tuple[list[SweepTrial], list[SweepTrial]]:
    """Runs the trials of a search; returns those of the whole sweep, and those that failed."""
    trials: list[SweepTrial] = []
    failed: list[SweepTrial] = []

    def train(number: int, settings: Mapping[str, str], judge: Judge) -> float | None:
        values = []
        for seed in range(FLAGS.seeds):
            trial = SweepTrial(folder_name(number, seed, settings), settings, seed)
            trials.append(trial)
            if not _train(trainer, trial, f"{study.num_tried + 1}/{total}", judge, check):
                failed.append(trial)
                return None
            evaluations = judge.counted(trainer.evaluations(trial, FLAGS.metric))
            step = study.ends.get(number)
            if step is not None and step < _tree(registered, settings).run.steps:
                print(f"  ended early after step {step}: others were better by then", flush=True)
            if not evaluations and trainer.code(trial) != ExitCode.NOT_FINITE:
                known = ", ".join(trainer.metrics(trial))
                raise UsageError(f"no evaluation has --metric={FLAGS.metric}; there are {known}")
            values.append(best_of(evaluations, study.goal))
        found = [value for value in values if value is not None]
        return math.fsum(found) / len(found) if len(found) == len(values) else math.nan

    total = min(FLAGS.trials, study.num_settings or FLAGS.trials)
    if not study.run(FLAGS.trials, train):
        print(
            f"the search ended after {counted(study.num_tried, 'setting')}: the last "
            f"{search.MOST_REPEATED} that Optuna chose were tried before",
            flush=True,
        )
    if total < FLAGS.trials:
        print(f"all {counted(total, 'setting')} of the search were tried", flush=True)
    known = {trial.name: trial for trial in trials}
    names = sorted({*known, *files.names(trainer.folder)}, key=_number)
    trials = [known.get(name) or trainer.recorded(name) for name in names]
    failed += [t for t in trials if t.name not in known and trainer.has_failed(t)]
    return trials, sorted(failed, key=lambda trial: _number(trial.name))


def _number(name: str) -> tuple[str, str]:
    """Returns what sorts the folders of trials by their numbers."""
    return name.partition("_")[0].zfill(9), name


def _compare(
    folder: str,
    trainer: Trainer,
    trials: Sequence[SweepTrial],
    failed: Sequence[SweepTrial],
    study: search.Study | None,
) -> int:
    """Compares the finished trials; returns FAILED if some failed.

    The trials of a search are compared by the values by which the search judged them.
    """
    from tekso.tools import compare
    from tekso.tools.comparison.runs import Best

    done = [trainer.logdir(trial) for trial in trials if trainer.code(trial) is not None]
    if not done:
        raise StoppedSweepError("no trial finished: all of them failed", ExitCode.FAILED)
    print(f"\n{counted(len(done), 'trial')} finished\n", flush=True)
    best = None
    if study is not None:
        numbers = {f"{number:03d}": end for number, end in study.ends.items()}
        ends = {t.name: numbers.get(t.name.partition("_")[0]) for t in trials}
        best = Best(study.goal, {name: end for name, end in ends.items() if end is not None})
    output = files.join(folder, "comparison.html")
    compare.compare(done, output=output, metric=FLAGS.metric, best=best)
    for trial in failed:
        print(f"failed: {trial.title}: {trainer.last_words(trial)}", file=sys.stderr)
    return ExitCode.FAILED if failed else OK


if __name__ == "__main__":
    sys.exit(main())
