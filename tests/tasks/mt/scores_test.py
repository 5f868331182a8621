"""Scores of translations, against BLEU and chrF written out from their papers."""

from __future__ import annotations

import collections
import math

import pytest

from tekso.tasks.mt.scores import Scorer

HYPOTHESES = ["the cat sat on the mat today", "a b c d e", "he reads the book that she wrote"]
REFERENCES = ["the cat sat on a mat today", "a b c d f", "he reads a book that she wrote then"]


def ngrams(words: list[str], n: int) -> collections.Counter[tuple[str, ...]]:
    return collections.Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """Papineni et al. 2002: geometric mean of clipped precisions, times the brevity penalty."""
    pairs = [(h.split(), r.split()) for h, r in zip(hypotheses, references, strict=True)]
    total = 0.0
    for n in range(1, 5):
        found = sum((ngrams(h, n) & ngrams(r, n)).total() for h, r in pairs)
        total += math.log(found / sum(ngrams(h, n).total() for h, _ in pairs)) / 4
    sizes = [sum(len(side) for side in column) for column in zip(*pairs, strict=True)]
    return 100.0 * math.exp(total + min(0.0, 1.0 - sizes[1] / sizes[0]))


def test_bleu_is_that_of_the_paper() -> None:
    scores = Scorer.Params().instantiate().score(HYPOTHESES, REFERENCES)
    assert scores.figures["bleu"] == pytest.approx(bleu(HYPOTHESES, REFERENCES), rel=1e-9)
    assert "tok:13a" in scores.signatures["bleu"] and "version:" in scores.signatures["bleu"]


def test_equal_texts_score_100_and_unlike_ones_nothing() -> None:
    scorer = Scorer.Params().instantiate()
    same = scorer.score(REFERENCES, REFERENCES).figures
    assert same == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    other = scorer.score(["xyz"] * 3, REFERENCES).figures
    assert other["bleu"] < 1e-3 and other["chrf"] < 5.0


def test_every_language_has_its_own_scores_and_the_table_begins_with_the_best() -> None:
    scores = Scorer.Params().instantiate().score(HYPOTHESES, REFERENCES, ["de", "fr", "fr"])
    assert set(scores.figures) == {f"{m}{s}" for m in ("bleu", "chrf") for s in ("", "/de", "/fr")}
    assert scores.figures["bleu/fr"] == pytest.approx(bleu(HYPOTHESES[1:], REFERENCES[1:]))
    table = [line.split()[0] for line in scores.lines()[-2:]]
    assert table == sorted(["de", "fr"], key=lambda name: -scores.figures[f"chrf/{name}"])


def test_one_language_alone_has_no_table() -> None:
    scores = Scorer.Params().instantiate().score(HYPOTHESES, REFERENCES, ["de"] * 3)
    assert set(scores.figures) == {"bleu", "chrf"} and len(scores.lines()) == 2


def test_case_counts_unless_it_is_said_otherwise() -> None:
    upper = [text.upper() for text in REFERENCES]
    plain = Scorer.Params(lowercase=True).instantiate().score(upper, REFERENCES)
    assert plain.figures["bleu"] == pytest.approx(100.0)
    assert Scorer.Params().instantiate().score(upper, REFERENCES).figures["bleu"] < 1e-3


@pytest.mark.parametrize(("hypotheses", "references"), [([], []), (["a"], ["a", "b"])])
def test_what_cannot_be_scored_is_refused(hypotheses: list[str], references: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{len(hypotheses)} translations and"):
        Scorer.Params().instantiate().score(hypotheses, references)


def test_an_unknown_tokenizer_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'moses', but sacrebleu has: .*13a"):
        Scorer.Params(bleu_tokenizer="moses").instantiate()


def test_a_tokenizer_that_does_not_work_here_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Please install MeCab")

    monkeypatch.setattr("sacrebleu.metrics.bleu.BLEU.corpus_score", broken)
    with pytest.raises(ValueError, match=r"bleu_tokenizer is '13a', which does not work .*MeCab"):
        Scorer.Params(tokenizers={"ja": "char"}).instantiate()


def test_with_several_references_a_match_with_any_counts() -> None:
    """Papineni et al. 2002, section 2.1: counts are clipped by the largest count of a reference."""
    scorer = Scorer.Params().instantiate()
    several = [[REFERENCES[0], HYPOTHESES[0]], [HYPOTHESES[1]], ["unlike", HYPOTHESES[2], "this"]]
    assert scorer.score(HYPOTHESES, several).figures["bleu"] == pytest.approx(100.0)
    one = scorer.score(HYPOTHESES, [[text] for text in REFERENCES])
    assert one == scorer.score(HYPOTHESES, REFERENCES)
    some = [[text, "x"] for text in REFERENCES]
    assert scorer.score(HYPOTHESES, some).figures["chrf"] == one.figures["chrf"]
