"""Train, dev and test text out of one collection: by position or by a hash, the same every time."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")


def check_fractions(params: Any) -> None:
    """Checks what is held out: dev_fraction and test_fraction of the Params of a source.

    Raises:
      ValueError: a fraction is out of range, or nothing is left for training.
    """
    for name in ("dev_fraction", "test_fraction"):
        if not 0.0 <= params.get(name) < 1.0:
            raise ValueError(
                f"{params.path_of(name)} is {params.get(name)}, but it has to be in [0, 1)"
            )
    if params.dev_fraction + params.test_fraction >= 1.0:
        raise ValueError(
            f"{params.path_of('dev_fraction')} {params.dev_fraction} and test_fraction "
            f"{params.test_fraction} leave nothing to train"
        )


def part(size: int, split: Split, dev_fraction: float, test_fraction: float) -> tuple[int, int]:
    """The part [begin, end) of `size` things that belongs to a split: train, test, dev in a row."""
    begin_test = int(size * (1.0 - dev_fraction - test_fraction))
    begin_dev = int(size * (1.0 - dev_fraction))
    bounds = {"train": (0, begin_test), "test": (begin_test, begin_dev), "dev": (begin_dev, size)}
    return bounds[split]


def files_param(params: Any, split: Split) -> str:
    """Returns the field with the files of a split: its own, or "files", where it is a part."""
    own = {"train": "files", "dev": "dev_files", "test": "test_files"}[split]
    return own if params.get(own) else "files"


def split_of(name: str, dev_fraction: float, test_fraction: float) -> Split:
    """The split that a name belongs to: a hash of it, so it never changes with its neighbours."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64
    if place < dev_fraction:
        return "dev"
    return "test" if place < dev_fraction + test_fraction else "train"
