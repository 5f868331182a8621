"""A source that reads a prepared data set of tensorflow-datasets; it downloads nothing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.input.skips import BadRecordError, Origin, first_line, reason_of
from tekso.framework.input.sources import Source, digest
from tekso.framework.input.splits import Split
from tekso.framework.input.tfds_shards import TfdsShards
from tekso.framework.params import REQUIRED, param
from tekso.framework.spelling import close_matches

_TOGETHER = 1024  # examples read at a time


class Tfds(Source):
    """One split of a TFDS data set; a record is one feature of an example, or a whole example.

    Data sets in the file formats tfrecord and array_record are read by index. Of any other, the
    whole split is read into memory when the first record is read by index.
    """

    class Params(Source.Params):
        """Params of Tfds."""

        name: str = param(
            "Name of the data set, for example 'lm1b' or 'lm1b:1.1.0'.", default=REQUIRED
        )
        data_dir: str | None = param(
            "Folder of prepared data sets. None: the default of tensorflow-datasets.", default=None
        )
        splits: dict[str, str] = param(
            "Names of the splits train, dev and test in the data set, or slices of splits, for "
            "example 'train[:90%]'.",
            default={"train": "train", "dev": "validation", "test": "test"},
        )
        feature: str = param("The feature to read; empty: all.", default="text")

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds the data set.

        Raises:
          InputError: the data set is not available, or has no such split or feature.
        """
        super().__init__(params, split=split)
        p = self.params
        self._builder = _builder(p.name, p.data_dir, p.path_of("data_dir"))
        self._split = p.splits.get(split, "")
        self._length = self._count()
        self._format = self._builder.info.file_format.value
        if p.feature:
            self._check_has(p.feature)

    def __len__(self) -> int:
        return self._length

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(f"{self._builder.info.full_name}/{self._split}", index, "record")

    def fingerprint(self) -> str:
        """Returns a digest of the data set's name, version and split sizes."""
        info = self._builder.info
        splits = [
            (name, one.num_examples, list(one.shard_lengths or []), one.num_bytes)
            for name, one in sorted(info.splits.items())
        ]
        return digest([f"{info.full_name} {self._split} {self.params.feature} {splits}".encode()])

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"TFDS data set {self.params.name}"

    @property
    def features(self) -> list[str]:
        """Names of the features of an example, sorted."""
        return sorted(self._builder.info.features)

    def check_whole(self, *names: str) -> None:
        """Checks that records are whole examples, with these features.

        Raises:
          InputError: `feature` is set, or a feature is missing.
        """
        p = self.params
        if p.feature:
            raise InputError(
                f"{p.path_of('feature')} is {p.feature!r}, must be empty: of this data set, whole "
                "examples are read"
            )
        self._check_has(*names)

    def _check_has(self, *names: str) -> None:
        for name in names:
            if name not in self.features:
                raise InputError(
                    f"{self.describe()} has no feature {name!r}, only {', '.join(self.features)}"
                )

    def _count(self) -> int:
        splits = self._builder.info.splits
        try:
            count = splits[self._split].num_examples
        except (KeyError, ValueError) as error:
            raise NoSplitError(
                f"{self.describe()} has no split {self._split!r}, only {', '.join(sorted(splits))};"
                f" set {self.params.path_of('splits')}.{self.split} to one of them, or to a slice "
                "like 'train[90%:]'"
            ) from error
        if not count:
            raise NoSplitError(f"{self.describe()}: the split {self._split!r} is empty")
        return int(count)

    def decoders(self) -> dict[str, Any]:
        """Returns TFDS decoders for the features that are not decoded as the data set says."""
        return {}

    @functools.cached_property
    def _serialized(self) -> Any:
        """The serialised examples as a sequence; None: the file format has no access by index."""
        if self._format == "array_record":
            from tensorflow_datasets.core.decode import DeserializeMethod

            return self._builder.as_data_source(
                self._split, deserialize_method=DeserializeMethod.RAW_BYTES
            )
        if self._format != "tfrecord":
            return None
        try:
            return TfdsShards(self._builder.info.splits[self._split].file_instructions)
        except OSError as error:
            raise InputError(
                f"{self.describe()}, split {self._split}: {error.filename}: {reason_of(error)}. "
                "Prepare the data set again."
            ) from error

    @functools.cached_property
    def _whole(self) -> list[Any]:
        return [record for _, record in self._read_all()]

    def _read(self, index: int) -> Any:
        record = self._whole[index] if self._serialized is None else self._at(index)
        if isinstance(record, BadRecordError):
            raise record
        return record

    def _at(self, index: int) -> Any:
        """Returns the record of an example that is read by index; a BadRecordError if malformed."""
        from google.protobuf.message import DecodeError

        try:
            example = self._builder.info.features.deserialize_example_np(
                self._serialized[index], decoders=self.decoders()
            )
        except BadRecordError as error:  # with the file and the byte
            return BadRecordError(self.origin(index), str(error))
        except (DecodeError, KeyError, OSError, RuntimeError, ValueError) as error:
            return BadRecordError(self.origin(index), f"it cannot be read: {first_line(error)}")
        return self._record(example, index)

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        if self._format == "array_record" or not self._is_complete():
            yield from super()._read_all()
            return
        import tensorflow as tf
        import tensorflow_datasets as tfds

        in_order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        data = self._builder.as_dataset(
            split=self._split,
            decoders=self.decoders() or None,
            shuffle_files=False,
            read_config=in_order,
        )
        index = 0
        features = self._builder.info.features
        names = [self.params.feature] if self.params.feature else list(features)
        together = all(features[name].shape == () for name in names)
        if together:  # reading one example at a time takes ten times as long
            data = data.map(lambda example: {name: example[name] for name in names})
            data = data.batch(_TOGETHER)
        try:
            for item in tfds.as_numpy(data):
                for example in _rows(item) if together else [item]:
                    yield self.origin(index), self._record(example, index)
                    index += 1
        except tf.errors.OpError as error:
            if self._serialized is not None:  # one by one, to name those that are damaged
                yield from ((self.origin(i), self._at(i)) for i in range(index, len(self)))
                return
            raise InputError(
                f"{self.describe()}, split {self._split}: record {index} cannot be read: "
                f"{error.message}. Prepare the data set again."
            ) from error

    def _is_complete(self) -> bool:
        """Returns whether no file lacks records: TFDS would take those of the next file."""
        return self._serialized is None or self._serialized.is_complete

    def _record(self, example: dict[str, Any], index: int) -> Any:
        """Returns the record of an example; a BadRecordError if it is malformed."""
        try:
            return self._feature(example)
        except BadRecordError as error:
            return BadRecordError(self.origin(index), error.reason)

    def _feature(self, example: dict[str, Any]) -> Any:
        if not self.params.feature:
            return example
        value = example[self.params.feature]
        return value.item() if isinstance(value, np.ndarray) and value.dtype == object else value


def _rows(examples: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Yields the examples of a batch one by one."""
    for values in zip(*examples.values(), strict=True):
        yield dict(zip(examples, values, strict=True))


def _builder(name: str, data_dir: str | None, setting: str) -> Any:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError) as error:
        known = tfds.list_builders(with_community_datasets=False)  # community ones need a network
        close = close_matches(name, known)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        where = f" in {data_dir}" if data_dir else ""
        raise InputError(
            f"TFDS has no data set {name!r}{where}{hint or f': {first_line(error)}'}"
        ) from error
    if not _is_prepared(builder):
        argument = f", data_dir={data_dir!r}" if data_dir else ""
        raise InputError(
            f"the TFDS data set {name!r} is not prepared in {builder.data_path}. Tekso does not "
            "download data. Prepare it once, with network access and enough disk space:\n"
            f'  python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}{argument})'
            '.download_and_prepare()"\n'
            f"or set {setting} to a folder that contains it."
        )
    return builder


def _is_prepared(builder: Any) -> bool:
    """Returns whether a data set is prepared, without TFDS's warning about a missing folder."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Variant folder")

    log = logging.getLogger("absl")
    log.addFilter(is_other)
    try:
        return bool(builder.is_prepared())
    finally:
        log.removeFilter(is_other)
