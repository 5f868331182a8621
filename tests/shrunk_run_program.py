"""Runs shrunk experiments through all modes of the trainer, as a user would; for tests.

    shrunk_run_program.py [--op_by_op] EXPERIMENT… FOLDER

    train   step 1, traced as for a user, without evaluation; tries to decode; saves, decodes
    train   restores, evaluates after step 2
    eval    restores, evaluates on one device; op by op
    decode  restores, compares what the task is given with the checkpoint, decodes; op by op
    export  restores, traces the exported functions
    call    loads the export, and compares it with the restored model

Each mode is another call of the trainer, which knows only the logdir. All run in one process, so
that nothing is imported twice. With DataParallel, only the first step and the exported functions
are traced, because tracing takes most of the time: op by op, the same code computes the same. With
the other executions, it is the second step and its evaluation; the first step runs on one device,
op by op, and so do `eval` and `decode`. Runs that resume under each of them are in tests/chaos/.
Only the first mode checks what the functions of the task, the schedule and the update read, and
only the second one checks the restored task.
With `--op_by_op`, the first step is not traced, either.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import fork_server
import numpy as np
import shrunk_experiments
import tensorflow as tf

from tekso.framework import registry, task_results
from tekso.framework.context import StepContext
from tekso.framework.execution import devices
from tekso.framework.exit_codes import ExitCode
from tekso.framework.exports import ExportedFunction
from tekso.framework.params import references
from tekso.framework.params import tree as params_tree
from tekso.framework.run import assembly, inspection, loss_check, saved_model
from tekso.framework.run.opened import open_run
from tekso.framework.run.weights import load_weights
from tekso.framework.theta import Theta, flatten
from tekso.models.decoding.search import Search
from tekso.tools import trainer

MODULES = (
    "shrunk_experiments",
    "small_boxes",
    "small_captions",
    "small_masks",
    "small_pictures",
)
OP_BY_OP = "--op_by_op"
DEVICES = 4  # of a mesh of 2 x 2, or of a pipeline
EXAMPLES = 2
LONGEST = 3  # tokens that a search finds: each is computed op by op
SCORE = "score"  # the exported function that is compared; else the first one, often a search
SAME_MODELS = ("multi.cldr_and_python",)
"""Modules whose experiments export the same functions of the same models, with other tasks. Op by
op, they count as experiments of one task and input: of these, a process exports each function once,
and of every experiment the one that is compared."""

SEARCHED_ELSEWHERE = {
    "asr.prompts.Las": "tests/tasks/asr/exports_test.py",
    "asr.prompts.Rnnt": "tests/tasks/asr/exports_test.py",
    "mt.cldr.Many": "mt.cldr.EnDe",
    "mt.text_files.Base": "mt.cldr.EnDe",
    "mt.text_files.Lstm": "mt.cldr.EnDeLstm",
    "multi.digits_and_cldr.Shared": "multi.cldr_and_python.Shared",
    "multi.punctuator.WithTranslation": "multi.cldr_and_python.Shared",
    "multi.smart_reply.Docstrings": "multi.cldr_and_python.Shared",
}
"""{an experiment: a test, or an experiment, that exports the same searches}. Op by op, it exports
only the function that is compared."""


def register(key: str) -> str:
    """Registers the shrunk form of an experiment; returns its key."""
    name = f"Shrunk{key.title().replace('.', '').replace('_', '')}"
    original = registry.get(key)

    def tree(self: Any) -> Any:
        small = shrunk_experiments.shrunk(original.tree(self))
        small.set({"run.steps": 2, "run.decode_at_end": False})
        if "xla" in small.execution:
            small.execution.xla = "none"  # compiling costs more than the rest
        if "towers" in small.execution:
            small.execution.towers = 1  # so that a step is traced once
        if "mesh" in small.execution and small.execution.mesh:
            small.execution.mesh = re.sub(r":\d+", ":2", small.execution.mesh)
        small.run.warm_start = {}
        for _, value, _ in params_tree.walk(small.task):
            if isinstance(value, Search.Params):
                value.max_length = LONGEST
        for _, input in shrunk_experiments.pairs(small):
            for split in ("dev", "test"):
                if "corpus" in input and split in input.corpus:
                    input.corpus.set({split: input.corpus.train[:8]})
        for one in small.eval_inputs.values():
            held_out = one.input if "task" in one else one
            held_out.max_batches = 1
            # The corpus in memory has no settings of the original one.
            for path in [path for path in held_out.changes if path.startswith("corpus.")]:
                del held_out.changes[path]
        return small

    fields = {"__doc__": "Shrunk.", "__module__": "shrunk_run", "tree": tree}
    registry.register(type(name, (original,), fields))
    return f"shrunk_run.{name}"


def main() -> int:
    """Runs the modes for the experiments of the command line, in folders of its last argument."""
    *keys, folder = sys.argv[1:]
    is_first_traced = keys[0] != OP_BY_OP
    keys = keys if is_first_traced else keys[1:]
    for module in MODULES:
        references.allow_imports(module)
    # The graph optimizer is off, and stays so: after a mesh, an experiment would enable it.
    devices.set_graph_optimizer = lambda wanted: None
    devices.setup_cpu(logical_devices=DEVICES)
    fork_server.draw_no_pixels()
    exported: dict[str, set[str]] = {}
    for key in keys:
        name = register(key)
        tree = registry.get(name)().tree()
        same = tree.task.to_text() + tree.input.to_text()
        if not is_first_traced and key.startswith(SAME_MODELS):
            same = key.rpartition(".")[0]
        code = _run(
            name,
            Path(folder) / key,
            decodes=key not in shrunk_experiments.NOTHING_DECODED,
            is_first_traced=is_first_traced,
            exports_all=is_first_traced or key not in SEARCHED_ELSEWHERE,
            exported=exported.setdefault(same, set()),
        )
        if code != ExitCode.OK:
            return code
        print(f"== {key}: done", flush=True)
    return ExitCode.OK


def _run(
    model_key: str,
    logdir: Path,
    *,
    decodes: bool,
    is_first_traced: bool,
    exports_all: bool,
    exported: set[str],
) -> int:
    """Runs the modes for an experiment; returns the exit code of the first that fails.

    Args:
      exports_all: whether to export other functions than the one that is compared.
      exported: the functions that are not exported again; this adds those that are.
    """
    model = ["--model", model_key, "--logdir", str(logdir)]
    no_evaluation = ["--set=eval_inputs={}", "--set=run.keep_best.eval_input=None"]
    tree = registry.get(model_key)().tree()
    can_run_op_by_op = "towers" in tree.execution
    one_device = ["--execution=data_parallel", "--set=execution.xla=none"]
    alone = [] if can_run_op_by_op else [*one_device, "--set=execution.towers=1"]
    # Later experiments of the same task and input have another execution: tests/chaos/ decodes
    # after training under each.
    decodes_at_end = is_first_traced and not exported
    decoding_flags = ["--set=run.decode_at_end=True"] if decodes_at_end else []
    write = _NewFunctions(saved_model.write, exported, exports_all=exports_all)
    check_functions, check_restored = assembly._check_functions, loss_check.check_restored
    for words, is_traced in (
        (
            [*model, "--steps=1", *no_evaluation, *decoding_flags, *alone],
            is_first_traced and can_run_op_by_op,
        ),
        ([*model, "--steps=2"], not can_run_op_by_op),
        *([(["--mode=eval", *model, *alone], False)] if tree.eval_inputs else []),
        *([(["--mode=decode", *model], False)] if decodes else []),
        (["--mode=export", *model, "--export_batch_size=1"], True),
    ):
        print(f"== {' '.join(words)}", flush=True)
        tf.config.run_functions_eagerly(not is_traced)
        decoding = _Decoding(task_results.decode, logdir)
        decode = decoding if "--mode=decode" in words else task_results.decode
        with (
            mock.patch.object(task_results, "decode", decode),
            mock.patch.object(saved_model, "write", write),
            mock.patch.object(assembly, "_check_functions", check_functions),
            mock.patch.object(loss_check, "check_restored", check_restored),
        ):
            code = trainer.main(["tekso-trainer", *words])
        check_functions = _check_nothing
        if "--steps=2" in words:
            check_restored = _find_nothing
        if code != ExitCode.OK:
            return int(code)
        if decoding.has_compared != ("--mode=decode" in words):
            raise ValueError(f"the weights of decoding were not compared by {words}")
    _call(logdir, write.names)
    return ExitCode.OK


def _check_nothing(*_: Any) -> None:
    """Takes the place of a check that an earlier mode has made."""


def _find_nothing(*_: Any, **__: Any) -> loss_check.Findings:
    """Takes the place of the check of a restored task, which an earlier mode has made."""
    return loss_check.Findings()


class _NewFunctions:
    """Writes a SavedModel of the functions that are not exported yet, and the one to compare."""

    def __init__(self, write: Any, exported: set[str], *, exports_all: bool) -> None:
        self._write, self._exported, self._exports_all = write, exported, exports_all
        self.names: list[str] = []  # of the functions that were written

    def __call__(self, path: str, module: Any, functions: Any, *, texts: Any, **rest: Any) -> None:
        left_out = self._exported if self._exports_all else set(functions)
        left_out = left_out - {_compared(functions)}
        kept = {name: one for name, one in functions.items() if name not in left_out}
        texts = {name: one for name, one in texts.items() if name in kept}
        self._write(path, module, kept, texts=texts, **rest)
        self.names = list(kept)
        self._exported.update(kept)


def _compared(functions: Any) -> str:
    """Returns the name of the exported function that is compared."""
    return SCORE if SCORE in functions else next(iter(functions))


class _Decoding:
    """Decodes after it has compared what the functions of the task get with the checkpoint."""

    def __init__(self, decode: Any, logdir: Path) -> None:
        self._decode, self._logdir = decode, logdir
        self.has_compared = False

    def __call__(self, task: Any, program: Any, input: Any) -> Any:
        if not self.has_compared:  # or it is one of several tasks
            self._compare(task, program)
            self.has_compared = True
        return self._decode(task, program, input)

    def _compare(self, task: Any, program: Any) -> None:
        found = flatten(program.call(_restored))
        wanted = flatten(load_weights(task, str(self._logdir)))
        if found.keys() != wanted.keys():
            raise ValueError(f"decoding has other weights: {found.keys() ^ wanted.keys()}")
        for path, value in found.items():
            stored = tf.cast(wanted[path], value.dtype)  # may compute in fewer bits
            np.testing.assert_array_equal(value.numpy(), stored.numpy(), err_msg=path)


def _restored(theta: Theta, ctx: StepContext) -> Theta:
    if ctx.mode != "decode":
        raise ValueError(f"the mode of decoding is {ctx.mode}")
    return theta


def _call(logdir: Path, names: list[str]) -> None:
    """Calls the functions of an export; compares one of them with the restored model."""
    tf.config.run_functions_eagerly(True)
    run = open_run(str(logdir))
    task, tree = run.task(), run.completed_tree()
    theta = load_weights(task, str(logdir))
    functions = task_results.exports(task, inspection.known_input(tree, run.logdir.assets))
    loaded = tf.saved_model.load(str(logdir / "export"))
    compared = _compared(functions)
    for name in names:
        one = functions[name]
        values = _values(one)
        seeds = {"seed": tf.constant(0, tf.int64)} if one.is_random else {}
        found = loaded.signatures[name](**values, **seeds)
        for output in one.outputs:
            if np.isnan(found[output].numpy()).any():
                raise ValueError(f"{output} of the exported {name} is NaN")
        if name == compared:
            ctx = StepContext(mode="decode", seed=tree.run.seed)
            wanted = one.function(theta, *values.values(), ctx)
            for output in one.outputs:
                _compare(f"{name}: {output}", found[output].numpy(), wanted[output].numpy())
        print(f"== called {name}", flush=True)


def _values(exported: ExportedFunction) -> dict[str, tf.Tensor]:
    """Returns drawn inputs; all rows have the shortest exported length."""
    rng = np.random.default_rng(1)
    length, values = exported.lengths[0], {}
    rows = [one.length_in(length) for one in exported.inputs.values() if one.has_length]
    for name, one in exported.inputs.items():
        shape = (EXAMPLES, *one.dims(length))
        dtype = tf.as_dtype(one.dtype)
        if dtype.is_floating:
            value = rng.normal(0, 0.1, shape)
        elif rows and not one.has_length and not one.shape:
            value = np.full(shape, min(rows))  # lengths of the rows
        else:
            value = rng.integers(1, 8, shape)
        values[name] = tf.constant(value, dtype)
    return values


def _compare(what: str, found: np.ndarray, wanted: np.ndarray) -> None:
    found = found[tuple(slice(n) for n in wanted.shape)]  # other lengths may be longer
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5, err_msg=what)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=what)


if __name__ == "__main__":
    sys.exit(main())
