"""Decoding for people: samples after prompts, and the score of given files, as text and records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.params import Configurable, param
from tekso.framework.task import Decoded, Program
from tekso.tasks.lm.generation import Generator, PromptBlock
from tekso.tasks.lm.sampling import check_sampling
from tekso.tasks.lm.scoring import Scorer

DEFAULT_WINDOW = 1024  # tokens, where neither decode.window nor the input's length says


class TextDecoder(Configurable):
    """Samples text and scores files with the weights of a run."""

    class Params(Configurable.Params):
        """Params of TextDecoder."""

        prompts: list[str] = param(
            "Texts to go on from. Empty: the beginnings of the first training examples.", default=[]
        )
        num_samples: int = param(
            "Samples after each prompt; or beginnings taken, where there are no prompts.", default=3
        )
        prompt_tokens: int = param("Length of the beginnings that are taken.", default=16)
        max_new_tokens: int = param("Tokens drawn after a prompt.", default=256)
        temperature: float = param("Logits are divided by it; 0 is greedy.", default=1.0)
        top_k: int | None = param("Only the so many likeliest tokens are drawn.", default=None)
        top_p: float = param("Only the likeliest tokens of this share are drawn.", default=1.0)
        window: int | None = param(
            "Tokens that the model sees at once; longer texts slide. None: the input's length.",
            default=None,
        )
        score_files: list[str] = param("Text files, or globs of them, to score.", default=[])
        score_overlap: int = param(
            "Tokens that each window of a scored file sees again, for context.", default=0
        )

    def __init__(self, params: Any, *, task: Any) -> None:
        """Checks the Params; `task` is a LanguageModel."""
        super().__init__(params)
        p = self.params
        check_sampling(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, where="task.decode")
        for name in ("num_samples", "prompt_tokens", "max_new_tokens"):
            if getattr(p, name) < 1:
                raise ValueError(f"task.decode.{name} is {getattr(p, name)}: want at least 1")
        self._task = task
        self._window = p.window or DEFAULT_WINDOW
        self._scorer = Scorer(task.log_probs, window=self._window, overlap=p.score_overlap)
        self._generators: dict[int | None, Generator] = {}

    def decode(self, program: Program, input: Any) -> Decoded | None:
        """Returns samples and scores; None if the input has no tokenizer, so there is no text.

        Raises:
          ValueError: a prompt or a file cannot be turned into tokens; it is named.
        """
        tokenizer = getattr(input, "tokenizer", None)
        if tokenizer is None:
            return None
        records = [*self._samples(program, input, tokenizer)]
        records += [self._score(program, path, tokenizer) for path in self._files()]
        return Decoded("\n".join(_shown(record) for record in records), records)

    # --- samples ---

    def _samples(self, program: Program, input: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
        prompts = self._prompts(input, tokenizer)
        generator = self._generator(getattr(tokenizer, "end_id", None))
        block = PromptBlock.of(prompts)
        drawn = program.call(
            generator.generate,
            tf.constant(block.head),
            tf.constant(block.tail),
            tf.constant(block.lengths),
        )
        ids, lengths = drawn["ids"].numpy(), drawn["lengths"].numpy()
        for prompt, row, length in zip(prompts, ids, lengths, strict=True):
            yield {
                "kind": "sample",
                "prompt": tokenizer.decode(prompt),
                "text": tokenizer.decode(row[:length].tolist()),
                "new_tokens": int(length) - len(prompt),
                "temperature": self.params.temperature,
                "top_k": self.params.top_k,
                "top_p": self.params.top_p,
            }

    def _prompts(self, input: Any, tokenizer: Any) -> list[list[int]]:
        p = self.params
        if p.prompts:
            encoded = [[int(i) for i in tokenizer.encode(text)] for text in p.prompts]
            for text, ids in zip(p.prompts, encoded, strict=True):
                if not ids:
                    raise ValueError(
                        f"task.decode.prompts: {text!r} has no tokens; a prompt needs at least one"
                    )
            return [ids for ids in encoded for _ in range(p.num_samples)]
        batch = input.batch(0)
        rows = zip(batch["ids"], batch["weights"], strict=True)
        taken = [ids[: min(p.prompt_tokens, int((w > 0).sum()))].tolist() for ids, w in rows]
        return [ids for ids in taken if ids][: p.num_samples]

    def _generator(self, stop_id: int | None) -> Generator:
        p = self.params
        if stop_id not in self._generators:
            self._generators[stop_id] = Generator(
                self._task.model,
                max_new_tokens=p.max_new_tokens,
                window=p.window,
                stop_id=stop_id,
                temperature=p.temperature,
                top_k=p.top_k,
                top_p=p.top_p,
            )
        return self._generators[stop_id]

    # --- scores ---

    def _files(self) -> Sequence[str]:
        found: list[str] = []
        for pattern in self.params.score_files:
            matches = sorted(tf.io.gfile.glob(pattern))
            if not matches:
                raise ValueError(f"task.decode.score_files: {pattern!r} matches no file")
            found += matches
        return found

    def _score(self, program: Program, path: str, tokenizer: Any) -> dict[str, Any]:
        with tf.io.gfile.GFile(path, "rb") as file:
            data = file.read()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"task.decode.score_files: {path} is not UTF-8 text, see its byte {error.start}"
            ) from error
        ids = [int(i) for i in tokenizer.encode(text)]
        if len(ids) < 2:
            raise ValueError(
                f"task.decode.score_files: {path} has {len(ids)} tokens; the first is given, so a "
                "text needs at least 2 to be scored"
            )
        num_bytes = len(data) - len(tokenizer.decode(ids[:1]).encode("utf-8"))
        score = self._scorer.score(program, ids, num_bytes=num_bytes)
        return {
            "kind": "score",
            "file": path,
            "tokens": len(score.log_probs),
            "bytes": num_bytes,
            "log_prob": score.total,
            "loss": score.loss,
            "bits_per_byte": score.bits_per_byte,
            "token_log_probs": [float(x) for x in score.log_probs],
        }


def _shown(record: dict[str, Any]) -> str:
    if record["kind"] == "score":
        return (
            f"score of {record['file']}: {record['bits_per_byte']:.4f} bits per byte, "
            f"{record['loss']:.4f} nats a token, log-probability {record['log_prob']:.2f} nats, "
            f"{record['tokens']:,} tokens"
        )
    title = f"--- {record['new_tokens']} tokens after {record['prompt']!r} "
    return f"{title}{'-' * max(3, 100 - len(title))}\n{record['text']}\n"
