"""TFDS: a data set that is prepared in a temporary folder; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tekso.framework.input.errors import InputError
from tekso.framework.input.tfds import Tfds
from tekso.framework.params import Params, param

TEXTS = [f"text {i} é" for i in range(7)]


class Holder(Params):
    """Params with a source."""

    source: Tfds.Params = param("The source.", default=Tfds.Params())


class TinyText(tfds.core.GeneratorBasedBuilder):
    """Seven short texts to train on and three to test on."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # there is no folder of checksums beside this file

    def _info(self) -> Any:
        features = {"text": tfds.features.Text(), "label": np.int64}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, manager: Any) -> dict[str, Any]:
        return {"train": self._generate(TEXTS), "test": self._generate(TEXTS[:3])}

    def _generate_examples(self) -> None:
        raise NotImplementedError

    def _generate(self, texts: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, text in enumerate(texts):
            yield i, {"text": text, "label": i}


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def data_dir(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = str(tmp_path_factory.mktemp("tfds"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_GCE_CHECK", "true")  # TensorFlow would look for a cloud to be in
        TinyText(data_dir=folder, file_format=request.param).download_and_prepare()
        yield folder


def source(data_dir: str, split: Any = "train", **kwargs: Any) -> Tfds:
    splits = {"train": "train[:5]", "dev": "train[5:]", "test": "test"}
    kwargs = {"name": "tiny_text", "splits": splits, **kwargs}
    one: Tfds = Tfds.Params(data_dir=data_dir, **kwargs).instantiate(split=split)
    return one


def all_of(one: Tfds) -> list[Any]:
    return [record for _, record in one.records()]


def test_records_are_read_in_order_and_by_index(data_dir: str) -> None:
    one = source(data_dir)
    texts = all_of(one)
    assert len(one) == len(texts) == 5
    assert all_of(source(data_dir)) == texts
    assert [one[i] for i in range(5)] == texts
    held_out = all_of(source(data_dir, "dev"))
    assert sorted(texts + held_out) == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("data_dir", ["tfrecord"], indirect=True)
def test_a_file_format_without_access_by_index_is_read_in_order(
    data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = source(data_dir), source(data_dir)
    monkeypatch.setattr(other, "_format", "riegeli")
    assert [other[i] for i in (4, 0)] == [one[i] for i in (4, 0)]
    assert len(other._whole) == 5


def test_without_a_feature_a_record_is_the_whole_example(data_dir: str) -> None:
    record = source(data_dir, feature="")[0]
    assert record["text"].decode() == TEXTS[record["label"]]


def test_a_missing_split_or_feature_names_those_there_are(data_dir: str) -> None:
    with pytest.raises(InputError, match=r"no split 'validation', only test, train"):
        Tfds.Params(name="tiny_text", data_dir=data_dir).instantiate(split="dev")
    with pytest.raises(InputError, match=r"no feature 'txt', only label, text"):
        source(data_dir, feature="txt")


def test_what_is_not_prepared_says_how_to_prepare_it_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"not prepared in .*lm1b(?s:.)*download_and_prepare"):
        source(str(tmp_path), name="lm1b")
    assert "Variant folder" not in caplog.text + capfd.readouterr().err


def test_errors_name_the_setting_where_the_data_set_is(tmp_path: Path, data_dir: str) -> None:
    def opened(split: Any, **changes: Any) -> None:
        Holder().set({f"source.{name}": x for name, x in changes.items()}).source.instantiate(
            split=split
        )

    with pytest.raises(InputError, match=r"or set source\.data_dir to a folder"):
        opened("train", name="lm1b", data_dir=str(tmp_path))
    splits = {"dev": "validation"}
    with pytest.raises(InputError, match=r"set source\.splits\.dev to one of them"):
        opened("dev", name="tiny_text", data_dir=data_dir, splits=splits)


def test_an_unknown_name_names_a_close_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no data set 'lm1' .*did you mean lm1b"):
        source(str(tmp_path), name="lm1")


def test_fingerprints_of_splits_differ(data_dir: str) -> None:
    assert source(data_dir).fingerprint() == source(data_dir).fingerprint()
    assert source(data_dir).fingerprint() != source(data_dir, "dev").fingerprint()
