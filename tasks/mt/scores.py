"""Scores of translations: BLEU and chrF by sacrebleu, over all pairs and per language."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tekso.framework.params import Configurable, param
from tekso.framework.tables import table

BLEU, CHRF = "bleu", "chrf"


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores computed by sacrebleu.

    Attributes:
      figures: {"bleu", "chrf", and with several languages "bleu/de", "chrf/de", …: 0 to 100}.
      signatures: {"bleu", "chrf": sacrebleu's signature, to be published with the score}.
    """

    figures: dict[str, float]
    signatures: dict[str, str]

    def lines(self) -> list[str]:
        """Returns a readable line per score; languages are sorted by chrF, the best first."""
        lines = [
            f"{name} {self.figures[key]:.2f}  {self.signatures[key]}"
            for key, name in ((BLEU, "BLEU"), (CHRF, "chrF"))
        ]
        languages = [key.partition("/")[2] for key in self.figures if key.startswith(f"{BLEU}/")]
        rows = [
            (self.figures[f"{CHRF}/{language}"], self.figures[f"{BLEU}/{language}"], language)
            for language in languages
        ]
        if rows:
            cells = [
                (language, f"{in_words:.2f}", f"{in_letters:.2f}")
                for in_letters, in_words, language in sorted(rows)[::-1]
            ]
            lines += ["", *table(("language", "BLEU", "chrF"), cells, right=(1, 2))]
        return lines


class Scorer(Configurable):
    """Compares translations with references.

    Source: Papineni et al. 2002 (BLEU); Popović 2015 (chrF); Post 2018 (sacrebleu, signatures).
    """

    class Params(Configurable.Params):
        """Params of Scorer."""

        bleu_tokenizer: str = param(
            "sacrebleu's tokenizer for BLEU: 13a, intl, zh, char, none, ….", default="13a"
        )
        tokenizers: dict[str, str] = param(
            "{target language: BLEU tokenizer} for the scores per language. Other languages, and "
            "the score over all pairs, use bleu_tokenizer.",
            default={},
        )
        lowercase: bool = param("Whether BLEU and chrF ignore case.", default=False)

    def __init__(self, params: Any) -> None:
        """Checks the tokenizer.

        Raises:
          ValueError: sacrebleu does not have the tokenizer, or a package for it is missing.
        """
        super().__init__(params)
        from sacrebleu.metrics import bleu

        p = self.params
        named = {p.path_of("bleu_tokenizer"): p.bleu_tokenizer}
        named |= {f"{p.path_of('tokenizers')}.{name}": t for name, t in p.tokenizers.items()}
        for path, name in named.items():
            if name not in bleu.BLEU.TOKENIZERS:
                raise ValueError(
                    f"{path} is {name!r}, but sacrebleu has: " + ", ".join(bleu.BLEU.TOKENIZERS)
                )
            try:
                self._of(["a b c d"], ["a b c d"], name)
            except (RuntimeError, ImportError, OSError) as error:
                raise ValueError(
                    f"{path} is {name!r}, which does not work here: {error}"
                ) from error

    def score(
        self,
        hypotheses: Sequence[str],
        references: Sequence[str | Sequence[str]],
        languages: Sequence[str | None] = (),
    ) -> Scores:
        """Returns the scores of translations or captions, each with one or several references.

        Args:
          hypotheses: detokenised texts.
          references: detokenised references: one text, or several, for each hypothesis.
          languages: target language of each pair; empty, or all the same: no scores per language.

        Raises:
          ValueError: there are no translations, or the numbers of texts differ.
        """
        if not hypotheses or len(hypotheses) != len(references):
            raise ValueError(
                f"{len(hypotheses)} translations and {len(references)} references: the numbers "
                "must be equal, and at least 1"
            )
        p = self.params
        figures, signatures = self._of(hypotheses, references, p.bleu_tokenizer)
        members: dict[str, list[int]] = collections.defaultdict(list)
        for i, language in enumerate(languages):
            members[str(language)].append(i)
        if len(members) > 1:
            for language, own in sorted(members.items()):
                part, _ = self._of(
                    [hypotheses[i] for i in own],
                    [references[i] for i in own],
                    p.tokenizers.get(language, p.bleu_tokenizer),
                )
                figures |= {f"{key}/{language}": value for key, value in part.items()}
        return Scores(figures, signatures)

    def _of(
        self, hypotheses: Sequence[str], references: Sequence[str | Sequence[str]], tokenizer: str
    ) -> tuple[dict[str, float], dict[str, str]]:
        from sacrebleu.metrics import bleu, chrf

        p = self.params
        listed = [[one] if isinstance(one, str) else list(one) for one in references]
        streams = [list(stream) for stream in itertools.zip_longest(*listed)]  # None: no further
        both: dict[str, Any] = {
            BLEU: bleu.BLEU(tokenize=tokenizer, lowercase=p.lowercase, force=True),
            CHRF: chrf.CHRF(lowercase=p.lowercase),
        }
        figures = {
            key: min(float(metric.corpus_score(list(hypotheses), streams).score), 100.0)
            for key, metric in both.items()
        }
        return figures, {key: str(m.get_signature()) for key, m in both.items()}
