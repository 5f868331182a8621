"""No room for what a run writes: every kind of file, under a limit of the size of files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import tensorflow as tf

from tekso.framework import out_of_space
from tekso.framework.exit_codes import ExitCode, exit_code_of
from tekso.framework.run import disk_space

LIMITED = """
import os, resource, sys
import numpy as np
from tekso.framework import files
from tekso.framework.run import weight_files
from tekso.framework.run.metrics_log import MetricsLog
from tekso.framework.run.report.tensorboard import TensorBoardEvents

os.chdir(sys.argv[1])
files.write_atomically("samples.txt", "before")
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))

def until_full(write):
    try:
        for step in range(200):
            write(step)
    except Exception as error:
        print(type(error).__name__, getattr(error, "errno", ""), error)

log = MetricsLog("metrics.jsonl")
until_full(lambda step: log.append({"step": step, "split": "train", "loss": 0.5}))
print(log.content().count(b"\\n"))
events = TensorBoardEvents("events")
until_full(lambda step: events.append(step, "train", {"loss": 0.5}))
events.close()
until_full(lambda step: files.write_atomically("samples.txt", "x" * 1000 * step))
weights = {"w": np.zeros(1000)}
until_full(lambda step: weight_files.write_weights("a.safetensors", weights, {}))
"""


def test_nothing_is_cut_off_and_every_error_says_why(tmp_path: Path) -> None:
    done = processes.run(["-c", LIMITED, tmp_path])
    log, complete, events, samples, weights = done.stdout.splitlines()
    assert log == "OSError 27 [Errno 27] File too large: 'metrics.jsonl'"
    content = (tmp_path / "metrics.jsonl").read_text()
    records = list(map(json.loads, content.splitlines()))
    assert content.endswith("\n") and len(content) <= 3_000 < len(content) * (1 + 1 / len(records))
    assert [record["step"] for record in records] == list(range(int(complete)))
    assert events == "OSError 27 [Errno 27] File too large: 'events/train'"
    assert samples.startswith("OSError 27")
    assert (tmp_path / "samples.txt").read_text() == "x" * 3_000
    assert weights == (
        "DiskFullError  cannot write a.safetensors: the file exceeds the size limit of 3,000 bytes "
        "(ulimit -f). Incomplete files were removed; increase the limit and repeat the command"
    )
    assert sorted(os.listdir(tmp_path)) == ["events", "metrics.jsonl", "samples.txt"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.EDQUOT, "the disk quota is used up. Earlier checkpoints are unchanged"),
        (errno.ENOSPC, "there is no space left on the disk. Earlier"),
        (errno.EFBIG, "the file is larger than the file system permits. Earlier"),
    ],
)
def test_a_message_of_tensorflow_is_replaced_by_the_reason(code: int, expected: str) -> None:
    message = f"/run/tensors.data-00000; {os.strerror(code)} [Op:SaveV2]"
    found = disk_space.full_checkpoint("/run/step", tf.errors.UnknownError(None, None, message))
    assert found is not None and exit_code_of(found) == ExitCode.DISK_FULL
    assert str(found).startswith(f"cannot write the checkpoint /run/step: {expected}")
    assert "Op:" not in str(found) and str(found).count("repeat the command") == 1


def test_a_file_system_without_free_inodes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=10, f_favail=0))
    found = disk_space.full_checkpoint("/run/step", OSError(errno.ENOSPC, "", "/run/step/a"))
    assert found is not None and "(no free inodes)" in str(found)


def test_other_errors_are_none_of_these() -> None:
    assert out_of_space.code_of(OSError(errno.EACCES, "Permission denied")) is None
    assert out_of_space.code_of(ValueError("space")) is None
    assert exit_code_of(OSError(errno.ENOSPC, "")) == ExitCode.DISK_FULL
