"""A data set of tensorflow-datasets as a source; it is prepared already, nothing is downloaded."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from tekso.framework.input.skips import InputError, Origin
from tekso.framework.input.sources import Source, digest
from tekso.framework.input.splits import Split
from tekso.framework.params import REQUIRED, param

_TOGETHER = 1024  # examples


class Tfds(Source):
    """One split of a data set: one feature of each example, or the whole example as a dict."""

    class Params(Source.Params):
        """Params of Tfds."""

        name: str = param("Name of the data set, as 'lm1b' or 'lm1b:1.1.0'.", default=REQUIRED)
        data_dir: str | None = param(
            "Folder of prepared data sets. None: tensorflow-datasets' own.", default=None
        )
        splits: dict[str, str] = param(
            "What train, dev and test are called there; slices, as 'train[:90%]', are understood.",
            default={"train": "train", "dev": "validation", "test": "test"},
        )
        feature: str = param("The feature that is wanted; empty: all.", default="text")

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds the data set.

        Raises:
          InputError: there is no such data set here, or no such split or feature in it.
        """
        super().__init__(params, split=split)
        p = self.params
        self._builder = _builder(p.name, p.data_dir)
        self._split = p.splits.get(split, "")
        self._length = self._count()
        self._whole: list[Any] | None = None
        self._indexed: Any = None
        if self._builder.info.file_format.value == "array_record":
            self._indexed = self._builder.as_data_source(self._split)
        if p.feature and p.feature not in self.features:
            raise InputError(
                f"{self.describe()} has no feature {p.feature!r}, only {', '.join(self.features)}"
            )

    def __len__(self) -> int:
        return self._length

    def origin(self, index: int) -> Origin:
        """Where a record lies."""
        return Origin(f"{self._builder.info.full_name}/{self._split}", index)

    def fingerprint(self) -> str:
        """A digest of what the records hold."""
        info = self._builder.info
        splits = [
            (name, one.num_examples, list(one.shard_lengths or []), one.num_bytes)
            for name, one in sorted(info.splits.items())
        ]
        return digest([f"{info.full_name} {self._split} {self.params.feature} {splits}".encode()])

    def describe(self) -> str:
        """The collection in a few words."""
        return f"TFDS data set {self.params.name}"

    @property
    def features(self) -> list[str]:
        """Names of the features of an example, sorted."""
        return sorted(self._builder.info.features)

    def _count(self) -> int:
        splits = self._builder.info.splits
        try:
            count = splits[self._split].num_examples
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{self.describe()} has no split {self._split!r}, only {', '.join(sorted(splits))};"
                f" splits says what {self.split} is called; slices like 'train[90%:]' do"
            ) from error
        if not count:
            raise InputError(f"{self.describe()}: the split {self._split!r} is empty")
        return int(count)

    def _read(self, index: int) -> Any:
        if self._indexed is not None:
            return self._feature(self._indexed[index])
        if self._whole is None:  # a format without random access is read once
            self._whole = [record for _, record in self._read_all()]
        return self._whole[index]

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        if self._indexed is not None:
            yield from super()._read_all()
            return
        import tensorflow as tf
        import tensorflow_datasets as tfds

        in_order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        data = self._builder.as_dataset(
            split=self._split, shuffle_files=False, read_config=in_order
        )
        index = 0
        features = self._builder.info.features
        names = [self.params.feature] if self.params.feature else list(features)
        together = all(features[name].shape == () for name in names)
        if together:  # many at a time: one by one takes ten times as long
            data = data.map(lambda example: {name: example[name] for name in names})
            data = data.batch(_TOGETHER)
        try:
            for item in tfds.as_numpy(data):
                for example in _rows(item) if together else [item]:
                    yield self.origin(index), self._feature(example)
                    index += 1
        except tf.errors.OpError as error:
            raise InputError(
                f"{self.describe()}, split {self._split}: record {index} cannot be read: "
                f"{error.message}. Prepare the data set again."
            ) from error

    def _feature(self, example: dict[str, Any]) -> Any:
        if not self.params.feature:
            return example
        value = example[self.params.feature]
        return value.item() if isinstance(value, np.ndarray) and value.dtype == object else value


def _rows(examples: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Examples that were read together, one by one."""
    for values in zip(*examples.values(), strict=True):
        yield dict(zip(examples, values, strict=True))


def _builder(name: str, data_dir: str | None) -> Any:
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except (tfds.core.registered.DatasetNotFoundError, ValueError, AssertionError) as error:
        known = tfds.list_builders(with_community_datasets=False)  # the others need a network
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        where = f" in {data_dir}" if data_dir else ""
        first_line = str(error).strip().partition("\n")[0]
        raise InputError(
            f"TFDS has no data set {name!r}{where}{hint or f': {first_line}'}"
        ) from error
    if not _is_prepared(builder):
        argument = f", data_dir={data_dir!r}" if data_dir else ""
        raise InputError(
            f"the TFDS data set {name!r} is not prepared in {builder.data_path}. Tekso downloads "
            "nothing by itself. Prepare it once, where there is a network and room:\n"
            f'  python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}{argument})'
            '.download_and_prepare()"\n'
            "or point input.corpus.data_dir at a folder that has it."
        )
    return builder


def _is_prepared(builder: Any) -> bool:
    """Asks the builder, which would write to the log that the folder is not there."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Variant folder")

    log = logging.getLogger("absl")
    log.addFilter(is_other)
    try:
        return bool(builder.is_prepared())
    finally:
        log.removeFilter(is_other)
