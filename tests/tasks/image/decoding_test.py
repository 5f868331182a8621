"""Odd image files have the pixels that their pictures show; broken files have a reason."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tekso.framework.input.skips import BadRecordError, Origin
from tekso.tasks.image import decoding

RED, BLUE = (200, 30, 40), (20, 60, 220)


def picture(mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> Image.Image:
    """The left half is red, the right half blue."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image.convert(mode)


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decode(data: bytes, channels: int = 3, background: int = 255) -> np.ndarray:
    return decoding.decode(data, channels=channels, background=background, origin=Origin("a.jpg"))


def png16(values: np.ndarray) -> bytes:
    """A PNG of 16-bit grey values, written by hand."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("GIF", {})],
)
def test_lossless_kinds_have_the_exact_pixels(kind: str, options: dict[str, Any]) -> None:
    np.testing.assert_array_equal(decode(encoded(picture(), kind, **options)), picture())


def test_a_jpeg_has_the_pixels_of_tensorflow() -> None:
    data = encoded(picture(), "JPEG", quality=95)
    own = decode(data).astype(int)
    other = tf.io.decode_jpeg(data, channels=3, dct_method="INTEGER_ACCURATE").numpy().astype(int)
    assert own.shape == (16, 24, 3)
    assert np.abs(own - other).max() <= 2  # libraries round the colour conversion differently
    assert np.abs(own[:, :8] - RED).max() <= 6 and np.abs(own[:, -8:] - BLUE).max() <= 6


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "1", "RGBA"])
def test_other_colour_models_become_rgb_or_grey(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    image = picture(mode)
    found = decode(encoded(image, kind))
    np.testing.assert_array_equal(found, np.asarray(image.convert("RGB")))
    assert decode(encoded(image, kind), channels=1).shape == (16, 24, 1)


def test_a_cmyk_jpeg_shows_the_colours_of_the_picture() -> None:
    found = decode(encoded(picture("CMYK"), "JPEG", quality=95)).astype(int)
    assert np.abs(found[:, :8] - RED).max() <= 12 and np.abs(found[:, -8:] - BLUE).max() <= 12


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientations_are_undone(orientation: int) -> None:
    upright = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(stored)), "PNG", exif=exif)
    np.testing.assert_array_equal(decode(data, channels=1)[:, :, 0], upright)


def test_transparent_pixels_show_the_background() -> None:
    image = picture("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 4, 16))
    found = decode(encoded(image, "PNG"), background=77)
    assert (found[:, :4] == 77).all() and (found[:, 4:12] == RED).all()


def test_sixteen_bits_become_eight() -> None:
    values = np.array([[0, 257, 65_535], [32_896, 128, 129]], np.uint16)
    np.testing.assert_array_equal(
        decode(png16(values), channels=1)[:, :, 0], [[0, 1, 255], [128, 0, 1]]
    )


def test_of_an_animation_the_first_frame_is_used() -> None:
    frames = [picture(), Image.new("RGB", (24, 16), (0, 255, 0))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(decode(data), picture())


def test_float_values_without_a_range_are_refused() -> None:
    with pytest.raises(BadRecordError, match="mode F have no known range"):
        decode(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "text"])
def test_a_broken_file_has_a_reason(kind: str, damage: str) -> None:
    noise = np.random.default_rng(0).integers(256, size=(40, 40, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    broken = {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "noise": data[:20] + bytes(len(data) - 20),
        "text": b"<html>404 Not Found</html>",
    }[damage]
    with pytest.raises(BadRecordError) as caught:
        decode(broken)
    assert str(caught.value).startswith("a.jpg: ") and caught.value.reason


def test_an_image_of_too_many_pixels_is_refused() -> None:
    small = png16(np.zeros((1, 1), np.uint16))
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 16, 0, 0, 0, 0)
    data = small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]
    with pytest.raises(BadRecordError, match=r"decompression bomb|too many"):
        decode(data)
