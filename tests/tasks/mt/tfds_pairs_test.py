"""TFDS as a parallel corpus: a data set that is prepared in a temporary folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow_datasets as tfds

from tekso.framework.input.errors import InputError
from tekso.tasks.mt.pairs import Pair
from tekso.tasks.mt.tfds_pairs import TfdsPairs

PAIRS = [(f"text {i} é", f"Text {i} ß") for i in range(7)]


class TinyTranslate(tfds.core.GeneratorBasedBuilder):
    """Seven pairs to train on and three to test on, of the form of wmt14_translate."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012
        tfds.core.BuilderConfig(name="de-en", version=tfds.core.Version("1.0.0"))
    ]
    code_path = None  # there is no folder of checksums beside this file

    def _info(self) -> Any:
        features = tfds.features.Translation(languages=("de", "en"))
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("de", "en"))

    def _split_generators(self, manager: Any) -> dict[str, Any]:
        return {"train": self._generate(PAIRS), "test": self._generate([*PAIRS[:3], ("", "leer")])}

    def _generate_examples(self) -> None:
        raise NotImplementedError

    def _generate(self, pairs: list[tuple[str, str]]) -> Iterator[tuple[int, dict[str, str]]]:
        for i, (english, german) in enumerate(pairs):
            yield i, {"en": english, "de": german}


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def data_dir(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(tmp_path_factory.mktemp("tfds"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_GCE_CHECK", "true")  # TensorFlow would look for a cloud to be in
        builder = TinyTranslate(data_dir=folder, config="de-en", file_format=request.param)
        builder.download_and_prepare()
        yield folder


def source(data_dir: str, split: Any = "train", **kwargs: Any) -> TfdsPairs:
    splits = {"train": "train[:5]", "dev": "train[5:]", "test": "test"}
    kwargs = {
        "name": "tiny_translate/de-en",
        "splits": splits,
        "source_feature": "en",
        "target_feature": "de",
        **kwargs,
    }
    one: TfdsPairs = TfdsPairs.Params(data_dir=data_dir, **kwargs).instantiate(split=split)
    return one


def all_of(one: TfdsPairs) -> list[Pair]:
    return [record for _, record in one.records()]


def test_features_are_the_sides(data_dir: str) -> None:
    one, held_out = source(data_dir), source(data_dir, "dev")
    pairs = all_of(one)
    assert [one[i] for i in range(5)] == pairs
    assert sorted([*pairs, *all_of(held_out)]) == [Pair(*pair) for pair in PAIRS]
    swapped = source(data_dir, source_feature="de", target_feature="en")
    assert all_of(swapped) == [Pair(pair.target, pair.source) for pair in pairs]
    assert one.fingerprint() != held_out.fingerprint()


def test_a_blank_side_is_skipped(data_dir: str) -> None:
    one = source(data_dir, "test")
    assert sorted(all_of(one)) == [Pair(*pair) for pair in PAIRS[:3]]
    (skip,) = one.skipped().named
    assert skip.file == "tiny_translate/de-en/1.0.0/test" and skip.reason == "source empty"


def test_a_missing_feature_names_those_there_are(data_dir: str) -> None:
    with pytest.raises(InputError, match=r"no feature 'fr', only de, en"):
        source(data_dir, target_feature="fr")
