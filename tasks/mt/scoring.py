"""Decodes an evaluation input: scores, samples with references, plots of attention weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.input.held_out import spread
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program, Scored
from tekso.framework.theta import Theta
from tekso.tasks.mt import attention_plot
from tekso.tasks.mt.input import TranslationInput
from tekso.tasks.mt.nearest import NearestSource
from tekso.tasks.mt.scores import BLEU, Scorer
from tekso.tasks.mt.translator import (
    Batch,
    PairModel,
    Translations,
    Translator,
    one_line,
    source_batch,
)


class Scoring(Configurable):
    """Translates held-out pairs and compares the translations with the references."""

    class Params(Configurable.Params):
        """Params of Scoring."""

        scorer: Scorer.Params = param("How translations are compared.", default=Scorer.Params())
        pairs: int | None = param(
            "Pairs of an evaluation input that are translated, spread evenly over it. None: all, "
            "including pairs that are too long for the loss; of a source that is too long, only "
            "the beginning is translated.",
            default=None,
        )
        shown: int = param("Translations that are shown with their references.", default=10)
        plots: int = param("Of these, translations whose attention weights are drawn.", default=2)
        nearest: int = param(
            "Pairs for a nearest-neighbour baseline at the last evaluation: the score of the "
            "target of the most similar training source. 0: no baseline.",
            default=0,
        )

    def __init__(self, params: Any, *, task: PairModel, translator: Translator) -> None:
        """Checks the numbers.

        Args:
          params: see Params.
          task: a Translation.
          translator: translates the pairs.
        """
        super().__init__(params)
        p = self.params
        for name in ("pairs", "shown", "plots", "nearest"):
            least = 1 if name == "pairs" else 0
            if p.get(name) is not None and p.get(name) < least:
                raise ValueError(f"{p.path_of(name)} is {p.get(name)}, must be at least {least}")
        self._model, self._translator = task.model, translator
        self._scorer = p.scorer.instantiate()

    def score(
        self,
        program: Program,
        input: TranslationInput,
        *,
        is_last: bool,
        stopped: Callable[[], bool],
    ) -> Scored | None:
        """Returns scores, samples and plots of an evaluation input; see `Task.score`."""
        p = self.params
        pairs = input.corpus_pairs(spread(input.num_corpus_pairs, p.pairs))
        sources = [pair.source for pair in pairs]
        references = [pair.target for pair in pairs]
        languages = [pair.language for pair in pairs]
        found = self._translator.translate(
            program, input, sources, languages=languages, stopped=stopped
        )
        if stopped():
            return None
        scores = self._scorer.score(found.best, references, languages)
        lines = [_summary(len(pairs), input, found), *scores.lines()]
        figures = dict(scores.figures)
        if is_last and p.nearest:
            looked_up, text = self._nearest(input, pairs, found)
            figures |= looked_up
            lines.append(text)
        shown = spread(len(pairs), p.shown).tolist()
        lines += ["", *(_sample(pairs[i], found, i) for i in shown)]
        images = self._attention(program, input, [pairs[i] for i in shown[: p.plots]], found, shown)
        notes = tuple(f"{key}: {text}" for key, text in scores.signatures.items())
        return Scored(figures, "\n".join(lines), images, notes)

    def _nearest(
        self, input: TranslationInput, pairs: Sequence[Any], found: Translations
    ) -> tuple[dict[str, float], str]:
        """Returns the scores of the nearest-neighbour baseline, and a text that compares them."""
        chosen = spread(len(pairs), self.params.nearest).tolist()
        looked_up = dict.fromkeys(chosen, "")
        for language in {pairs[i].language for i in chosen}:
            known = (pair[:2] for pair in input.training_pairs() if pair.language == language)
            own = [i for i in chosen if pairs[i].language == language]
            targets = NearestSource(known).translate(pairs[i].source for i in own)
            looked_up.update(zip(own, targets, strict=True))
        references = [pairs[i].target for i in chosen]
        figures = self._scorer.score([looked_up[i] for i in chosen], references).figures
        model = self._scorer.score([found.best[i] for i in chosen], references).figures
        text = (
            f"of {len(chosen)} pairs, the target of the nearest training source: BLEU "
            f"{figures[BLEU]:.2f}; the model: {model[BLEU]:.2f}"
        )
        return {f"nearest/{key}": value for key, value in figures.items()}, text

    def _attention(
        self,
        program: Program,
        input: TranslationInput,
        pairs: Sequence[Any],
        found: Translations,
        shown: Sequence[int],
    ) -> dict[str, bytes]:
        """Returns plots of the attention weights of some pairs, if the model provides them."""
        images: dict[str, bytes] = {}
        if not hasattr(self._model, "attention"):
            return images
        for number, (pair, i) in enumerate(zip(pairs, shown, strict=False)):
            if not found.hypotheses[i]:
                continue
            source = self._translator.encode(input, pair.source, pair.language)
            target = found.hypotheses[i][0].ids
            batch = self._forced(source, target, input)
            tensors = (tf.constant(batch[name]) for name in _FORCED_NAMES)
            values = program.call(self._attention_weights, *tensors)
            images[f"attention_{number}"] = attention_plot.draw(
                np.asarray(values)[0, : len(target) + 1, : len(source)],
                source=[input.source_token(int(token)) for token in source],
                target=[*(input.target_tokenizer.decode([token]) for token in target), ""],
                title=pair.source[:60],
            )
        return images

    def _forced(self, source: np.ndarray, target: np.ndarray, input: TranslationInput) -> Batch:
        """Returns a batch of one pair, padded so that few shapes are traced."""
        longest = input.params.source_length, self._translator.longest_target
        sizes = [
            min(1 << max(4, int(size - 1).bit_length()), most or 1 << 30)
            for size, most in zip((len(source), len(target) + 1), longest, strict=True)
        ]
        end_id = input.target_tokenizer.end_id
        batch = source_batch([source], rows=1, length=max(sizes[0], len(source)))
        read = np.concatenate([[end_id], target]).astype(np.int32)
        ids = np.full([1, max(sizes[1], len(read))], end_id, np.int32)
        ids[0, : len(read)] = read
        segment_ids = (np.arange(ids.shape[1]) < len(read)).astype(np.int32)[None]
        return {**batch, "target_ids": ids, "target_segment_ids": segment_ids}

    def _attention_weights(self, theta: Theta, *tensors_and_ctx: Any) -> tf.Tensor:
        *tensors, ctx = tensors_and_ctx
        batch = dict(zip(_FORCED_NAMES, tensors, strict=True))
        return self._model.attention(theta.model, batch, ctx)


_FORCED_NAMES = ("source_ids", "source_segment_ids", "target_ids", "target_segment_ids")


def _summary(count: int, input: TranslationInput, found: Translations) -> str:
    """Returns a line on the pairs that were translated, cut or skipped."""
    parts = [f"{count:,} of {input.num_corpus_pairs:,} pairs"]
    if found.num_cut:
        parts.append(f"of {found.num_cut:,} sources only the beginning was translated")
    if input.skipped().count:
        parts.append(f"{input.skipped().count:,} more are malformed or blank")
    return "; ".join(parts)


def _sample(pair: Any, found: Translations, index: int) -> str:
    hypotheses = found.hypotheses[index]
    score = f"  ({hypotheses[0].score:.3f})" if hypotheses else ""
    text = hypotheses[0].text if hypotheses else ""
    to = f" [{pair.language}]" if pair.language else ""
    model = one_line(text)
    return f"source{to}: {pair.source}\n  model: {model}{score}\n  reference: {pair.target}"
