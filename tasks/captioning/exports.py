"""Exports models of images and captions to programs without Tekso: pixels and tokens in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import (
    ExportedFunction,
    ExportedInput,
    ExportedOutput,
    lengths_up_to,
)
from tekso.framework.theta import Theta
from tekso.models.decoding.beam_search import BeamSearch
from tekso.tasks.captioning.captioning_search import with_memory
from tekso.tasks.captioning.input import LANGUAGE_IDS
from tekso.tasks.classification.task import X
from tekso.tasks.image.preparation import scale_and_shift

_CAPTIONS = {
    "ids": ExportedOutput(
        "tokens of each caption, end included, padded with 0: int32, [examples, captions, longest]"
    ),
    "lengths": ExportedOutput("number of tokens of each caption: int32, [examples, captions]"),
    "scores": ExportedOutput("scores that rank the captions: float32, [examples, captions]"),
    "log_probs": ExportedOutput("nats: float32, [examples, captions]"),
}
_EMBEDDINGS = {"embeddings": ExportedOutput("of unit length: float32, [examples, size]")}

Embed = Callable[..., tf.Tensor]
"""Called with (theta of the task, normalised images or tokens and segments, ctx)."""


def caption_exports(
    model: Any, search: BeamSearch.Params, known: Any, *, forbidden_ids: Sequence[int]
) -> dict[str, ExportedFunction]:
    """Returns the functions of a captioner: "caption" (beam search) and "greedy".

    Args:
      model: a Captioner.
      search: the search for captions.
      known: params, tokenizer and languages of the input.
      forbidden_ids: tokens that are never in a caption.
    """
    greedy = search.copy().set(
        beam_size=1, num_hypotheses=1, length_normalization=0.0, coverage_penalty=0.0
    )
    docs = {
        "caption": f"The best captions by beam search with {search.beam_size} hypotheses.",
        "greedy": "Greedy decoding: the likeliest token at every step.",
    }
    inputs = {"images": _pixels(known.params)}
    if len(known.languages) > 1:
        names = ", ".join(f"{i} {name}" for i, name in enumerate(known.languages))
        inputs[LANGUAGE_IDS] = ExportedInput(f"language of each caption: {names}")
    return {
        name: ExportedFunction(
            doc=docs[name],
            function=_searching(model, params, known, forbidden_ids),
            inputs=inputs,
            outputs=_CAPTIONS,
            for_litert=params.beam_size == 1,
        )
        for name, params in (("caption", search), ("greedy", greedy))
    }


def _searching(
    model: Any, params: BeamSearch.Params, known: Any, forbidden_ids: Sequence[int]
) -> Callable[..., dict[str, tf.Tensor]]:
    search = params.copy().set(return_attention=False).instantiate()
    scale, shift = scale_and_shift(known.params)

    def caption(theta: Theta, images: tf.Tensor, *languages_and_ctx: Any) -> dict[str, tf.Tensor]:
        *languages, ctx = languages_and_ctx
        batch = {X: tf.cast(images, tf.float32) * scale + shift}
        batch.update(zip([LANGUAGE_IDS], languages, strict=False))
        given = with_memory(model, theta.model, batch, ctx)
        found: dict[str, tf.Tensor] = search.search(
            model, theta.model, given, ctx,
            end_id=known.tokenizer.end_id, forbidden_ids=forbidden_ids,
        )  # fmt: skip
        return found

    return caption


def embedding_exports(images: Embed, texts: Embed, known: Any) -> dict[str, ExportedFunction]:
    """Returns the functions of a dual encoder: "embed_images" and "embed_texts".

    Args:
      images: embeds images.
      texts: embeds tokens; segment 0 is padding.
      known: params and tokenizer of the input.
    """
    scale, shift = scale_and_shift(known.params)

    def of_images(theta: Theta, pixels: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
        return {"embeddings": images(theta, tf.cast(pixels, tf.float32) * scale + shift, ctx)}

    def of_texts(
        theta: Theta, ids: tf.Tensor, lengths: tf.Tensor, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        segments = tf.range(ids.shape[1]) < tf.expand_dims(lengths, 1)
        return {"embeddings": texts(theta, ids, tf.cast(segments, tf.int32), ctx)}

    tokens = ExportedInput(
        f"the tokens of each text and the end token {known.tokenizer.end_id}, padded with any id",
        has_length=True,
    )
    return {
        "embed_images": ExportedFunction(
            doc="The embedding of every image, for images of the size of training.",
            function=of_images,
            inputs={"images": _pixels(known.params)},
            outputs=_EMBEDDINGS,
            for_litert=True,
        ),
        "embed_texts": ExportedFunction(
            doc="The embedding of every text: its product with that of an image is their cosine.",
            function=of_texts,
            inputs={
                "ids": tokens,
                "lengths": ExportedInput("number of tokens of each text, end included"),
            },
            outputs=_EMBEDDINGS,
            lengths=lengths_up_to(known.params.target_length),
            for_litert=True,
        ),
    }


def _pixels(params: Any) -> ExportedInput:
    shape = (params.image_size, params.image_size, params.channels)
    return ExportedInput("pixels from 0 to 255, RGB or grey", tf.uint8, shape=shape)
