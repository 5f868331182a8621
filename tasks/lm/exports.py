"""What a language model gives to programs that do not have Tekso: scores and generated tokens."""

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
    """Returns the functions of a language model: "score", "generate" and, if it draws, "sample".

    A prompt is read as `TextDecoder` reads it, up to as many tokens as the model sees at once; what
    is drawn is equal up to the order of sums.

    Args:
      task: a LanguageModel.
      decode: how it decodes: window, number of new tokens, sampling.
      end_id: a row ends with this token; None: with none.
      forbidden_ids: tokens that are never drawn.
    """
    window = decode.window or DEFAULT_WINDOW
    ids = ExportedInput("the tokens of a text, the end token before the first", has_length=True)
    labels = ExportedInput("the token after each of them", has_length=True)
    functions = {
        "score": ExportedFunction(
            doc="The log-probability of every label, given the ids up to there.",
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
            doc="The likeliest token, one after the other.",
        ),
    }
    if decode.temperature > 0.0:
        doc = "Tokens drawn as task.decode says; seed 0 draws as the run does."
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
        doc=f"{doc} A row ends with the end token, or after {decode.max_new_tokens} new ones.",
        function=_from_first_token(generator),
        inputs={
            "ids": ExportedInput("prompts, filled up with any id", has_length=True),
            "lengths": ExportedInput("tokens of each prompt, at least 1"),
        },
        outputs={
            "ids": ExportedOutput("prompts and what follows, then 0: int32, [examples, longest]"),
            "lengths": ExportedOutput("tokens of each row, the prompt's too: int32, [examples]"),
        },
        lengths=lengths_up_to(decode.window or DEFAULT_WINDOW),
        is_random=is_random,
        for_litert=not is_random,
    )


def _from_first_token(generator: Generator) -> Callable[..., dict[str, tf.Tensor]]:
    """The function of a generator in which rows may be of any length from 1 on."""

    def generate(
        theta: Theta, ids_BL: tf.Tensor, lengths_B: tf.Tensor, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        head, tail = ids_BL[:, :1], ids_BL[:, 1:]
        return generator.generate(theta.model, head, tail, lengths_B, ctx)

    return generate
