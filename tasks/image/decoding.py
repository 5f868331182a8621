"""Decodes image files to pixels: JPEG, PNG, WebP, GIF, BMP and TIFF, by Pillow.

Pillow releases Python's global lock while it decodes, so threads decode in parallel.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from tekso.framework.input.skips import BadRecordError, Origin

MOST_PIXELS = 178_956_970
"""A larger image is taken for a malformed one (Pillow's limit against decompression bombs)."""

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""Lower-case suffixes of image files."""


def decode(data: bytes, *, channels: int, background: int, origin: Origin) -> np.ndarray:
    """Returns the pixels of an image file.

    An image is turned as its EXIF orientation says. Grey, palette and CMYK images are converted to
    RGB, or colours to grey (ITU-R 601-2 luma). Transparent pixels show `background`. 16-bit grey
    values are divided by 257. Of an animation, the first frame is used.

    Args:
      data: the bytes of the file.
      channels: 1 (grey) or 3 (RGB).
      background: grey value behind transparent pixels, 0 to 255.
      origin: position of the file, for errors.

    Shapes:
      returns: [height, width, channels] uint8

    Raises:
      BadRecordError: the file is empty, malformed, truncated, too large or not an image.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise BadRecordError(origin, "the file is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise BadRecordError(origin, f"{image.width} × {image.height} pixels are too many")
            image.load()
            upright = ImageOps.exif_transpose(image)
        return _pixels(upright, channels, background, origin)
    except (BadRecordError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise BadRecordError(origin, "not an image in a known format") from error
    except Exception as error:  # for damaged files, Pillow raises errors of a dozen classes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BadRecordError(origin, f"the image cannot be decoded: {reason}") from error


def _pixels(image: Any, channels: int, background: int, origin: Origin) -> np.ndarray:
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_eight_bits(np.asarray(image), image.mode, origin))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        behind = Image.new("RGBA", image.size, (background, background, background, 255))
        image = Image.alpha_composite(behind, image)
    image = image.convert("L" if channels == 1 else "RGB")
    return np.asarray(image).reshape(image.height, image.width, channels)


def _eight_bits(values: np.ndarray, mode: str, origin: Origin) -> np.ndarray:
    """Returns 16-bit grey values as uint8.

    Raises:
      BadRecordError: the values have another range.
    """
    if mode.startswith("F") or values.min() < 0 or values.max() > 65_535:
        raise BadRecordError(origin, f"grey values of Pillow's mode {mode} have no known range")
    return np.round(values.astype(np.float32) / 257.0).astype(np.uint8)
