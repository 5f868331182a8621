"""Images of TFDS: a data set that is prepared in a temporary folder; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tekso.framework.input.skips import InputError
from tekso.tasks.image.input import Images
from tekso.tasks.image.tfds_images import TfdsImages

PIXELS = np.random.default_rng(0).integers(256, size=(5, 6, 4, 3), dtype=np.uint8)


class TinyPictures(tfds.core.GeneratorBasedBuilder):
    """Five pictures."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # there is no folder of checksums beside this file

    def _info(self) -> Any:
        features = {
            "image": tfds.features.Image(shape=(6, 4, 3)),
            "label": tfds.features.ClassLabel(names=["ant", "bee"]),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager: Any) -> dict[str, Any]:
        return {"train": self._generate()}

    def _generate_examples(self) -> None:
        raise NotImplementedError

    def _generate(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, pixels in enumerate(PIXELS):
            yield i, {"image": pixels, "label": i % 2}


@pytest.mark.parametrize("form", ["tfrecord", "array_record"])
def test_images_are_read_with_the_names_of_their_classes(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # TensorFlow would look for a cloud to be in
    TinyPictures(data_dir=str(tmp_path), file_format=form).download_and_prepare()
    source = TfdsImages.Params(
        name="tiny_pictures", data_dir=str(tmp_path), splits={"train": "train[:4]"}
    )
    params = Images.Params(source=source, image_size=6, batch_size=4, order="sequential")
    input = params.instantiate()
    assert input.class_names == ("ant", "bee") and input.num_classes == 2
    found = [input.source[i] for i in range(4)]
    wanted = {pixels.tobytes(): i % 2 for i, pixels in enumerate(PIXELS)}
    assert [wanted[one.image.tobytes()] for one in found] == [one.label for one in found]
    np.testing.assert_array_equal(input.batch(0)["labels"], [one.label for one in found])
    with pytest.raises(InputError, match="no feature 'class', only image, label"):
        source.copy().set(label_feature="class").instantiate()
