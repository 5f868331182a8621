"""tekso-vocab: learns subword pieces from text files and writes a SentencePiece model.

From a parallel corpus, it learns one vocabulary for both sides, from equally many texts of each.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from tekso.framework import files
from tekso.framework.commands import typed
from tekso.framework.counting import counted
from tekso.framework.input.sentence_piece import SentencePiece, learn
from tekso.framework.input.text_files import TextFiles
from tekso.tasks.mt.parallel_files import ParallelFiles
from tekso.tasks.mt.vocabulary import texts_of
from tekso.tools import command_flags
from tekso.tools.command_errors import UsageError

PROGRAM = "tekso-vocab"
USAGE = "--input='texts/*.txt' --output=vocab.model [--vocab_size=8192]"
_SHOWN = 12  # pieces
_MEASURED = 1 << 20  # characters of text for measuring bytes per token

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]
_DEFAULTS = SentencePiece.Params()


def _define() -> None:
    f = FLAGS
    flags.DEFINE_multi_string(
        "input",
        [],
        "Text files to learn from: globs, separated by commas; can be repeated. Arguments without "
        "a flag are files, too.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "source_files",
        "",
        "Instead of --input: source side of a parallel corpus; globs, separated by commas.",
        flag_values=f,
    )
    flags.DEFINE_string(
        "target_files",
        "",
        "Target side of the parallel corpus: the same number of files, translated line by line.",
        flag_values=f,
    )
    flags.DEFINE_string("output", None, "File to write, such as vocab.model.", flag_values=f)
    flags.DEFINE_integer(
        "vocab_size",
        _DEFAULTS.vocab_size,
        "Number of ids, including 258 reserved ones.",
        flag_values=f,
    )
    flags.DEFINE_enum(
        "model_type", _DEFAULTS.model_type, ("bpe", "unigram"), "Algorithm.", flag_values=f
    )
    flags.DEFINE_integer(
        "train_bytes",
        _DEFAULTS.train_bytes,
        "Maximum number of bytes to learn from, sampled evenly from the whole text.",
        flag_values=f,
    )
    flags.DEFINE_float(
        "character_coverage",
        _DEFAULTS.character_coverage,
        "Fraction of the characters in the text that get their own pieces; other characters are "
        "encoded as bytes.",
        flag_values=f,
    )
    flags.DEFINE_integer(
        "max_skipped", 10, "Maximum number of skipped files or pairs that are not UTF-8.",
        flag_values=f,
    )  # fmt: skip
    flags.DEFINE_boolean("overwrite", False, "Replace the output if it exists.", flag_values=f)
    command_flags.define_common(f)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code: 0 success, 1 error, 2 wrong command line."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _run(words: list[str]) -> None:
    inputs = [*FLAGS.input, *words]
    _check(inputs)
    text = _open(inputs)
    begin = time.perf_counter()
    model = learn(
        _texts(text),
        vocab_size=FLAGS.vocab_size,
        model_type=FLAGS.model_type,
        train_bytes=FLAGS.train_bytes,
        character_coverage=FLAGS.character_coverage,
    )
    seconds = time.perf_counter() - begin
    files.write_atomically(FLAGS.output, model)
    if isinstance(text, ParallelFiles) and text.skipped().count:  # counted while they were read
        print(f"warning: {text.skipped()}")
    _report(text, inputs, seconds)


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = " ".join((__doc__ or "").partition(": ")[2].split())
    names = dict.fromkeys(("input", "source_files", "target_files"), "globs")
    names["output"] = "file"
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names=names)


def _open(inputs: Sequence[str]) -> TextFiles | ParallelFiles:
    if not inputs:
        pairs: ParallelFiles = ParallelFiles.Params(
            source_files=FLAGS.source_files,
            target_files=FLAGS.target_files,
            dev_fraction=0.0,
            max_skipped=FLAGS.max_skipped,
        ).instantiate()
        print(f"read {len(pairs):,} pairs of lines", flush=True)
        return pairs
    text: TextFiles = TextFiles.Params(
        files=",".join(inputs), dev_fraction=0.0, max_skipped=FLAGS.max_skipped
    ).instantiate()
    print(f"read {counted(text.num_files, 'file')}, {text.num_bytes:,} bytes", flush=True)
    if text.skipped().count:
        print(f"warning: {text.skipped()}")
    return text


def _texts(text: TextFiles | ParallelFiles) -> Iterator[str]:
    records = (record for _, record in text.records())
    return texts_of(records, "both") if isinstance(text, ParallelFiles) else records


def _check(inputs: Sequence[str]) -> None:
    """Checks the flags before anything is read.

    Raises:
      UsageError: a flag is missing, or its value cannot be used.
    """
    is_parallel = FLAGS.source_files or FLAGS.target_files
    if inputs and is_parallel:
        raise UsageError("give either --input, or --source_files and --target_files")
    if bool(FLAGS.source_files) != bool(FLAGS.target_files):
        missing = "target_files" if FLAGS.source_files else "source_files"
        raise UsageError(f"--{missing} is missing: a parallel corpus has two sides")
    if not inputs and not is_parallel:
        raise UsageError(f"--input is missing, as in {_usage()}")
    if not FLAGS.output:
        raise UsageError(f"--output is missing, as in {_usage()}")
    if files.is_folder(FLAGS.output):
        raise UsageError(
            f"--output={FLAGS.output} is a folder: name a file, as "
            f"{files.join(FLAGS.output, 'vocab.model')}"
        )
    if files.exists(FLAGS.output) and not FLAGS.overwrite:
        raise UsageError(
            f"--output={FLAGS.output} exists; give another name, or --overwrite to replace it"
        )


def _report(text: Any, inputs: Sequence[str], seconds: float) -> None:
    params = SentencePiece.Params(file=FLAGS.output, vocab_size=FLAGS.vocab_size)
    tokenizer: SentencePiece = params.instantiate()
    num_pieces = tokenizer.num_pieces
    print(
        f"learned {num_pieces:,} pieces ({FLAGS.model_type}) in {seconds:.1f} s, wrote "
        f"{FLAGS.output} ({files.size_bytes(FLAGS.output):,} bytes)"
    )
    if num_pieces < FLAGS.vocab_size:
        print(
            f"warning: only {num_pieces:,} pieces could be learned from the text, fewer than "
            f"--vocab_size={FLAGS.vocab_size}; the other ids are unused"
        )
    sample = _beginning(_texts(text))
    num_bytes = len(sample.encode("utf-8"))
    bytes_per_token = num_bytes / max(1, len(tokenizer.encode(sample)))
    print(f"{bytes_per_token:.2f} bytes per token at the beginning of the text")
    longest = sorted(tokenizer.token_bytes, key=len, reverse=True)[:_SHOWN]
    print(
        "longest pieces: " + " ".join(repr(piece.decode("utf-8", "replace")) for piece in longest)
    )
    settings = [f"--set=input.tokenizer.file={FLAGS.output}"]
    if FLAGS.vocab_size != _DEFAULTS.vocab_size:
        settings.append(f"--set=input.tokenizer.vocab_size={FLAGS.vocab_size}")
    if isinstance(text, ParallelFiles):
        files_of = {side: getattr(FLAGS, f"{side}_files") for side in ("source", "target")}
        read = [f"--set=input.corpus.{side}_files={globs}" for side, globs in files_of.items()]
        print("train an experiment on parallel files with these arguments:")
        print(f"  {shlex.join([*read, *settings])}")
        return
    read = ["--model=lm.text_files.SentencePiece", f"--set=input.files={','.join(inputs)}"]
    print(f"train with it:\n  {typed('tekso-trainer')} {shlex.join([*read, *settings])}")


def _beginning(texts: Iterator[str]) -> str:
    """Returns the beginning of the text, for measuring."""
    found: list[str] = []
    size = 0
    for text in texts:
        found.append(text[: _MEASURED - size])
        size += len(found[-1])
        if size >= _MEASURED:
            break
    return "".join(found)


if __name__ == "__main__":
    sys.exit(main())
