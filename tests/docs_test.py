"""Tests that every command in README.md and docs/ works.

The test runs the commands of a document one after the other in a new folder, as a reader would.
Before, it writes the Python blocks that begin with `# path/to/file.py` into this folder. `HOW` in
docs_commands.py defines for each kind of command how to run it, or names the test that covers it. A
command that matches no entry of `HOW` is an error.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fork_server
import numpy as np
import processes
import pytest
import tensorflow as tf
from docs_commands import HOW, STEPS, TESTS, Run
from docs_commands_elsewhere import TestedBy

from tekso.framework import experiment, ops
from tekso.framework.context import StepContext
from tekso.framework.costs import reference_work, stored_speeds, this_machine
from tekso.framework.initializers import Zeros
from tekso.framework.input.arrays import Arrays
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner, MultiLearner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import REQUIRED, Params, param
from tekso.framework.schedules import Cosine, end_with_run
from tekso.framework.theta import Theta, flatten, unflatten
from tekso.framework.warm_start import WarmStart
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.layers.normalization import LayerNorm
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification
from tekso.tasks.image.sources import ImageArrays
from tekso.tasks.mt.task import Translation

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIMEOUT_S = 300
LOGDIR = re.compile(r"(?:--logdir|LOGDIR)=(\S+)")
FILE = re.compile(r"# ([\w./-]+\.py)")  # the first line of a block that is a file


@dataclass(frozen=True)
class Command:
    text: str
    place: str  # file:line

    def how(self) -> Run | TestedBy | None:
        return next((how for kind, how in HOW if re.fullmatch(kind, self.text)), None)


def blocks(document: Path, language: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the fenced blocks of a language, each with the number of its first line."""
    start, lines = 0, []
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        if start and line.strip() == "```":
            yield start, lines
            start, lines = 0, []
        elif start:
            lines.append(line)
        elif re.fullmatch(rf"\s*```{language}\b.*", line):
            start = number + 1


def commands(document: Path) -> Iterator[Command]:
    """Yields the commands of a document; a backslash at the end of a line joins it to the next."""
    for first, lines in blocks(document, "(bash|sh|shell|console)"):
        text = ""
        for number, line in enumerate(lines, start=first):
            text += line.strip().removeprefix("$ ")
            if text.endswith("\\"):
                text = text.removesuffix("\\")
                continue
            text = re.sub(r"\s+#.*$", "", re.sub(r"\s+", " ", text)).strip()
            if text and not text.startswith("#"):
                yield Command(text, f"{document.relative_to(ROOT)}:{number}")
            text = ""


ALL = [command for document in DOCUMENTS for command in commands(document)]


XLA_FLAGS = "--xla_backend_optimization_level=0"  # compiles sooner


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as after `make install`, with the commands of this checkout."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("setup.py", "pyproject.toml"):
        (tmp_path / name).touch()
    programs = tmp_path / ".venv" / "bin"
    modules = {
        f"tekso-{name}": f"tekso.tools.{name.replace('-', '_')}"
        for name in ("trainer", "vocab", "benchmark", "ckpt", "new-task")
    }
    for name, module in {**modules, "tensorboard": "tensorboard.main"}.items():
        executable(programs / name, f'exec {processes.forwarding("-m", module)} "$@"\n')
    executable(programs / "python", f'exec {processes.forwarding()} "$@"\n')
    # `pytest` collects the tests with the given arguments, but does not run them.
    collect = "-m pytest --collect-only -q -p no:cacheprovider"
    start = f'cd "{ROOT}" && exec "{sys.executable}" {collect} {TESTS}'
    executable(programs / "pytest", f'{start} "$@"\n')
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / "my_text").mkdir()
    written = (document for document in DOCUMENTS if document.name != "catalogue.md")
    for number, document in enumerate(written):
        (tmp_path / "my_text" / f"{number}.txt").write_text(document.read_text() * 4)
    return tmp_path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache folder after the first plan, which measures the machine for about 100 s.

    The speeds are made up. probe_runs_test.py measures the machine.
    """
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XLA_FLAGS", XLA_FLAGS)
        path = stored_speeds._path("machine")
    # Half of the time of the machine now, so that no plan finds it faster and measures again.
    least_s = reference_work.measure().cpu_s / 2
    record = {"reference": {"cpu_s": least_s, "seconds": least_s}, "speeds": speeds()}
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))
    return folder


def speeds() -> dict[str, Any]:
    """Returns the record of a machine that does 1e9 of anything in a second."""
    names = [field.name for field in dataclasses.fields(this_machine.MachineSpeed)]
    one = {name: 1e-6 if name in this_machine.STARTS else 1e9 for name in names}
    one |= {name: [(1.0, 1e9)] for name in this_machine.POINTS}
    one |= {name: [] for name in this_machine.BY_OP}
    kinds = ("side_by_side", "alone", "alone_cpu")
    return {**dict.fromkeys(this_machine.OF_STEP, 1e-6), **dict.fromkeys(kinds, one)}


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.place)
def test_command_has_a_test(command: Command) -> None:
    how = command.how()
    assert how is not None, (
        f"{command.place}: no test runs this command:\n  {command.text}\n"
        "add how to run it to tests/docs_commands.py, or which test does to "
        "tests/docs_commands_elsewhere.py"
    )
    if isinstance(how, TestedBy):
        file, _, function = how.test.partition("::")
        names = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert function in names, f"{how.test} does not exist"


def test_every_line_of_how_is_needed() -> None:
    for kind, _ in HOW:
        assert any(re.fullmatch(kind, command.text) for command in ALL), f"no command is {kind}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    packages = "framework|models|tasks|params|tools|tests|docs"
    for name in re.findall(rf"`((?:{packages})/[\w./]*)`", document.read_text()):
        assert (ROOT / name).exists(), f"{document}: there is no {name}"


def fragments(document: Path) -> Iterator[str]:
    """Yields the Python blocks of a document that are not complete files."""
    for _, lines in blocks(document, "python"):
        if lines and not FILE.fullmatch(lines[0]):
            yield "\n".join(lines) + "\n"


def run_execution(code: str, folder: Path) -> None:
    module = importlib.import_module("tekso.framework.execution")
    names = {name: getattr(module, name) for name in module.__all__}
    exec(code, names)
    assert names["execution"](None).instantiate() is not None


def run_load(code: str, folder: Path) -> None:
    pairs = {"train": [[1.0, 2.0], [3.0, 4.0]], "dev": [[5.0, 6.0]]}
    for split, x in pairs.items():
        data = tf.data.Dataset.from_tensor_slices((x, list(range(len(x)))))
        data.save(str(folder / "pictures" / split))
    names: dict[str, Any] = {"tf": tf}
    exec(code.replace("pictures/", f"{folder}/pictures/"), names)
    kind = type("Pictures", (Arrays,), {"load": names["load"], "__module__": __name__})
    batch = kind.Params(batch_size=2, order="sequential").instantiate().batch(0)
    assert batch["x"].tolist() == pairs["train"] and batch["labels"].tolist() == [0, 1]


def run_devices(code: str, folder: Path) -> None:
    shown = "import tensorflow as tf; print(len(tf.config.list_logical_devices('CPU')))"
    done = processes.run(["-c", code + shown], cwd=folder)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def run_model(code: str, folder: Path) -> None:
    params = Classification.Params(num_classes=3, model=Mlp.Params(input_dim=4, output_dim=3))
    task = params.instantiate()
    names: dict[str, Any] = {"StepContext": StepContext, "task": task, "theta": task.init(seed=0)}
    exec(code, {**names, "x": np.ones([5, 4], np.float32)}, names)
    assert names["logits"].shape == (5, 3)


def run_warm_start(code: str, folder: Path) -> None:
    """Checks that a run accepts the Params, and that the rules rename weights."""
    names: dict[str, Any] = {"WarmStart": WarmStart}
    exec(code, names)  # the document's own code
    run = experiment.Run.Params(warm_start=names["warm_start"]).instantiate().params
    if "main" in run.warm_start:
        ((pattern, there),) = run.warm_start["main"].rules.items()
        (new,) = run.warm_start["main"].ignore
        paths = ["encoder/norm/scale", "head/w"]
        assert [re.sub(pattern, there, path) for path in paths] == [f"model/{paths[0]}", paths[1]]
        assert [bool(re.fullmatch(new, path)) for path in paths] == [False, True]
        return
    if "decoder" not in run.warm_start:
        base, adapters = run.warm_start["base"].only[0], run.warm_start["adapters"].only[0]
        paths = ["model/w", "model/w_lora_a", "model/w_lora_b"]
        assert [bool(re.fullmatch(base, path)) for path in paths] == [True, False, False]
        assert [bool(re.fullmatch(adapters, path)) for path in paths] == [False, True, True]
        return
    rules = run.warm_start["decoder"].rules
    assert {re.sub(a, b, "model/decoder/w") for a, b in rules.items()} == {"model/stack/w"}


def run_translator(code: str, folder: Path) -> None:
    """Trains on two pairs; a beam search finds both, and their log-probabilities are the loss."""
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    model = names["GruTranslator"].Params(source_vocab_size=7, target_vocab_size=5, dim=8)
    task = Translation.Params(model=model, scoring=None).instantiate()
    ctx = StepContext(mode="eval")
    source = {"source_ids": [[2, 6, 1, 0], [3, 1, 0, 0]]}
    target = {"target_ids": [[1, 3, 4], [1, 2, 0]], "target_labels": [[3, 4, 1], [2, 1, 0]]}
    segments = {"source_segment_ids": [[1, 1, 1, 0], [1, 1, 0, 0]]}
    segments |= {"target_segment_ids": [[1, 1, 1], [1, 1, 0]]}
    arrays = source | target | segments
    batch = {name: tf.constant(rows, tf.int32) for name, rows in arrays.items()}
    batch["target_weights"] = tf.cast(batch["target_segment_ids"], tf.float32)

    def total(flat: Any) -> Any:
        return task.loss(unflatten(flat), batch, ctx).loss_sum

    @tf.function(autograph=False)
    def step(flat: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(flat)
            loss = total(flat)
        gradients = tape.gradient(loss, flat)
        return {path: w - 0.2 * tf.convert_to_tensor(gradients[path]) for path, w in flat.items()}

    @tf.function(autograph=False)
    def found(flat: Any) -> Any:
        search = BeamSearch.Params(beam_size=3, max_length=4, length_normalization=0.0)
        theta = unflatten(flat).model
        return search.instantiate().search(task.model, theta, batch, ctx, end_id=1)

    flat = flatten(task.init(seed=0))
    for _ in range(100):
        flat = step(flat)
    best = found(flat)
    assert best["ids"][:, 0, :3].numpy().tolist() == [[3, 4, 1], [2, 1, 0]]
    nats = -tf.reduce_sum(best["log_probs"][:, 0])
    np.testing.assert_allclose(nats, total(flat), rtol=1e-4)


def run_cells(code: str, folder: Path) -> None:
    """Builds the source of images: the weights are those of the classes, in training only."""
    cells = np.zeros([3, 5, 2, 1], np.uint8), np.array([1, 0, 1])
    namespace = {"ImageArrays": ImageArrays, "np": np, "read_cells": lambda split: cells}
    exec(code, namespace)
    for split, weights in (("train", [4.0, 1.0, 4.0]), ("dev", [1.0, 1.0, 1.0])):
        source = namespace["Cells"].Params().instantiate(split=split)
        assert [source[i].weight for i in range(3)] == weights


def run_migrations(code: str, folder: Path) -> None:
    """Reads Params of every version of the class in the document."""
    module = types.ModuleType("of_the_document")
    sys.modules[module.__name__] = module
    try:
        exec(code, vars(module))
        for version, line in ((1, "timeout_s : 7"), (2, "timeout_ms : 7000")):
            stated = f'{{"of_the_document:Reader": {version}}}'
            read = Params.from_text(f'. : Params("of_the_document:Reader", {stated})\n{line}')
            assert (read.timeout_ms, read.retries) == (7000, 0)
        assert Params.from_text(module.Reader.Params().to_text()) == module.Reader.Params()
    finally:
        del sys.modules[module.__name__]


class EncoderAndHead(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("encoder", Mlp.Params(input_dim=4, hidden_dims=[5], output_dim=3))
        self.child("norm", LayerNorm.Params(dim=3))


def run_learner(code: str, folder: Path) -> None:
    names: dict[str, Any] = {kind.__name__: kind for kind in (AdamW, Cosine, Learner, MultiLearner)}
    exec(code, names)
    params = names["learner"](None)
    specs = EncoderAndHead.Params().instantiate().specs()
    groups = end_with_run(params, 10).instantiate().groups(specs)
    assert set(groups["others"][1]) == {"norm/scale", "norm/bias"}
    assert {group: params.learners[group].schedule.initial_value for group in groups} == {
        "encoder": 0.001,
        "others": 0.01,
    }
    (undecayed,) = params.learners["encoder"].optimizer.weight_decay_exclude
    decayed = {path for path in specs if not re.fullmatch(undecayed, path)}
    assert decayed == {path for path in specs if path.endswith("/w")} != set()


def run_figure(code: str, folder: Path) -> None:
    names: dict[str, Any] = {"tf": tf}
    exec(code, names)
    ctx = StepContext(mode="train")
    theta, weights = Theta(w=tf.constant([[1.0, -1.0, 1.0]])), tf.constant([1.0, 1.0, 0.0])
    names["fprop"](None, theta, tf.constant([[1.0], [-1.0], [1.0]]), ctx, weights)
    sums = [float(v) for v in ctx.collected.sums["metric"]["active_units"]]
    assert sums == pytest.approx([1.0, 2.0])  # without the padding


def run_penalty(code: str, folder: Path) -> None:
    """Checks that the penalty counts once, whatever the number of examples is."""
    names: dict[str, Any] = {"tf": tf}
    exec(code, names)
    theta = Theta(w=tf.constant([[1.0, -2.0]]))
    for num_examples in (2, 5):
        ctx = StepContext(mode="train", num_examples=num_examples)
        names["fprop"](None, theta, tf.ones([num_examples, 1]), ctx)
        (sums,) = ctx.collected.sums["loss"].values()
        assert float(sums[0] / sums[1]) == pytest.approx(5e-4)


class Drawing(Layer):
    """Runs code of a document in its fprop, with three equal layers."""

    def __init__(self, params: Any, code: str) -> None:
        super().__init__(params)
        self.child_list("blocks", [Mlp.Params(input_dim=4, output_dim=4, hidden_dims=[4])] * 3)
        self._code = code

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> dict[str, Any]:
        """Returns the names that the code leaves, for layer 1."""
        names: dict[str, Any] = {"ctx": ctx, "theta": theta, "self": self, "ops": ops, "x": x}
        names |= {"shape": [2, 4], "i": 1}
        exec(self._code, names)
        return names


def run_draws(code: str, folder: Path) -> None:
    """Checks that the draws of the document have different numbers."""
    layer = Drawing.Params().instantiate(code=code)
    ctx = StepContext(mode="train", num_examples=2)
    found = layer.fprop(layer.init(seed=0), tf.ones([2, 4]), ctx)
    assert np.all(found["u"] != found["v"]) and found["x"].shape == [2, 4]


def run_centered(code: str, folder: Path) -> None:
    """Checks that the moving mean takes a tenth of the mean of the batch."""
    names: dict[str, Any] = {"tf": tf, "Layer": Layer, "Zeros": Zeros}
    names |= {"REQUIRED": REQUIRED, "param": param}
    exec(code, names)
    layer = names["Centered"].Params(dim=2).instantiate()
    theta, ctx = layer.init(), StepContext(mode="train", num_examples=2)
    layer.fprop(theta, tf.constant([[1.0, -2.0], [3.0, 4.0]]), ctx)
    sums = ctx.collected.sums["statistic"].items()
    means = {name: value / weight for name, (value, weight) in sums}
    new = layer.new_statistics({"mean": theta.mean}, means)
    np.testing.assert_allclose(new["mean"], [0.2, 0.1], rtol=1e-6)


def test_code_of_other_frameworks_has_no_syntax_errors() -> None:
    """Blocks of `py` are not run, because no other framework is installed."""
    found = 0
    for document in DOCUMENTS:
        for first, lines in blocks(document, "py"):
            found += 1
            try:
                ast.parse("\n".join(lines))
            except SyntaxError as error:
                line = first + (error.lineno or 1) - 1
                pytest.fail(f"{document.relative_to(ROOT)}:{line}: {error.msg}")
    assert found, "no document has a block of `py`"


FRAGMENTS = {
    "def learner(self):": run_learner,
    'ctx.collect_metric("active_units"': run_figure,
    'ctx.collect_loss("l2"': run_penalty,
    "class Centered(Layer):": run_centered,
    "def execution(self):": run_execution,
    'name="radius"': run_draws,
    "return tf.data.Dataset.load(": run_load,
    "class Cells(ImageArrays):": run_cells,
    "class GruTranslator(Layer):": run_translator,
    "from tekso.framework.execution import devices": run_devices,
    "logits = task.model.fprop(theta.model, x": run_model,
    'WarmStart.Params(checkpoint="runs/bert"': run_warm_start,
    'checkpoint="runs/pretrained"': run_warm_start,
    'WarmStart.Params(checkpoint="runs/lora.safetensors"': run_warm_start,
    "def to_milliseconds(fields: dict[str, Any]) -> dict[str, Any]:": run_migrations,
    # Appended to the preceding file, which the test runs.
    "model = session.task.model": None,
    # Run by text_exports_test.py, in a process without Tekso.
    "import tensorflow_text": None,
}
"""{a line of a fragment: the function that runs it}."""


@pytest.mark.parametrize(
    ("document", "code"),
    [(document, code) for document in DOCUMENTS for code in fragments(document)],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_python_that_is_no_file_works(document: Path, code: str, tmp_path: Path) -> None:
    found = [run for line, run in FRAGMENTS.items() if line in code]
    assert len(found) == 1, f"{document}: expected one matching line in FRAGMENTS for\n{code}"
    if found[0] is not None:
        found[0](code, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a document has up to 20 commands
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if any(commands(path))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_of_a_document_work(document: Path, folder: Path, cache: Path) -> None:
    for _, lines in blocks(document, "python"):
        if lines and (name := FILE.fullmatch(lines[0])):
            file = folder / name[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(lines) + "\n")
        elif lines[0] == "model = session.task.model":
            file.write_text(file.read_text() + "\n".join(lines) + "\n")

    # Without what an outer `make` hands down; `tekso-trainer` and `pytest` are those of .venv.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    path = [str(folder / ".venv" / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]]
    environment["PATH"] = os.pathsep.join(path)
    environment["XDG_CACHE_HOME"] = str(cache)
    environment |= processes.GRAPH_OPTIMIZER_OFF
    environment["XLA_FLAGS"] = XLA_FLAGS
    steps: dict[str, int] = {}  # that were trained, by logdir
    for command in commands(document):
        how = command.how()
        if not isinstance(how, Run):
            continue
        if document not in runs_in(command.text):
            continue
        logdir = logdir_of(f"{command.text} {how.arguments}") if how.trains else ""
        steps[logdir] = steps.get(logdir, 0) + STEPS
        arguments = how.arguments_for(command.text, steps[logdir])
        before = log_of(folder / logdir) if how.trains else b""
        done = subprocess.run(
            ["bash", "-c", f"{command.text} {arguments}"],
            cwd=folder,
            env=environment
            | (processes.OP_BY_OP if how.is_op_by_op(command.text) else {})
            | (fork_server.UNCHECKED if how.is_checked_elsewhere(command.text) else {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        said = f"{command.place}: {command.text}\n{done.stdout}{done.stderr}"
        assert "machine_" not in done.stderr, f"the speeds of {cache} were not read: {said}"
        assert done.returncode == 0, said
        assert re.search(how.prints, done.stdout.strip()), f"want {how.prints}: {said}"
        if how.leaves:
            left = [path for path in folder.glob(how.leaves) if path.stat().st_size]
            assert left, f"want {how.leaves}: {said}"
        if how.trains:
            assert_trained(folder / logdir, before, steps[logdir], said)


def runs_in(text: str) -> list[Path]:
    """Returns the documents in which a command runs: those that use its logdir, or the first."""
    having = [path for path in DOCUMENTS if text in [one.text for one in commands(path)]]
    logdir = LOGDIR.search(text)
    using = [path for path in having if logdir and path.read_text().count(logdir[1]) > 1]
    return using or having[:1]


def logdir_of(text: str) -> str:
    found = LOGDIR.search(text)
    assert found, f"no logdir in {text}"
    return found[1]


def log_of(logdir: Path) -> bytes:
    path = logdir / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""


def assert_trained(logdir: Path, before: bytes, steps: int, said: str) -> None:
    """Asserts that a run resumed: its log keeps the earlier lines, and has lines of new steps."""
    log = log_of(logdir)
    assert log.startswith(before), f"trained again from the beginning: {said}"
    trained = [
        record["step"]
        for record in map(json.loads, log[len(before) :].splitlines())
        if record["split"] == "train"
    ]
    assert trained and trained[-1] == steps, f"trained to {trained}, want {steps}: {said}"
    assert bool(before) == (trained[0] > 1), said
    assert (logdir / "checkpoints" / f"step_{steps:08d}").is_dir(), said


def test_a_command_that_trains_nothing_is_noticed(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text(json.dumps({"step": STEPS, "split": "train"}) + "\n")
    (tmp_path / "checkpoints" / f"step_{STEPS:08d}").mkdir(parents=True)
    with pytest.raises(AssertionError, match="trained to"):
        assert_trained(tmp_path, log.read_bytes(), STEPS, "")
    with pytest.raises(AssertionError, match="from the beginning"):
        assert_trained(tmp_path, b"another line", 2 * STEPS, "")
