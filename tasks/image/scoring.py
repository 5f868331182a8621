"""Confusions between classes and pictures of errors, at the last evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tekso.framework.input.held_out import spread
from tekso.framework.input.input import Input
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program, Scored
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image import drawing
from tekso.tasks.image.input import images_of
from tekso.tasks.image.preparation import pixels_of
from tekso.tasks.image.sources import class_name

_MOST_DRAWN = 64  # classes of a confusion matrix that is drawn
_MOST_LISTED = 10  # confusions in the text


class ImageScoring(Configurable):
    """Classifies held-out images once more; counts and shows what is confused with what.

    Raises:
      ValueError: a number is out of range.
    """

    class Params(Configurable.Params):
        """Params of ImageScoring."""

        max_batches: int | None = param(
            "Batches that are classified, spread evenly over the pass; None: all.", default=100
        )
        shown: int = param("Images with their labels that are drawn; as many errors.", default=25)
        baselines: dict[str, float] = param(
            "Accuracies of other methods on the same images by name, printed beside the model's.",
            default={},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.shown < 0 or (p.max_batches is not None and p.max_batches < 1):
            raise ValueError(
                f"{p.path_of('shown')} is {p.shown} and max_batches is {p.max_batches}, but must "
                "be at least 0 and 1"
            )

    def score(
        self,
        program: Program,
        answer: Callable[..., Mapping[str, Any]],
        input: Input,
        *,
        stopped: Callable[[], bool],
    ) -> Scored | None:
        """Returns confusions as text, and pictures; see `Task.score`.

        Args:
          program: calls functions with the weights.
          answer: function(theta, x, ctx) that returns the "probabilities" of the classes.
          input: an evaluation input of images.
          stopped: returns whether to stop early.
        """
        images = images_of(input)
        labels, guesses, examples, errors = [], [], _Examples(self), _Examples(self)
        for step in spread(input.num_batches or 0, self.params.max_batches).tolist():
            batch = input.batch(step)
            found = np.asarray(program.call(answer, batch[X])["probabilities"])
            if stopped():
                return None
            real = batch[WEIGHTS] > 0
            own, guess = batch[LABELS][real], found.argmax(1)[real]
            labels.append(own)
            guesses.append(guess)
            x = batch[X][real]
            examples.add(x, own, guess)
            wrong = own != guess
            errors.add(x[wrong], own[wrong], guess[wrong])
        names = [class_name(images.class_names, i) for i in range(found.shape[1])]
        counts = confusions(np.concatenate(labels), np.concatenate(guesses), len(names))
        pictures = {
            "examples": examples.draw(names, images.params, "examples"),
            "errors": errors.draw(names, images.params, "errors"),
        }
        if len(names) <= _MOST_DRAWN:
            pictures["confusion_matrix"] = drawing.matrix(counts, names)
        text = "\n".join(confusion_lines(counts, names))
        drawn = {name: png for name, png in pictures.items() if png}
        return Scored({}, text, drawn, self._notes(counts))

    def _notes(self, counts: np.ndarray) -> tuple[str, ...]:
        if not self.params.baselines:
            return ()
        listed = ", ".join(f"{name} {value:.3f}" for name, value in self.params.baselines.items())
        accuracy = np.trace(counts) / max(counts.sum(), 1)
        return (f"accuracy on {counts.sum():,} images {accuracy:.4f}; {listed}",)


class _Examples:
    """The first images, with labels and guesses, to be drawn."""

    def __init__(self, scoring: ImageScoring) -> None:
        self._most = scoring.params.shown
        self._found: list[tuple[np.ndarray, int, int]] = []

    def add(self, x: np.ndarray, labels: np.ndarray, guesses: np.ndarray) -> None:
        rows = zip(x, labels.tolist(), guesses.tolist(), strict=True)
        for row in rows:
            if len(self._found) >= self._most:
                return
            self._found.append(row)

    def draw(self, names: list[str], params: Any, title: str) -> bytes:
        """Returns a PNG; b"" if there is nothing to draw."""
        if not self._found:
            return b""
        titles = [
            names[label] if label == guess else f"{names[label]}: {names[guess]}"
            for _, label, guess in self._found
        ]
        images = [pixels_of(x, params) for x, _, _ in self._found]
        return drawing.gallery(images, titles, title=title)


def confusions(labels: np.ndarray, guesses: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns how many images of each class were taken for each class.

    Shapes:
      labels, guesses: [n]
      returns: [num_classes, num_classes] int64; a row for each label
    """
    counts = np.bincount(labels.astype(np.int64) * num_classes + guesses, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def confusion_lines(counts: np.ndarray, names: list[str]) -> list[str]:
    """Returns the share of right guesses, and the most frequent confusions, as lines of text."""
    right, total = int(np.trace(counts)), int(counts.sum())
    lines = [f"{right:,} of {total:,} images are right"]
    wrong = counts - np.diag(np.diag(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:_MOST_LISTED].tolist()
    for place in order:
        label, guess = divmod(place, len(names))
        if wrong[label, guess]:
            lines.append(
                f"  {wrong[label, guess]:,} of {counts[label].sum():,} images of {names[label]!r} "
                f"taken for {names[guess]!r}"
            )
    return lines
