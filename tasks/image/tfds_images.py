"""Images of a prepared data set of tensorflow-datasets; nothing is downloaded."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.splits import Split
from tekso.framework.input.tfds import Tfds
from tekso.framework.params import param
from tekso.tasks.image.sources import ImageSource, LabelledImage


class TfdsImages(Tfds, ImageSource):
    """One split of a TFDS data set with images and labels, such as mnist, cifar10 or imagenette.

    Data sets in the file formats tfrecord and array_record are read by index. Of any other, the
    image files of the whole split are read into memory when the first one is needed.

    Raises:
      InputError: the data set is not available, has no such split or features, or its images are
        not of 8 or 16 bits.
    """

    class Params(Tfds.Params, ImageSource.Params):
        """Params of TfdsImages."""

        feature: str = param("Must be empty: whole examples are read.", default="")
        image_feature: str = param("The feature with the image.", default="image")
        label_feature: str = param("The feature with the class.", default="label")

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        self.check_whole(p.image_feature, p.label_feature)
        features = self._builder.info.features
        self.class_names = tuple(getattr(features[p.label_feature], "names", None) or ())
        self.has_files = p.image_feature in self.decoders()
        if self.has_files and features[p.image_feature].np_dtype not in (np.uint8, np.uint16):
            raise InputError(
                f"{self.describe()}: {p.image_feature!r} has pixels of the type "
                f"{np.dtype(features[p.image_feature].np_dtype)}, but must have uint8 or uint16"
            )

    def decoders(self) -> dict[str, Any]:
        """See `Tfds`: image files are not decoded here, but like those of other sources."""
        return self._decoders

    @functools.cached_property
    def _decoders(self) -> dict[str, Any]:
        import tensorflow_datasets as tfds

        return {
            name: tfds.decode.SkipDecoding()
            for name, feature in self._builder.info.features.items()
            if isinstance(feature, tfds.features.Image)
        }

    def _feature(self, example: dict[str, Any]) -> LabelledImage:
        p, origin = self.params, Origin(self.describe())
        label = np.asarray(example[p.label_feature])
        if label.shape or label.dtype.kind not in "iu" or label < 0:
            raise BadRecordError(origin, f"{p.label_feature!r} is {label}, which is not a class")
        image = example[p.image_feature]
        if isinstance(image, bytes):
            return LabelledImage(image, int(label))
        image = np.asarray(image)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
            raise BadRecordError(
                origin,
                f"{p.image_feature!r} is {list(image.shape)} {image.dtype}, but must be [height, "
                "width, 1 or 3] uint8",
            )
        return LabelledImage(image, int(label))
