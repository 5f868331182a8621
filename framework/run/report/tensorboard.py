"""TensorBoard events: one folder per split, so that TensorBoard draws the splits in one chart.

A file is a sequence of records: length (8 bytes), checksum (4), an Event, checksum (4). When a run
resumes from a step, later events are removed from the files, so that no reader sees a step twice.
Records that are damaged are removed too: TensorBoard would show nothing that comes after them.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from tekso.framework import files, out_of_space
from tekso.framework.input.record_frames import masked_checksum

_PATTERN = "events.out.tfevents"
_STAMP = re.compile(rf"{re.escape(_PATTERN)}\.(\d+\.\d+)\.")
_LENGTH_BYTES = 8
_HEADER, _FOOTER = struct.Struct("<QI"), struct.Struct("<I")  # length and its checksum; checksum
_FIRST_BYTE = b"\x09"  # of every Event: the tag of its wall time
_BUCKETS = 30  # of a histogram
_PNG_SIZE_AT = 16  # offset of width and height, after the signature and the first chunk's header


class TensorBoardEvents:
    """Writes scalars, texts and pictures to files in a folder."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writers: dict[str, tuple[str, tf.io.TFRecordWriter]] = {}  # with their paths
        self._first_step: int | None = None

    def keep_until(self, step: int) -> list[str]:
        """Removes events of later steps from the files, and from a running TensorBoard.

        Returns: paths of the files from which damaged records were removed.
        """
        self._first_step, repaired = step + 1, []
        if files.exists(self._directory):
            for folder, _, names in tf.io.gfile.walk(self._directory):
                for name in names:
                    path = files.join(folder, name)
                    if name.startswith(_PATTERN) and not _cut(path, step):
                        repaired.append(path)
        return repaired

    def append(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes one point of every curve of a split.

        Raises:
          OSError: the file cannot be written.
        """
        self._append(
            step,
            split,
            [
                tf.compat.v1.Summary.Value(tag=tag, simple_value=value)
                for tag, value in values.items()
            ],
        )

    def append_text(self, step: int, split: str, tag: str, text: str) -> None:
        """Writes a text, indented by four spaces so that Markdown shows it verbatim.

        Raises:
          OSError: the file cannot be written.
        """
        shown = textwrap.indent(text, "    ", lambda line: True)
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="text")
        )
        tensor = tf.make_tensor_proto([shown], dtype=tf.string)
        value = tf.compat.v1.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._append(step, split, [value])

    def append_image(self, step: int, split: str, tag: str, picture: bytes) -> None:
        """Writes a picture, given as the bytes of a PNG file.

        Raises:
          OSError: the file cannot be written.
        """
        width, height = struct.unpack_from(">II", picture, _PNG_SIZE_AT)
        image = tf.compat.v1.Summary.Image(
            width=width, height=height, colorspace=4, encoded_image_string=picture
        )
        self._append(step, split, [tf.compat.v1.Summary.Value(tag=tag, image=image)])

    def append_histograms(self, step: int, split: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a histogram of the finite elements of every array.

        Raises:
          OSError: the file cannot be written.
        """
        values = [
            tf.compat.v1.Summary.Value(tag=tag, histo=_histogram(array))
            for tag, array in arrays.items()
        ]
        self._append(step, split, values)

    def _append(self, step: int, split: str, values: Sequence[Any]) -> None:
        summary = tf.compat.v1.Summary(value=values)
        event = tf.compat.v1.Event(wall_time=time.time(), step=step, summary=summary)
        try:
            path, writer = self._writers.get(split) or self._open(split)
            if files.is_local(path) and not files.exists(path):  # somebody removed old events
                writer.close()
                _, writer = self._open(split)
            writer.write(event.SerializeToString())
            writer.flush()
        except tf.errors.OpError as error:
            code = out_of_space.code_of(error) or errno.EIO
            folder = files.join(self._directory, split)
            raise OSError(code, os.strerror(code), folder) from error

    def close(self) -> None:
        """Closes the files."""
        for _, writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _open(self, split: str) -> tuple[str, tf.io.TFRecordWriter]:
        folder = files.join(self._directory, split)
        for path in (self._directory, folder):  # not those above, which may have been moved away
            files.make_folder(path, parents=False)
        stamp = _later_stamp(files.names(folder))
        name = f"{_PATTERN}.{stamp:.6f}.{socket.gethostname()}.{os.getpid()}"
        path = files.join(folder, name)
        writer = tf.io.TFRecordWriter(path)
        header = tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2")
        writer.write(header.SerializeToString())
        if self._first_step is not None:
            start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
            event = tf.compat.v1.Event(
                wall_time=time.time(), step=self._first_step, session_log=start
            )
            writer.write(event.SerializeToString())
        writer.flush()
        self._writers[split] = path, writer
        return path, writer


def _histogram(array: np.ndarray) -> Any:
    """Returns TensorBoard's form of a histogram with 30 buckets of equal width."""
    values = array.astype(np.float64).ravel()
    values = values[np.isfinite(values)]
    if not values.size:
        values = np.zeros(1)
    counts, limits = np.histogram(values, bins=_BUCKETS)
    return tf.compat.v1.HistogramProto(
        min=values.min(),
        max=values.max(),
        num=values.size,
        sum=values.sum(),
        sum_squares=np.square(values).sum(),
        bucket_limit=limits[1:],
        bucket=counts,
    )


def _later_stamp(names: Sequence[str]) -> float:
    """Returns a time stamp for a new file that is later than those of all files in its folder.

    TensorBoard reads files in the order of their names, and the clock may have been set back.
    """
    found = [float(stamp[1]) for name in names if (stamp := _STAMP.match(name))]
    return max([time.time(), *(stamp + 1.0 for stamp in found)])


def _cut(path: str, step: int) -> bool:
    """Removes events of later steps and incomplete or damaged records from a file.

    Returns: whether the file was intact, except for an incomplete record at its end, which a killed
      process may leave.
    """
    content = files.read(path)
    kept, start, is_intact = [], 0, True
    while start < len(content):
        end = _end_of_record(content, start)
        if end is None:
            start = _next_record(content, start + 1)
            is_intact = is_intact and start == len(content)
            continue
        event = _event(content[start + _HEADER.size : end - _FOOTER.size])
        if event is None:
            is_intact = False
        elif event.step <= step:
            kept.append(content[start:end])
        start = end
    if (whole := b"".join(kept)) != content:
        files.write_atomically(path, whole)
    return is_intact


def _event(data: bytes) -> Any:
    """Returns the Event in a record; None if the record is something else."""
    try:
        return tf.compat.v1.Event.FromString(data)
    except DecodeError:
        return None


def _end_of_record(content: bytes, start: int) -> int | None:
    """Returns the end of the record at an offset; None if it is damaged or incomplete."""
    if start + _HEADER.size > len(content):
        return None
    length, checksum = _HEADER.unpack_from(content, start)
    end = start + _HEADER.size + length + _FOOTER.size
    if masked_checksum(content[start : start + _LENGTH_BYTES]) != checksum or end > len(content):
        return None
    data = content[start + _HEADER.size : end - _FOOTER.size]
    is_intact = masked_checksum(data) == _FOOTER.unpack_from(content, end - _FOOTER.size)[0]
    return end if is_intact else None


def _next_record(content: bytes, start: int) -> int:
    """Returns the offset of the first intact record from an offset on, or the end of the file."""
    while (found := content.find(_FIRST_BYTE, start + _HEADER.size)) >= 0:
        start = found - _HEADER.size
        if _end_of_record(content, start) is not None:
            return start
        start += 1
    return len(content)
