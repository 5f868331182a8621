"""Recall: how often the texts of an image are among the k most similar texts, and the reverse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RANKS = (1, 5, 10)
OF_IMAGES, OF_TEXTS = "image_to_text_recall", "text_to_image_recall"
NAMES = tuple(f"{name}_{k}" for name in (OF_IMAGES, OF_TEXTS) for k in RANKS)
"""Names of all figures."""
_BLOCK = 1024  # rows of similarities computed together


def recalls(
    images: npt.ArrayLike, texts: npt.ArrayLike, image_of_text: Sequence[int]
) -> dict[str, float]:
    """Returns {"image_to_text_recall_1", …, "text_to_image_recall_10": share}.

    An image is found if one of its texts is among the k texts with the largest products. Equal
    products of others count against it, and so does everything that is not a number. An image
    without a text is not found.

    Shapes:
      images: [n, dim]; texts: [m, dim]; image_of_text: [m], row of the image of each text
    """
    x, y = np.asarray(images, np.float32), np.asarray(texts, np.float32)
    owner = np.asarray(image_of_text, np.int64)
    best = np.full(len(x), max(RANKS), np.int64)  # rank of the best own text of every image
    ranks = np.empty(len(y), np.int64)
    for begin in range(0, len(x), _BLOCK):
        block = x[begin : begin + _BLOCK] @ y.T
        for row, scores in enumerate(block):
            own = owner == begin + row
            if own.any():
                best[begin + row] = np.sum(~(scores[~own] < scores[own].max()))
    for begin in range(0, len(y), _BLOCK):
        block = y[begin : begin + _BLOCK] @ x.T
        own = owner[begin : begin + _BLOCK]
        right = np.take_along_axis(block, own[:, None], 1)
        ranks[begin : begin + _BLOCK] = np.sum(~(block < right), axis=1) - 1
    found = {f"{OF_IMAGES}_{k}": float(np.mean(best < k)) for k in RANKS}
    return found | {f"{OF_TEXTS}_{k}": float(np.mean(ranks < k)) for k in RANKS}
