"""Exports a translation model to programs without Tekso: beam search, greedy search and scoring.

Inputs and outputs are tokens. The tokenizers are exported as files next to the model.
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
        "the tokens of each source and its end token, padded with any id; if there are several "
        "languages, the language token comes first",
        has_length=True,
    ),
    "source_lengths": ExportedInput("number of tokens of each source, end included"),
}
_FOUND = {
    "ids": ExportedOutput(
        "tokens of each target, end included, padded with 0: int32, [examples, targets, longest]"
    ),
    "lengths": ExportedOutput(
        "number of tokens of each target, 0 if there is no target: int32, [examples, targets]"
    ),
    "scores": ExportedOutput("scores that rank the targets: float32, [examples, targets]"),
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
      search: the search for targets.
      end_id: the token that ends a target, and the decoder's first input.
      forbidden_ids: tokens that are never in a target.
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
            task, greedy, tokens, longest, "Greedy decoding: the likeliest token at every step."
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
                "the tokens of each target, end included",
                has_length=True,
                longest=longest_target,
            ),
            "target_lengths": ExportedInput("number of tokens of each target, end included"),
        },
        outputs={
            "log_probs": ExportedOutput(
                "nats, 0 beyond the target: float32, [examples, length]", length_of="target_labels"
            )
        },
        lengths=lengths_up_to(max(longest, longest_target)),
    )


def _segments(ids: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Returns 1 for tokens and 0 for padding."""
    places = tf.range(ids.shape[1])
    return tf.cast(places < tf.expand_dims(lengths, 1), tf.int32)
