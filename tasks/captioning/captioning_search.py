"""Finds captions of images by a search with the weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import param
from tekso.framework.task import Program
from tekso.framework.theta import Theta
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.search import Search
from tekso.tasks.captioning.input import LANGUAGE_IDS
from tekso.tasks.classification.task import X
from tekso.tasks.mt.target_search import Hypothesis, TargetSearch, hypotheses_of, side_by_side

_ROWS = 32  # images of a batch by default


class Asked(NamedTuple):
    """An image as the model gets it, [height, width, channels], and the number of a language."""

    x: np.ndarray
    language: int = 0


class CaptionSearch(TargetSearch):
    """Finds captions of images; all batches have one shape."""

    class Params(TargetSearch.Params):
        """Params of CaptionSearch."""

        search: Search.Params = param(
            "The search for captions; its max_length is the input's target_length if it is not "
            "set.",
            default=BeamSearch.Params(max_length_ratio=None),
        )
        batch_size: int = param("Images of a batch.", default=_ROWS)

    sizes = ("batch_size", "num_searches")
    unit = "captions"

    def captions(
        self,
        program: Program,
        tokenizer: Tokenizer,
        images: Sequence[Callable[[], Asked]],
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[list[Hypothesis]]:
        """Returns the captions of each image, the best first; empty if it was stopped before.

        Args:
          program: runs a function with the weights of the run.
          tokenizer: decodes captions.
          images: return the images; each is called once, when its batch is built.
          stopped: called before every batch; if it returns True, the search stops.
        """
        found: list[list[Hypothesis]] = [[] for _ in images]
        rows = self.params.batch_size

        def search(places: Sequence[int]) -> Any:
            return self.results(program, tokenizer, self._batch([images[i]() for i in places]))

        plans = list(blocks(range(len(images)), rows))
        for places, result in side_by_side(search, plans, self.most_searches(program), stopped):
            for row, place in enumerate(places):
                found[place] = hypotheses_of(result, row, tokenizer.end_id, _decoding(tokenizer))
        return found

    def _batch(self, images: Sequence[Asked]) -> dict[str, np.ndarray]:
        """Returns the arrays of some images; rows beyond them are zeros."""
        rows, form = self.params.batch_size, images[0].x.shape
        x, languages = np.zeros([rows, *form], np.float32), np.zeros(rows, np.int32)
        for row, image in enumerate(images):
            x[row], languages[row] = image
        return {X: x, LANGUAGE_IDS: languages}

    def _run(
        self,
        theta: Theta,
        batch: Mapping[str, tf.Tensor],
        ctx: StepContext,
        end_id: int,
        forbidden_ids: range,
    ) -> Any:
        found = with_memory(self._model, theta, batch, ctx)
        return super()._run(theta, found, ctx, end_id, forbidden_ids)


def with_memory(
    model: Any, theta: Theta, batch: Mapping[str, tf.Tensor], ctx: StepContext
) -> dict[str, tf.Tensor]:
    """Returns the arrays that a search reads: images are encoded once.

    Shapes:
      batch: "x" [B, H, W, C]; "language_ids" [B] int32, with several languages only
      returns: "memory" [B, S, D], "source_segment_ids" [B, S] int32
    """
    memory = model.encode(theta, batch, ctx)
    return {"memory": memory, "source_segment_ids": tf.ones(memory.shape[:2], tf.int32)}


def _decoding(tokenizer: Tokenizer) -> Callable[[np.ndarray], str]:
    return lambda ids: " ".join(tokenizer.decode(ids.tolist()).split())


def blocks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yields consecutive parts of at most `size` items."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
