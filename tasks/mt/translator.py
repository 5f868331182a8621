"""Translator: texts in, translations out, by a search with the weights of a run.

    texts ─ encode ─ sort by length ─ batches of few shapes ─ search ─ decode ─ in the order given

Every shape of a batch is traced and compiled once: sources are filled up to one of a few lengths,
and a batch of each length has a fixed number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework.params import Configurable, param
from tekso.framework.task import Program
from tekso.framework.theta import Theta
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.search import Search

_SHORTEST = 16  # tokens: sources are filled up to this, twice this, and so on
_FEWEST_ROWS = 8

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A translation.

    Attributes:
      text: detokenised.
      ids: its tokens, without the end.
      score: what hypotheses are ranked by: the log-probability, normalised as the search says.
      log_prob: of all tokens and the end, in nats.
    """

    text: str
    ids: np.ndarray
    score: float
    log_prob: float


@dataclasses.dataclass(frozen=True)
class Translations:
    """What came of some texts.

    Attributes:
      hypotheses: of each text, the best first; none where it was left off.
      num_cut: texts longer than `max_source_length`, of which the beginning was translated.
    """

    hypotheses: list[list[Hypothesis]]
    num_cut: int

    @property
    def best(self) -> list[str]:
        """The best translation of each text."""
        return [own[0].text if own else "" for own in self.hypotheses]


class Translator(Configurable):
    """Translates texts."""

    class Params(Configurable.Params):
        """Params of Translator."""

        search: Search.Params = param("How targets are found.", default=BeamSearch.Params())
        batch_tokens: int = param("Source tokens that are translated together.", default=2048)
        max_source_length: int | None = param(
            "Tokens of a source; of a longer one, the beginning is translated. None: source_length "
            "of the input.",
            default=None,
        )
        xla: Literal["none", "search"] = param(
            "What XLA compiles: nothing, or a whole search as one program. That takes half a "
            "minute for each shape of a batch, and pays where there are many texts.",
            default="none",
        )

    def __init__(self, params: Any, *, task: Any) -> None:
        """Checks the numbers; `task` is a Translation."""
        super().__init__(params)
        p = self.params
        for name in ("batch_tokens", "max_source_length"):
            if p.get(name) is not None and p.get(name) < 1:
                raise ValueError(f"{p.path_of(name)} is {p.get(name)}: want at least 1")
        self._model = task.model
        self._search = p.search.instantiate()
        self._functions: dict[int, Callable[..., Any]] = {}  # by the token that ends a target

    def translate(
        self,
        program: Program,
        input: Any,
        texts: Sequence[str],
        *,
        languages: Sequence[str | None] = (),
        rows: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Translations:
        """Returns the translations of texts.

        Args:
          program: calls with the weights of the run.
          input: a translation Input: makes ids of texts and texts of ids.
          texts: to translate; the translation of a text without tokens is empty.
          languages: to translate each into, of a model of several.
          rows: of a batch; None: as many as `batch_tokens` allows.
          stopped: asked after every batch whether to leave off.
        """
        targets = list(languages) or [None] * len(texts)
        input = getattr(input, "inner", input)
        longest = self._longest(input)
        whole = [
            input.encode_source(text, language=language)
            for text, language in zip(texts, targets, strict=True)
        ]
        num_cut = sum(len(ids) > longest for ids in whole)
        encoded = [_cut(ids, longest) for ids in whole]
        found: list[list[Hypothesis]] = [[] for _ in texts]
        for length, members in _by_length(encoded, texts, longest).items():
            size = rows or max(_FEWEST_ROWS, _power_of_two(self.params.batch_tokens // length))
            for first in range(0, len(members), size):
                if stopped():
                    return Translations(found, num_cut)
                own = members[first : first + size]
                batch = source_batch([encoded[i] for i in own], rows=size, length=length)
                result = self._call(program, input.target_tokenizer.end_id, batch)
                for row, i in enumerate(own):
                    found[i] = _hypotheses(result, row, input)
        return Translations(found, num_cut)

    @property
    def longest_target(self) -> int | None:
        """Most tokens of a translation, its end included; None: its source alone tells."""
        longest: int | None = self._search.params.max_length
        return longest

    def encode(self, input: Any, text: str, language: str | None) -> np.ndarray:
        """Returns what is read of a text: its tokens, those of a text that is too long cut."""
        return _cut(input.encode_source(text, language=language), self._longest(input))

    def _longest(self, input: Any) -> int:
        return int(self.params.max_source_length or input.params.source_length)

    def _call(self, program: Program, end_id: int, batch: Mapping[str, np.ndarray]) -> Any:
        tensors = (tf.constant(batch["source_ids"]), tf.constant(batch["source_segment_ids"]))
        result = program.call(self._function(end_id), *tensors)
        found = {name: np.asarray(value) for name, value in result.items()}
        if np.isnan(found["scores"]).any():
            raise ValueError(
                "the scores of translations are no numbers: some weights are not finite "
                "(tekso-ckpt inspect shows which); take an earlier checkpoint"
            )
        return found

    def _function(self, end_id: int) -> Callable[..., Any]:
        """Returns the pure function for `program.call`: the same one every time."""
        if end_id not in self._functions:

            def search(theta: Theta, ids: tf.Tensor, segment_ids: tf.Tensor, ctx: Any) -> Any:
                def run(theta: Theta, ids: tf.Tensor, segment_ids: tf.Tensor) -> Any:
                    batch = {"source_ids": ids, "source_segment_ids": segment_ids}
                    return self._search.search(self._model, theta, batch, ctx, end_id=end_id)

                if self.params.xla == "search":
                    run = tf.function(run, jit_compile=True, autograph=False)
                elif not tf.config.list_logical_devices("TPU"):
                    ctx = ctx.filling_in_place()
                return run(theta.model, ids, segment_ids)

            self._functions[end_id] = search
        return self._functions[end_id]


def source_batch(sources: Sequence[np.ndarray], *, rows: int, length: int) -> Batch:
    """Returns the source side of a batch; rows beyond the sources are padding.

    Shapes:
      sources: [tokens] each, `length` at most
      returns: "source_ids" and "source_segment_ids" [rows, length] int32
    """
    ids = np.zeros([rows, length], np.int32)
    segment_ids = np.zeros([rows, length], np.int32)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
        segment_ids[row, : len(source)] = 1
    return {"source_ids": ids, "source_segment_ids": segment_ids}


def one_line(text: str) -> str:
    """Returns a text without line ends."""
    return " ".join(text.split("\n")).replace("\r", " ")


def _by_length(
    encoded: Sequence[np.ndarray], texts: Sequence[str], longest: int
) -> dict[int, list[int]]:
    """{length of a batch: the texts in it, the longest first}; empty texts are in none."""
    members: dict[int, list[int]] = {}
    for i in sorted(range(len(texts)), key=lambda i: -len(encoded[i])):
        if texts[i].strip():
            length = _SHORTEST
            while length < len(encoded[i]):
                length *= 2
            members.setdefault(min(length, longest), []).append(i)
    return members


def _cut(ids: np.ndarray, longest: int) -> np.ndarray:
    """The first tokens, and the end."""
    return ids if len(ids) <= longest else np.concatenate([ids[: longest - 1], ids[-1:]])


def _power_of_two(number: int) -> int:
    """The largest that is not larger; 1 at least."""
    return 1 << max(number.bit_length() - 1, 0)


def _hypotheses(result: Mapping[str, np.ndarray], row: int, input: Any) -> list[Hypothesis]:
    end_id = input.target_tokenizer.end_id
    hypotheses = []
    for n, length in enumerate(result["lengths"][row]):
        if length:
            ids = result["ids"][row, n, :length]
            ids = ids[:-1] if ids[-1] == end_id else ids
            score, log_prob = (float(result[k][row, n]) for k in ("scores", "log_probs"))
            hypotheses.append(Hypothesis(input.decode_target(ids), ids, score, log_prob))
    return hypotheses
