"""Figures and records of training steps, and the events of a folder, for tests of reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

VALUES = {
    "loss": 1.45678,
    "bits_per_byte": 2.10164,
    "perplexity": 4.2922,
    "gradient_norm": 0.53111,
    "learning_rate": 0.00298123,
    "nonfinite_total": 0.0,
}
MANY = {
    "loss": 0.58512, "perplexity": 1.795, "bits_per_byte": 0.61, "accuracy_of_the_first": 0.7133,
    "accuracy_of_the_second": 0.6737, "recall": 0.4912, "precision": 0.25, "f1": 0.5,
}  # fmt: skip


def events(folder: Path) -> list[tuple[int, str, float]]:
    found = []
    for file in sorted(folder.iterdir()):
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return found


def records(*points: tuple[int, str, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"step": step, "split": split, **values} for step, split, values in points]
