"""Exports a language model to programs without Tekso: scoring, generation and sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import (
    ExportedFunction,
    ExportedInput,
    ExportedOutput,
    lengths_up_to,
)
from tekso.framework.theta import Theta
from tekso.tasks.lm.decode import DEFAULT_WINDOW, TextDecoder
from tekso.tasks.lm.generation import Generator
from tekso.tasks.lm.scoring import ScoredModel


def language_model_exports(
    task: ScoredModel,
    decode: TextDecoder.Params,
    *,
    end_id: int | None,
    forbidden_ids: Sequence[int] = (),
) -> dict[str, ExportedFunction]:
    """Returns the functions "score" and "generate", and "sample" if the temperature is not 0.

    They read prompts as `TextDecoder` does, up to the length of the window. The tokens are the same
    up to the order of sums.

    Args:
      task: a LanguageModel.
      decode: how to decode: window, number of new tokens, sampling.
      end_id: a row ends with this token; None: there is no end token.
      forbidden_ids: tokens that are never sampled.
    """
    window = decode.window or DEFAULT_WINDOW
    ids = ExportedInput("the tokens of a text, preceded by the end token", has_length=True)
    labels = ExportedInput("the token after each of the ids", has_length=True)
    functions = {
        "score": ExportedFunction(
            doc="The log-probability of every label, given the ids up to its position.",
            function=lambda *arguments: {"log_probs": task.log_probs(*arguments)},
            inputs={"ids": ids, "labels": labels},
            outputs={
                "log_probs": ExportedOutput("nats, float32, [examples, length]", length_of="ids")
            },
            lengths=lengths_up_to(window),
        ),
        "generate": _generating(
            task,
            decode.copy().set(temperature=0.0),
            end_id,
            forbidden_ids,
            doc="Greedy decoding: the likeliest token at every step.",
        ),
    }
    if decode.temperature > 0.0:
        doc = "Tokens sampled with the settings of task.decode; seed 0 gives the run's samples."
        functions["sample"] = _generating(task, decode, end_id, forbidden_ids, doc=doc)
    return functions


def _generating(
    task: ScoredModel,
    decode: TextDecoder.Params,
    end_id: int | None,
    forbidden_ids: Sequence[int],
    *,
    doc: str,
) -> ExportedFunction:
    generator = Generator(
        task.model,
        max_new_tokens=decode.max_new_tokens,
        window=decode.window,
        stop_id=end_id,
        temperature=decode.temperature,
        top_k=decode.top_k,
        top_p=decode.top_p,
        forbidden_ids=tuple(forbidden_ids),
    )
    is_random = decode.temperature > 0.0
    return ExportedFunction(
        doc=f"{doc} A row ends with the end token, or after {decode.max_new_tokens} new tokens.",
        function=_from_first_token(generator),
        inputs={
            "ids": ExportedInput("prompts, padded with any id", has_length=True),
            "lengths": ExportedInput("number of tokens of each prompt, at least 1"),
        },
        outputs={
            "ids": ExportedOutput(
                "prompts and new tokens, padded with 0: int32, [examples, longest]"
            ),
            "lengths": ExportedOutput(
                "number of tokens of each row, prompt included: int32, [examples]"
            ),
        },
        lengths=lengths_up_to(decode.window or DEFAULT_WINDOW),
        is_random=is_random,
        for_litert=not is_random,
    )


def _from_first_token(generator: Generator) -> Callable[..., dict[str, tf.Tensor]]:
    """Returns the generator's function for prompts of any length from 1."""

    def generate(
        theta: Theta, ids_BL: tf.Tensor, lengths_B: tf.Tensor, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        head, tail = ids_BL[:, :1], ids_BL[:, 1:]
        return generator.generate(theta.model, head, tail, lengths_B, ctx)

    return generate
