"""Translations or classes of the lines of a file, for tekso-decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

from tekso.framework.json_text import to_json

if TYPE_CHECKING:  # slow to import
    from tekso.tools.line_reader import LineReader

SEARCH = "task.translator.search"
_MOST_LINES = 2048  # read, sorted by length and written together
_PROGRESS_S = 10.0


def translate(
    parts: Any,
    reader: LineReader,
    file: IO[bytes],
    *,
    language: str | None,
    form: str,
    log: Callable[[str], None],
) -> None:
    """Writes the translations of all lines in their order.

    Args:
      parts: the experiment, with restored weights.
      reader: reader of the lines.
      file: written to, a group of lines at a time.
      language: target language of a multilingual model.
      form: "text" or "json"; see the flag --format of tekso-decode.
      log: prints the progress and a summary.
    """
    translator = parts.task.translator
    several = parts.tree.get(SEARCH).num_hypotheses > 1
    done, cut, empty, broken = 0, 0, 0, 0
    begin = reported = time.perf_counter()
    while lines := reader.take(_MOST_LINES):
        texts = [line.text for line in lines]
        languages = [language] * len(texts) if language else []
        found = translator.translate(parts.program, parts.input, texts, languages=languages)
        answers = zip(texts, found.hypotheses, strict=True)
        shown = (
            _shown(done + i, *own, several=several, form=form) for i, own in enumerate(answers)
        )
        file.write("".join(shown).encode("utf-8"))
        file.flush()
        done += len(lines)
        cut += found.num_cut
        empty += sum(not text.strip() for text in texts)
        broken += sum(not line.is_text for line in lines)
        if time.perf_counter() - reported > _PROGRESS_S:
            reported = time.perf_counter()
            log(f"{done:,} lines, {done / (reported - begin):.1f} per second")
    log(f"translated {done:,} lines in {time.perf_counter() - begin:.1f} s")
    if empty:
        log(f"{empty:,} of them are empty and have empty translations")
    if cut:
        log(
            f"{cut:,} of them are too long for the model: only their beginning was translated "
            "(task.translator.max_source_length)"
        )
    if broken:
        log(f"{broken:,} of them have bytes that are not UTF-8; they are read as U+FFFD")


def classifies(tree: Any) -> bool:
    """Returns whether Params of a run are those of a classifier of texts."""
    from tekso.framework.task import Task
    from tekso.tasks.classification.labelled_texts import LabelledTexts
    from tekso.tasks.classification.task import Classification

    if not isinstance(tree.task, Task.Params) or not issubclass(tree.task.owner, Classification):
        return False
    return issubclass(type(tree.input).owner, LabelledTexts)


def classify(
    parts: Any, reader: LineReader, file: IO[bytes], *, form: str, log: Callable[[str], None]
) -> None:
    """Writes a line for every line: the likeliest class, a tab and its probability, or an object.

    Args:
      parts: the experiment, with restored weights.
      reader: reader of the lines.
      file: written to, a group of lines at a time.
      form: "text" or "json"; see the flag --format of tekso-decode.
      log: prints a summary.
    """
    from tekso.tasks.classification.text_answers import classified

    length, done, cut, broken = parts.input.params.length, 0, 0, 0
    begin = time.perf_counter()
    while lines := reader.take(_MOST_LINES):
        texts = [line.text for line in lines]
        found = classified(parts.task, parts.program, parts.input, texts)
        for text, classes in zip(texts, found, strict=True):
            best = classes[0]
            shown = f"{best['class']}\t{best['probability']:.4f}"
            if form == "json":
                shown = to_json({"text": text, "classes": classes}, ensure_ascii=False)
            file.write(f"{shown}\n".encode())
        file.flush()
        done += len(lines)
        cut += sum(len(text.encode()) > length for text in texts)
        broken += sum(not line.is_text for line in lines)
    log(f"classified {done:,} lines in {time.perf_counter() - begin:.1f} s")
    if cut:
        log(f"{cut:,} of them are longer than {length} bytes: their ends did not count")
    if broken:
        log(f"{broken:,} of them have bytes that are not UTF-8; they are read as U+FFFD")


def _shown(number: int, source: str, hypotheses: Sequence[Any], *, several: bool, form: str) -> str:
    """Returns the output for one line of input, with its line end."""
    if form == "json":
        record = {"source": source, "hypotheses": [h.record() for h in hypotheses]}
        return to_json(record, ensure_ascii=False) + "\n"
    from tekso.tasks.mt.translator import one_line

    if several:
        shown = [(one_line(h.text), h.score) for h in hypotheses] or [("", 0.0)]
        return "".join(f"{number} ||| {text} ||| {score:.4f}\n" for text, score in shown)
    return (one_line(hypotheses[0].text) if hypotheses else "") + "\n"
