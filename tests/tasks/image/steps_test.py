"""Steps do to pixels what they say, and are the same for the same random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tekso.tasks.image.colour import OPERATIONS, ColourJitter, RandAugment, scaled, turned
from tekso.tasks.image.mixing import CutMix, Mixup
from tekso.tasks.image.steps import (
    CentreCrop,
    Flip,
    InceptionCrop,
    PadAndCrop,
    RandomErasing,
    fitted,
)

RNG = np.random.default_rng(3)
NOISE = RNG.integers(256, size=(20, 30, 3), dtype=np.uint8)
SQUARE = RNG.integers(256, size=(16, 16, 3), dtype=np.uint8)
ROWS, COLUMNS = np.mgrid[0:100, 0:200].astype(np.float64)
PLACES = np.stack([ROWS, COLUMNS, 0 * ROWS], axis=2).round().astype(np.uint8)
"""A pixel's value is its place: [row, column, 0]."""


def draws(key: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))


def several(step: Any, image: np.ndarray, size: int, count: int = 60) -> list[np.ndarray]:
    return [step.apply(image, size, draws(key)) for key in range(count)]


def test_centre_crop_keeps_the_middle_of_the_shorter_side() -> None:
    found = CentreCrop.Params(fraction=0.5).instantiate().apply(PLACES, 50, draws())
    np.testing.assert_array_equal(found[:, :, 0], np.arange(25, 75)[:, None] + np.zeros(50))
    np.testing.assert_array_equal(found[:, :, 1], np.arange(75, 125) + np.zeros((50, 1)))


def test_inception_crop_has_the_drawn_areas_and_aspects() -> None:
    step = InceptionCrop.Params(least_area=0.1, most_area=0.5).instantiate()
    areas, aspects = [], []
    for found in several(step, PLACES, 40, 200):
        top, bottom = (float(v) for v in np.quantile(found[:, :, 0], [0.0, 1.0]))
        left, right = (float(v) for v in np.quantile(found[:, :, 1], [0.0, 1.0]))
        height, width = bottom - top + 1, right - left + 1
        areas.append(height * width / 20_000)
        aspects.append(width / height)
    assert 0.06 < min(areas) < 0.15 and 0.4 < max(areas) < 0.55
    assert 0.65 < min(aspects) < 0.8 and 1.2 < max(aspects) < 1.5
    assert abs(np.mean(np.log(aspects))) < 0.06  # both orientations alike


def test_inception_crop_of_a_thin_image_is_the_largest_that_fits() -> None:
    thin = np.zeros((2, 400, 3), np.uint8)
    thin[:, 199:201] = 255
    step = InceptionCrop.Params(least_area=1.0).instantiate()
    assert step.apply(thin, 8, draws()).max() > 150


def test_flips_are_as_frequent_as_said() -> None:
    for direction, mirrored in (("horizontal", NOISE[:, ::-1]), ("vertical", NOISE[::-1])):
        step = Flip.Params(probability=0.25, direction=direction).instantiate()
        flipped = [np.array_equal(found, mirrored) for found in several(step, NOISE, 8, 400)]
        assert 70 <= sum(flipped) <= 130


def test_pad_and_crop_moves_by_at_most_the_padding() -> None:
    step = PadAndCrop.Params(padding=2, value=9).instantiate()
    padded = np.pad(SQUARE, [(2, 2), (2, 2), (0, 0)], constant_values=9)
    windows = {padded[i : i + 16, j : j + 16].tobytes() for i in range(5) for j in range(5)}
    found = {image.tobytes() for image in several(step, SQUARE, 16, 300)}
    assert found == windows


def test_random_erasing_fills_a_rectangle_of_the_drawn_area() -> None:
    step = RandomErasing.Params(probability=1.0, least_area=0.1, most_area=0.2, value=7)
    for found in several(step.instantiate(), SQUARE, 16):
        changed = np.argwhere((found != SQUARE).any(axis=2))
        (top, left), (bottom, right) = changed.min(0), changed.max(0) + 1
        assert (found[top:bottom, left:right] == 7).all()
        assert 0.05 < (bottom - top) * (right - left) / 256 < 0.25
    same = RandomErasing.Params(probability=0.0).instantiate()
    assert several(same, SQUARE, 16, 1)[0] is SQUARE


def test_brightness_contrast_and_saturation_scale_distances() -> None:
    image = np.full((1, 2, 3), [[100, 50, 0], [0, 50, 100]], np.uint8)
    np.testing.assert_array_equal(scaled(image, 0.0, 1.5)[0, 0], [150, 75, 0])
    np.testing.assert_array_equal(scaled(image, 50.0, 3.0)[0, 1], [0, 50, 200])
    step = ColourJitter.Params(brightness=0.0, contrast=0.0, saturation=1.0).instantiate()
    luma = SQUARE @ [0.299, 0.587, 0.114]
    for found in several(step, SQUARE, 16, 10):  # saturation keeps the luma where nothing is cut
        inside = ((found > 0) & (found < 255)).all(axis=2)
        difference = found @ [0.299, 0.587, 0.114] - luma
        assert np.abs(difference[inside]).max() < 1.0


def test_a_third_of_a_turn_of_the_hue_makes_red_green() -> None:
    red = np.full((2, 2, 3), [250, 10, 10], np.uint8)
    assert np.abs(turned(red, 1 / 3).astype(int) - [10, 250, 10]).max() <= 4
    assert np.abs(turned(red, 1.0).astype(int) - red).max() <= 2


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_operations_keep_shape_and_type_and_strength_zero_changes_nothing(
    name: str, channels: int
) -> None:
    image = SQUARE[:, :, :channels]
    for sign in (1.0, -1.0):
        found = OPERATIONS[name](image, 0.9, sign)
        assert (found.shape, found.dtype) == (image.shape, np.uint8)
    unchanged = OPERATIONS[name](image, 0.0, 1.0)
    if name in ("autocontrast", "equalize"):  # these have no strength
        pixels = Image.fromarray(np.squeeze(image))
        wanted = np.asarray(getattr(ImageOps, name)(pixels)).reshape(image.shape)
        np.testing.assert_array_equal(unchanged, wanted)
    else:
        np.testing.assert_array_equal(unchanged, image)


def test_affine_operations_move_pixels_as_named() -> None:
    places = np.array(fitted(PLACES, 100))
    right = OPERATIONS["translate_x"](places, 1.0, -1.0)
    np.testing.assert_array_equal(right[:, 46:], places[:, 1:55])
    assert (right[:, :44] == 128).all()
    down = OPERATIONS["translate_y"](places, 1.0, -1.0)
    np.testing.assert_array_equal(down[46:], places[1:55])
    value = OPERATIONS["rotate"](places, 1.0, 1.0)[49, 79].astype(float)
    x, y = 29.5, -0.5  # from the centre of the image to the centre of this pixel
    sine, cosine = 0.5, 3**0.5 / 2
    assert value[0] == pytest.approx(49.5 - sine * x + cosine * y, abs=1.0)
    assert value[1] / 2 == pytest.approx(49.5 + cosine * x + sine * y, abs=1.0)


def test_posterize_and_solarize_have_the_values_of_their_definition() -> None:
    np.testing.assert_array_equal(OPERATIONS["posterize"](SQUARE, 1.0, 1.0), SQUARE & 0xF0)
    np.testing.assert_array_equal(
        OPERATIONS["solarize"](SQUARE, 0.5, 1.0), np.where(SQUARE >= 128, 255 - SQUARE, SQUARE)
    )


def test_rand_augment_applies_the_given_number_of_operations() -> None:
    none = RandAugment.Params(num_operations=0).instantiate()
    np.testing.assert_array_equal(several(none, SQUARE, 16, 1)[0], SQUARE)
    one, same = (RandAugment.Params(num_operations=1).instantiate() for _ in range(2))
    first, second = (several(step, SQUARE, 16, 500) for step in (one, same))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    outputs = {
        OPERATIONS[name](SQUARE, 0.9, sign).tobytes() for name in OPERATIONS for sign in (1.0, -1.0)
    }
    assert {found.tobytes() for found in first} == outputs


def test_mixtures_count_labels_by_weight_and_by_area() -> None:
    x, other = np.zeros((8, 8, 1), np.float32), np.ones((8, 8, 1), np.float32)
    for key in range(50):
        mixed, share = Mixup.Params(alpha=0.4).instantiate().mixed(x, other, draws(key))
        np.testing.assert_allclose(mixed, 1.0 - share, atol=1e-6)
        mixed, share = CutMix.Params().instantiate().mixed(x, other, draws(key))
        assert mixed.mean() == pytest.approx(1.0 - share)
    shares = [
        Mixup.Params(alpha=0.4).instantiate().mixed(x, other, draws(k))[1] for k in range(900)
    ]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.04)
    assert np.var(shares) == pytest.approx(0.25 / (2 * 0.4 + 1), abs=0.01)  # Beta(a, a)
