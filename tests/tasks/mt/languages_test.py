"""Many languages: their corpora together, tokens of languages, and how often each is met."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.input import shuffle
from tekso.framework.input.errors import InputError
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.input import PaddedPairs
from tekso.tasks.mt.languages import ManyLanguages, sampled
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.pair_files import Tsv
from tekso.tasks.mt.pairs import InMemoryPairs, Pair

SIZES = {"de": 400, "fr": 100, "is": 4}
KEY = shuffle.key_of(0, "languages")


def corpora(sizes: dict[str, int]) -> ManyLanguages.Params:
    parts: dict[str, Any] = {
        language: InMemoryPairs.Params(train=[(f"s{i}", f"{language}{i}") for i in range(size)])
        for language, size in sizes.items()
    }
    return ManyLanguages.Params(corpora=parts)


def make(form: Any, **kwargs: Any) -> Any:
    kwargs = {"batch_size": 8, "source_length": 8, "target_length": 8, **kwargs}
    return form.Params(corpus=corpora(SIZES), **kwargs).instantiate(seed=3)


def language_ids(batch: dict[str, np.ndarray]) -> list[int]:
    """The first source token of every pair that counts."""
    found = []
    for row in np.flatnonzero(batch["target_weights"].any(axis=1)):
        segments = batch["source_segment_ids"][row]
        for segment in range(1, segments.max() + 1):
            found.append(int(batch["source_ids"][row][segments == segment][0]))
    return found


def test_corpora_follow_each_other_and_name_their_language() -> None:
    params = corpora({"fr": 2, "de": 3})
    one: ManyLanguages = params.instantiate()
    assert ManyLanguages.languages_of(params) == one.languages
    pairs = [record for _, record in one.records()]
    assert pairs == [one[i] for i in range(5)]
    assert pairs[1:3] == [Pair("s1", "fr1", "fr"), Pair("s0", "de0", "de")]
    assert one.languages == ("fr", "de")


def test_malformed_pairs_of_a_corpus_are_skipped_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\nbad\n")
    tsv = Tsv.Params(files=str(tmp_path / "a.tsv"), dev_fraction=0.0)
    memory = InMemoryPairs.Params(train=[("c", "d")])
    one = ManyLanguages.Params(corpora={"x": tsv, "y": memory}).instantiate()
    assert [record for _, record in one.records()] == [Pair("a", "b", "x"), Pair("c", "d", "y")]
    assert one.skipped().count == 1 and one.skipped().named[0].reason.startswith("line 2: 1 col")


def test_languages_in_languages_are_refused() -> None:
    inner = InMemoryPairs.Params(train=[("a", "b", "x")], languages=["x"])
    with pytest.raises(InputError, match=r"corpora\.de has 1 languages, must have one"):
        ManyLanguages.Params(corpora={"de": inner}).instantiate()


@pytest.mark.parametrize("form", [PaddedPairs, BucketedPairs, PackedPairs])
def test_the_token_of_the_wanted_language_is_before_every_source(form: Any) -> None:
    one = make(form, order="once")
    assert one.languages == ("de", "fr", "is")
    assert one.source_vocab_size == one.target_vocab_size == 256 + 3
    ids = [i for step in range(one.num_batches) for i in language_ids(one.batch(step))]
    assert ids == [256] * 400 + [257] * 100 + [258] * 4
    assert one.encode_source("s1", "is").tolist() == [258, *b"s1", 0]
    assert one.pairs([404]) == [Pair("s4", "fr4", "fr")]


def test_a_missing_or_unknown_language_names_those_there_are() -> None:
    one = make(PaddedPairs)
    with pytest.raises(InputError, match="no target language None; there are de, fr, is"):
        one.encode_source("s1")
    with pytest.raises(InputError, match=r"no target language 'fra'; .*did you mean fr"):
        one.encode_source("s1", "fra")
    single = PaddedPairs.Params(
        corpus=InMemoryPairs.Params(train=[("a", "b")]), batch_size=1, source_length=4,
        target_length=4,
    ).instantiate()  # fmt: skip
    with pytest.raises(InputError, match="one target language, without a name: leave out 'de'"):
        single.encode_source("a", "de")


@pytest.mark.parametrize("form", [PaddedPairs, BucketedPairs, PackedPairs])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_languages_are_met_as_the_temperature_says(form: Any, temperature: float) -> None:
    one = make(form, temperature=temperature, batch_size=32)
    met: collections.Counter[int] = collections.Counter()
    for step in range(300):
        met.update(language_ids(one.batch(step)))
    weights = np.array(list(SIZES.values())) ** (1 / temperature)
    shares = np.array([met[256 + i] for i in range(3)]) / met.total()
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.015)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.floats(1.0, 20.0))
def test_an_epoch_takes_pairs_of_a_language_equally_often(
    sizes: list[int], temperature: float
) -> None:
    languages = np.repeat(np.arange(len(sizes)), sizes)
    taken = sampled(languages, temperature=temperature, key=KEY)
    times = np.bincount(taken, minlength=len(languages))
    for number, size in enumerate(sizes):
        own = times[languages == number]
        wanted = max(sizes) * (size / max(sizes)) ** (1 / temperature)
        assert own.min() >= 1 and own.max() - own.min() <= 1
        assert abs(own.sum() - max(wanted, size)) <= 0.5001
    if temperature == 1.0:
        assert times.tolist() == [1] * len(languages)


def test_batches_with_a_temperature_are_the_same_after_a_restart() -> None:
    used, fresh = make(PaddedPairs, temperature=3.0), make(PaddedPairs, temperature=3.0)
    for step in (1000, 3, 0):
        np.testing.assert_array_equal(
            used.batch(step)["target_ids"], fresh.batch(step)["target_ids"]
        )
