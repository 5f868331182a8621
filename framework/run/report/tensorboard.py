"""TensorBoard events: one folder per split, so that TensorBoard draws the splits in one chart.

A file is a sequence of records: length (8 bytes), checksum (4), an Event, checksum (4). When a run
resumes from a step, later events are removed from the files, so that no reader sees a step twice.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import files, out_of_space

_PATTERN = "events.out.tfevents"
_LENGTH_BYTES, _CHECKSUM_BYTES = 8, 4
_PNG_SIZE_AT = 16  # offset of width and height, after the signature and the first chunk's header


class TensorBoardEvents:
    """Writes scalars, texts and pictures to files in a folder."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writers: dict[str, tf.io.TFRecordWriter] = {}
        self._first_step: int | None = None

    def keep_until(self, step: int) -> None:
        """Removes events of later steps from the files, and from a running TensorBoard."""
        self._first_step = step + 1
        if files.exists(self._directory):
            for folder, _, names in tf.io.gfile.walk(self._directory):
                for name in names:
                    if name.startswith(_PATTERN):
                        _cut(files.join(folder, name), step)

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

    def _append(self, step: int, split: str, values: Sequence[Any]) -> None:
        summary = tf.compat.v1.Summary(value=values)
        event = tf.compat.v1.Event(wall_time=time.time(), step=step, summary=summary)
        try:
            if split not in self._writers:
                self._writers[split] = self._open(split)
            self._writers[split].write(event.SerializeToString())
            self._writers[split].flush()
        except tf.errors.OpError as error:
            code = out_of_space.code_of(error) or errno.EIO
            folder = files.join(self._directory, split)
            raise OSError(code, os.strerror(code), folder) from error

    def close(self) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _open(self, split: str) -> tf.io.TFRecordWriter:
        folder = files.join(self._directory, split)
        files.make_folder(folder)
        name = f"{_PATTERN}.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        writer = tf.io.TFRecordWriter(files.join(folder, name))
        header = tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2")
        writer.write(header.SerializeToString())
        if self._first_step is not None:
            start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
            event = tf.compat.v1.Event(
                wall_time=time.time(), step=self._first_step, session_log=start
            )
            writer.write(event.SerializeToString())
        return writer


def _cut(path: str, step: int) -> None:
    """Removes events of later steps, and an incomplete last record, from a file."""
    content = files.read(path)
    kept, start = [], 0
    while start + _LENGTH_BYTES <= len(content):
        (length,) = struct.unpack_from("<Q", content, start)
        data = start + _LENGTH_BYTES + _CHECKSUM_BYTES
        end = data + length + _CHECKSUM_BYTES
        if end > len(content):
            break
        if tf.compat.v1.Event.FromString(content[data : data + length]).step <= step:
            kept.append(content[start:end])
        start = end
    if (whole := b"".join(kept)) != content:
        files.write_atomically(path, whole)
