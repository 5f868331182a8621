"""Sources of captions: formats, splits, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_emoji import write_emoji
from small_pictures import png

from tekso.framework.input.errors import InputError
from tekso.tasks.captioning.emoji import Emoji
from tekso.tasks.captioning.sources import Caption, CaptionTable, CocoCaptions
from tekso.tasks.detection.sources import CocoBoxes


def write_coco(path: Path, **changes: Any) -> str:
    data = {
        "images": [{"id": i, "file_name": f"{i}.png"} for i in range(3)],
        "annotations": [
            {"image_id": 0, "caption": "a  dog\n"},
            {"image_id": 2, "caption": "a cat"},
            {"image_id": 0, "caption": "one dog"},
            {"image_id": 2, "caption": " "},
            {"image_id": 2, "caption": None},
        ],
    }
    path.write_text(json.dumps({**data, **changes}))
    return str(path)


def all_of(source: Any) -> dict[str, list[str]]:
    return {
        Path(source.origin(i).file).name: [caption.text for caption in source.captions(i)]
        for i in range(len(source))
    }


def test_coco_captions_are_grouped_by_image_and_what_is_empty_is_counted(tmp_path: Path) -> None:
    path = write_coco(tmp_path / "captions.json")
    source = CocoCaptions.Params(file=path, folder="pictures", dev_fraction=0.0).instantiate()
    assert all_of(source) == {"0.png": ["a dog", "one dog"], "2.png": ["a cat"]}
    assert source.origin(0).file == "pictures/0.png"
    reasons = [(Path(skip.file).name, skip.reason) for skip in source.skipped().named]
    assert reasons == [
        ("1.png", "the image has no caption"),
        ("2.png", "the caption is empty"),
        ("2.png", "the caption is empty"),
    ]
    with pytest.raises(InputError, match=r"1 .*skipped|max_skipped"):
        CocoCaptions.Params(file=path, dev_fraction=0.0, max_skipped=1).instantiate()


def test_coco_splits_are_disjoint_and_own_files_are_used_whole(tmp_path: Path) -> None:
    images = [{"id": i, "file_name": f"{i}.png"} for i in range(60)]
    captions = [{"image_id": i, "caption": f"number {i}"} for i in range(60)]
    path = write_coco(tmp_path / "all.json", images=images, annotations=captions)
    params = CocoCaptions.Params(file=path, dev_fraction=0.3)
    train, dev = (set(all_of(params.instantiate(split=split))) for split in ("train", "dev"))
    assert len(train) + len(dev) == 60
    assert not train & dev
    boxes = [{**one, "height": 8, "width": 8} for one in images]
    other = write_coco(tmp_path / "boxes.json", images=boxes, annotations=[], categories=[])
    source = CocoBoxes.Params(file=other, dev_fraction=0.3).instantiate(split="dev")
    assert {source.origin(i).file for i in range(len(source))} == dev  # as in captions
    own = write_coco(tmp_path / "own.json")
    source = params.set(dev_file=own, dev_folder="other").instantiate(split="dev")
    assert [source.origin(i).file for i in range(2)] == ["other/0.png", "other/2.png"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotations": [{"image_id": 9, "caption": "x"}]}, "annotation 0 has the image 9, but"),
        ({"annotations": [{"image_id": 0}]}, "not in COCO's format: there is no 'caption'"),
        ({"images": 7}, "not in COCO's format"),
        (
            {"images": [{"id": i % 2, "file_name": f"{i}.png"} for i in range(3)]},
            "images 0 and 2 have the same id 0",
        ),
        ({"annotations": []}, "the split train has no image with a caption"),
    ],
)
def test_malformed_coco_files_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_coco(tmp_path / "captions.json", **changes)
    with pytest.raises(InputError, match=message):
        CocoCaptions.Params(file=path, dev_fraction=0.0).instantiate()


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*none.json, which file names"):
        CocoCaptions.Params(file=str(tmp_path / "none.json")).instantiate()
    with pytest.raises(InputError, match="file is empty: set a JSON file in COCO's format"):
        CocoCaptions.Params().instantiate()
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        CocoCaptions.Params(file=str(tmp_path / "no.json")).instantiate()


def table(tmp_path: Path, text: str, **params: Any) -> Any:
    (tmp_path / "t.tsv").write_text(text)
    given = {"file": str(tmp_path / "t.tsv"), "dev_fraction": 0.0, **params}
    return CaptionTable.Params(**given).instantiate()


def test_a_table_has_a_caption_in_every_line_and_unknown_languages_are_counted(
    tmp_path: Path,
) -> None:
    lines = "a.png\ta dog\ten\nb.png\tein Hund\tde\r\na.png\tun chien\tfr\n\nb.png\n"
    source = table(tmp_path, lines, language_column=3, languages=["en", "de"])
    assert source.languages == ("en", "de")
    assert [source.captions(i) for i in range(2)] == [
        (Caption("a dog", "en"),),
        (Caption("ein Hund", "de"),),
    ]
    reasons = {skip.reason for skip in source.skipped().named}
    assert reasons == {
        "the language of the caption is 'fr', must be one of en, de",
        "the line has 1 columns, but needs 3",
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"path_column": 2}, "must be different numbers from 1"),
        ({"language_column": 3}, r"languages is \[\] and language_column is 3: set both"),
        ({"languages": ["en"]}, "language_column is None: set both, or neither"),
    ],
)
def test_columns_of_a_table_must_fit(tmp_path: Path, params: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        table(tmp_path, "a.png\ta dog\ten\n", **params)


def test_without_captions_the_error_names_what_was_left_out(tmp_path: Path) -> None:
    reason = r"no image with a caption; 1 skipped\n.*has 2 columns, but needs 3"
    with pytest.raises(InputError, match=reason):
        table(tmp_path, "a.png\ta dog\n", languages=["en"], language_column=3)


def test_a_table_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(b"a.png\t\xff\n")
    with pytest.raises(InputError, match="not UTF-8 at byte 6"):
        CaptionTable.Params(file=str(tmp_path / "t.tsv")).instantiate()


def test_an_image_that_cannot_be_read_is_one_bad_record(tmp_path: Path) -> None:
    source = table(tmp_path, "a.png\ta dog\n", folder=str(tmp_path))
    with pytest.raises(InputError, match=r"a.png: No such file"):
        source[0]
    (tmp_path / "a.png").write_bytes(png(np.zeros([2, 2, 3], np.uint8)))
    assert source[0].captions == (Caption("a dog"),)


def test_emoji_of_test_are_new_and_skin_tones_of_dev_are_new_combinations(tmp_path: Path) -> None:
    write_emoji(tmp_path, 300)
    params = Emoji.Params(folder=str(tmp_path))
    texts = {
        split: {text for own in all_of(params.instantiate(split=split)).values() for text in own}
        for split in ("train", "dev", "test")
    }
    assert sum(map(len, texts.values())) == 600
    things = {split: {text.partition(" with")[0] for text in own} for split, own in texts.items()}
    assert not things["test"] & (things["train"] | things["dev"])
    assert things["dev"] <= things["train"]
    assert all(" with " in text for text in texts["dev"])
    assert 15 < len(things["test"]) < 45
    together = set.union(*texts.values())
    assert "thing 0 with light and dark skin tones" in together
    assert "thing 3 with medium-dark skin tone" in together
    origin = params.instantiate().origin(0).file
    assert Path(origin).parent == tmp_path / "img" / "google" / "64"


def test_without_the_package_of_emoji_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"npm pack emoji-datasource-google.*folder=FOLDER"):
        Emoji.Params(folder=str(tmp_path)).instantiate()
    (tmp_path / "emoji.json").write_text('[{"name": "X"}]')
    with pytest.raises(InputError, match=r"not the emoji\.json of the package: KeyError"):
        Emoji.Params(folder=str(tmp_path)).instantiate()
