"""tekso-trainer: trains, evaluates, decodes, exports or inspects a registered experiment."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tekso.framework.json_text import to_json
from tekso.tools import (
    cluster_flags,
    command_errors,
    command_flags,
    experiment_flags,
    flag_modes,
    list_mode,
    trainer_flags,
)
from tekso.tools.command_errors import OK, UsageError
from tekso.tools.trainer_flags import EXAMPLE, FLAGS, PROGRAM

if TYPE_CHECKING:  # slow to import, so the functions below import these modules when they run
    from tekso.framework.experiment import Tree
    from tekso.framework.run.checkpoints import Checkpoint
    from tekso.framework.run.job import Job
    from tekso.framework.run.logdir import Logdir


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trainer; returns an `ExitCode`."""
    argv = list(sys.argv if argv is None else argv)
    return command_errors.run(PROGRAM, lambda: _run(argv), show_traceback="--traceback" in argv)


def _run(argv: list[str]) -> int:
    if command_flags.asks_for_version(argv):
        print(command_flags.version_text(PROGRAM))
        return OK
    trainer_flags.parse(["", "--help"] if argv[1:] == ["help"] else argv)
    if FLAGS.help:
        print(trainer_flags.help_text())
        return OK
    if FLAGS.supervise:
        return _supervised(argv)
    return _act(argv)


def _supervised(argv: list[str]) -> int:
    """Runs the trainer in forks, and restarts it; TensorFlow is imported only in the forks."""
    from tekso.tools.supervisor import Supervisor, checkpoints_in

    supervisor = Supervisor(
        restarts=FLAGS.restarts,
        progress=lambda: checkpoints_in(_logdir_path()),
        log=lambda text: print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True),
    )
    show_traceback = "--traceback" in argv
    act = functools.partial(_act, argv)
    return supervisor.run(lambda: command_errors.run(PROGRAM, act, show_traceback=show_traceback))


def _act(argv: list[str]) -> int:
    begin = time.perf_counter()
    if FLAGS.logdir == "":
        raise UsageError("--logdir is empty: give a folder, or remove the flag to use runs/MODEL")
    if FLAGS["list"].value is None and FLAGS.mode != "replay":
        _logdir_path()  # an error before the slow imports
    experiment_flags.load(FLAGS.model, FLAGS["import"].value or [])
    if FLAGS["list"].value is not None:
        return list_mode.run(FLAGS["list"].value, as_json=FLAGS.format == "json")
    actions: dict[str, Callable[[list[str]], int]] = {
        "train": functools.partial(_train, begin=begin),
        "eval": _eval,
        "follow": _follow,
        "decode": _decode,
        "export": _export,
        "replay": _replay,
        "inspect_params": _inspect_params,
        "inspect_model": _inspect_model,
        "inspect_sharding": _inspect_sharding,
        "inspect_pipeline": _inspect_pipeline,
        "plan": _plan,
    }
    return actions[FLAGS.mode](argv)


# --- flags ---


def _logdir_path() -> str:
    path = FLAGS.logdir or (f"runs/{FLAGS.model}" if FLAGS.model else "")
    if not path:
        raise UsageError(f"--model is missing, as in {EXAMPLE}; --list shows all")
    return os.path.expanduser(path)


def _logdir() -> Logdir:
    from tekso.framework.run.logdir import Logdir

    return Logdir(_logdir_path())


def _experiment() -> tuple[str, Tree.Params, Tree.Params]:
    """Returns the key of --model or --logdir, its tree changed by the flags, and as registered."""
    from tekso.framework import registry

    if FLAGS.model:
        experiment = experiment_flags.experiment(FLAGS.model)
        model, tree = registry.key_of(experiment), experiment().tree()
        registered = tree.copy()
    else:
        model, tree = _logdir().experiment()
        registered = experiment_flags.experiment(model)().tree()
    _change(tree)
    return model, tree, registered


def _change(tree: Tree.Params) -> None:
    flags = {
        "steps": ("run.steps", FLAGS.steps),
        "seed": ("run.seed", FLAGS.seed),
        "log_every": ("run.log_every_steps", FLAGS.log_every),
        "deterministic": ("run.deterministic", FLAGS.deterministic),
    }
    if FLAGS.warm_start == "":  # an empty variable of a script would train from random weights
        raise UsageError("--warm_start is empty: give the folder of a run or of a checkpoint")
    if FLAGS.warm_start and not tree.run.warm_start:  # before --set run.warm_start.main.…
        _set_warm_start(tree, os.path.expanduser(FLAGS.warm_start))
    experiment_flags.change(tree, execution=FLAGS.execution, settings=FLAGS.set, flags=flags)
    if FLAGS.warm_start:
        _set_warm_start(tree, os.path.expanduser(FLAGS.warm_start))


def _set_warm_start(tree: Tree.Params, checkpoint: str) -> None:
    from tekso.framework.params.paths import join_key
    from tekso.framework.warm_start import WarmStart

    sources = tree.run.warm_start
    if len(sources) > 1:
        raise UsageError(
            f"--warm_start sets one checkpoint, but run.warm_start has {', '.join(sources)}: set "
            "each by --set run.warm_start.NAME.checkpoint=PATH"
        )
    if not sources:
        tree.run.warm_start = {"main": WarmStart.Params()}
    for name in tree.run.warm_start:
        path = join_key("run.warm_start", name)
        tree.set_text(f"{path}.checkpoint", repr(checkpoint), origin="--warm_start")


def _job(model: str, tree: Tree.Params, registered: Tree.Params, argv: list[str]) -> Job:
    from tekso.framework.run.following import FollowingConsole
    from tekso.framework.run.job import Job
    from tekso.framework.run.report.console import Console, console_for

    console: Console = console_for(sys.stderr if FLAGS.format == "json" else sys.stdout)
    cluster = cluster_flags.find(FLAGS)
    if cluster is not None and cluster.process > 0:
        console = FollowingConsole(console, cluster.process)
    return Job(
        model=model,
        tree=tree,
        registered=registered,
        logdir=_logdir(),
        console=console,
        command=[PROGRAM, *argv[1:]],
        imports=FLAGS["import"].value or [],
        tpu=FLAGS.tpu,
        cpu_devices=FLAGS.cpu_devices,
        cluster=cluster,
        cluster_timeout_s=FLAGS.cluster_timeout_s,
        cluster_token_file=FLAGS.cluster_token_file,
        wait_limit_s=FLAGS.wait_limit_s,
        shows_step=FLAGS.trace_pipeline,
    )


# --- modes ---


def _train(argv: list[str], *, begin: float) -> int:
    from tekso.framework.run import modes

    if FLAGS.format == "json":
        raise UsageError(
            "--format=json works with --list and every mode except train and follow: training "
            "writes its figures as JSON to metrics.jsonl in the logdir"
        )
    model, tree, registered = _experiment()
    if FLAGS.trace_pipeline:
        from tekso.framework.run import pipeline_plan

        pipeline_plan.check_can_be_traced(tree)
    job = _job(model, tree, registered, argv)
    profiled = trainer_flags.profile_steps()
    return modes.train(dataclasses.replace(job, profile_steps=profiled, begin=begin))


def _job_of_checkpoint(argv: list[str], *, reads_data: bool) -> tuple[Job, Checkpoint]:
    """Returns the checkpoint, and a job with the tree of the checkpoint, changed by the flags.

    If the data is not read, the sizes that training took from the data are filled in.
    """
    from tekso.framework import registry
    from tekso.framework.run.opened import open_run
    from tekso.framework.run.report.console import console_for

    logdir, console = _logdir(), console_for(sys.stderr)
    if FLAGS.model and FLAGS.checkpoint is None:
        logdir.check_model(registry.key_of(experiment_flags.experiment(FLAGS.model)))
    warn = functools.partial(console.line, style="warning")
    run = open_run(logdir.path, FLAGS.checkpoint, warn=warn)
    tree = run.tree() if reads_data else run.completed_tree()
    _change(tree)
    return _job(run.model, tree, tree, argv), run.checkpoint


def _eval(argv: list[str]) -> int:
    from tekso.framework.run import checkpoint_modes

    job, checkpoint = _job_of_checkpoint(argv, reads_data=True)
    figures = checkpoint_modes.evaluate(job, checkpoint)
    if FLAGS.format == "json" and job.is_first:
        _print_json(figures)
    return OK


def _follow(argv: list[str]) -> int:
    from tekso.framework import registry
    from tekso.framework.run import checkpoint_modes, missing_run

    logdir = _logdir()
    missing_run.wait(logdir)
    if FLAGS.model:
        logdir.check_model(registry.key_of(experiment_flags.experiment(FLAGS.model)))
    model, tree = logdir.experiment()
    _change(tree)
    checkpoint_modes.follow(_job(model, tree, tree, argv))
    return OK


def _decode(argv: list[str]) -> int:
    from tekso.framework.run import checkpoint_modes

    job, checkpoint = _job_of_checkpoint(argv, reads_data=False)
    decoded = checkpoint_modes.decode(job, checkpoint)
    if not job.is_first:
        return OK
    if FLAGS.format == "json":
        _print_json(
            {
                "model": job.model,
                "checkpoint": checkpoint.path,
                "step": checkpoint.step,
                "records": decoded.records,
            }
        )
    else:
        print(decoded.text)
    return OK


def _export(argv: list[str]) -> int:
    from tekso.tools import export_mode

    job, checkpoint = _job_of_checkpoint(argv, reads_data=False)
    return export_mode.run(
        job.model,
        job.tree,
        checkpoint,
        job.logdir,
        output=FLAGS.output,
        batch_size=FLAGS.export_batch_size,
        lengths=FLAGS.export_lengths,
        litert=FLAGS.litert,
        as_json=FLAGS.format == "json",
    )


def _replay(argv: list[str]) -> int:
    from tekso.framework.run import replay
    from tekso.framework.run.report.console import console_for
    from tekso.framework.tables import terminal_width

    if not FLAGS.incident:
        raise UsageError("--mode=replay requires --incident=LOGDIR/incidents/step_…")
    warn = functools.partial(console_for(sys.stderr).line, style="warning")
    record = replay.replay(FLAGS.incident, warn=warn)
    _print(record, functools.partial(replay.text, width=terminal_width()))
    return OK


def _inspect_params(argv: list[str]) -> int:
    from tekso.framework.run import inspection

    model, tree, _ = _experiment()
    record = inspection.params_record(model, tree)
    _print(record, inspection.params_text)
    return OK


def _inspect_model(argv: list[str]) -> int:
    from tekso.framework.run import inspection
    from tekso.framework.tables import terminal_width

    model, tree, _ = _experiment()
    task = inspection.task_of(tree, assets_dir=_assets_dir(model))
    record = inspection.model_record(model, task)
    _print(record, functools.partial(inspection.model_text, width=terminal_width()))
    return OK


def _inspect_sharding(argv: list[str]) -> int:
    from tekso.tools import layout_search_mode, sharding_mode

    model, tree, _ = _experiment()
    assets_dir = _assets_dir(model)
    if FLAGS.auto:
        return layout_search_mode.run(
            model,
            tree,
            assets_dir=assets_dir,
            device=FLAGS.device,
            num_devices=FLAGS.devices,
            as_json=FLAGS.format == "json",
        )
    return sharding_mode.run(
        model,
        tree,
        assets_dir=assets_dir,
        num_devices=FLAGS.cpu_devices,
        as_json=FLAGS.format == "json",
    )


def _inspect_pipeline(argv: list[str]) -> int:
    from tekso.tools import pipeline_mode

    model, tree, _ = _experiment()
    return pipeline_mode.run(
        model,
        tree,
        assets_dir=_assets_dir(model),
        as_json=FLAGS.format == "json",
        picture=FLAGS.output,
    )


def _plan(argv: list[str]) -> int:
    from tekso.tools import plan_mode

    model, tree, _ = _experiment()
    logdir = _logdir()
    logdir.check_model(model)
    return plan_mode.run(
        model,
        tree,
        logdir=logdir.path,
        assets_dir=logdir.assets if logdir.model() is not None else None,
        device=FLAGS.device if flag_modes.is_given(FLAGS["device"]) else "this_machine",
        num_devices=FLAGS.devices,
        searches=FLAGS.auto,
        as_json=FLAGS.format == "json",
    )


def _assets_dir(model: str) -> str | None:
    """Returns the assets folder of the run in --logdir; None without --logdir."""
    if not FLAGS.logdir:
        return None
    logdir = _logdir()
    if logdir.model() is None:
        raise UsageError(
            f"--logdir={FLAGS.logdir}: there is no run; to show an experiment, give only --model"
        )
    logdir.check_model(model)
    return logdir.assets


def _print(record: dict[str, Any], to_text: Callable[[dict[str, Any]], str]) -> None:
    if FLAGS.format == "json":
        _print_json(record)
    else:
        print(to_text(record))


def _print_json(record: Any) -> None:
    print(to_json(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
