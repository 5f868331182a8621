"""The contrastive task: embeddings of images and captions that belong together are similar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import spread
from tekso.framework.input.input import Input
from tekso.framework.input.skips import BadRecordError
from tekso.framework.params import REQUIRED, param
from tekso.framework.task import Batch, Decoded, LossSums, Program, Scored, Task
from tekso.framework.theta import Theta
from tekso.models.contrastive_loss import ContrastiveLoss, Embedded
from tekso.models.dual_encoder import DualEncoder
from tekso.tasks.captioning.captioning_search import blocks
from tekso.tasks.captioning.exports import embedding_exports
from tekso.tasks.captioning.input import (
    TARGET_LABELS,
    TARGET_SEGMENTS,
    CaptionedImages,
    captions_of,
    known_captions,
)
from tekso.tasks.classification.task import WEIGHTS, X
from tekso.tasks.contrastive import recall
from tekso.tasks.image.image_input import held_out
from tekso.tasks.unset_sizes import set_sizes, set_vocab_size

IN_BATCH = "batch_accuracy"
_MOST_SHOWN = 5  # images that decoding prints for a text


class Contrastive(Task):
    """Minimises the contrastive loss of images and captions; see `ContrastiveLoss`.

    Reports "batch_accuracy", the share of images that are closest to their own caption among those
    of the batch; and from evaluations recall at 1, 5 and 10 among all images and captions of the
    input, in both directions: "image_to_text_recall_1", … "text_to_image_recall_10".

    The loss compares the examples of the global batch, so it depends on the batch size.

    Shapes:
      batch: the arrays of `CaptionedImages`
      loss returns: sums over the examples, scalars
      predict returns: "images", "texts" [batch, model.dim] float32, of unit length
    """

    class Params(Task.Params):
        """Params of Contrastive."""

        model: DualEncoder.Params = param(
            "The network; sizes that are not set are taken from the input.", default=REQUIRED
        )
        contrast: ContrastiveLoss.Params = param("The loss.", default=ContrastiveLoss.Params())
        scored_images: int | None = param(
            "Images of an evaluation input for the recall, spread evenly over it; None: all.",
            default=None,
        )
        baselines: dict[str, float] = param(
            "Recalls of other methods on the same images by name, printed beside the model's.",
            default={},
        )
        decode: list[str] = param(
            "Texts for which --mode=decode finds images of the split dev.", default=[]
        )

    goals = {name: "max" for name in (IN_BATCH, *recall.NAMES)}  # noqa: RUF012
    model: DualEncoder
    contrast: ContrastiveLoss

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.scored_images is not None and p.scored_images < 1:
            raise ValueError(
                f"{p.path_of('scored_images')} is {p.scored_images}, but must be at least 1"
            )
        self.child("model", p.model)
        self.child("contrast", p.contrast)

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets the size of the vocabulary and of the images, where they are not set.

        Raises:
          ValueError: the vocabulary size is set nowhere, or is smaller than the input's.
        """
        params = params.copy()
        model, data = params.model, input.params
        set_vocab_size(model, "text.vocab_size", input.vocab_size, data="captions")
        if "target_length" in data:
            sizes = {
                "image.image_size": data.image_size,
                "image.channels": data.channels,
                "text.positions.max_length": data.target_length,
            }
            set_sizes(model, sizes)
        return params

    def check_inputs(self, inputs: Mapping[str, Any]) -> None:
        """Checks the kind of the inputs.

        Raises:
          InputError: an input has no captions.
        """
        for input in inputs.values():
            captions_of(input)

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of images."""
        return len(batch[X]), "images"

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the sum of the weights of the images."""
        return tf.reduce_sum(batch[WEIGHTS])

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the sums of the losses over the examples at hand."""
        found = self.predict(theta, batch, ctx)
        pairs = Embedded(found["images"], found["texts"], batch[WEIGHTS])
        nats, hits = self.contrast.fprop(theta.contrast, pairs, ctx)
        weights = tf.cast(batch[WEIGHTS], nats.dtype)
        metrics = {IN_BATCH: (tf.reduce_sum(weights * hits), tf.reduce_sum(weights))}
        return LossSums(tf.reduce_sum(weights * nats), metrics)

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the embeddings; see the class."""
        ids, segments = batch[TARGET_LABELS], batch[TARGET_SEGMENTS]
        given = {X: batch[X], "ids": ids, "segment_ids": segments}
        images, texts = self.model.fprop(theta.model, given, ctx)
        return {"images": images, "texts": texts}

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns the recalls of an evaluation input; malformed images are left out."""
        own = captions_of(input)
        chosen = spread(len(own.source), self.params.scored_images).tolist()
        kept, images = self._embedded_images(program, own, chosen, stopped)
        texts = [c.text for image in kept for c in own.source.captions(image)]
        owner = [row for row, i in enumerate(kept) for _ in range(own.num_captions(i))]
        embedded = self._embedded_texts(program, own, texts, stopped)
        if stopped() or not kept:
            return None
        figures = recall.recalls(images, embedded, owner)
        broken = len(chosen) - len(kept)
        lines = [f"{len(kept):,} images and {len(texts):,} captions"]
        lines += [f"{broken:,} images are malformed"] if broken else []
        lines += [f"{name} {value:.4f}" for name, value in figures.items()]
        notes: tuple[str, ...] = ()
        if self.params.baselines and is_last:
            listed = ", ".join(
                f"{name} {value:.4f}" for name, value in self.params.baselines.items()
            )
            notes = (f"other methods: {listed}",)
        return Scored(figures, "\n".join(lines), {}, notes)

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns True: decoding reads images of the split dev."""
        del params
        return True

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns the images of the split dev that are most similar to the texts in the Params."""
        texts = list(self.params.decode)
        if not texts:
            return None
        shown = held_out(captions_of(input))
        own = shown.input
        kept, images = self._embedded_images(program, own, list(range(len(own.source))))
        if not kept:
            raise InputError(f"{own.describe()}: no image can be read")
        scores = self._embedded_texts(program, own, texts) @ images.T
        records = [
            {
                "kind": "retrieval",
                "text": text,
                "images": [
                    {"file": str(own.source.origin(kept[i])), "similarity": float(row[i])}
                    for i in np.argsort(-row, kind="stable")[:_MOST_SHOWN].tolist()
                ],
            }
            for text, row in zip(texts, scores, strict=True)
        ]
        return Decoded(shown.titled("\n".join(map(_shown, records)), "images"), records)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns functions that embed images, from pixels, and texts, from tokens."""
        return embedding_exports(self._of_images, self._of_texts, known_captions(input))

    def _embedded_images(
        self,
        program: Program,
        input: CaptionedImages,
        images: list[int],
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[list[int], np.ndarray]:
        """Returns the images that can be read, and their embeddings."""
        kept: list[int] = []
        found: list[np.ndarray] = []
        for block in blocks(images, input.params.batch_size):
            if stopped():
                break
            pixels: list[np.ndarray] = []
            for image in block:
                try:
                    pixels.append(input.pixels(image, plain=True))
                except BadRecordError as error:
                    input.source.skips.add(error.origin, error.reason)
                else:
                    kept.append(image)
            x = np.zeros([input.params.batch_size, *input.form()[X][0]], np.float32)
            x[: len(pixels)] = pixels if pixels else 0.0
            found.append(np.asarray(program.call(self._of_images, x))[: len(pixels)])
        return kept, np.concatenate(found) if found else np.zeros([0, self.params.model.dim])

    def _embedded_texts(
        self,
        program: Program,
        input: CaptionedImages,
        texts: list[str],
        stopped: Callable[[], bool] = lambda: False,
    ) -> np.ndarray:
        rows, length = input.params.batch_size, input.params.target_length
        found = []
        for block in blocks(texts, rows):
            if stopped():
                break
            ids = np.zeros([2, rows, length], np.int32)
            for row, text in enumerate(block):
                target = input.target(text)
                ids[:, row] = target[TARGET_LABELS], target[TARGET_SEGMENTS]
            found.append(np.asarray(program.call(self._of_texts, *ids))[: len(block)])
        return np.concatenate(found) if found else np.zeros([0, self.params.model.dim])

    def _of_images(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return self.model.embed_images(theta.model, x, ctx)

    def _of_texts(
        self, theta: Theta, ids: tf.Tensor, segments: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        return self.model.embed_texts(theta.model, ids, segments, ctx)


def _shown(record: Mapping[str, Any]) -> str:
    lines = [f"{one['similarity']:7.3f}  {one['file']}" for one in record["images"]]
    return "\n".join([f"text: {record['text']}", *lines])
