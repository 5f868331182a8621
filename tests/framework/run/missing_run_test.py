"""A folder without a run: what may be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tekso.framework.run import missing_run
from tekso.framework.run.checkpoints import CheckpointError
from tekso.framework.run.opened import open_run


def test_a_wrong_folder_is_explained(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("best", "other"):
        (runs / name).mkdir(parents=True)
        (runs / name / "params.txt").touch()
    assert missing_run.reason(f"{runs}/bset/") == (
        f"there is no folder {runs}/bset; did you mean {runs}/best?"
    )
    assert missing_run.reason(f"{runs}/x") == f"there is no folder {runs}/x"
    assert missing_run.reason(str(runs)) == f"{runs} contains runs: {runs}/best, {runs}/other"
    text = f"{runs}/best/params.txt is a file, but a run is a folder"
    assert missing_run.reason(f"{runs}/best/params.txt") == text
    assert missing_run.reason(str(runs / "best")) == missing_run.reason(str(tmp_path)) == ""
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*; did you mean .*/best\?"):
        open_run(f"{runs}/bset")
