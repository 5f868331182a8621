"""Decodes a classifier: the likeliest classes of some held-out examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import Input
from tekso.framework.input.shown_examples import shown_rows
from tekso.framework.task import Decoded, Program
from tekso.tasks.classification.exports import has_texts
from tekso.tasks.classification.labelled_texts import class_name
from tekso.tasks.classification.text_answers import Classifier

_MOST = 10  # examples shown
_WIDTH = 50  # characters of a text shown


def decoded_examples(task: Classifier, program: Program, input: Input) -> Decoded:
    """Returns label, likeliest class and its probability for some held-out examples.

    Args:
      task: a `Classification`.
      program: calls functions with the weights of the task.
      input: the training input; its examples are used if no held-out ones can be loaded, and the
        text says why.
    """
    shown = shown_rows(input, most=_MOST)
    batch, examples = shown.batch, shown.examples
    found = program.call(task.class_probabilities, batch["x"])
    arrays = {name: np.asarray(value) for name, value in found.items()}
    read = examples.input.inner if isinstance(examples.input, HeldOut) else examples.input
    names = tuple(getattr(read, "class_names", ()) or getattr(input, "class_names", ()))
    records = [
        {
            "kind": "class",
            "split": examples.split,
            **({"text": _text(batch["x"][row])} if has_texts(input) else {}),
            "label": _class(names, int(batch["labels"][row])),
            "predicted": _class(names, int(arrays["labels"][row])),
            "probability": float(arrays["probabilities"][row].max()),
        }
        for row in shown.rows
    ]
    return Decoded(examples.titled("\n".join(_lines(records)), "examples"), records)


def missing_predict(cls: Any, base: Any) -> str:
    """Returns why `base.predict` may not compute what a subclass is trained for, or "".

    Args:
      cls: class of a task.
      base: its base class, which has `predict`.
    """
    changed = [name for name in ("pieces", "loss") if getattr(cls, name) is not getattr(base, name)]
    if cls.predict is not base.predict or not changed:
        return ""
    return (
        f"{cls.__name__} has its own {'() and '.join(changed)}(), but no predict(): define predict("
        'theta, batch, ctx), which returns {"logits": …, "labels": …} of batch["x"] as in training,'
        " or decode(program, input)"
    )


def _class(names: tuple[str, ...], number: int) -> int | str:
    return class_name(names, number) if names else number


def _text(ids: np.ndarray) -> str:
    """Returns the text of bytes that are padded with 0; the last character may be cut."""
    return bytes(ids.astype(np.uint8)).rstrip(b"\0").decode("utf-8", errors="replace")


def _lines(records: list[dict[str, Any]]) -> Iterator[str]:
    for record in records:
        line = (
            f"label {record['label']}  predicted {record['predicted']}  "
            f"probability {record['probability']:.3f}"
        )
        text = " ".join(record.get("text", "").split())  # on one line
        yield f"{line}  {text[:_WIDTH]}" if text else line
