"""Sources of images with captions: their base class, COCO's JSON, and tables of paths."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split
from tekso.framework.params import param
from tekso.tasks.image.coco import check_ids
from tekso.tasks.image.packed_names import PackedNames
from tekso.tasks.image.sources import AnySource
from tekso.tasks.image.split_sources import SplitFiles


@dataclasses.dataclass(frozen=True)
class Caption:
    """A text that describes an image, and its language; "" if there is only one."""

    text: str
    language: str = ""


@dataclasses.dataclass(frozen=True)
class CaptionedImage:
    """A record of a `CaptionSource`.

    Attributes:
      image: the bytes of an image file; or pixels, [height, width, channels] uint8.
      captions: its captions, at least one.
    """

    image: bytes | np.ndarray
    captions: tuple[Caption, ...]


class CaptionSource(AnySource):
    """Base class of sources whose records are `CaptionedImage`s.

    Attributes:
      languages: languages of the captions in the order of their tokens; empty if there is only one,
        which then has no name.
    """

    class Params(AnySource.Params):
        """Params of CaptionSource."""

        max_skipped: int = param(
            "Most malformed images and captions that are skipped; more are an error.", default=100
        )

    languages: tuple[str, ...] = ()

    @classmethod
    def languages_of(cls, params: Any) -> tuple[str, ...]:
        """Returns the languages that a source with these Params names, without reading data."""
        return tuple(params.languages) if "languages" in params else ()

    def captions(self, index: int) -> tuple[Caption, ...]:
        """Returns the captions of an image without reading the image."""
        raise NotImplementedError(f"{type(self).__name__} has no captions(index)")

    def image(self, index: int) -> bytes | np.ndarray:
        """Returns the image of a record.

        Raises:
          BadRecordError: it cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no image(index)")

    def fingerprint(self) -> str:
        """Returns a digest of the names of the images and of the captions."""
        parts = []
        for index in range(len(self)):
            origin = self.origin(index)
            parts.append(f"{files.base_name(origin.file)} {origin.offset}".encode())
            for caption in self.captions(index):
                parts.append(f"{caption.language}\t{caption.text}".encode("utf-8", "surrogatepass"))
        return digest(parts)

    def _read(self, index: int) -> CaptionedImage:
        return CaptionedImage(self.image(index), self.captions(index))


class CaptionFiles(CaptionSource):
    """Base of sources of image files: a subclass defines `_records` and `_path`.

    Empty captions, captions in a language that `languages` does not name, and images without a
    caption are reported, up to `max_skipped`, and left out.

    Raises:
      InputError: there is no image with a caption in the split, or too much is left out.
    """

    class Params(CaptionSource.Params):
        """Params of CaptionFiles."""

        folder: str = param("Folder of the training images.", default="")
        languages: list[str] = param(
            "Languages of the captions, in the order of their tokens, if captions name theirs.",
            default=[],
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        self.languages = self.languages_of(self.params)
        self._captions: list[tuple[Caption, ...]] = []
        paths: list[str] = []
        for path, captions in self._records(split):
            kept = tuple(self._kept(path, captions))
            if kept:
                paths.append(path)
                self._captions.append(kept)
            elif not captions:
                self.skips.add(Origin(path), "the image has no caption")
        self._paths = PackedNames(paths)
        if not paths:
            left_out = f"; {self.skips.report}" if self.skips.report.count else ""
            raise InputError(
                f"{self.describe()}: the split {split} has no image with a caption{self._hint()}"
                f"{left_out}"
            )

    def _records(self, split: Split) -> Iterable[tuple[str, Sequence[Caption]]]:
        """Returns path and captions of every image of a split."""
        raise NotImplementedError(f"{type(self).__name__} has no _records(split)")

    def _hint(self) -> str:
        """Returns why a split may have no images, and what to set; or ""."""
        return ""

    def _kept(self, path: str, captions: Iterable[Caption]) -> Iterable[Caption]:
        names = self.languages or ("",)
        for number, caption in enumerate(captions):
            text = " ".join(caption.text.split())
            place = Origin(path, number, "record")
            if not text:
                self.skips.add(place, "the caption is empty")
            elif caption.language not in names:
                wanted = f"one of {', '.join(self.languages)}" if self.languages else "empty"
                self.skips.add(
                    place, f"the language of the caption is {caption.language!r}, must be {wanted}"
                )
            else:
                yield Caption(text, caption.language)

    def __len__(self) -> int:
        return len(self._paths)

    def origin(self, index: int) -> Origin:
        """Returns the position of a record."""
        return Origin(self._paths[index])

    def captions(self, index: int) -> tuple[Caption, ...]:
        """See `CaptionSource`."""
        return self._captions[index]

    def image(self, index: int) -> bytes:
        """See `CaptionSource`."""
        path = self._paths[index]
        try:
            return files.read(path)
        except OSError as error:
            raise BadRecordError(Origin(path), reason_of(error)) from error


class SplitCaptionFiles(SplitFiles, CaptionFiles):
    """Base of sources with one file of captions, or one for each split; see the subclasses."""

    class Params(SplitFiles.Params, CaptionFiles.Params):
        """Params of SplitCaptionFiles."""

        file: str = param("Captions of the training images.", default="")

    kind = "a file with captions"
    """What `file` is, for errors."""

    def describe(self) -> str:
        """Returns a short description of the collection."""
        return f"captions of {self.file or type(self).__name__}"

    @classmethod
    def unset(cls, params: Any, split: Split) -> str:
        """See `Source`."""
        own = "" if split == "train" else params.get(f"{split}_file")
        return "" if params.file or own else f"{params.path_of('file')} is empty: set {cls.kind}"

    def _hint(self) -> str:
        return self.why_empty()

    def _records(self, split: Split) -> Iterable[tuple[str, Sequence[Caption]]]:
        p, path = self.params, self.file
        if why := self.unset(p, split):
            raise InputError(why)
        try:
            data = files.read(path)
        except FileNotFoundError as error:
            setting = p.path_of(f"{split}_file" if self.own else "file")
            raise InputError(f"there is no file {path}, which {setting} names") from error
        for name, captions in self._parsed(path, data).items():
            if self.takes(name):
                yield files.join(self.folder, name), captions

    def _parsed(self, path: str, data: bytes) -> Mapping[str, Sequence[Caption]]:
        """Returns {name of an image: its captions}.

        Raises:
          InputError: the file has another format.
        """
        raise NotImplementedError(f"{type(self).__name__} has no _parsed(path, data)")


class CocoCaptions(SplitCaptionFiles):
    """Images in a folder, and their captions in a JSON file in the format of COCO.

        {"images": [{"id": 7, "file_name": "a.jpg"}],
         "annotations": [{"image_id": 7, "caption": "a dog on a sofa"}]}

    An annotation may have a `language`. Other keys are ignored.

    Raises:
      InputError: as `CaptionFiles`; the file is missing, is no such JSON, or refers to an unknown
        image.
    """

    class Params(SplitCaptionFiles.Params):
        """Params of CocoCaptions."""

    kind = "a JSON file in COCO's format"

    def _parsed(self, path: str, data: bytes) -> Mapping[str, Sequence[Caption]]:
        try:
            found = json.loads(data)
        except ValueError as error:
            raise InputError(f"{path}: not JSON: {error}") from error
        try:
            check_ids(path, "images", found["images"])
            names = {one["id"]: str(one["file_name"]) for one in found["images"]}
            captions: dict[str, list[Caption]] = {name: [] for name in names.values()}
            for number, one in enumerate(found["annotations"]):
                if one["image_id"] not in names:
                    raise InputError(
                        f"{path}: annotation {number} has the image {one['image_id']!r}, but "
                        "there is no such image"
                    )
                text = "" if one["caption"] is None else str(one["caption"])  # counted as empty
                caption = Caption(text, str(one.get("language", "")))
                captions[names[one["image_id"]]].append(caption)
        except (KeyError, TypeError, AttributeError) as error:
            what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(
                f"{path}: not in COCO's format: {what}; expected an object with the lists "
                "'images' (id, file_name) and 'annotations' (image_id, caption)"
            ) from error
        return captions


class CaptionTable(SplitCaptionFiles):
    """A text file with a line for each caption: path of the image, caption, and its language.

        dogs/1.jpg <tab> a dog on a sofa <tab> en

    Columns are separated by tabs. The lines of an image need not be neighbours, and paths are
    relative to `folder`.

    Raises:
      InputError: as `CaptionFiles`; the file is missing, or is no text in UTF-8.
    """

    class Params(SplitCaptionFiles.Params):
        """Params of CaptionTable."""

        path_column: int = param("Column of the path, from 1.", default=1)
        caption_column: int = param("Column of the caption.", default=2)
        language_column: int | None = param(
            "Column of the language; None: the captions have one language.", default=None
        )

    kind = "a file with a path and a caption in every line, separated by a tab"

    def _parsed(self, path: str, data: bytes) -> Mapping[str, Sequence[Caption]]:
        p = self.params
        columns = [p.path_column, p.caption_column]
        columns += [] if p.language_column is None else [p.language_column]
        if min(columns) < 1 or len(set(columns)) < len(columns):
            raise InputError(
                f"{p.path_of('path_column')}, caption_column and language_column are {columns}, "
                "but must be different numbers from 1"
            )
        if (p.language_column is None) != (not p.languages):
            raise InputError(
                f"{p.path_of('languages')} is {list(p.languages)} and language_column is "
                f"{p.language_column}: set both, or neither"
            )
        try:
            lines = data.decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error
        found: dict[str, list[Caption]] = {}
        for number, line in enumerate(lines):
            cells = line.removesuffix("\r").split("\t")
            if not line.strip():
                continue
            if len(cells) < max(columns):
                self.skips.add(
                    Origin(path, number, "record"),
                    f"the line has {len(cells)} columns, but needs {max(columns)}",
                )
                continue
            name, text, *language = (cells[column - 1].strip() for column in columns)
            found.setdefault(name, []).append(Caption(text, *language))
        return found
