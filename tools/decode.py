"""tekso-decode: translates or classifies lines, answers for images, or transcribes speech."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

from absl import flags

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.framework.counting import counted
from tekso.tools import (
    command_flags,
    decode_images,
    decode_speech,
    decode_tasks,
    experiment_flags,
)
from tekso.tools.command_errors import UsageError
from tekso.tools.decode_texts import SEARCH, classifies, classify, translate
from tekso.tools.line_reader import STANDARD_INPUT, LineReader

if TYPE_CHECKING:  # slow to import, so the functions below import these modules when they run
    from tekso.framework.input.input import Input
    from tekso.framework.run.assembly import Assembly

PROGRAM = "tekso-decode"
USAGE = "--logdir=runs/mine --input=texts.en --output=texts.de"
_STANDARD_OUTPUT = "-"

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    f = FLAGS
    flags.DEFINE_string("logdir", None, "Folder of the run.", flag_values=f)
    flags.DEFINE_string(
        "input",
        STANDARD_INPUT,
        "File to translate, or to classify, line by line; - reads standard input and answers each "
        "line at once. A folder: images to classify, to detect objects in, to segment or to "
        "caption, or audio files to transcribe. A .wav, .flac, .ogg or .mp3 file: transcribed.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "output",
        _STANDARD_OUTPUT,
        "File to write, only if all lines are translated; - writes to standard output.",
        flag_values=f,
    )
    _define_files()
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
        "'number ||| translation ||| score'; for an image, its class and probability, or a line "
        "for every object or class in it, between tabs; for speech, its transcript. json: one "
        "object per input line or file, with scores.",
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


def _define_files() -> None:
    """Defines the flags for sounds and images."""
    f = FLAGS
    flags.DEFINE_enum(
        "samples",
        None,
        sorted(decode_speech.SAMPLE_FORMATS),
        "The input has raw samples of one channel, which are transcribed while they arrive: 16-bit "
        "integers or 32-bit floats. For example, a microphone on standard input.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "sample_rate",
        None,
        "Samples per second of --samples. By default that of the model.",
        lower_bound=1,
        flag_values=f,
    )
    flags.DEFINE_string(
        "pictures",
        None,
        "Folder to write PNG files to, one per image: with boxes (detection), or the masks "
        "(segmentation).",
        flag_values=f,
    )


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
    if FLAGS.sample_rate is not None and FLAGS.samples is None:
        raise UsageError("--sample_rate is for --samples: audio files have their own")
    if FLAGS.sample_rate is not None:
        decode_speech.check_rate(FLAGS.sample_rate)
    if FLAGS.pictures is not None and FLAGS.samples is not None:
        raise UsageError("--pictures is for images, but --samples is for speech")
    if FLAGS.samples is not None and decode_speech.is_audio_name(FLAGS.input):
        raise UsageError(
            f"--samples is for raw samples, but --input={FLAGS.input} has a header: remove "
            "--samples"
        )
    if FLAGS.samples is not None:
        _transcribe_stream()
        return
    path = os.path.expanduser(FLAGS.input)
    is_folder = FLAGS.input != STANDARD_INPUT and files.is_folder(path)
    if is_folder or decode_speech.is_audio_name(path):
        _decode_files(path, is_folder=is_folder)
        return
    if FLAGS.pictures is not None:
        raise UsageError(f"--pictures is for images, but --input={FLAGS.input} is not a folder")
    reader = LineReader(FLAGS.input)  # reports a missing file before the slow part
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is only for translations
            parts, kind = _parts("texts")
        with _output() as file:
            if kind == "classes":
                classify(parts, reader, file, form=FLAGS.format, log=_log)
            else:
                translate(parts, reader, file, language=FLAGS.language, form=FLAGS.format, log=_log)
    finally:
        reader.close()


def _decode_files(path: str, *, is_folder: bool) -> None:
    """Answers for the images of a folder, or transcribes audio files, as the model does."""
    _refuse_flags_of_translation()
    audio = decode_speech.audio_files(path)
    images = decode_images.image_files(FLAGS.input) if is_folder and not audio else []
    begin = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        parts, kind = _parts("speech" if not is_folder else "files")
    if kind == "images":
        images = images or decode_images.image_files(FLAGS.input)
    paths = audio if kind == "speech" else images
    if not paths:
        raise UsageError(
            f"--input={FLAGS.input} has no audio files ({', '.join(decode_speech.SUFFIXES)})"
        )
    pictures = None
    if FLAGS.pictures is not None:
        folder = os.path.expanduser(FLAGS.pictures)
        pictures = decode_images.PictureFolder(folder, FLAGS.input, paths)
    with _output() as file:
        if kind == "speech":
            broken = decode_speech.transcribe_files(parts, paths, file, form=FLAGS.format)
        else:
            broken = decode_images.answer(parts, paths, file, form=FLAGS.format, pictures=pictures)
    done, form = ("transcribed", "audio") if kind == "speech" else ("read", "images")
    read = counted(len(paths) - broken, "file")
    _log(f"{done} {read} in {time.perf_counter() - begin:.1f} s")
    if broken:
        _log(f"{counted(broken, 'file')} cannot be read as {form}: the output has the reason")


def _transcribe_stream() -> None:
    _refuse_flags_of_translation()
    with contextlib.redirect_stdout(sys.stderr):
        parts, _ = _parts("speech")
    with _output() as file:
        reason = decode_speech.transcribe_stream(
            parts,
            FLAGS.input,
            file,
            form=FLAGS.format,
            sample_format=FLAGS.samples,
            sample_rate=FLAGS.sample_rate,
        )
    if reason:
        _log(f"there was no transcript before the end of the input, because {reason}")


def _refuse_flags_of_translation(given: str = "") -> None:
    given = given or (f"--samples={FLAGS.samples}" if FLAGS.samples else f"--input={FLAGS.input}")
    for name in ("language", "beam_size", "num_hypotheses"):
        if FLAGS[name].value is not None:
            raise UsageError(
                f"--{name} is for translation, not for {given}; settings of the run have --set"
            )


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = (__doc__ or "").partition(": ")[2]
    names = {"pictures": "folder", "input": "file", "output": "file"}
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names=names)


Kind = Literal["texts", "classes", "images", "speech"]


def _parts(wanted: Kind | Literal["files"]) -> tuple[Assembly, Kind]:
    """Returns the experiment of the logdir, with weights, and what it decodes.

    Args:
      wanted: what it must decode; files: images or speech.

    Raises:
      UsageError: it decodes something else, or does not have the language.
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
    path = decode_tasks.path_of(tree, model, FLAGS.task)
    kind = _kind(wanted, model, decode_tasks.tree_of(tree, FLAGS.task))
    chosen = {
        name: (f"{SEARCH}.{name}".replace("task", path, 1), FLAGS[name].value)
        for name in ("beam_size", "num_hypotheses")
    }
    chosen = chosen if kind == "texts" else {}
    experiment_flags.change(tree, execution=FLAGS.execution, settings=FLAGS.set or [], flags=chosen)
    if kind == "texts":
        decode_tasks.tree_of(tree, FLAGS.task).get(
            SEARCH
        ).instantiate()  # reports wrong values before the slow part
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
    parts = job.assemble(ProcessGroup(), reads_data=False, one_task=FLAGS.task)
    restore(parts.program, run.checkpoint)
    parts = decode_tasks.of_task(parts, FLAGS.task)
    how = f", {_search_text(parts.tree)}" if kind == "texts" else ""
    if kind == "texts":
        _check_language(parts.input)
    console.line(f"{model} at step {run.checkpoint.step}{how}")
    return parts, kind


def _kind(wanted: Kind | Literal["files"], model: str, tree: Any) -> Kind:
    """Returns what an experiment decodes.

    Raises:
      UsageError: it is not what is wanted.
    """
    given = f"--samples={FLAGS.samples}" if FLAGS.samples else f"--input={FLAGS.input}"
    speech = decode_speech.transcribes(tree.task)
    if wanted != "texts":
        if speech:
            if FLAGS.pictures is not None:
                raise UsageError(f"--pictures is for images, but {model} transcribes speech")
            return "speech"
        if wanted == "files" and decode_images.answers_for_images(tree.task):
            if FLAGS.pictures is not None:
                decode_images.check_pictures(tree.task, FLAGS.pictures, FLAGS.input)
            return "images"
        if wanted == "files":
            raise UsageError(
                f"{model} is neither a model of images nor of speech, but {given} is a folder"
            )
        raise UsageError(f"{model} does not transcribe speech, but {given} is audio")
    if SEARCH in tree:
        return "texts"
    if classifies(tree):
        _refuse_flags_of_translation(f"{model}, which classifies texts")
        return "classes"
    if speech:
        raise UsageError(
            f"{model} transcribes speech: --input must be an audio file or a folder of them, or "
            "add --samples=s16le for raw samples"
        )
    if decode_images.answers_for_images(tree.task):
        raise UsageError(
            f"{model} answers for images: --input must be a folder of image files, but is "
            f"{FLAGS.input}"
        )
    imports = [f"--import={name}" for name in FLAGS["import"].value or []]
    raise UsageError(
        f"{model} is not a translation model; to run the decoding of its task: "
        f"{typed('tekso-trainer')} "
        f"{shlex.join([*imports, '--mode=decode', f'--logdir={FLAGS.logdir}'])}"
    )


def _search_text(tree: Any) -> str:
    search = tree.get(SEARCH)
    return f"beam {search.beam_size}" if "beam_size" in search else type(search).owner.__name__


def _check_language(input: Input) -> None:
    from tekso.framework.input.errors import InputError
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


def _log(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
