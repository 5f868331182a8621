"""Logdirs of a few lines, for tests of tekso-compare."""

from __future__ import annotations

import json
from pathlib import Path

PARAMS = """# model: lm.some.Model
. : Params("tekso.framework.experiment:Tree")
task.prompt : "a  # b"  # params/lm/some.py:8
learner.schedule.initial_value : {rate}  # {origin}
run.steps : 4
run.seed : {seed}  # --seed
"""
SCRIPT = "<script>x</script>"


def write(folder: Path, *, loss: float, seed: int = 0, rate: float = 0.1, text: str = "") -> str:
    folder.mkdir()
    (folder / "params.txt").write_text(PARAMS.format(rate=rate, origin="--set", seed=seed))
    rows = []
    for step in (2, 4):
        spent = {"start": 1.0, "step": 2.0 * step}
        both = {"step": step, "seconds": spent, "elapsed_seconds": 9.0}
        rows.append({**both, "split": "train", "loss": 8.0 / step, "tokens_seen": 10.0 * step})
        rows.append({**both, "split": "dev", "loss": loss + (4 - step), "error": None})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if text:
        (folder / "samples.txt").write_text(text)
    return str(folder)


def two_groups(tmp_path: Path, first: list[float], second: list[float]) -> list[str]:
    return [
        write(tmp_path / f"{name}{seed}", loss=loss, seed=seed, rate=rate, text=SCRIPT)
        for name, rate, losses in (("a", 0.1, first), ("b", 0.3, second))
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
