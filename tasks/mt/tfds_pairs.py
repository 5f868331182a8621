"""Parallel corpora from tensorflow-datasets, such as `wmt14_translate/de-en`, without download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.splits import Split
from tekso.framework.input.tfds import Tfds
from tekso.framework.params import REQUIRED, param
from tekso.tasks.mt.pairs import Pair, PairSource, text_of


class TfdsPairs(PairSource):
    """Reads pairs from a data set: one feature is the source, another the target."""

    class Params(PairSource.Params):
        """Params of TfdsPairs."""

        name: str = param(
            "Name of the data set, such as 'wmt14_translate/de-en', or with a version, "
            "'wmt14_translate/de-en:1.0.0'.",
            default=REQUIRED,
        )
        data_dir: str | None = param(
            "Folder of prepared data sets. None: the default of tensorflow-datasets.", default=None
        )
        splits: dict[str, str] = param(
            "Names of train, dev and test in the data set; slices such as 'train[:90%]' work.",
            default={"train": "train", "dev": "validation", "test": "test"},
        )
        source_feature: str = param("The feature that is the source.", default=REQUIRED)
        target_feature: str = param("The feature that is the target.", default=REQUIRED)

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        """Finds the data set.

        Raises:
          InputError: the data set is not in the folder, or lacks the split or a feature.
        """
        super().__init__(params, split=split)
        p = self.params
        whole = Tfds.Params(name=p.name, data_dir=p.data_dir, splits=dict(p.splits), feature="")
        self._examples: Tfds = whole.instantiate(split=split)
        self._examples.check_whole(p.source_feature, p.target_feature)

    def __len__(self) -> int:
        return len(self._examples)

    def origin(self, index: int) -> Origin:
        """Returns the location of a record."""
        return self._examples.origin(index)

    def fingerprint(self) -> str:
        """Returns a digest of all records."""
        return self._examples.fingerprint()

    def describe(self) -> str:
        """Returns a short description of the source."""
        return f"TFDS data set {self.params.name}"

    def _read(self, index: int) -> Pair:
        return self._pair(self._examples[index], self.origin(index))

    def _read_all(self) -> Iterator[tuple[Origin, Any]]:
        for origin, example in self._examples.records():
            record: Any
            try:
                record = self._pair(example, origin)
            except BadRecordError as error:
                record = error
            yield origin, record

    def _pair(self, example: dict[str, Any], origin: Origin) -> Pair:
        p = self.params
        return Pair(
            text_of(example[p.source_feature], origin, "source "),
            text_of(example[p.target_feature], origin, "target "),
        )
