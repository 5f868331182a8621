"""Divides a collection into train, dev and test: by position or by a hash, always the same."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, Literal

from tekso.framework.input.errors import NoSplitError
from tekso.framework.source_lines import place_of

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def load_split(owner: Any, split: Split) -> Any:
    """Returns `owner.load(split)`.

    Raises:
      NoSplitError: `load` raises a KeyError with the name of the split.
    """
    with missing_split(owner, split):
        return owner.load(split)


@contextlib.contextmanager
def missing_split(owner: Any, split: Split) -> Iterator[None]:
    """Converts a KeyError with the name of a split to a NoSplitError.

    Args:
      owner: an input or a source with a method `load(split)`, which runs inside.
      split: the split.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (split,):
            raise
        names = ", ".join(map(repr, SPLITS[:-1])) + f" or {SPLITS[-1]!r}"
        cure = "return its examples"
        if split != "train":
            other = "test" if split == "dev" else "dev"
            cure += f", or evaluate another split, as in HeldOut.Params(split={other!r})"
        raise NoSplitError(
            f"{type(owner).__name__}.load({split!r}){place_of(type(owner).load)} raises KeyError: "
            f"{split!r}, so the data has no such split. load is called with {names}: {cure}"
        ) from error


def check_fractions(params: Any) -> None:
    """Checks dev_fraction and test_fraction in the Params of a source.

    Raises:
      ValueError: a fraction is out of range, or nothing is left for training.
    """
    for name in ("dev_fraction", "test_fraction"):
        if not 0.0 <= params.get(name) < 1.0:
            raise ValueError(f"{params.path_of(name)} is {params.get(name)}, but must be in [0, 1)")
    if params.dev_fraction + params.test_fraction >= 1.0:
        raise ValueError(
            f"{params.path_of('dev_fraction')} {params.dev_fraction} and test_fraction "
            f"{params.test_fraction} leave no training data"
        )


def part(size: int, split: Split, dev_fraction: float, test_fraction: float) -> tuple[int, int]:
    """Returns the range [begin, end) of a split in `size` elements, ordered train, test, dev."""
    begin_test = int(size * (1.0 - dev_fraction - test_fraction))
    begin_dev = int(size * (1.0 - dev_fraction))
    bounds = {"train": (0, begin_test), "test": (begin_test, begin_dev), "dev": (begin_dev, size)}
    return bounds[split]


def held_out_fractions(params: Any, own: str) -> tuple[float, float]:
    """Returns the fractions of the training data that are dev and test data.

    Args:
      params: Params with dev_fraction and test_fraction.
      own: end of the names of the fields with data of a split's own, as "files" of "dev_files" and
        "test_files". The fraction of a split that has such data is 0.
    """
    dev, test = (
        0.0 if params.get(f"{split}_{own}") else params.get(f"{split}_fraction")
        for split in ("dev", "test")
    )
    return dev, test


def why_empty(params: Any, split: Split, own: str) -> str:
    """Returns why a split has no data and what to set, for the end of an error; or "".

    Args:
      params: as of `held_out_fractions`.
      split: the split without data.
      own: as of `held_out_fractions`.
    """
    if split == "train":
        dev, test = held_out_fractions(params, own)
        return f": {dev:g} of the data are for dev, {test:g} for test" if dev + test else ""
    if params.get(f"{split}_{own}"):
        return ""
    fraction = params.get(f"{split}_fraction")
    return f": set {params.path_of(f'{split}_{own}')}, or a {split}_fraction above {fraction:g}"


def files_param(params: Any, split: Split) -> str:
    """Returns the name of the field with the files of a split.

    This is "dev_files" or "test_files" if set. Otherwise the split is held out from "files".
    """
    own = {"train": "files", "dev": "dev_files", "test": "test_files"}[split]
    return own if params.get(own) else "files"


def split_of(name: str, dev_fraction: float, test_fraction: float) -> Split:
    """Returns the split of a name by its hash, so that it does not depend on other names."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64
    if place < dev_fraction:
        return "dev"
    return "test" if place < dev_fraction + test_fraction else "train"
