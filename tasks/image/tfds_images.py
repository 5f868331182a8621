"""Images of a prepared data set of tensorflow-datasets; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.splits import Split
from tekso.framework.input.tfds import Tfds
from tekso.framework.params import param
from tekso.tasks.image.sources import ImageSource, LabelledImage


class TfdsImages(Tfds, ImageSource):
    """One split of a TFDS data set with images and labels, such as mnist, cifar10 or imagenette.

    A data set in the file format array_record is read by index. Of any other, the whole split is
    decoded into memory when the first image is read.

    Raises:
      InputError: the data set is not available, or has no such split or features.
    """

    class Params(Tfds.Params, ImageSource.Params):
        """Params of TfdsImages."""

        feature: str = param("Must be empty: whole examples are read.", default="")
        image_feature: str = param("The feature with the image.", default="image")
        label_feature: str = param("The feature with the class.", default="label")

    has_files = False  # TFDS decodes the images

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        self.check_whole(p.image_feature, p.label_feature)
        names = getattr(self._builder.info.features[p.label_feature], "names", None)
        self.class_names = tuple(names or ())

    def _feature(self, example: dict[str, Any]) -> LabelledImage:
        p = self.params
        image = np.asarray(example[p.image_feature])
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
            raise BadRecordError(
                Origin(self.describe()),
                f"{p.image_feature!r} is {list(image.shape)} {image.dtype}, but must be [height, "
                "width, 1 or 3] uint8",
            )
        return LabelledImage(image, int(example[p.label_feature]))
