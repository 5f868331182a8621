"""What a run knows of its texts without its data is what the input with the data knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tekso.framework.input.characters import Characters
from tekso.framework.input.errors import InputError
from tekso.framework.input.mixtures import Mixture
from tekso.framework.input.tokenizers import Bytes
from tekso.tasks.lm.packed_text import PackedText
from tekso.tasks.mt.input import PaddedPairs
from tekso.tasks.mt.pairs import InMemoryPairs

PAIRS = [("ab", "xyz", "de"), ("ba", "zzy", "fr"), ("abba", "x", "de")]
OWN = {"source_tokenizer": Characters.Params(), "target_tokenizer": Characters.Params()}


def params_of(**changes: Any) -> Any:
    corpus = InMemoryPairs.Params(train=PAIRS, languages=["de", "fr"])
    params = PaddedPairs.Params(
        corpus=corpus,
        tokenizer=Characters.Params(),
        batch_size=2,
        source_length=8,
        target_length=8,
    )
    return params.set(changes)


def without_data(params: Any) -> Any:
    return params.copy().set({"corpus.train": []})


@pytest.mark.parametrize("tokenizers", [{}, OWN], ids=["shared", "own"])
def test_known_texts_are_those_of_the_input(tmp_path: Path, tokenizers: Any) -> None:
    params = params_of(**tokenizers)
    whole = params.instantiate(seed=1, assets_dir=str(tmp_path))
    known = PaddedPairs.known(without_data(params), assets_dir=str(tmp_path))
    assert known.languages == whole.languages == ("de", "fr")
    for name in ("vocab_size", "source_vocab_size", "target_vocab_size"):
        assert getattr(known, name) == getattr(whole, name)
    assert (known.source_tokenizer is known.target_tokenizer) == (not tokenizers)
    for language in ("de", "fr"):
        ids = known.encode_source("abab", language=language)
        assert ids.tolist() == whole.encode_source("abab", language=language).tolist()
        assert known.source_token(int(ids[0])) == f"<{language}>"
    labels = whole.batch(0)["target_labels"][0]
    assert known.decode_target(labels) == whole.decode_target(labels) != ""
    with pytest.raises(InputError, match="no target language 'es'"):
        known.encode_source("a", language="es")


def test_what_was_never_learned_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        PaddedPairs.known(params_of(), assets_dir=str(tmp_path / "of_no_run"))


def test_one_tokenizer_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="target_tokenizer is missing"):
        params = params_of(source_tokenizer=Characters.Params())
        PaddedPairs.known(params, assets_dir=str(tmp_path))


def test_a_mixture_of_pairs_is_not_known_without_its_data(tmp_path: Path) -> None:
    part = params_of()
    part.instantiate(seed=1, assets_dir=str(tmp_path))
    mixture = Mixture.Params(inputs=[part], batch_size=2)
    assert Mixture.known(mixture, assets_dir=str(tmp_path)) is None


def test_a_mixture_of_texts_knows_the_tokenizer_of_its_parts() -> None:
    part = PackedText.Params(files="of/no/*.txt", tokenizer=Bytes.Params(), batch_size=1, length=4)
    known = Mixture.known(Mixture.Params(inputs=[part] * 2, batch_size=2), assets_dir=None)
    assert known.params.batch_size == 2
    assert known.vocab_size == len(Bytes.token_bytes)
