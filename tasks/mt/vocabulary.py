"""Training text for the tokenizers of pairs: one side, or both sides alternating."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from tekso.framework.input.sources import TrainingText
from tekso.tasks.mt.pairs import Pair, PairSource

Side = Literal["source", "target", "both"]


def training_text(params: Any, corpus: PairSource, train: Any, side: Side) -> TrainingText:
    """Returns the text to learn a vocabulary from: training text, never held-out text.

    Args:
      params: Params of the input, with corpus and split.
      corpus: the corpus of the input.
      train: for an evaluation input: Params of its training input; otherwise None.
      side: the side or sides to learn from.
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
    """Returns a function that opens the training split of an input once, and the split's name.

    Args:
      params: Params of the input, with corpus and split.
      corpus: the corpus of the input.
      train: for an evaluation input: Params of its training input; otherwise None.
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
    """Yields the texts of one side, or of both; half of the pairs then yield the target first.

    The Thue-Morse sequence determines these pairs. Learning subword pieces may repeatedly drop
    every other text to reduce their number, and this order keeps both sides in equal parts.
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
