"""Shallow fusion: a language model of another run scores the transcripts of a search.

    score(labels) = log P(labels | speech) + weight * log P_lm(labels, end) + token_bonus * tokens

Legend: N rows, L length, V tokens of the recogniser, without blank and end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.input.characters import Characters
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import REQUIRED, Configurable, param
from tekso.framework.theta import Theta, flatten
from tekso.framework.trained import LoadTrained, TrainedError, TrainedModel
from tekso.models.decoding.decoder import Decoder, DecoderStep

_NO_TOKEN = -1
_ROWS, _LENGTH = 8, 16  # calls are padded to multiples of these, so that few shapes are traced


class LanguageFusion(Configurable):
    """Names a language model and its weight in a search."""

    class Params(Configurable.Params):
        """Params of LanguageFusion."""

        run: str = param(
            "Run of the language model: its folder, RUN/best, RUN/STEP or a checkpoint.",
            default=REQUIRED,
        )
        experiment: str = param(
            "Key of the experiment that the run must have. Empty: any.", default=""
        )
        weight: float = param("Factor of the language model's log-probabilities.", default=0.3)
        token_bonus: float = param(
            "Added for every token, since a language model prefers short texts. 0 for attention "
            "decoders, which have length_normalization.",
            default=0.0,
        )

    def __init__(self, params: Any) -> None:
        """Checks the weight.

        Raises:
          ValueError: it is negative or not finite, or the bonus is not finite.
        """
        super().__init__(params)
        p = self.params
        if not 0.0 <= p.weight < float("inf"):
            raise ValueError(f"{p.path_of('weight')} is {p.weight}, must be finite and at least 0")
        if not abs(p.token_bonus) < float("inf"):
            raise ValueError(f"{p.path_of('token_bonus')} is {p.token_bonus}, must be finite")

    def load(self, load: LoadTrained, tokenizer: Tokenizer, vocab_size: int) -> LanguageScores:
        """Returns the scores of the language model for the tokens of a recogniser.

        Args:
          load: opens the run.
          tokenizer: that of the recogniser.
          vocab_size: V, at least the tokenizer's.

        Raises:
          ValueError: the run cannot be opened, is of another experiment or has no language model;
            or its tokenizer lacks tokens of the recogniser.
        """
        p = self.params
        try:
            trained = load(p.run)
        except TrainedError as error:
            raise ValueError(f"{p.path_of('run')} is {p.run}: {error}") from error
        if p.experiment and trained.experiment != p.experiment:
            raise ValueError(
                f"{p.path_of('run')} is {p.run}, a run of {trained.experiment}, but "
                f"{p.path_of('experiment')} is {p.experiment}"
            )
        model = getattr(trained.task, "model", None)
        if not all(hasattr(model, name) for name in ("logits", "extend_step", "init_cache")):
            raise ValueError(
                f"{p.path_of('run')} is {p.run}, a run of {trained.experiment}, which is not a "
                "language model"
            )
        known: Any = getattr(trained.input, "tokenizer", None)
        ids = matched_tokens(tokenizer, known, vocab_size, path=p.path_of("run"), run=p.run)
        return LanguageScores(trained, ids, int(known.end_id), p.weight, p.token_bonus)


def matched_tokens(
    own: Tokenizer, other: Any, vocab_size: int, *, path: str, run: str
) -> npt.NDArray[np.int32]:
    """Returns the language model's token for each token of the recogniser.

    Tokens that no transcript has, which include the end of a text, have none: -1.

    Args:
      own: tokenizer of the recogniser.
      other: tokenizer of the language model.
      vocab_size: V.
      path: name of the Params, for errors.
      run: run of the language model, for errors.

    Shapes:
      returns: [V]
    Raises:
      ValueError: the tokenizers divide texts in different ways, or tokens are missing.
    """
    found = np.full(vocab_size, _NO_TOKEN, np.int32)
    unused = {own.end_id, *own.unused_ids}
    used = [token for token in range(own.vocab_size) if token not in unused]
    if isinstance(other, Tokenizer) and other.fingerprint() == own.fingerprint():
        found[used] = used
        return found
    names = type(own).__name__, type(other).__name__
    if not (isinstance(own, Characters) and isinstance(other, Characters)):
        raise ValueError(
            f"{path} is {run}, whose tokenizer ({names[1]}) is not that of the recogniser "
            f"({names[0]}): train the language model with the same tokenizer and table"
        )
    of_text = {text: token for token, text in enumerate(other.token_bytes)}
    for token in (other.end_id, *other.unused_ids):
        of_text.pop(other.token_bytes[token], None)
    missing = [own.token_bytes[token] for token in used if own.token_bytes[token] not in of_text]
    if missing:
        shown = ", ".join(repr(text.decode("utf-8", "replace")) for text in missing[:5])
        raise ValueError(
            f"{path} is {run}, whose language model lacks {len(missing)} of the {len(used)} "
            f"characters of the recogniser ({shown}{', …' if missing[5:] else ''}): train it on "
            "text that has them"
        )
    found[used] = [of_text[own.token_bytes[token]] for token in used]
    return found


@dataclasses.dataclass(frozen=True)
class LanguageScores:
    """A language model with its weights, over the tokens of a recogniser; see `PrefixScores`.

    Attributes:
      trained: the language model.
      ids: its token for each token of the recogniser, -1 for none, [V].
      end_id: its token of the end of a text, which is also its first input.
      weight: factor of its log-probabilities.
      token_bonus: added for every token.
    """

    trained: TrainedModel
    ids: npt.NDArray[np.int32]
    end_id: int
    weight: float
    token_bonus: float

    @property
    def flat(self) -> dict[str, tf.Tensor]:
        """The weights of the model by path."""
        flat = flatten(self.trained.theta)
        return {path: flat[path] for path in self.trained.task.specs()}

    def theta(self, flat: Mapping[str, tf.Tensor]) -> Theta:
        """Returns the weights of the model from those by path."""
        return Theta(self.trained.task.theta(dict(flat)).model)

    def next_scores(self, prefixes: Sequence[tuple[int, ...]]) -> npt.NDArray[np.float32]:
        """Returns the scores of each token and of the end after some prefixes.

        Shapes:
          returns: [prefixes, V + 1], the end last
        """
        rows = -(-len(prefixes) // _ROWS) * _ROWS
        needed = 1 + max(map(len, prefixes))
        self.check_length(needed)
        most = longest_text(self.trained.task.model.params) or needed + _LENGTH
        length = min(-(-needed // _LENGTH) * _LENGTH, most)
        ids = np.full([rows, length], self.end_id, np.int32)
        last = np.zeros(rows, np.int32)
        for i, prefix in enumerate(prefixes):
            ids[i, 1 : len(prefix) + 1] = self.ids[list(prefix)]
            last[i] = len(prefix)
        found = np.asarray(self._last_scores(tf.constant(ids), tf.constant(last)))
        return found[: len(prefixes)]

    @functools.cached_property
    def _last_scores(self) -> Any:
        model, theta = self.trained.task.model, self.trained.theta.model

        def run(ids: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
            logits = model.logits(theta, ids, StepContext(mode="decode"))
            return self.weighted(tf.gather(logits, last, batch_dims=1))

        return tf.function(run, autograph=False)

    def weighted(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns the scores of the recogniser's tokens and the end, from the model's logits.

        Shapes:
          logits: [N, tokens of the model]
          returns: [N, V + 1] float32
        """
        log_probs = tf.nn.log_softmax(tf.cast(logits, tf.float32))
        has_token = self.ids != _NO_TOKEN
        places = np.append(np.where(has_token, self.ids, self.end_id), self.end_id)
        added = np.append(np.where(has_token, self.token_bonus, -np.inf), 0.0)
        scores = self.weight * tf.gather(log_probs, places.astype(np.int32), axis=1)
        return scores + tf.constant(added.reshape(1, -1), tf.float32)

    def check_length(self, length: int) -> None:
        """Raises a ValueError if the model has too few positions for a text."""
        most = longest_text(self.trained.task.model.params)
        if most is not None and length > most:
            raise ValueError(
                f"the language model of {self.trained.path} has positions for {most} tokens, but "
                f"a transcript has more: train it with input.length of at least {length}"
            )


def longest_text(params: Any) -> int | None:
    """Returns the most tokens that a language model with learned positions can read, or None."""
    path = "positions.max_length"
    return int(params.get(path)) if path in params else None


class FusedDecoder:
    """A decoder that adds the scores of a language model to each step; see `Decoder`.

    Its weights are Theta(model=…, language=…). The end token is the decoder's token V.
    """

    def __init__(self, model: Decoder, scores: LanguageScores) -> None:
        """Keeps both models."""
        self._model, self._scores = model, scores
        self._language: Any = scores.trained.task.model
        self._ids = np.append(
            np.where(scores.ids == _NO_TOKEN, scores.end_id, scores.ids), scores.end_id
        ).astype(np.int32)

    def start_decoding(
        self, theta: Theta, batch: Mapping[str, tf.Tensor], max_length: int, ctx: StepContext
    ) -> Any:
        """See `Decoder`."""
        self._scores.check_length(max_length)
        state = self._model.start_decoding(theta.model, batch, max_length, ctx)
        rows = batch["source_segment_ids"].shape[0]
        cache = self._language.init_cache(rows, max_length)
        # The dim of the rows, which is not the first one in a repeated stack.
        one, two = (self._language.init_cache(n, max_length) for n in (1, 2))
        self._dims = tf.nest.map_structure(_dim_that_differs, one, two)
        return {"model": state, "language": cache}

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """See `Decoder`."""
        step = self._model.decode_step(theta.model, ids, state["model"], position, ctx)
        own = tf.expand_dims(tf.gather(tf.constant(self._ids), ids), 1)
        logits, cache = self._language.extend_step(
            theta.language, own, state["language"], position, ctx, logits_of="last"
        )
        added = self._scores.weighted(logits[:, 0])
        padding = step.logits.shape[1] - added.shape[1]
        added = tf.pad(added, [[0, 0], [0, padding]], constant_values=-np.inf)
        if step.added is not None:
            added += step.added
        return DecoderStep(
            step.logits, step.attention, {"model": step.state, "language": cache}, added
        )

    def expand(self, state: Any, k: int) -> Any:
        """See `Decoder`."""
        return {
            "model": self._model.expand(state["model"], k),
            "language": self._along_rows(state["language"], lambda t, dim: tf.repeat(t, k, dim)),
        }

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        """See `Decoder`."""
        return {
            "model": self._model.select(state["model"], rows),
            "language": self._along_rows(
                state["language"], lambda t, dim: tf.gather(t, rows, axis=dim)
            ),
        }

    def _along_rows(self, cache: Any, change: Any) -> Any:
        def changed(x: tf.Tensor, dim: int) -> tf.Tensor:
            return x if dim < 0 else change(x, dim)

        return tf.nest.map_structure(changed, cache, self._dims)


def _dim_that_differs(one: tf.Tensor, two: tf.Tensor) -> int:
    """Returns the first dim in which two shapes differ, or -1."""
    pairs = enumerate(zip(one.shape, two.shape, strict=True))
    return next((dim for dim, (a, b) in pairs if a != b), -1)
