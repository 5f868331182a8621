"""What tokenizers of pairs are learned from: training text of one side, or of both in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from tekso.framework.input.sources import TrainingText
from tekso.tasks.mt.pairs import Pair, PairSource

Side = Literal["source", "target", "both"]


def training_text(params: Any, corpus: PairSource, train: Any, side: Side) -> TrainingText:
    """Text to learn a vocabulary from: that of the training input, never what is held out.

    Args:
      params: of the input, with corpus and split.
      corpus: what the input reads.
      train: for an evaluation input: Params of the training input that it belongs to.
      side: whose text.
    """
    source, name = training_source(params, corpus, train)
    return TrainingText(
        texts=lambda: texts_of((pair for _, pair in source().records()), side),
        fingerprint=lambda: source().fingerprint(),
        name=name,
        verify=train is None,
    )


def training_source(
    params: Any, corpus: PairSource, train: Any
) -> tuple[Callable[[], PairSource], str]:
    """The training split that an input belongs to: a function that opens it once, and its name.

    Args:
      params: of the input, with corpus and split.
      corpus: what the input reads.
      train: for an evaluation input: Params of the training input that it belongs to.
    """
    of = train.corpus if train is not None and "corpus" in train else params.corpus
    is_own = params.split == "train" and of == params.corpus
    opened = [corpus] if is_own else []

    def source() -> PairSource:
        if not opened:
            opened.append(of.instantiate(split="train"))
        return opened[0]

    return source, corpus.describe() if is_own else of.owner.__name__


def texts_of(pairs: Iterable[Pair], side: Side) -> Iterator[str]:
    """The texts of one side; of both, the target of every other pair before its source.

    Which pairs these are is the Thue-Morse sequence: whoever takes every other text again and again
    to have fewer of them, as it is done before pieces are learned, still has both sides in equal
    parts.
    """
    for number, pair in enumerate(pairs):
        if side != "both":
            yield pair.source if side == "source" else pair.target
        elif number.bit_count() % 2 == 0:
            yield pair.source
            yield pair.target
        else:
            yield pair.target
            yield pair.source
