"""The best checkpoint, and why there is none."""

from __future__ import annotations

from tekso.framework.run.ranking import Ranking


def test_values_that_were_forgotten_are_named_if_there_is_no_best() -> None:
    ranking = Ranking("dev/bleu", "max", count=1)
    assert "evaluated by dev/bleu (run.keep_best), so" in ranking.why_no_best()
    ranking.forget_until(10)  # nothing
    assert "changed" not in ranking.why_no_best()
    for step, bleu in ((10, 0.3), (20, 0.4), (30, 0.2)):
        ranking.add(step, {"dev/bleu": bleu})
    ranking.forget_until(30)
    assert (ranking.best(), ranking.earlier_best()) == (None, [20])
    assert "(run.keep_best) since its meaning or the data changed, so" in ranking.why_no_best()
    ranking.add(40, {"dev/bleu": 0.1})
    assert ranking.best() == 40 and ranking.to_keep([20, 30, 40]) == [40, 20]
    ranking.read({})
    assert "changed" not in ranking.why_no_best()
