"""Exports recognisers with the front end inside: samples in, scores or tokens out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.exports import ExportedFunction, ExportedInput, ExportedOutput

_INPUTS = {
    "samples": ExportedInput("in [-1, 1)", dtype=tf.float32, has_length=True),
    "num_samples": ExportedInput("length of each recording"),
}
_SCORES = {
    "log_probs": ExportedOutput("nats, float32, [examples, frames, tokens]"),
    "num_frames": ExportedOutput("frames of each recording"),
}
_PATH = {
    "ids": ExportedOutput("tokens of each recording, padded with 0: int32, [examples, longest]"),
    "frames": ExportedOutput("the frame of each token: int32, [examples, longest]"),
    "lengths": ExportedOutput("number of tokens of each recording: int32"),
    "log_probs": ExportedOutput("nats of the path: float32, [examples]"),
}
_HYPOTHESES = {
    "ids": ExportedOutput(
        "tokens of each transcript, end included, padded with 0: int32, [examples, transcripts, "
        "longest]"
    ),
    "lengths": ExportedOutput(
        "number of tokens of each transcript, 0 if there is none: int32, [examples, transcripts]"
    ),
    "log_probs": ExportedOutput("nats: float32, [examples, transcripts]"),
    "is_finished": ExportedOutput("whether it has an end token: bool, [examples, transcripts]"),
}

Run = Callable[..., Mapping[str, tf.Tensor]]
"""Called with (theta, samples, num_samples, ctx)."""


def exported_scores(run: Run, longest: int) -> dict[str, ExportedFunction]:
    """Returns the function of a CTC model: {"recognize": …}.

    Args:
      run: returns "log_probs" and "num_frames".
      longest: samples of the longest recording.
    """
    doc = "The log-probabilities of tokens; the last one is the blank."
    return {"recognize": _exported(doc, run, _SCORES, longest)}


def exported_path(run: Run, longest: int) -> dict[str, ExportedFunction]:
    """Returns the function of a transducer with greedy search: {"recognize": …}.

    Args:
      run: returns "ids", "frames", "lengths" and "log_probs".
      longest: samples of the longest recording.
    """
    doc = "The tokens of the greedy path, and the frame of each."
    return {"recognize": _exported(doc, run, _PATH, longest)}


def exported_hypotheses(
    run: Run, greedy: Run, longest: int, *, beam_size: int, beam_for_litert: bool
) -> dict[str, ExportedFunction]:
    """Returns the functions of an attention decoder: "recognize" and "greedy".

    Args:
      run: beam search; returns "ids", "lengths", "log_probs" and "is_finished".
      greedy: the same with one hypothesis.
      longest: samples of the longest recording.
      beam_size: hypotheses of the beam search.
      beam_for_litert: whether LiteRT can run the beam search.
    """
    docs = {
        "recognize": f"The best transcripts by beam search with {beam_size} hypotheses.",
        "greedy": "Greedy decoding: the likeliest token at every step.",
    }
    runs = {"recognize": run, "greedy": greedy}
    found = {name: _exported(docs[name], runs[name], _HYPOTHESES, longest) for name in docs}
    found["recognize"] = dataclasses.replace(found["recognize"], for_litert=beam_for_litert)
    return found


def _exported(
    doc: str, run: Any, outputs: Mapping[str, ExportedOutput], longest: int
) -> ExportedFunction:
    return ExportedFunction(
        doc=doc,
        function=run,
        inputs=_INPUTS,
        outputs=outputs,
        lengths=[longest],
        for_litert=True,
    )
