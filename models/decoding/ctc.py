"""Decoding of CTC outputs on the host: greedy, and prefix beam search.

Legend: T frames, V tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tekso.models.decoding.prefix_scores import PrefixScores, PrefixTotals

LogProbs = npt.NDArray[np.floating]


def merge_path(path: Sequence[int] | npt.NDArray[np.integer], *, blank_id: int) -> list[int]:
    """Returns the labelling of a path: repeated tokens are merged, then blanks are removed."""
    tokens = np.asarray(path, np.int64)
    new = np.concatenate([np.ones(min(len(tokens), 1), np.bool_), tokens[1:] != tokens[:-1]])
    found: list[int] = tokens[new & (tokens != blank_id)].tolist()
    return found


def ctc_greedy(log_probs: LogProbs, *, blank_id: int) -> list[int]:
    """Returns the labelling of the most probable path, which may not be the best labelling.

    Shapes:
      log_probs: [T, V]
    """
    return merge_path(log_probs.argmax(1) if len(log_probs) else [], blank_id=blank_id)


def ctc_alignment(log_probs: LogProbs, labels: Sequence[int], *, blank_id: int) -> list[int] | None:
    """Returns the frame in which each label begins in the most probable path of a labelling.

    None: no path has this labelling, for example because there are too few frames.

    Shapes:
      log_probs: [T, V]
    """
    tokens = np.full(2 * len(labels) + 1, blank_id)
    tokens[1::2] = labels
    skips = np.full(len(tokens), False)
    skips[3::2] = tokens[3::2] != tokens[1:-2:2]
    best = np.full(len(tokens), -np.inf)
    best[0] = 0.0  # before the first frame
    moves = np.zeros((len(log_probs), len(tokens)), np.int64)
    for t, frame in enumerate(np.asarray(log_probs, np.float64)):
        arrived = np.full((3, len(tokens)), -np.inf)
        for move in range(min(3, len(tokens))):
            arrived[move, move:] = best[: len(tokens) - move]
        arrived[2, ~skips] = -np.inf
        moves[t] = arrived.argmax(0)
        best = arrived.max(0) + frame[tokens]
    state = max(range(max(len(tokens) - 2, 0), len(tokens)), key=lambda s: best[s])
    if best[state] == -np.inf:
        return None
    begins = [0] * len(labels)
    for t in range(len(log_probs) - 1, -1, -1):
        if state % 2:
            begins[state // 2] = t
        state -= int(moves[t, state])
    return begins


@dataclasses.dataclass(frozen=True)
class CtcHypothesis:
    """A labelling.

    Attributes:
      labels: its tokens.
      log_prob: its log-probability in nats, summed over the paths that the search kept, plus the
        score of the language model.
    """

    labels: tuple[int, ...]
    log_prob: float


def ctc_beam_search(
    log_probs: LogProbs,
    *,
    blank_id: int,
    beam_size: int,
    tokens_per_frame: int | None = None,
    language: PrefixScores | None = None,
) -> list[CtcHypothesis]:
    """Returns the most probable labellings, best first, by prefix beam search.

    If the beam holds all prefixes, the result is exact.

    Args:
      log_probs: log-probabilities of the tokens in each frame.
      blank_id: token of the blank.
      beam_size: prefixes kept after each frame, and labellings returned, at most.
      tokens_per_frame: most probable labels that extend a prefix; None: all.
      language: scores that are added for each token and the end; None: none.

    Shapes:
      log_probs: [T, V]
    Raises:
      ValueError: beam_size or tokens_per_frame is below 1.
    Source: Hannun et al. 2014, algorithm 1.
    """
    beam = CtcBeam(
        blank_id=blank_id,
        beam_size=beam_size,
        tokens_per_frame=tokens_per_frame,
        language=language,
    )
    beam.read(log_probs)
    return beam.hypotheses()


class CtcBeam:
    """A prefix beam search that reads frames in any number of parts.

    Each prefix keeps the log-sums of its paths that end in a blank and in its last label.
    """

    def __init__(
        self,
        *,
        blank_id: int,
        beam_size: int,
        tokens_per_frame: int | None = None,
        language: PrefixScores | None = None,
    ) -> None:
        """Starts with the empty prefix; see `ctc_beam_search`."""
        if beam_size < 1 or (tokens_per_frame is not None and tokens_per_frame < 1):
            raise ValueError(
                f"ctc_beam_search: beam_size {beam_size} and tokens_per_frame {tokens_per_frame} "
                "must be at least 1"
            )
        self._blank_id, self._beam_size, self._most = blank_id, beam_size, tokens_per_frame
        self._language = PrefixTotals(language)
        self._beam: dict[tuple[int, ...], _Sums] = {(): _Sums(blank=0.0)}

    def read(self, log_probs: LogProbs) -> None:
        """Reads the next frames.

        Shapes:
          log_probs: [T, V]
        """
        total = self._language.total
        for frame in np.asarray(log_probs, np.float64):
            order = np.argsort(-frame, kind="stable")
            labels = [token for token in order if token != self._blank_id][: self._most]
            self._language.prepare(self._beam)
            beam = _after_frame(self._beam, frame, labels, self._blank_id)
            ranks = {prefix: sums.total + total(prefix) for prefix, sums in beam.items()}
            self._beam = {prefix: beam[prefix] for prefix in self._best(ranks)}

    def hypotheses(self) -> list[CtcHypothesis]:
        """Returns the labellings of the frames read so far, best first."""
        self._language.prepare(self._beam)
        ended = self._language.ended
        ranks = {prefix: float(sums.total + ended(prefix)) for prefix, sums in self._beam.items()}
        return [CtcHypothesis(prefix, ranks[prefix]) for prefix in self._best(ranks)]

    def _best(self, ranks: dict[tuple[int, ...], float]) -> list[tuple[int, ...]]:
        possible = (prefix for prefix, rank in ranks.items() if rank > -np.inf)
        return sorted(possible, key=lambda prefix: (-ranks[prefix], prefix))[: self._beam_size]


@dataclasses.dataclass
class _Sums:
    """Log-sums of the paths of a prefix, by their last token."""

    blank: float = -np.inf
    label: float = -np.inf

    @property
    def total(self) -> float:
        return float(np.logaddexp(self.blank, self.label))


def _after_frame(
    beam: dict[tuple[int, ...], _Sums], frame: LogProbs, labels: list[int], blank_id: int
) -> dict[tuple[int, ...], _Sums]:
    """Extends every path of the beam by a token."""
    found: dict[tuple[int, ...], _Sums] = {}
    for prefix, sums in beam.items():
        total = sums.total
        same = found.setdefault(prefix, _Sums())
        same.blank = float(np.logaddexp(same.blank, total + frame[blank_id]))
        if prefix:
            same.label = float(np.logaddexp(same.label, sums.label + frame[prefix[-1]]))
        for token in labels:
            repeats = bool(prefix) and token == prefix[-1]
            longer = found.setdefault((*prefix, int(token)), _Sums())
            before = sums.blank if repeats else total
            longer.label = float(np.logaddexp(longer.label, before + frame[token]))
    return {prefix: sums for prefix, sums in found.items() if sums.total > -np.inf}
