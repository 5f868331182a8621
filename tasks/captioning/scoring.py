"""Scores captions of an evaluation input: BLEU, chrF, CIDEr-D and exact matches, with pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tekso.framework.input.held_out import spread
from tekso.framework.input.skips import BadRecordError
from tekso.framework.params import Configurable, param
from tekso.framework.task import Program, Scored
from tekso.tasks.captioning.captioning_search import Asked, CaptionSearch
from tekso.tasks.captioning.cider import cider
from tekso.tasks.captioning.input import CaptionedImages, language_id
from tekso.tasks.image import drawing
from tekso.tasks.image.preparation import pixels_of
from tekso.tasks.mt.scores import Scorer

CIDER, EXACT = "cider", "exact_match"


class _Case(NamedTuple):
    """An image, a language of its captions, and the references in this language."""

    image: int
    language: str
    references: list[str]


class CaptionScoring(Configurable):
    """Captions held-out images and compares the captions with their references.

    Raises:
      ValueError: a number is out of range.
    """

    class Params(Configurable.Params):
        """Params of CaptionScoring."""

        scorer: Scorer.Params = param("BLEU and chrF.", default=Scorer.Params())
        images: int | None = param(
            "Images of an evaluation input that are captioned, spread evenly over it; None: all.",
            default=None,
        )
        shown: int = param("Captions that are shown with their references.", default=16)
        baselines: dict[str, float] = param(
            "Exact matches of other methods on the same images by name, printed beside the "
            "model's.",
            default={},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.shown < 0 or (p.images is not None and p.images < 1):
            raise ValueError(
                f"{p.path_of('shown')} is {p.shown} and images is {p.images}, but must be at least "
                "0 and 1"
            )
        self._scorer = p.scorer.instantiate()

    def score(
        self,
        program: Program,
        searcher: CaptionSearch,
        input: CaptionedImages,
        *,
        stopped: Callable[[], bool],
    ) -> Scored | None:
        """Returns scores, samples and a picture; see `Task.score`.

        Malformed images are not captioned; they are counted in the report of the source.
        """
        cases = _cases(input, spread(len(input.source), self.params.images).tolist())
        blank = np.zeros(input.form()["x"][0], np.float32)
        broken: set[int] = set()

        def asked(number: int) -> Asked:
            case = cases[number]
            language = language_id(input.languages, case.language or None)
            try:
                return Asked(input.pixels(case.image, plain=True), language)
            except BadRecordError as error:
                input.source.skips.add(error.origin, error.reason)
                broken.add(number)
                return Asked(blank, language)

        images = [lambda number=number: asked(number) for number in range(len(cases))]
        found = searcher.captions(program, input.tokenizer, images, stopped=stopped)
        if stopped():
            return None
        kept = [i for i in range(len(cases)) if i not in broken]
        texts = [found[i][0].text if found[i] else "" for i in kept]
        return self._scored(input, [cases[i] for i in kept], texts, len(broken))

    def _scored(
        self, input: CaptionedImages, cases: list[_Case], texts: list[str], num_broken: int
    ) -> Scored | None:
        if not cases:
            return None
        references = [case.references for case in cases]
        languages = [case.language for case in cases]
        scores = self._scorer.score(texts, references, languages)
        hits = [text in own for text, own in zip(texts, references, strict=True)]
        figures = dict(scores.figures)
        figures[CIDER] = float(np.mean(cider(texts, references)))
        figures[EXACT] = float(np.mean(hits))
        broken = f"; {num_broken:,} are malformed" if num_broken else ""
        lines = [
            f"{len(cases):,} captions of {len(input.source):,} images{broken}",
            *scores.lines(),
            f"CIDEr-D {figures[CIDER]:.4f}",
            f"exact matches: {sum(hits):,} of {len(hits):,}",
            "",
        ]
        shown = spread(len(cases), self.params.shown).tolist()
        for i in shown:
            case, to = cases[i], f" [{cases[i].language}]" if cases[i].language else ""
            lines.append(f"{input.source.origin(case.image)}{to}\n  model: {texts[i]}")
            lines += [f"  reference: {text}" for text in case.references]
        notes = [f"{key}: {text}" for key, text in scores.signatures.items()]
        if self.params.baselines:
            listed = ", ".join(f"{k} {v:.3f}" for k, v in self.params.baselines.items())
            notes.append(f"exact match on {len(hits):,} captions {figures[EXACT]:.3f}; {listed}")
        pictures = {"captions": self._drawn(input, [cases[i] for i in shown], texts, shown)}
        drawn = {name: png for name, png in pictures.items() if png}
        return Scored(figures, "\n".join(lines), drawn, tuple(notes))

    def _drawn(
        self, input: CaptionedImages, cases: list[_Case], texts: list[str], shown: list[int]
    ) -> bytes:
        if not cases:
            return b""
        images = [pixels_of(input.pixels(case.image, plain=True), input.params) for case in cases]
        titles = [
            f"{texts[i]}\n({case.references[0]})" if texts[i] not in case.references else texts[i]
            for i, case in zip(shown, cases, strict=True)
        ]
        return drawing.gallery(images, titles, title="captions (references of others)", lines=4)


def _cases(input: CaptionedImages, images: list[int]) -> list[_Case]:
    """Returns a case for every image and every language of its captions."""
    cases = []
    for image in images:
        by_language: dict[str, list[str]] = {}
        for caption in input.source.captions(image):
            by_language.setdefault(caption.language, []).append(caption.text)
        cases += [_Case(image, *item) for item in by_language.items()]
    return cases
