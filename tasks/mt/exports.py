"""What a translation model gives to programs that do not have Tekso: translations and scores.

Tokens go in and come out: the tokenizers lie beside the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
from tekso.tasks.mt.translator import PairModel

_SOURCE = {
    "source_ids": ExportedInput(
        "the tokens of each source, its end (and before them its language, where there are "
        "several), filled up with any id",
        has_length=True,
    ),
    "source_lengths": ExportedInput("tokens of each source, its end among them"),
}
_FOUND = {
    "ids": ExportedOutput(
        "tokens of each target, its end among them, then 0: int32, [examples, targets, longest]"
    ),
    "lengths": ExportedOutput(
        "tokens of each target, 0: there is none; int32, [examples, targets]"
    ),
    "scores": ExportedOutput("what targets are ranked by: float32, [examples, targets]"),
    "log_probs": ExportedOutput("nats: float32, [examples, targets]"),
}


def translation_exports(
    task: PairModel,
    search: BeamSearch.Params,
    *,
    end_id: int,
    forbidden_ids: Sequence[int] = (),
    longest: int,
    longest_target: int,
) -> dict[str, ExportedFunction]:
    """Returns the functions of a translation model: "translate", "greedy" and "score".

    Args:
      task: a Translation.
      search: how targets are found.
      end_id: ends a target, and stands for the token before the first.
      forbidden_ids: tokens that no target gets.
      longest: most tokens of a source.
      longest_target: most tokens of a target that is scored.
    """
    greedy = search.copy().set(
        beam_size=1, num_hypotheses=1, length_normalization=0.0, coverage_penalty=0.0
    )
    beam = f"beam search with {search.beam_size} hypotheses"
    tokens = end_id, forbidden_ids
    return {
        "translate": _translating(task, search, tokens, longest, f"The best targets by {beam}."),
        "greedy": _translating(
            task, greedy, tokens, longest, "The likeliest token, one after the other."
        ),
        "score": _scoring(task, end_id, longest, longest_target),
    }


def _translating(
    task: PairModel,
    params: BeamSearch.Params,
    tokens: tuple[int, Sequence[int]],
    longest: int,
    doc: str,
) -> ExportedFunction:
    end_id, forbidden_ids = tokens
    search = params.copy().set(return_attention=False).instantiate()

    def translate(
        theta: Theta, ids_BS: tf.Tensor, lengths_B: tf.Tensor, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        batch = {"source_ids": ids_BS, "source_segment_ids": _segments(ids_BS, lengths_B)}
        found: dict[str, tf.Tensor] = search.search(
            task.model, theta.model, batch, ctx, end_id=end_id, forbidden_ids=forbidden_ids
        )
        return found

    return ExportedFunction(
        doc=doc,
        function=translate,
        inputs=_SOURCE,
        outputs=_FOUND,
        lengths=lengths_up_to(longest),
        for_litert=params.beam_size == 1,
    )


def _scoring(task: PairModel, end_id: int, longest: int, longest_target: int) -> ExportedFunction:
    def score(
        theta: Theta,
        ids_BS: tf.Tensor,
        lengths_B: tf.Tensor,
        labels_BT: tf.Tensor,
        target_lengths_B: tf.Tensor,
        ctx: StepContext,
    ) -> dict[str, tf.Tensor]:
        begin_B1 = tf.fill([labels_BT.shape[0], 1], tf.constant(end_id, tf.int32))
        segments_BT = _segments(labels_BT, target_lengths_B)
        batch = {
            "source_ids": ids_BS,
            "source_segment_ids": _segments(ids_BS, lengths_B),
            "target_ids": tf.concat([begin_B1, labels_BT[:, :-1]], 1),
            "target_labels": labels_BT,
            "target_segment_ids": segments_BT,
        }
        log_probs_BT = task.log_probs(theta, batch, ctx)
        return {"log_probs": tf.where(segments_BT > 0, log_probs_BT, 0.0)}

    return ExportedFunction(
        doc="The log-probability of every token of given targets.",
        function=score,
        inputs={
            "source_ids": dataclasses.replace(_SOURCE["source_ids"], longest=longest),
            "source_lengths": _SOURCE["source_lengths"],
            "target_labels": ExportedInput(
                "the tokens of each target, its end among them",
                has_length=True,
                longest=longest_target,
            ),
            "target_lengths": ExportedInput("tokens of each target, its end among them"),
        },
        outputs={
            "log_probs": ExportedOutput(
                "nats, 0 beyond the target: float32, [examples, length]", length_of="target_labels"
            )
        },
        lengths=lengths_up_to(max(longest, longest_target)),
    )


def _segments(ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """1 for tokens, 0 for what fills up."""
    places = tf.range(ids.shape[1])
    return tf.cast(places < tf.expand_dims(lengths, 1), tf.int32)
