"""The momentum encoder of docs/own_model.md: its weights, its queue, and two devices."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fork_server
import numpy as np
import processes
import pytest

from tekso.framework.run.session import Session

PAGE = Path(__file__).resolve().parents[1] / "docs" / "own_model.md"
FILES = ("my_views", "my_moco")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the files of the page, whose modules can be imported."""
    text = PAGE.read_text()
    for name in FILES:
        code = text.partition(f"```python\n# {name}.py\n")[2].partition("\n```")[0]
        (tmp_path / f"{name}.py").write_text(code + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def test_a_step_moves_the_slow_weights_and_the_queue(folder: Path) -> None:
    experiment = importlib.import_module("my_moco").Momentum
    session = Session(experiment, {"execution.xla": "none"})
    before = session.theta()
    session.train(1)
    after = session.theta()
    slow, fast, new = (np.asarray(x) for x in (before.slow.w, before.encoder.w, after.slow.w))
    np.testing.assert_allclose(new, 0.99 * slow + 0.01 * fast, rtol=1e-5, atol=1e-7)
    assert not np.allclose(after.encoder.w, fast)
    queue = np.asarray(after.queue)
    np.testing.assert_array_equal(queue[:-64], np.asarray(before.queue)[64:])
    np.testing.assert_allclose(np.linalg.norm(queue[-64:], axis=1), 1.0, rtol=1e-5)


def test_two_devices_have_the_losses_of_one(folder: Path) -> None:
    losses = {}
    for devices in (1, 2):
        done = processes.run(
            [
                *("-m", "tekso.tools.trainer", "--import=my_moco", "--model=my_moco.Momentum"),
                *(f"--logdir=runs/{devices}", f"--cpu_devices={devices}", "--steps=4"),
                *("--set", "run.eval_every_steps=2", "--set", "execution.xla=none"),
                *("--set", "run.log_every_steps=1"),
            ],
            cwd=folder,
            env=fork_server.UNCHECKED if devices == 1 else {},
            optimized=False,
            op_by_op=devices == 1,
        )
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stdout + done.stderr
        lines = (folder / "runs" / str(devices) / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        losses[devices] = [
            value for one in records for name, value in sorted(one.items()) if "loss" in name
        ]
    assert len(losses[1]) >= 4
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)
