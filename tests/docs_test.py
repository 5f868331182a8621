"""Tests that every command in README.md and docs/ works.

The test runs the commands of a document one after the other in a new folder, as a reader would.
Before, it writes the Python blocks that begin with `# path/to/file.py` into this folder. `HOW`
defines for each kind of command how to run it, or names the test that covers it. A command that
matches no entry of `HOW` is an error.
"""

from __future__ import annotations

import ast
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

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework import experiment
from tekso.framework.context import StepContext
from tekso.framework.input.arrays import Arrays
from tekso.framework.params import Params
from tekso.framework.warm_start import WarmStart
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIMEOUT_S = 300
FILE = re.compile(r"# ([\w./-]+\.py)")  # the first line of a block that is a file


@dataclass(frozen=True)
class Run:
    """A command that the test runs unchanged, with further arguments that make it short.

    Attributes:
      arguments: arguments to append, which override earlier ones. "{steps}" is replaced by a number
        of steps that is larger for each command on the same logdir, so that each of them trains.
      prints: a regular expression that the output must contain.
      leaves: a glob for files in the folder, one of which must not be empty afterwards.
    """

    arguments: str = ""
    prints: str = r"\S"
    leaves: str = ""

    @property
    def trains(self) -> bool:
        return "{steps}" in self.arguments


@dataclass(frozen=True)
class TestedBy:
    """A command that cannot run here (it needs a network, for example); another test covers it."""

    __test__ = False

    test: str  # file::function


STEPS = 2
"""Steps that each command trains."""
# The test is about commands, not sizes: one layer is traced much faster than four.
SHORT = (
    "--steps={steps} --set run.decode_at_end=false --set eval_inputs.dev.max_batches=1 "
    "--set execution.xla=none"
)
SMALL = f"{SHORT} --set *.num_layers=1"
TWO_STAGES = f"{SHORT} --set *.num_layers=2 --set execution.num_stages=2"
TESTS = "tests/packaging_test.py"
"""The tests that `pytest` commands of the documents collect; all tests would take long."""

# Regular expressions for complete commands; the first match is used.
HOW: list[tuple[str, Run | TestedBy]] = [
    (r"make train", Run(f"LOGDIR=runs/made ARGS='{SMALL}'")),
    (r"make test", Run(prints=r"packaging_test\.py::test_")),
    (r"make install", Run(prints="up to date|Nothing to be done")),
    (r"python3.11 -m venv \.venv", TestedBy("tests/make_test.py::test_install_makes_a_venv")),
    (r"\. \.venv/bin/activate", TestedBy("tests/make_test.py::test_install_makes_a_venv")),
    (
        r"pip install tensorflow-cpu",
        TestedBy("tests/packaging_test.py::test_required_is_the_tensorflow_that_is_installed"),
    ),
    (
        r"pip install -e '\.\[test\]'",
        TestedBy("tests/packaging_test.py::test_editable_installation_imports_the_source"),
    ),
    (
        r"(apt-get download|dpkg-deb -x) .*",
        TestedBy("tests/tasks/image/sources_test.py::test_missing_fashion_mnist_names_its_package"),
    ),
    (
        r"tekso-trainer .*image\.fashion_mnist.*",
        TestedBy(
            "tests/params/image/fashion_mnist_test.py"
            "::test_the_files_of_the_package_are_trained_on_and_scored"
        ),
    ),
    (
        r"pip install ale-py|tekso-trainer .*image\.pong.*",
        TestedBy("tests/tasks/detection/sources_test.py::test_without_ale_py_pong_names_it"),
    ),
    (
        r"pip download .*deepforest.*|unzip deepforest.*|tekso-trainer .*image\.trees.*",
        TestedBy(
            "tests/tasks/detection/sources_test.py::test_what_is_wrong_with_a_voc_file_is_said"
        ),
    ),
    (
        r"tekso-(trainer|decode) .*runs/boxes.*",
        TestedBy(
            "tests/params/image/boxes_test.py"
            "::test_files_in_the_format_of_coco_are_trained_on_scored_and_searched"
        ),
    ),
    (
        r"npm pack emoji-datasource.*|tar xzf emoji-datasource.*",
        TestedBy(
            "tests/tasks/captioning/sources_test.py"
            "::test_without_the_package_of_emoji_the_error_says_how_to_get_it"
        ),
    ),
    (
        r"tekso-trainer .*(image\.emoji\.Caption|runs/emoji ).*",
        TestedBy("tests/params/image/emoji_test.py::test_emoji_are_captioned_and_scored"),
    ),
    (
        r"tekso-trainer .*(image\.emoji\.DualEncoder|runs/names ).*",
        TestedBy("tests/params/image/emoji_test.py::test_emoji_are_found_by_their_names"),
    ),
    (
        r"tekso-trainer .*image\.glyphs.*",
        TestedBy("tests/tasks/image/glyphs_test.py::test_clones_and_relatives_are_one_family"),
    ),
    (
        r"tekso-trainer .*(image\.unet\.(Shapes|Volumes)|runs/volumes ).*",
        TestedBy(
            "tests/params/image/unet_test.py::test_volumes_are_trained_on_scored_and_segmented"
        ),
    ),
    (
        r"tekso-trainer .*image\.unet.*",
        TestedBy(
            "tests/params/image/unet_test.py::test_folders_are_trained_on_scored_and_segmented"
        ),
    ),
    (
        r"pip install (-e '\.\[images,speech\]'|'tekso\[images\]')",
        TestedBy("tests/packaging_test.py::test_wheel_has_the_extras_of_the_readme"),
    ),
    (
        r"pip install scikit-learn",
        TestedBy("tests/first_task_test.py::test_scikit_learn_is_needed_by_the_page_alone"),
    ),
    (
        r"tekso-trainer --model=\S+ --logdir=\S+ --cluster=\S+ --process=.*",
        TestedBy(
            "tests/framework/execution/data_parallel_processes_test.py"
            "::test_lost_process_is_named_and_the_same_command_resumes"
        ),
    ),
    (
        r"tekso-trainer .*--supervise.*",
        TestedBy(
            "tests/framework/execution/data_parallel_processes_test.py"
            "::test_supervisor_restarts_a_run_that_is_killed_again_and_again"
        ),
    ),
    (
        r"tekso-trainer .*--process=.*",
        TestedBy(
            "tests/framework/execution/mesh/processes_test.py"
            "::test_lost_process_is_named_and_the_same_command_goes_on"
        ),
    ),
    (
        r"tekso-trainer .*execution\.updates.*",
        TestedBy(
            "tests/framework/execution/parameter_servers_test.py"
            "::test_workers_are_lost_and_one_comes_back_and_a_lost_server_ends_the_run"
        ),
    ),
    (
        r"tekso-(worker --address|trainer .*execution\.workers)=.*",
        TestedBy(
            "tests/framework/execution/pipeline/remote_test.py"
            "::test_two_workers_train_as_one_process_and_a_lost_one_is_named"
        ),
    ),
    (
        r"tekso-trainer --model=lm\.python_source\.Tiny(Mesh|Spmd)Pipeline .*",
        TestedBy(
            "tests/framework/execution/pipeline/experiments_test.py"
            "::test_it_gives_the_figures_of_one_device"
        ),
    ),
    (
        r"python tests/chaos/kill_runs\.py .*",
        TestedBy(
            "tests/chaos/killer_test.py"
            "::test_a_run_that_is_killed_and_damaged_is_the_same_to_the_last_bit"
        ),
    ),
    (
        r"python tests/compare_experiments\.py .*",
        TestedBy("tests/compare_experiments_test.py::test_it_selects_what_has_no_result"),
    ),
    (
        r"python tests/fuzz_executions\.py .*",
        TestedBy("tests/fuzz_executions_test.py::test_the_program_repeats_a_case"),
    ),
    (
        r"srun .*tekso-trainer .*",
        TestedBy(
            "tests/framework/cluster_test.py::test_slurm_gives_processes_of_a_node_successive_ports"
        ),
    ),
    (
        r"tekso-(ckpt average|trainer --mode=eval) .*averaged",
        TestedBy("tests/tools/ckpt_test.py::test_an_average_is_evaluated_decoded_and_trained_on"),
    ),
    (
        r"tekso-(trainer|decode) .*--logdir=runs/pair.*",
        TestedBy(
            "tests/params/multi/commands_test.py::test_a_trigger_classifies_lines_and_is_exported"
        ),
    ),
    (
        r"tekso-trainer .*runs/(shared|teacher|student).*|tekso-decode .*--task=.*",
        TestedBy(
            "tests/params/multi/commands_test.py"
            "::test_two_tasks_are_trained_evaluated_decoded_and_one_is_distilled"
        ),
    ),
    (
        r"tekso-trainer .*--logdir=runs/python( .*)?",
        TestedBy(
            "tests/tools/trainer_test.py"
            "::test_the_default_experiment_trains_evaluates_samples_and_goes_on"
        ),
    ),
    (
        r"tekso-trainer .*--model=my_tasks\.\w+ .*",
        Run("--steps={steps} --set execution.xla=none", prints="petals/accuracy"),
    ),
    (
        r"tekso-(decode .*--language|trainer .*--mode=decode .*task\.decode_language)=.*",
        TestedBy("tests/tools/decode_test.py::test_a_model_of_several_languages_is_told_which"),
    ),
    (
        r"tekso-decode .*--pictures=found_masks",
        TestedBy(
            "tests/tools/decode_images_test.py"
            "::test_masks_are_palette_files_of_the_size_of_the_image_that_the_source_of_masks_reads"
        ),
    ),
    (
        r"tekso-trainer .*--logdir=runs/new_head .*",
        TestedBy(
            "tests/framework/run/initial_weights_test.py"
            "::test_several_checkpoints_and_weights_that_keep_their_initial_values"
        ),
    ),
    (
        r"tekso-decode .*--input=pictures .*",
        TestedBy("tests/tools/decode_images_test.py::test_every_image_of_a_folder_gets_a_line"),
    ),
    (
        r"tekso-decode .*",
        TestedBy(
            "tests/tools/decode_test.py::test_every_line_has_its_translation_and_empty_lines_stay"
        ),
    ),
    (  # the largest models, which take half a minute each
        r"tekso-trainer --mode=inspect_sharding --model=lm\.one_billion_words\.MeshDff262144",
        TestedBy(
            "tests/tools/trainer_listing_test.py"
            "::test_inspect_sharding_of_4_9_billion_weights_on_512_devices"
        ),
    ),
    (  # searches some thousand layouts
        r"tekso-trainer --mode=inspect_sharding --auto --model=lm\.one_billion_words\.Dff262144 .*",
        TestedBy(
            "tests/framework/planning/layout_search_test.py"
            "::test_on_the_model_of_the_paper_its_layout_or_a_better_one_is_the_best"
        ),
    ),
    (
        r"tekso-trainer --mode=inspect_pipeline --model=lm\.gpipe\.Layers1663",
        TestedBy(
            "tests/framework/run/pipeline_plan_test.py"
            "::test_deepest_model_on_128_devices_is_traced_piece_by_piece_of_a_kind_and_needs_no_"
            "devices"
        ),
    ),
    (
        r"tekso-(ckpt convert .*--layout=gpt2|trainer --mode=eval --logdir=runs/gpt2) .*",
        TestedBy("tests/tools/weight_commands_test.py::test_an_imported_gpt2_is_evaluated"),
    ),
    (r"tekso-ckpt (convert|merge) .*", Run(prints=r"wrote|merged")),
    (
        r"(arecord .*)?tekso-decode --logdir=runs/prompts .*",
        TestedBy(
            "tests/tools/decode_speech_test.py"
            "::test_files_and_samples_on_standard_input_have_the_same_transcript"
        ),
    ),
    (
        r"tekso-trainer .*runs/texts.*",
        TestedBy(
            "tests/params/asr/prompts_test.py::test_prompts_are_recognised_with_a_language_model"
        ),
    ),
    (
        r"tekso-trainer .*--logdir=runs/own .*TranscriptFiles.*",
        TestedBy(
            "tests/tasks/asr/input_test.py"
            "::test_utterances_of_a_table_are_named_by_their_audio_files"
        ),
    ),
    (
        r"pip install 'tekso\[speech\]'|apt-get download asterisk.*|for deb in asterisk.*"
        r"|export TEKSO_ASTERISK=.*|tekso-trainer .*runs/prompts.*",
        TestedBy(
            "tests/params/asr/prompts_test.py::test_prompts_are_trained_on_scored_and_transcribed"
        ),
    ),
    (r"tekso-ckpt list .*", Run(prints=rf"(?m)^step_0+{STEPS} ")),
    (r"tekso-ckpt verify .*", Run(prints=r": good")),
    (r"tekso-ckpt show .*", Run(prints=r"\(all\) .* 100\.0%")),
    (r"tekso-ckpt grep .*", Run(prints=r"weights/model/")),
    (r"tekso-ckpt stats .*", Run(prints=r"all numbers of \d+ tensors are finite")),
    (
        r"tekso-ckpt diff .*",
        TestedBy("tests/tools/reading_commands_test.py::test_diff_names_what_differs"),
    ),
    (r"tekso-new-task my_task", Run(leaves="my_task/experiments.py", prints=r"wrote .*my_task")),
    (
        r"tekso-trainer .*--model=mt\.cldr\.\w+ --logdir=.*",
        Run(f"{SMALL} --set input.corpus.num_pairs=2000 --set task.scoring.pairs=4"),
    ),
    (r"tekso-trainer --list='?image.*", Run(prints=r"(?m)^image\.imagenet\.ResNet50 .*25,610,152")),
    (r"tekso-trainer --list=.*", Run(prints=r"(?m)^lm\.python_source\.Tiny\b")),
    (
        r"tekso-trainer .*--mode=eval.*",
        Run(
            "--set eval_inputs.dev.max_batches=1",
            prints=r"loss \d+\.\d+",
            leaves="runs/*/evaluations.jsonl",
        ),
    ),
    (
        r"tekso-trainer .*--mode=follow",
        Run(prints=r"loss \d+\.\d+", leaves="runs/*/events_followed"),
    ),
    (
        r"tekso-trainer .*(text_files\.Char|runs/spread) .*--mode=decode.*",
        Run("--set task.decode.max_new_tokens=16", prints=r"\S+(\s+\S+){5}"),
    ),
    (r"tekso-trainer .*--mode=decode.*", Run(prints=r"\S+(\s+\S+){5}")),
    (
        r"tekso-trainer .*--mode=export .*",
        Run(prints=r"exported ", leaves="runs/*/export/saved_model.pb"),
    ),
    (
        r"tekso-compare .*",
        TestedBy(
            "tests/tools/compare_test.py"
            "::test_the_page_is_one_file_without_scripts_and_the_csv_has_all_points"
        ),
    ),
    (
        r"tekso-results .*",
        TestedBy("tests/tools/results_test.py::test_a_result_has_what_the_trainer_wrote"),
    ),
    (
        r"(taskset .*)?make benchmarks.*",
        TestedBy("tests/make_test.py::test_benchmarks_passes_its_arguments_on"),
    ),
    (
        r"make docs",
        TestedBy(
            "tests/site_test.py::test_the_site_builds_without_warnings_and_has_a_search_index"
        ),
    ),
    (
        r"make pictures.*",
        TestedBy(
            "tests/tools/pictures_test.py::test_points_and_seconds_are_those_that_the_run_wrote"
        ),
    ),
    (r"make catalogue", TestedBy("tests/tools/catalogue_test.py::test_the_page_is_up_to_date")),
    (
        r"tekso-sweep .*",
        TestedBy(
            "tests/tools/sweep_test.py"
            "::test_a_sweep_that_is_killed_resumes_its_trial_and_runs_no_other_again"
        ),
    ),
    (
        r"tekso-trainer .*--profile_steps=.*",
        TestedBy("tests/tools/trainer_test.py::test_a_profile_and_figures_of_weights_are_written"),
    ),
    (r"tekso-trainer .*--output=schedule\.png", Run(leaves="schedule.png")),
    (r"tekso-trainer .*--mode=plan .*", Run(prints=r"no problems were found")),
    (r"tekso-trainer .*--mode=inspect_.* --format=json", Run(prints=r"(?s)^\{\n.*\n\}$")),
    (r"tekso-trainer .*--mode=inspect_.*", Run(prints=r"(\n.*){5}")),
    (  # an experiment of the page's own, without an evaluation
        r"tekso-trainer .*--model=my_pipeline\..* --trace_pipeline",
        Run("--steps={steps}", leaves="runs/*/pipeline.png"),
    ),
    (r"tekso-trainer .*--trace_pipeline", Run(TWO_STAGES, leaves="runs/*/pipeline.png")),
    (r"tekso-trainer .*TinyPipeline --logdir.*", Run(TWO_STAGES)),
    (r"tekso-trainer .*runs/three.*", Run(f"{SHORT} --set *.num_layers=3")),  # a layer per stage
    (r"tekso-trainer .*--model=(lm|mt|my_lab)\..* --logdir=.*", Run(SMALL)),
    (r"tekso-trainer .*--logdir=.*", Run(SHORT)),
    (r"tekso-vocab .*--input=.*", Run(leaves="my_pieces.model")),
    (
        r"tekso-benchmark .*--model=.*",
        Run(
            f"--steps={STEPS} --warmup=1 --set *.num_layers=1 --set execution.xla=none",
            prints=r"per second|/s\b",
        ),
    ),
    (r"tensorboard --logdir=\S+", Run("--inspect", prints=rf"last_step +{STEPS}\b")),
    (r"python make_pairs\.py", Run(prints="", leaves="train.en")),
    (r"python forced\.py", Run(prints="")),  # contains assertions
    (
        r"python -m tekso\.tools\.plan_accuracy",
        TestedBy("tests/tools/plan_accuracy_test.py::test_plan_and_measurement_are_side_by_side"),
    ),
    (
        r"python -m tekso\.tools\.plan_accuracy several_devices",
        TestedBy(
            "tests/tools/plan_accuracy_test.py::"
            "test_steps_on_several_devices_are_planned_and_measured_with_the_same_devices"
        ),
    ),
    (
        r"python -m tekso\.tools\.pipeline_memory",
        TestedBy(
            "tests/tools/pipeline_memory_test.py::"
            "test_memory_of_all_stages_is_beside_the_measurement_for_every_k_and_m"
        ),
    ),
    (
        r"python -m tekso\.tools\.gpipe_tables.*",
        TestedBy("tests/tools/gpipe_tables_test.py::test_tables_have_the_published_figures_beside"),
    ),
    (r"python \w+\.py", Run()),
    (
        r"(\.venv/bin/)?pytest( -n 2)?( --dist=loadfile)?( -m \"not slow\"| -k \w+)?",
        Run(prints=r"packaging_test\.py::test_"),
    ),
    (
        r"make lint",
        TestedBy(
            "tests/make_test.py::test_test_all_runs_the_quick_tests_then_lint_then_the_slow_tests"
        ),
    ),
]


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
    for name in ("trainer", "vocab", "benchmark", "ckpt", "new-task"):
        module = name.replace("-", "_")
        text = f'exec {processes.forwarding("-m", f"tekso.tools.{module}")} "$@"\n'
        executable(programs / f"tekso-{name}", text)
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


@pytest.mark.parametrize("command", ALL, ids=lambda command: command.place)
def test_command_has_a_test(command: Command) -> None:
    how = command.how()
    assert how is not None, (
        f"{command.place}: no test runs this command:\n  {command.text}\n"
        "add an entry to HOW in tests/docs_test.py: how to run it, or which test does"
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
    if "decoder" not in run.warm_start:
        base, adapters = run.warm_start["base"].only[0], run.warm_start["adapters"].only[0]
        paths = ["model/w", "model/w_lora_a", "model/w_lora_b"]
        assert [bool(re.fullmatch(base, path)) for path in paths] == [True, False, False]
        assert [bool(re.fullmatch(adapters, path)) for path in paths] == [False, True, True]
        return
    rules = run.warm_start["decoder"].rules
    assert {re.sub(a, b, "model/decoder/w") for a, b in rules.items()} == {"model/stack/w"}


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


FRAGMENTS = {
    "def execution(self):": run_execution,
    "def load(self, split):": run_load,
    "from tekso.framework.execution import devices": run_devices,
    "logits = task.model.fprop(theta.model, x": run_model,
    'WarmStart.Params(checkpoint="runs/bert"': run_warm_start,
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
def test_commands_of_a_document_work(document: Path, folder: Path) -> None:
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
    steps: dict[str, int] = {}  # that were trained, by logdir
    for command in commands(document):
        how = command.how()
        if not isinstance(how, Run):
            continue
        arguments, logdir = how.arguments, ""
        if how.trains:
            logdir = logdir_of(f"{command.text} {how.arguments}")
            steps[logdir] = steps.get(logdir, 0) + STEPS
            arguments = arguments.format(steps=steps[logdir])
        before = log_of(folder / logdir) if how.trains else b""
        done = subprocess.run(
            ["bash", "-c", f"{command.text} {arguments}"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        said = f"{command.place}: {command.text}\n{done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        assert re.search(how.prints, done.stdout.strip()), f"want {how.prints}: {said}"
        if how.leaves:
            left = [path for path in folder.glob(how.leaves) if path.stat().st_size]
            assert left, f"want {how.leaves}: {said}"
        if how.trains:
            assert_trained(folder / logdir, before, steps[logdir], said)


def logdir_of(text: str) -> str:
    found = re.search(r"(?:--logdir|LOGDIR)=(\S+)", text)
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
