"""Bases of the sources whose dev and test data are other files, or a part of the training data."""

from __future__ import annotations

from typing import Any, ClassVar

from tekso.framework.input.splits import (
    Split,
    check_fractions,
    held_out_fractions,
    split_of,
    why_empty,
)
from tekso.framework.params import param
from tekso.tasks.image.sources import AnySource


class SplitSource(AnySource):
    """Base of sources that hold out a part of the training data, unless a split has own data.

    A hash of a record's name chooses its split.

    Raises:
      ValueError: a fraction is out of range.
    """

    class Params(AnySource.Params):
        """Params of SplitSource."""

        dev_fraction: float = param(
            "Fraction of the training data for dev, if dev has no data of its own.", default=0.1
        )
        test_fraction: float = param(
            "Fraction of the training data for test, if test has no data of its own.", default=0.0
        )

    split_by: ClassVar[str]
    """Field with the training data, such as "folder"; dev and test have "dev_folder", …"""

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        check_fractions(params)
        # Before the base class, in which some sources read their records.
        self._fractions = held_out_fractions(params, self.split_by)
        super().__init__(params, split=split)

    @property
    def own(self) -> str:
        """The split's own folder or file; "" if its data are a part of those for training."""
        return self._of_split(self.split_by)

    def _of_split(self, field: str) -> str:
        split = getattr(self, "split", "train")  # describe() is called before it is set
        return "" if split == "train" else str(self.params.get(f"{split}_{field}"))

    def takes(self, name: str) -> bool:
        """Returns whether a record of the folder or file of this split belongs to the split."""
        if self.own:
            return True
        return split_of(name, *self._fractions) == self.split

    def why_empty(self) -> str:
        """Returns why the split has no records, and what to set, for the end of an error; or ""."""
        return why_empty(self.params, self.split, self.split_by)


class SplitFolders(SplitSource):
    """Base of sources with a folder for training, and perhaps one for dev and test each."""

    class Params(SplitSource.Params):
        """Params of SplitFolders."""

        folder: str = param("Folder of the training data.", default="")
        dev_folder: str = param("Folder for dev; empty: hold out a part of `folder`.", default="")
        test_folder: str = param("Folder for test; empty: hold out a part of `folder`.", default="")

    split_by = "folder"


class SplitFiles(SplitSource):
    """Base of sources with a file that lists images, and perhaps one for dev and test each.

    The images are in `folder`, and those of a split may be in a folder of its own.
    """

    class Params(SplitSource.Params):
        """Params of SplitFiles."""

        file: str = param("File that lists the training images.", default="")
        folder: str = param("Folder of the training images.", default="")
        dev_file: str = param("File for dev; empty: hold out a part of `file`.", default="")
        dev_folder: str = param("Folder for dev; empty: as in training.", default="")
        test_file: str = param("File for test; empty: hold out a part of `file`.", default="")
        test_folder: str = param("Folder for test; empty: as in training.", default="")

    split_by = "file"

    @property
    def folder(self) -> str:
        """The folder of the images of the split."""
        return self._of_split("folder") or str(self.params.folder)

    @property
    def file(self) -> str:
        """The file that lists the images of the split, or those of all splits."""
        return self.own or str(self.params.file)
