"""Decoding with a language model: samples after prompts, and scores of files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import files
from tekso.framework.input.input import Input
from tekso.framework.input.text import NotTextError, to_text
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import Configurable, param
from tekso.framework.task import Decoded, Program
from tekso.framework.theta import Theta
from tekso.models.decoding.sampling import check_sampling
from tekso.tasks.lm.generation import Generator, PromptBlock
from tekso.tasks.lm.scoring import ScoredModel, TextScorer

DEFAULT_WINDOW = 1024  # tokens, if neither decode.window nor the length of the input is set
RULER_WIDTH = 80  # columns
PROMPT_LENGTH = 24  # most characters of a suggested prompt


class TextDecoder(Configurable):
    """Samples text and scores files with the weights of a run."""

    class Params(Configurable.Params):
        """Params of TextDecoder."""

        prompts: list[str] = param(
            'Texts to continue; "" starts a new text. Empty list: the first training examples.',
            default=[],
        )
        num_samples: int = param(
            "Samples for each prompt; without prompts, the number of examples.", default=1
        )
        prompt_tokens: int = param("Tokens of an example that are used as prompt.", default=16)
        max_new_tokens: int = param("Most tokens sampled after a prompt.", default=256)
        temperature: float = param("Divisor of the logits; 0 is greedy.", default=1.0)
        top_k: int | None = param("Sample only from the k likeliest tokens.", default=None)
        top_p: float = param(
            "Sample only from the likeliest tokens with this total probability.", default=1.0
        )
        window: int | None = param(
            "Context length in tokens; longer texts use a sliding window. None: the length of the "
            "input.",
            default=None,
        )
        score_files: list[str] = param("Text files or globs to score.", default=[])
        score_overlap: int = param(
            "Tokens of context that each window of a scored file shares with the one before.",
            default=0,
        )

    def __init__(self, params: Any, *, task: ScoredModel) -> None:
        """Checks the Params.

        Args:
          params: see Params.
          task: a LanguageModel.
        """
        super().__init__(params)
        p = self.params
        check_sampling(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, where="task.decode")
        for name in ("num_samples", "prompt_tokens", "max_new_tokens"):
            if getattr(p, name) < 1:
                raise ValueError(f"task.decode.{name} is {getattr(p, name)}, must be at least 1")
        if p.window is not None and p.window < 2:
            raise ValueError(
                f"task.decode.window is {p.window}, must be at least 2 tokens, or None"
            )
        self._model = task.model
        self._scorer = TextScorer(
            task.log_probs, window=p.window or DEFAULT_WINDOW, overlap=p.score_overlap
        )
        self._generate: dict[Any, Callable[..., dict[str, tf.Tensor]]] = {}

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns samples and scores; None if the input has no tokenizer.

        Raises:
          OSError: a file is missing or cannot be read.
          ValueError: a file is not text.
        """
        tokenizer = getattr(input, "tokenizer", None)
        if tokenizer is None:
            return None
        records = [*self._samples(program, input, tokenizer)]
        patterns = self.params.score_files
        paths = files.glob(patterns, what="task.decode.score_files") if patterns else []
        records += [self._score(program, path, tokenizer) for path in paths]
        return Decoded("\n".join(_shown(record) for record in records), records)

    def example_prompt(self, inputs: Iterable[Any]) -> str:
        """Returns the first non-empty prompt, or the beginning of a text of the inputs."""
        for prompt in self.params.prompts:
            if prompt:
                found: str = prompt
                return found
        for input in inputs:
            if input.tokenizer is not None:
                text = input.tokenizer.decode(input.batch(0)["ids"][0])
                lines = text.strip().splitlines() or [""]
                line = next(filter(_has_words, lines), lines[0]).strip()
                words = textwrap.shorten(line, PROMPT_LENGTH, placeholder="")
                return words or line[:PROMPT_LENGTH]
        return ""

    def _samples(
        self, program: Program, input: Input, tokenizer: Tokenizer
    ) -> Iterator[dict[str, Any]]:
        prompts = self._prompts(input, tokenizer)
        block = PromptBlock.of(prompts)
        arrays = (tf.constant(a) for a in (block.head, block.tail, block.lengths))
        drawn = program.call(self._generate_with(tokenizer), *arrays)
        rows = zip(np.asarray(drawn["ids"]), np.asarray(drawn["lengths"]), strict=True)
        given = [text for text in self.params.prompts for _ in range(self.params.num_samples)]
        lost = [tokenizer.unknown(text) for text in given] or [[]] * len(prompts)
        for prompt, unknown, (ids, length) in zip(prompts, lost, rows, strict=True):
            yield {
                "kind": "sample",
                "prompt": tokenizer.decode(prompt),
                "unknown": unknown,
                "text": tokenizer.decode(ids[:length]),
                "new_tokens": int(length) - len(prompt),
                "temperature": self.params.temperature,
                "top_k": self.params.top_k,
                "top_p": self.params.top_p,
            }

    def _prompts(self, input: Input, tokenizer: Tokenizer) -> list[np.ndarray]:
        p = self.params
        if p.prompts:
            end = np.array([tokenizer.end_id])
            encoded = [tokenizer.encode(text) if text else end for text in p.prompts]
            begun = [ids if len(ids) else end for ids in encoded]
            return [ids for ids in begun for _ in range(p.num_samples)]
        batch = input.batch(0)
        count = min(p.num_samples, len(batch["ids"]))
        return [ids[: p.prompt_tokens] for ids in batch["ids"][:count]]

    def _generate_with(self, tokenizer: Tokenizer) -> Callable[..., dict[str, tf.Tensor]]:
        """Returns the pure function for `program.call`, built once per tokenizer."""
        p = self.params
        key = tokenizer.end_id, tuple(tokenizer.unused_ids)
        if key not in self._generate:
            generator = Generator(
                self._model,
                max_new_tokens=p.max_new_tokens,
                window=p.window,
                stop_id=tokenizer.end_id,
                temperature=p.temperature,
                top_k=p.top_k,
                top_p=p.top_p,
                forbidden_ids=key[1],
            )

            def generate(theta: Theta, *prompts_and_ctx: Any) -> dict[str, tf.Tensor]:
                return generator.generate(theta.model, *prompts_and_ctx)

            self._generate[key] = generate
        return self._generate[key]

    def _score(self, program: Program, path: str, tokenizer: Tokenizer) -> dict[str, Any]:
        try:
            with files.open(path, streams=True) as file:
                text = to_text(file.read())
        except NotTextError as error:
            raise ValueError(
                f"task.decode.score_files: {path} is not text, see byte {error.offset}: {error}"
            ) from error
        ids = np.concatenate([[tokenizer.end_id], tokenizer.encode(text)])
        num_bytes = int(tokenizer.token_num_bytes[ids].sum())
        score = self._scorer.score(program, ids, num_bytes=num_bytes)
        return {
            "kind": "score",
            "file": path,
            "tokens": len(score.log_probs),
            "bytes": num_bytes,
            "log_prob": score.total,
            "loss": score.loss,
            "bits_per_byte": score.bits_per_byte,
            "token_log_probs": score.log_probs.tolist(),
        }


def _has_words(line: str) -> bool:
    """Whether most characters of a line are letters and spaces."""
    letters = sum(map(str.isalpha, line))
    return letters > 1 and letters + sum(map(str.isspace, line)) >= 0.6 * len(line)


def _shown(record: dict[str, Any]) -> str:
    if record["kind"] == "score":
        return (
            f"score of {record['file']}: {record['bits_per_byte']:.4f} bits per byte, "
            f"{record['loss']:.4f} nats per token, log-probability {record['log_prob']:.2f} nats, "
            f"{record['tokens']:,} tokens"
        )
    prompt = repr(record["prompt"])
    if len(prompt) > RULER_WIDTH // 2:
        prompt = f"… {prompt[-RULER_WIDTH // 2 :]}"
    title = f"--- {record['new_tokens']} tokens after {prompt} "
    shown = f"{title:-<{RULER_WIDTH}}\n{record['text']}\n"
    if record["unknown"]:
        names = ", ".join(map(repr, record["unknown"]))
        return f"warning: parts of the prompt are not in the vocabulary: {names}\n{shown}"
    return shown
