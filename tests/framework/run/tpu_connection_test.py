"""Connecting to a TPU: reported, and ended where nothing answers."""

from __future__ import annotations

import threading

import processes
import pytest

from tekso.framework.run.tpu_connection import connecting

CONNECTS = """
import socket
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.run.tpu_connection import connecting

silent = socket.create_server(("127.0.0.1", 0))  # takes connections and says nothing
tpu = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
with connecting(tpu, limit_s=1.0):
    DataParallel.Params().instantiate().setup_devices(tpu=tpu)
"""


def test_a_tpu_that_does_not_answer_ends_the_process_with_its_name() -> None:
    done = processes.run(["-c", CONNECTS], timeout=120)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "TPU 'grpc://127.0.0.1:" in line]
    assert lines[0].startswith("connecting to TPU ") and "has not answered for 1 s" in lines[1]


def test_a_connection_that_is_made_is_reported_and_watched_no_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with connecting("mine"):
        (watch,) = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    watch.join(timeout=10)
    assert not watch.is_alive()
    assert capsys.readouterr().err == "connecting to TPU 'mine', at most 600 s …\n"


def test_without_a_tpu_nothing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with connecting(None):
        pass
    assert capsys.readouterr().err == ""
