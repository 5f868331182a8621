"""tekso-decode: translates a file line by line, or classifies the images of a folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from absl import flags

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.tools import command_flags, decode_images, decode_tasks, experiment_flags
from tekso.tools.command_errors import UsageError
from tekso.tools.line_reader import STANDARD_INPUT, LineReader

if TYPE_CHECKING:  # slow to import, so the functions below import these modules when they run
    from tekso.framework.input.input import Input
    from tekso.framework.run.assembly import Assembly

PROGRAM = "tekso-decode"
USAGE = "--logdir=runs/mine --input=texts.en --output=texts.de"
_STANDARD_OUTPUT = "-"
_MOST_LINES = 2048  # read, sorted by length and written together
_PROGRESS_S = 10.0
_SEARCH = "translator.search"  # path from the task

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("logdir", None, "Folder of the run.", flag_values=f)
    flags.DEFINE_string(
        "input",
        STANDARD_INPUT,
        "File to translate; - reads standard input and answers each line at once. A folder: images "
        "to classify.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "output",
        _STANDARD_OUTPUT,
        "File to write, only if all lines are translated; - writes to standard output.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Checkpoint: a step, a path, best or last. By default the newest good one.",
        flag_values=f,
    )
    flags.DEFINE_string("task", None, "Task of a model of several tasks.", flag_values=f)
    flags.DEFINE_string("language", None, "Target language of a multilingual model.", flag_values=f)
    flags.DEFINE_integer(
        "beam_size",
        None,
        "Beam size of the search. By default the value of the run.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_integer(
        "num_hypotheses", None, "Number of translations for each line, best first.", lower_bound=1,
        flag_values=f,
    )  # fmt: skip
    flags.DEFINE_enum(
        "format",
        "text",
        ("text", "json"),
        "text: one output line per input line; with several hypotheses, one line for each, as "
        "'number ||| translation ||| score'; for an image, its class and probability between tabs. "
        "json: one object per input line or image, with scores.",
        flag_values=f,
    )
    flags.DEFINE_multi_string(
        "set", [], "path=value, as for tekso-trainer; can be repeated.", flag_values=f
    )
    flags.DEFINE_string(
        "execution",
        None,
        "data_parallel, mesh_sharded, pipelined or spmd_pipelined.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "cpu_devices", None, "Number of logical CPU devices to create.", flag_values=f
    )
    flags.DEFINE_string(
        "tpu", None, "TPU to run on: a name, an address, or local; a mesh: local.", flag_values=f
    )
    flags.DEFINE_multi_string(
        "import", [], "Package with your own experiments; can be repeated.", flag_values=f
    )
    command_flags.define_common(f)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code: 0 success, 1 error, 2 wrong command line."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _run(words: list[str]) -> None:
    if words:
        raise UsageError(f"{words[0]!r} is not a flag: flags begin with --, as in {_usage()}")
    if not FLAGS.logdir:
        raise UsageError(f"--logdir is missing, as in {_usage()}")
    if FLAGS.output != _STANDARD_OUTPUT and files.is_folder(os.path.expanduser(FLAGS.output)):
        raise UsageError(f"--output={FLAGS.output} is a folder: name a file")
    if FLAGS.input != STANDARD_INPUT and files.is_folder(os.path.expanduser(FLAGS.input)):
        _classify()
        return
    reader = LineReader(FLAGS.input)  # reports a missing file before the slow part
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is only for translations
            parts = _parts()
        with _output() as file:
            _translate(parts, reader, file)
    finally:
        reader.close()


def _classify() -> None:
    for name in ("language", "beam_size", "num_hypotheses"):
        if FLAGS[name].value is not None:
            raise UsageError(f"--{name} is for translation, but --input={FLAGS.input} is a folder")
    paths = decode_images.image_files(FLAGS.input)
    begin = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        parts = _parts(of_images=True)
    with _output() as file:
        broken = decode_images.classify(parts, paths, file, form=FLAGS.format)
    _log(f"classified {len(paths) - broken:,} images in {time.perf_counter() - begin:.1f} s")
    if broken:
        _log(f"{broken:,} files cannot be read as images; their lines have the reasons")


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = (__doc__ or "").partition(": ")[2]
    purpose = purpose[:1].upper() + purpose[1:]
    names = {"logdir": "folder", "input": "file", "output": "file", "set": "path=value"}
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names=names)


def _parts(*, of_images: bool = False) -> Assembly:
    """Returns the experiment of the logdir, with the weights of the checkpoint.

    Args:
      of_images: whether the model must be an image classifier instead of a translation model.

    Raises:
      UsageError: it is not, or does not have the language.
    """
    experiment_flags.load(None, FLAGS["import"].value or [])
    from tekso.framework.run.job import Job
    from tekso.framework.run.logdir import Logdir
    from tekso.framework.run.opened import open_run
    from tekso.framework.run.process_group import ProcessGroup
    from tekso.framework.run.report.console import console_for
    from tekso.framework.run.restore import restore

    console = console_for(sys.stderr)
    logdir = Logdir(os.path.expanduser(FLAGS.logdir))
    warn = functools.partial(console.line, style="warning")
    run = open_run(logdir.path, FLAGS.checkpoint, warn=warn)
    model, tree = run.model, run.completed_tree()
    task = decode_tasks.path_of(tree, model, FLAGS.task)
    search = f"{task}.{_SEARCH}"
    if of_images and not decode_images.classifies_images(tree.get(task)):
        raise UsageError(f"{model} does not classify images, but --input={FLAGS.input} is a folder")
    if not of_images and search not in tree:
        imports = [f"--import={name}" for name in FLAGS["import"].value or []]
        given = f"--logdir={FLAGS.logdir}"
        raise UsageError(
            f"{model} is not a translation model; to run the decoding of its task: "
            f"{typed('tekso-trainer')} {shlex.join([*imports, '--mode=decode', given])}"
        )
    chosen = {
        name: (f"{search}.{name}", FLAGS[name].value) for name in ("beam_size", "num_hypotheses")
    }
    chosen = {} if of_images else chosen
    experiment_flags.change(tree, execution=FLAGS.execution, settings=FLAGS.set or [], flags=chosen)
    if not of_images:
        tree.get(search).instantiate()  # reports wrong values before the slow part
    job = Job(
        model=model,
        tree=tree,
        registered=tree,
        logdir=logdir,
        console=console,
        command=[PROGRAM],
        tpu=FLAGS.tpu,
        cpu_devices=FLAGS.cpu_devices,
    )
    parts = job.assemble(ProcessGroup(), reads_data=False)
    restore(parts.program, run.checkpoint)
    parts = decode_tasks.of_task(parts, FLAGS.task)
    how = "" if of_images else f", {_search_text(tree.get(search))}"
    if not of_images:
        _check_language(parts.input)
    console.line(f"{model} at step {run.checkpoint.step}{how}")
    return parts


def _search_text(search: Any) -> str:
    return f"beam {search.beam_size}" if "beam_size" in search else type(search).owner.__name__


def _check_language(input: Input) -> None:
    from tekso.framework.input.skips import InputError
    from tekso.tasks.mt.pair_texts import texts_of

    try:
        texts_of(input).encode_source("", language=FLAGS.language)
    except InputError as error:
        given = f"--language={FLAGS.language}" if FLAGS.language else "--language is missing"
        raise UsageError(f"{given}: {error}") from error


@contextlib.contextmanager
def _output() -> Iterator[IO[bytes]]:
    """Opens the output; a file appears under its name when the block ends without an error."""
    if FLAGS.output == _STANDARD_OUTPUT:
        yield sys.stdout.buffer
        return
    with files.writing_atomically(os.path.expanduser(FLAGS.output)) as file:
        yield file


def _translate(parts: Any, reader: LineReader, file: IO[bytes]) -> None:
    translator = parts.task.translator
    several = translator.params.search.num_hypotheses > 1
    done, cut, empty, broken = 0, 0, 0, 0
    begin = reported = time.perf_counter()
    while lines := reader.take(_MOST_LINES):
        texts = [line.text for line in lines]
        languages = [FLAGS.language] * len(texts) if FLAGS.language else []
        found = translator.translate(parts.program, parts.input, texts, languages=languages)
        answers = zip(texts, found.hypotheses, strict=True)
        shown = (_shown(done + i, *own, several=several) for i, own in enumerate(answers))
        file.write("".join(shown).encode("utf-8"))
        file.flush()
        done += len(lines)
        cut += found.num_cut
        empty += sum(not text.strip() for text in texts)
        broken += sum(not line.is_text for line in lines)
        if time.perf_counter() - reported > _PROGRESS_S:
            reported = time.perf_counter()
            _log(f"{done:,} lines, {done / (reported - begin):.1f} per second")
    _log(f"translated {done:,} lines in {time.perf_counter() - begin:.1f} s")
    if empty:
        _log(f"{empty:,} of them are empty and have empty translations")
    if cut:
        _log(
            f"{cut:,} of them are too long for the model: only their beginning was translated "
            "(task.translator.max_source_length)"
        )
    if broken:
        _log(f"{broken:,} of them have bytes that are not UTF-8; they are read as U+FFFD")


def _shown(number: int, source: str, hypotheses: Sequence[Any], *, several: bool) -> str:
    """Returns the output for one line of input, with its line end."""
    if FLAGS.format == "json":
        record = {"source": source, "hypotheses": [h.record() for h in hypotheses]}
        return json.dumps(record, ensure_ascii=False) + "\n"
    from tekso.tasks.mt.translator import one_line

    if several:
        shown = [(one_line(h.text), h.score) for h in hypotheses] or [("", 0.0)]
        return "".join(f"{number} ||| {text} ||| {score:.4f}\n" for text, score in shown)
    return (one_line(hypotheses[0].text) if hypotheses else "") + "\n"


def _log(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
