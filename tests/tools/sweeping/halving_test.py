"""Successive halving: which trials it ends, also if the sweep is killed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_sweeps import PARAMS, RATE, TINY, FakeTrainer

from tekso.framework.exit_codes import ExitCode
from tekso.tools import sweep
from tekso.tools.sweeping.trials import SweepTrial, Trainer


@pytest.mark.parametrize(
    ("steps", "killed"),
    [
        (200, ()),
        (200, ("002_", "004_")),
        (200, ("late",)),
        (200, ("unseen",)),  # ended before the sweep looked at its evaluations
        (20000, ()),  # 1 % of the steps are 200: nothing is compared before
    ],
)
def test_halving_ends_the_same_trials_when_it_is_killed_or_late(
    steps: int, killed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")
    fake, left = FakeTrainer(monkeypatch), list(killed)

    def train(self: Trainer, trial: SweepTrial, stops: Any) -> int:
        number, log = int(trial.name[:3]), Path(self.logdir(trial), "metrics.jsonl")
        log.parent.mkdir(parents=True, exist_ok=True)
        losses = [(number * 7) % 5 + step / 1000 for step in range(20, 220, 20)]
        # A run that is resumed may have lost its last evaluations.
        for count in range(3 if killed == ("late",) else 0, len(losses) + 1):
            lines = [
                {"step": 20 * (i + 1), "split": "dev", "loss": losses[i]} for i in range(count)
            ]
            log.write_text("".join(json.dumps(line) + "\n" for line in lines))
            if killed != ("unseen",) and stops():
                if trial.name[:4] in left:  # after the decision, before the trial has ended
                    left.remove(trial.name[:4])
                    raise KeyboardInterrupt
                break
        fake.trained.append(trial.name)
        record = {"exit_code": 0, "settings": dict(trial.settings), "seed": 0}
        (log.parent / "trial.json").write_text(json.dumps(record))
        (log.parent / "params.txt").write_text(PARAMS.format(rate=1e-3, seed=0))
        return ExitCode.OK

    monkeypatch.setattr(Trainer, "train", train)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=halving", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3:1e-2", "--trials=6", f"--steps={steps}"]  # fmt: skip
    assert ExitCode.OK in (sweep.main(words) for _ in range(3))  # it is killed at most twice
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/optuna.db")
    ends = [trial.user_attrs.get("ended_at") for trial in study.trials]
    first = 20 if steps == 200 else 200
    assert ends == [None, first, first, first, first, None]  # trials 0 and 5 are equally good
    assert [t.value for t in study.trials] == [
        pytest.approx((number * 7) % 5 + 0.02) for number in range(6)
    ]
    assert left in ([], ["late"], ["unseen"]) and sorted(fake.trained) == sorted(set(fake.trained))
    if not killed:  # or else this trainer loses evaluations that Optuna was told
        means = f"{(0 + 2 + 4 + 1 + 3 + 0) / 6 + 0.02:.4f}"  # of the best values, not the last ones
        printed = capsys.readouterr().out
        ended = f"\n  ended early after step {first}: others were better by then\n"
        assert printed.count(ended) == 4
        table = printed.partition("best dev/loss (smallest)\n")[2]
        assert re.search(rf" 6 +{means} ", table), table


def test_a_trial_that_is_judged_at_its_last_step_has_not_ended_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optuna = pytest.importorskip("optuna", reason="the extra `sweep` is not installed")

    def train(self: Trainer, trial: SweepTrial, stops: Any) -> int:
        folder = Path(self.logdir(trial))
        folder.mkdir(parents=True)
        record: Any = {"step": 200, "split": "dev", "loss": float(trial.name[:3])}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        record = {"exit_code": 0, "settings": dict(trial.settings), "seed": 0}
        (folder / "trial.json").write_text(json.dumps(record))
        (folder / "params.txt").write_text(PARAMS.format(rate=1e-3, seed=0))
        return ExitCode.OK

    monkeypatch.setattr(Trainer, "train", train)
    words = ["tekso-sweep", TINY, f"--logdir={tmp_path}", "--search=halving", "--metric=dev/loss",
             f"--sweep={RATE}=1e-3:1e-2", "--trials=3", "--steps=200"]  # fmt: skip
    assert sweep.main(words) == ExitCode.OK
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/optuna.db")
    assert 200 in [trial.user_attrs.get("ended_at") for trial in study.trials]
    assert "ended early" not in capsys.readouterr().out
