"""Events for TensorBoard: read by it, without later steps, without damaged records."""

from __future__ import annotations

import io
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from report_values import events, records

from tekso.framework.input.record_frames import masked_checksum
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report import curves
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.run.report.report import Report
from tekso.framework.run.report.tensorboard import TensorBoardEvents


def test_events_are_read_by_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardEvents(str(tmp_path))
    writer.append(1, "train", {"loss": 2.0})
    writer.append(2, "train", {"loss": 1.0})
    writer.append(2, "dev", {"loss": 1.5})
    writer.close()
    accumulator = EventAccumulator(str(tmp_path / "train"))
    accumulator.Reload()
    assert [(e.step, e.value) for e in accumulator.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert events(tmp_path / "dev") == [(2, "loss", 1.5)]


def test_texts_and_pictures_are_read_by_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    picture = curves.draw(records((1, "dev", {"loss": 2.0})), title="t")
    assert picture is not None
    writer = TensorBoardEvents(str(tmp_path))
    writer.append_text(3, "dev", "decoded", "a *b*\n\n  c\n")
    writer.append_image(3, "dev", "attention", picture)
    writer.close()
    accumulator = EventAccumulator(str(tmp_path / "dev"))
    accumulator.Reload()
    (text,) = accumulator.Tensors("decoded")
    assert text.step == 3
    assert tf.make_ndarray(text.tensor_proto).tolist() == [b"    a *b*\n    \n      c\n"]
    metadata = accumulator.SummaryMetadata("decoded")
    assert metadata.plugin_data.plugin_name == "text"
    (image,) = accumulator.Images("attention")
    assert image.encoded_image_string == picture
    decoded = tf.io.decode_png(picture)
    assert (image.height, image.width) == tuple(decoded.shape[:2])


def test_going_on_leaves_no_event_of_a_later_step(tmp_path: Path) -> None:
    first = TensorBoardEvents(str(tmp_path))
    for step in (1, 2, 3):
        first.append(step, "train", {"loss": float(step)})
    first.close()
    (file,) = (tmp_path / "train").iterdir()
    with file.open("ab") as stream:  # a record that a kill cut off
        stream.write(struct.pack("<Q", 100) + b"1234half")
    second = TensorBoardEvents(str(tmp_path))
    second.keep_until(1)
    second.append(2, "train", {"loss": 20.0})
    second.close()
    assert events(tmp_path / "train") == [(1, "loss", 1.0), (2, "loss", 20.0)]


def test_events_continue_in_a_new_file_if_theirs_is_removed(tmp_path: Path) -> None:
    writer = TensorBoardEvents(str(tmp_path / "events"))
    writer.append(1, "train", {"loss": 1.0})
    shutil.rmtree(tmp_path / "events")
    writer.append(2, "train", {"loss": 2.0})
    writer.append(3, "train", {"loss": 3.0})
    writer.close()
    assert events(tmp_path / "events" / "train") == [(2, "loss", 2.0), (3, "loss", 3.0)]


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checksums = (struct.pack("<I", masked_checksum(part)) for part in (length, data))
    return length + next(checksums) + data + next(checksums)


DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {
    "an event is not an event": lambda content, at: content[:at] + b"\xff" + content[at + 1 :],
    "a length is wrong": lambda content, at: content[: at - 12] + b"\x07" + content[at - 11 :],
    "bytes are missing": lambda content, at: content[: at + 3] + content[at + 9 :],
    "a record is not an event": lambda content, at: (
        content[: at - 12] + record(b"something else") + content[at - 12 :]
    ),
    "zeros are written over two events": lambda content, at: (
        content[: at - 20] + bytes(40) + content[at + 20 :]
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_events_are_removed_and_the_others_stay(tmp_path: Path, kind: str) -> None:
    first = TensorBoardEvents(str(tmp_path))
    for step in range(1, 8):
        first.append(step, "train", {"loss": float(step)})
    first.close()
    (file,) = (tmp_path / "train").iterdir()
    intact = file.read_bytes()
    at = intact.index(b"\x09", len(intact) * 3 // 5)  # the first byte of an event
    file.write_bytes(DAMAGE[kind](intact, at))
    stream = io.StringIO()
    report = Report(
        Logdir(str(tmp_path.parent)), PlainConsole(stream), title="lm.some.Model", steps=20
    )
    report._events = TensorBoardEvents(str(tmp_path))
    report.continue_from(6)
    found = [step for step, *_ in events(tmp_path / "train")]
    assert len(found) in (4, 5, 6) and found[:2] == [1, 2] and found[-1] == 6
    assert stream.getvalue().startswith(f"warning: removed damaged records from {file}; ")
    assert TensorBoardEvents(str(tmp_path)).keep_until(6) == []
    report.close()


def test_a_clock_that_is_set_back_does_not_change_the_order_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, now in enumerate([2e9, 1e9, 1.5e9], 1):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        writer = TensorBoardEvents(str(tmp_path))
        writer.append(step, "train", {"loss": float(step)})
        writer.close()
    assert [step for step, *_ in events(tmp_path / "train")] == [1, 2, 3]  # by name
