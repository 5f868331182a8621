"""Files in the format of COCO: images, annotations and categories in one JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.image.packed_names import PackedNames
from tekso.tasks.image.split_sources import SplitFiles


@dataclasses.dataclass(frozen=True)
class CocoFile:
    """The parts of a COCO file that are used.

    Attributes:
      class_names: names of the categories, in the order of their ids.
      names: names of the image files.
      sizes: height and width of every image, in pixels.
      annotations: for every image, its annotations as (number in the file, class from 1, object).
    """

    class_names: tuple[str, ...]
    names: list[str]
    sizes: list[tuple[int, int]]
    annotations: list[list[tuple[int, int, Mapping[str, Any]]]]


class CocoFiles(SplitFiles):
    """Base of the sources of images in a folder, with a JSON file in the format of COCO.

    The classes are the categories in the order of their ids, which may have gaps. A subclass
    implements `_keep`, which stores the annotations that it needs.

    Raises:
      InputError: the file is missing, is no such JSON, or refers to an unknown image or category.
    """

    class Params(SplitFiles.Params):
        """Params of CocoFiles."""

        file: str = param("JSON file of the training images.", default="")

    contents = "images"
    """What the file is read for, as `describe` says."""

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        if params.file:
            return ""
        return f"{params.path_of('file')} is empty: set a JSON file in COCO's format"

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        if why := self.unset(self.params, split):
            raise InputError(why)
        found = _parsed(self.file)
        chosen = [i for i, name in enumerate(found.names) if self.takes(name)]
        try:
            chosen = self._keep(found, chosen)
        except (KeyError, TypeError, ValueError) as error:
            raise _no_coco(self.file, error) from error
        if not chosen:
            raise InputError(f"{self.file}: the split {split} has no images{self.why_empty()}")
        self._names = PackedNames(found.names[i] for i in chosen)

    def _keep(self, found: CocoFile, chosen: list[int]) -> list[int]:
        """Stores the annotations of the chosen images; returns the images that are kept."""
        raise NotImplementedError(f"{type(self).__name__} has no _keep(found, chosen)")

    def __len__(self) -> int:
        return len(self._names)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(files.join(self.folder, self._names[index]))

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"{self.contents} of {self.file}"

    def image(self, index: int) -> bytes:
        """Returns the image of a record.

        Raises:
          BadRecordError: it cannot be read.
        """
        origin = self.origin(index)
        try:
            return files.read(origin.file)
        except OSError as error:
            raise BadRecordError(origin, reason_of(error)) from error


def _parsed(path: str) -> CocoFile:
    """Returns the parts of a COCO file that are used.

    Raises:
      InputError: see `CocoFiles`.
    """
    try:
        data = json.loads(files.read(path))
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    lists = [
        data.get(key) if isinstance(data, Mapping) else None
        for key in ("images", "annotations", "categories")
    ]
    if not all(isinstance(one, Sequence) for one in lists):
        raise InputError(
            f"{path}: not in COCO's format: expected an object with the lists 'images', "
            "'annotations' and 'categories'"
        )
    try:
        return _converted(path, *lists)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _no_coco(path, error) from error


def _no_coco(path: str, error: Exception) -> InputError:
    if isinstance(error, InputError):
        return error
    what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return InputError(f"{path}: not in COCO's format: {what}")


def check_ids(path: str, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Checks that no two images, or categories, have the same id.

    Raises:
      InputError: two have; annotations of one would count for the other.
    """
    seen: dict[Any, int] = {}
    for number, one in enumerate(records):
        if (before := seen.setdefault(one["id"], number)) != number:
            raise InputError(
                f"{path}: {kind} {before} and {number} have the same id {one['id']!r}; number them "
                "again, also in the annotations"
            )


def _converted(path: str, images: Any, annotations: Any, categories: Any) -> CocoFile:
    check_ids(path, "images", images)
    check_ids(path, "categories", categories)
    categories = sorted(categories, key=lambda one: one["id"])
    labels = {one["id"]: number for number, one in enumerate(categories, 1)}
    by_image: dict[Any, list[Any]] = {one["id"]: [] for one in images}
    for number, one in enumerate(annotations):
        if one["image_id"] not in by_image or one["category_id"] not in labels:
            raise InputError(
                f"{path}: annotation {number} has the image {one['image_id']!r} and the category "
                f"{one['category_id']!r}, but there is no such image or category"
            )
        by_image[one["image_id"]].append((number, labels[one["category_id"]], one))
    sizes = [(int(one["height"]), int(one["width"])) for one in images]
    for one, size in zip(images, sizes, strict=True):
        if min(size) < 1:
            raise InputError(
                f"{path}: image {one['id']!r} has the height {size[0]} and the width {size[1]}, "
                "which must be at least 1"
            )
    return CocoFile(
        class_names=tuple(str(one["name"]) for one in categories),
        names=[str(one["file_name"]) for one in images],
        sizes=sizes,
        annotations=[by_image[one["id"]] for one in images],
    )
