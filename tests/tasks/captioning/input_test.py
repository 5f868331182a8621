"""Batches of captioned images: tokens, weights, drawn captions and malformed images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_captions import Bars
from small_pictures import png

from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.words import Words
from tekso.tasks.captioning.input import CaptionedImages, captions_of, language_id
from tekso.tasks.captioning.sources import CaptionTable


def captioned(**params: Any) -> Any:
    given: dict[str, Any] = {"source": Bars.Params(), "image_size": 8, "batch_size": 5}
    given |= {"target_length": 7, "tokenizer": Words.Params(vocab_size=30)}
    return CaptionedImages.Params(**{**given, **params})


def test_the_end_token_comes_before_the_inputs_and_after_the_labels() -> None:
    input = captioned(order="sequential").instantiate()
    batch = input.batch(0)
    text = input.source.captions(1)[0].text
    ids = input.tokenizer.encode(text).tolist()
    assert len(ids) == 5
    assert batch["target_ids"][1].tolist() == [0, *ids, 0]
    assert batch["target_labels"][1].tolist() == [*ids, 0, 0]
    assert batch["target_weights"][1].tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert batch["target_segment_ids"][1].tolist() == [1, 1, 1, 1, 1, 1, 0]
    assert input.num_cut == 0


def test_a_long_caption_is_cut_and_counted() -> None:
    input = captioned(target_length=4, order="sequential").instantiate()
    batch = input.batch(0)
    assert batch["target_weights"].tolist() == [[1, 1, 1, 1]] * 5
    assert (batch["target_labels"][:, -1] == 0).all()
    assert input.num_cut == 12


def test_form_and_signature_are_those_of_the_batches() -> None:
    for languages in ([], ["en", "de"]):
        params = captioned(source=Bars.Params(languages=languages))
        batch = params.instantiate().batch(0)
        signature = CaptionedImages.signature(params)
        assert signature == {name: (array.shape, array.dtype) for name, array in batch.items()}
        assert ("language_ids" in batch) == bool(languages)


def test_every_caption_is_an_example_or_one_is_drawn_per_image_and_epoch() -> None:
    source = Bars.Params(captions=3)
    each = captioned(source=source, order="once").instantiate()
    assert each.num_examples == 36
    drawn = captioned(source=source, captions="drawn", order="sequential").instantiate()
    assert drawn.num_examples == 12
    index = np.zeros(40, np.int64)
    labels = drawn.examples(index, np.arange(40))["target_labels"]
    texts = {drawn.tokenizer.decode(row.tolist()) for row in labels}
    assert texts == {caption.text for caption in drawn.source.captions(0)}
    dev = HeldOut.Params(batch_size=4).instantiate(train=captioned(source=source, captions="drawn"))
    first = captions_of(dev).source.captions(0)[0].text
    assert captions_of(dev).tokenizer.decode(dev.batch(0)["target_labels"][0].tolist()) == first


def test_language_ids_are_those_of_the_captions() -> None:
    source = Bars.Params(languages=["en", "de"])
    batch = captioned(source=source, order="sequential").instantiate().batch(0)
    assert batch["language_ids"].tolist() == [0, 1, 0, 1, 0]


def test_a_broken_image_has_weight_0_and_is_counted(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(png(np.full([8, 8, 3], 99, np.uint8)))
    (tmp_path / "b.png").write_bytes(b"no picture")
    (tmp_path / "t.tsv").write_text("".join(f"{n}.png\tthing {n}\n" for n in "abc"))
    source = CaptionTable.Params(
        file=str(tmp_path / "t.tsv"), folder=str(tmp_path), dev_fraction=0.0
    )
    input = captioned(source=source, batch_size=3, order="sequential").instantiate()
    batch = input.batch(0)
    assert batch["weights"].tolist() == [1, 0, 1]
    assert batch["target_weights"].sum(axis=1).tolist() == [3, 0, 3]
    np.testing.assert_array_equal(batch["x"][1], batch["x"][2])
    assert "not an image" in input.skipped().named[0].reason


def test_padding_of_a_pass_counts_in_no_sum() -> None:
    dev = HeldOut.Params(batch_size=3).instantiate(train=captioned())
    last = dev.batch(1)
    assert last["weights"].tolist() == [1, 0, 0]
    assert last["target_weights"][1:].sum() == 0


def test_tokenizer_and_languages_are_known_without_the_data(tmp_path: Path) -> None:
    params = captioned(source=Bars.Params(languages=["en", "de"]))
    learned = params.instantiate(assets_dir=str(tmp_path)).tokenizer
    known = CaptionedImages.known(params, assets_dir=str(tmp_path))
    assert known.languages == ("en", "de")
    assert known.vocab_size == 30
    assert known.tokenizer.encode("red bar").tolist() == learned.encode("red bar").tolist()


def test_an_unknown_language_is_an_error_with_what_there_is() -> None:
    assert language_id((), None) == language_id(("en", "de"), None) == 0
    assert language_id(("en", "de"), "de") == 1
    with pytest.raises(InputError, match=r"'dee', but the captions have: en, de; did you mean de"):
        language_id(("en", "de"), "dee")
    with pytest.raises(InputError, match="one language, without a name: leave out 'de'"):
        language_id((), "de")
