"""Reports: lines that fit and carry no escape codes, a log without doubles, curves, TensorBoard."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shlex
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.commands import typed
from tekso.framework.input.record_frames import masked_checksum
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.metrics_log import MetricsLog
from tekso.framework.run.pace import Pace, Reading
from tekso.framework.run.report import curves, lines, summary
from tekso.framework.run.report.console import PlainConsole, console_for
from tekso.framework.run.report.report import Report
from tekso.framework.run.report.tensorboard import TensorBoardEvents

VALUES = {
    "loss": 1.45678,
    "bits_per_byte": 2.10164,
    "perplexity": 4.2922,
    "gradient_norm": 0.53111,
    "learning_rate": 0.00298123,
    "nonfinite_total": 0.0,
}


def train_line(step: int = 1200, steps: int = 2000, **changes: Any) -> str:
    options: dict[str, Any] = {"speed": 13100.0, "unit": "tokens", "wait_share": 0.004}
    options["seconds_left"] = 105.0
    options.update(changes)
    return lines.train_line(step, steps, VALUES, **options)


# --- lines ---


def test_a_line_tells_everything_that_is_asked_of_it() -> None:
    assert train_line(width=120) == (
        "step 1200/2000  loss 1.4568  2.102 bits/byte  grad 0.53  lr 3.0e-3  13.1k tok/s  wait  0%"
        "   1m45s left"
    )
    assert train_line(speed=None, wait_share=None, seconds_left=None, width=120) == (
        "step 1200/2000  loss 1.4568  2.102 bits/byte  grad 0.53  lr 3.0e-3"
    )


def test_a_line_of_80_columns_tells_it_too() -> None:
    assert train_line() == (
        "step 1200/2000 loss 1.4568 2.102 bpb grad 0.53 lr 3.0e-3 13.1k/s wait  0%  1m45s"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_figures_of_a_line_stand_below_those_of_the_line_before(width: int) -> None:
    def line(step: int, scale: float, **more: float) -> str:
        values = {name: scale * value for name, value in VALUES.items()}
        return lines.train_line(
            step, 2000, values, speed=1e3 * more["speed"], unit="tokens", width=width,
            wait_share=more["wait"], seconds_left=more["left"],
        )  # fmt: skip

    first = line(10, 5.9, speed=9.0, wait=0.0, left=7300.0)
    for step, speed in ((1, None), (2000, 0.5)):  # the first line and the last know less
        less = lines.train_line(
            step, 2000, VALUES, speed=speed, unit="tokens", wait_share=speed, seconds_left=None,
            width=width,
        )  # fmt: skip
        for word in ("loss", "bpb", "bits/byte", "lr"):
            assert less.find(word) == first.find(word)
    for other in (
        line(100, 1.0, speed=13.1, wait=0.99, left=105.0),
        line(2000, 0.01, speed=1312.0, wait=0.07, left=2.0),
    ):
        assert len(other) == len(first) <= width
        words = [(m.start(), m[0]) for m in re.finditer(r"[a-z]{3,}", first)]
        assert words and all(other[at:].startswith(word) for at, word in words)


def test_perplexity_stands_where_there_are_no_bytes_and_skipped_steps_are_told() -> None:
    values = {"loss": 1.5, "perplexity": 4.4817, "nonfinite_total": 3.0}
    line = lines.train_line(
        7, 20, values, speed=950.0, unit="examples", wait_share=0.25, seconds_left=7300.0
    )
    assert line == ("step  7/20  loss 1.5000  ppl 4.4817  skipped 3    950/s  wait 25%   2h01m")


@given(
    step=st.integers(1, 10**8),
    loss=st.floats(allow_nan=True),
    speed=st.floats(0, 1e12),
    left=st.floats(0, 1e8),
    width=st.integers(40, 200),
)
def test_a_line_fits_whatever_the_figures(
    step: int, loss: float, speed: float, left: float, width: int
) -> None:
    values = {**VALUES, "loss": loss, "gradient_norm": loss, "nonfinite_total": 12345.0}
    line = lines.train_line(
        step, 10**8, values, speed=speed, unit="tokens", wait_share=1.0, seconds_left=left,
        width=width,
    )  # fmt: skip
    assert len(line) <= width and "\n" not in line
    assert line.startswith("step") and f"loss {lines.number(loss):>6}" in line


def test_a_narrow_line_leaves_out_what_matters_least() -> None:
    line = train_line(width=60)
    assert len(line) <= 60
    assert "2.102 bpb" in line and "13.1k/s" in line and "wait" not in line and "lr" not in line


def test_an_evaluation_has_a_line() -> None:
    values = {"loss": 1.45678, "bits_per_byte": 2.10164, "perplexity": 4.2922, "accuracy": 0.5}
    assert lines.eval_line("dev", 500, values, seconds=3.14, is_best=True) == (
        "dev at step 500 loss 1.4568 2.102 bits/byte accuracy 0.5000 in 3.1s best so far"
    )


def test_an_evaluation_of_any_width_has_all_figures() -> None:
    values = {"loss": 0.5851, "accuracy": 0.7133, "precision": 0.6737, "recall": 0.4912, "f1": 0.5}
    whole = lines.eval_line("dev", 500, values, seconds=3.14, width=None)
    assert len(whole) > lines.WIDTH
    assert all(f"{name} {value:.4f}" in whole for name, value in values.items())


def test_a_long_text_is_wrapped_below_its_indentation_and_words_stay_whole() -> None:
    text = "  input: text files a/long-path/of/files.txt, train: 3 texts of 1,003,854 bytes"
    assert lines.wrapped(text, 42) == [
        "  input: text files",
        "      a/long-path/of/files.txt, train: 3",
        "      texts of 1,003,854 bytes",
    ]
    assert lines.wrapped(text, 100) == [text]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00298, "3.0e-3"), (0.0, "0.0e0"), (1.0, "1.0e0"), (5e-12, "5.0e-12"), (math.nan, "nan")],
)
def test_scientific(value: float, text: str) -> None:
    assert lines.scientific(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"), (1.0, "1.0000"), (0.53111, "0.5311"), (12.3456, "12.346"),
        (123456.0, "1.23e+05"), (1234.5, "1234.5"), (0.00001234, "1.23e-05"), (-2.5, "-2.5000"),
        (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_number(value: float, text: str) -> None:
    assert lines.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (9.96, "10s"), (59.6, "1m00s"), (105, "1m45s"),
     (3599.6, "1h00m"), (11100, "3h05m"), (187_200, "2d04h")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert lines.duration(seconds) == text


# --- consoles ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_plain_lines_without_colours_and_without_what_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    console = console_for(stream)
    console.progress(3, 10, "training")
    console.line("step 1", "evaluation")
    console.line("careful", "warning")
    console.close()
    assert stream.getvalue() == "step 1\nwarning: careful\n"
    assert console.width == 80


def test_a_terminal_gets_colours_and_a_bar_and_each_line_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = console_for(stream)
    console.progress(3, 10, "evaluating [dev]")
    console.line("dev at step 3  loss [1.5]", "evaluation")
    console.progress(4, 10)
    console.close()
    text = stream.getvalue()
    assert "\x1b[" in text and "4/10" in text
    assert text.count("dev at step 3  loss [1.5]") == 1


def test_a_dumb_terminal_is_written_to_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    console = console_for(stream)
    console.progress(1, 2)
    console.line("text", "good")
    assert stream.getvalue() == "text\n"


class Closed(io.StringIO):
    """Its reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_command_continues_without_lines_if_nobody_reads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = console_for(Closed())
    for step in range(3):
        console.line(f"step {step}")
    console.close()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("warning: no more lines are shown (Broken pipe); the command continues")


# --- metrics.jsonl ---


def test_each_record_is_in_the_file_at_once_in_full_precision(tmp_path: Path) -> None:
    log = MetricsLog(str(tmp_path / "metrics.jsonl"))
    loss = float(np.float32(1.1))
    log.append({"step": 1, "split": "train", "loss": loss, "bad": math.nan})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "split": "train", "loss": loss, "bad": None}
    log.close()


def test_records_beyond_a_step_and_cut_off_lines_are_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(str(path))
    for step in (1, 2, 3, 4):
        log.append({"step": step, "split": "train", "loss": 1.0})
    log.append({"step": 2, "split": "dev", "loss": 1.0})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 1, "spl')
    log = MetricsLog(str(path))
    log.keep_until(2)
    assert [(r["step"], r["split"]) for r in log.read()] == [(1, "train"), (2, "train"), (2, "dev")]
    log.append({"step": 3, "split": "train", "loss": 2.0})
    assert log.read()[-1] == {"step": 3, "split": "train", "loss": 2.0}
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    log.close()


def test_a_log_on_another_file_system() -> None:
    log = MetricsLog("ram://report_test/metrics.jsonl")
    log.append({"step": 1, "split": "train", "loss": 1.0})
    log.append({"step": 2, "split": "train", "loss": 1.0})
    log.close()
    log.keep_until(1)
    assert [record["step"] for record in log.read()] == [1]


# --- TensorBoard ---


def events(folder: Path) -> list[tuple[int, str, float]]:
    found = []
    for file in sorted(folder.iterdir()):
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return found


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


def test_events_go_on_in_a_new_file_if_theirs_is_removed(tmp_path: Path) -> None:
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
    report.go_on_from(6)
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


# --- curves ---


def records(*points: tuple[int, str, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"step": step, "split": split, **values} for step, split, values in points]


def test_curves_are_a_png_and_nothing_is_no_picture() -> None:
    train = [(i, "train", {"loss": 5 / i, "bits_per_byte": 7 / i, "perplexity": 9 / i,
                           "learning_rate": 0.1}) for i in range(1, 200)]  # fmt: skip
    dev = [(100, "dev", {"loss": math.nan, "bits_per_byte": 1.0})]
    picture = curves.draw(records(*train, *dev), title="lm.some.Model", references={"gzip": 2.0})
    assert picture is not None and picture.startswith(b"\x89PNG")
    assert curves.draw([], title="") is None
    assert curves.draw(records((1, "train", {"loss": math.nan})), title="") is None


def test_smoothing_keeps_length_mean_level_and_a_straight_line() -> None:
    line = [float(i) for i in range(200)]
    np.testing.assert_allclose(curves.smoothed(line), line)
    values = np.random.default_rng(0).normal(size=400)
    smooth = curves.smoothed(list(values))
    assert len(smooth) == 400 and np.std(smooth) < 0.5 * np.std(values)
    np.testing.assert_allclose(smooth[200], values[190:211].mean())
    assert curves.smoothed([3.0, 1.0]) == [3.0, 1.0]


# --- the whole report, the pace, the summary ---


def test_a_report_reaches_people_programs_and_tensorboard(tmp_path: Path) -> None:
    stream = io.StringIO()
    report = Report(Logdir(str(tmp_path)), PlainConsole(stream), title="lm.some.Model", steps=20)
    report.train(10, VALUES, Reading(2000.0, 0.5, 0.25), unit="tokens")
    report.evaluation("dev", 10, {"loss": 2.0}, seconds=1.0, is_best=True)
    report.draw_curves()
    report.close()
    first, second = (json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first.items() >= {"step": 10, "split": "train", "tokens_per_second": 2000.0}.items()
    assert first.items() >= VALUES.items()
    assert second["split"] == "dev" and second["loss"] == 2.0
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith(" 2.5s") and lines[1].startswith("dev at step 10  loss 2.0000")
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert {tag for _, tag, _ in events(tmp_path / "events" / "train")} >= VALUES.keys()
    assert report.evaluated(10)["dev"]["loss"] == 2.0 and report.evaluated(9) == {}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pace_counts_waiting_and_leaves_pauses_out() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.read() is None
    for _ in range(4):
        with pace.waiting():
            clock.now += 0.5
        clock.now += 1.5
        pace.step(300)
    with pace.paused("evaluation"):
        clock.now += 50.0
    reading = pace.read()
    assert reading == Reading(units_per_s=150.0, wait_share=0.25, seconds_per_step=2.0)
    clock.now += 1.0
    pace.step(300)
    reading = pace.read()
    assert reading is not None and reading.seconds_per_step == pytest.approx(0.8 * 2.0 + 0.2 * 1.0)


def test_the_summary_compares_says_where_things_lie_and_what_to_type(tmp_path: Path) -> None:
    lines = summary.finished(
        steps=2000, seconds=118.0, evaluations={"dev": VALUES, "longer": {"loss": 2.0}},
        references={"dev": {"gzip": 1.9812, "xz": 1.7034}},
    )  # fmt: skip
    text = "\n".join(lines)
    assert "2000 steps, 1m58s" in text and "gzip 1.9812, xz 1.7034" in text
    logdir = Logdir(f"{tmp_path}/a run/")
    assert "samples" not in "\n".join(summary.places(logdir, newest=2000, best=None))
    logdir.write("samples.txt", "one\n")
    text = "\n".join(summary.places(logdir, newest=2000, best=1600))
    for name in ("checkpoints", "metrics.jsonl", "curves.png", "samples.txt", "params.txt"):
        assert f"{tmp_path}/a run/{name}" in text
    assert "the newest at step 2000, the best at step 1600" in text
    trainer = typed("tekso-trainer")
    text = "\n".join(summary.next_commands(logdir, 2000, imports=["mine"]))
    assert f"{trainer} --import=mine '--logdir={tmp_path}/a run' --steps=4000" in text
    assert "--set" not in text
    few = summary.next_commands(Logdir("run"), 5, evaluates=False, decodes=False)
    assert [line.split("--logdir=run")[1] for line in few[1:]] == [" --steps=100", ""]
    ended = summary.next_commands(
        Logdir("run"), 15, evaluates=False, decodes=False, ended_early=True
    )
    assert [line.split("--logdir=run")[1] for line in ended[1:]] == [
        " --set run.early_stopping.patience=0", "",
    ]  # fmt: skip
    decoding = """task.decode.prompts=["It's"]"""
    lines = summary.next_commands(Logdir("run"), 5, decoding=decoding)
    assert shlex.split(lines[1]) == [
        *shlex.split(trainer), "--logdir=run", "--mode=decode", "--set", decoding,
    ]  # fmt: skip
