"""The TFRecord files of a split of a TFDS data set, as a sequence of serialised examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.input.joined import JoinedIndex
from tekso.framework.input.record_frames import Frames, read_frame, walk
from tekso.framework.input.skips import BadRecordError, Origin, reason_of


class TfdsShards:
    """The serialised examples of a split, read by index.

    Each file is scanned once to find its records; an example is read when it is asked for. The
    number of an example does not depend on damage: the data set says how many each file has.

    Args:
      instructions: the files of the split, and how many examples to skip and to take of each; see
        `SplitInfo.file_instructions` of tensorflow-datasets.

    Raises:
      OSError: a file cannot be opened.
    """

    def __init__(self, instructions: Sequence[Any]) -> None:
        self._instructions = instructions
        self._paths = [str(one.filename) for one in instructions]
        self._index = JoinedIndex(one.take for one in instructions)
        self._frames: dict[str, Frames] = {}
        for path in self._paths:
            if path not in self._frames:
                with files.open(path) as file:
                    self._frames[path] = walk(file, files.size_bytes(path))

    @property
    def is_complete(self) -> bool:
        """Whether every file has as many records as the data set says."""
        counts = (len(self._frames[path]) for path in self._paths)
        return all(
            count == one.examples_in_shard
            for count, one in zip(counts, self._instructions, strict=True)
        )

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> bytes:
        """Returns a serialised tf.train.Example.

        Raises:
          BadRecordError: it is damaged, or its file ends before it.
        """
        shard, within = self._index.place(index)
        path = self._paths[shard]
        number, frames = within + self._instructions[shard].skip, self._frames[path]
        if number >= len(frames):
            problem = frames.problem or f"only {len(frames)} records"
            raise BadRecordError(Origin(path, frames.end), problem)
        origin = Origin(path, frames.offset(number))
        try:
            with files.open(path) as file:
                return read_frame(file, origin, int(frames.lengths[number]))
        except OSError as error:
            raise BadRecordError(origin, reason_of(error)) from error
