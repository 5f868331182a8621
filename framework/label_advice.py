"""Advice about labels of a sparse softmax cross-entropy that are no classes."""

from __future__ import annotations

OF_DATA = "the data has the"
COMPUTED = "the task computes the"
"""What has a label that is in no array of the batch, as the place of an example in the batch."""

EXCLUDED_LABELS = (
    "tf.nn.sparse_softmax_cross_entropy_with_logits fails for other labels, also if their weight "
    "is 0: to exclude labels of -1, give it tf.maximum(labels, 0), and multiply the result by "
    "tf.cast(labels >= 0, tf.float32)"
)
"""What to write where some elements have no label."""

_OF_EXAMPLES = (
    "No array of the batch has this label. If it is the place of an example in the batch, the "
    "scores must have a column for each example of all devices, not only of the own ones: "
    '"Compare the examples of all devices" in docs/own_model.md has the code'
)


def label_advice(label: int, classes: int, of: str) -> str:
    """Returns what is wrong with a label, and what to do.

    Args:
      label: the label.
      classes: number of classes of the scores.
      of: what has the label: "'x' has the", `OF_DATA` or `COMPUTED`.
    """
    cure = f"Correct the input or the number of classes. {EXCLUDED_LABELS}"
    return (
        f"{of} label {label}, but the loss has {classes} classes: labels are 0 to {classes - 1}. "
        f"{_OF_EXAMPLES if of == COMPUTED else cure}"
    )
