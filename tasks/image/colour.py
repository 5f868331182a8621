"""Steps that change the colours of an image, and RandAugment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tekso.framework.params import param
from tekso.tasks.image.steps import Image, ImageStep, as_pillow, fitted

_GREY = 128
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R 601-2


class ColourJitter(ImageStep):
    """Changes brightness, contrast, saturation and hue, in this order, by random amounts.

    A factor is uniform in [1 - x, 1 + x], but at least 0; the hue turns by up to `hue` full turns.
    Grey images have no saturation and no hue.

    Source:
      Howard 2013, "Some improvements on deep convolutional neural network based image
      classification", section 2.
    """

    class Params(ImageStep.Params):
        """Params of ColourJitter."""

        brightness: float = param("Range x of the factor of all values.", default=0.4)
        contrast: float = param("Range x of the factor of distances to the mean.", default=0.4)
        saturation: float = param("Range x of the factor of distances to grey.", default=0.4)
        hue: float = param("Largest turn of the hue, at most 0.5.", default=0.0)

    moves_pixels = False

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """See `ImageStep`."""
        del size
        p = self.params
        limits = (p.brightness, p.contrast, p.saturation)
        factors = [max(0.0, random.uniform(1.0 - x, 1.0 + x)) for x in limits]
        turn = random.uniform(-p.hue, p.hue)
        image = scaled(image, np.float32(0.0), factors[0])
        image = scaled(image, _luma(image).mean(), factors[1])
        if image.shape[2] == 1:
            return image
        return turned(scaled(image, _luma(image), factors[2]), turn)


class RandAugment(ImageStep):
    """Applies a few random operations of one strength.

    The operations: identity, autocontrast, equalize, rotate, solarize, colour, posterize, contrast,
    brightness, sharpness, shear x, shear y, translate x, translate y. Each is drawn uniformly, with
    repetition; its sign is random. Pixels from outside of the image are grey. An image of another
    size is resized before.

    Raises:
      ValueError: the magnitude is not in [0, 10], or there are fewer than 0 operations.
    Source:
      Cubuk et al. 2020, "RandAugment". Ranges at magnitude 10: rotation 30°, shear 0.3, translation
      0.45 of the side, factors 1 ± 0.9, posterize to 4 bits, solarize from 0.
    """

    class Params(ImageStep.Params):
        """Params of RandAugment."""

        num_operations: int = param("Operations applied to each image.", default=2)
        magnitude: float = param("Strength, 0 to 10.", default=9.0)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not 0.0 <= p.magnitude <= 10.0 or p.num_operations < 0:
            raise ValueError(
                f"{p.path_of('magnitude')} is {p.magnitude} and num_operations is "
                f"{p.num_operations}, but must be in [0, 10] and at least 0"
            )

    def apply(self, image: Image, size: int, random: np.random.Generator) -> Image:
        """See `ImageStep`."""
        image = fitted(image, size)
        names = list(OPERATIONS)
        for _ in range(self.params.num_operations):
            name = names[random.integers(len(names))]
            sign = 1.0 if random.random() < 0.5 else -1.0
            image = OPERATIONS[name](image, self.params.magnitude / 10.0, sign)
        return image


def scaled(image: Image, centre: Any, factor: float) -> Image:
    """Returns an image whose distances to `centre` are multiplied by a factor."""
    if factor == 1.0:
        return image
    values: np.ndarray = centre + np.float32(factor) * (image - centre)
    return np.clip(np.round(values), 0, 255).astype(np.uint8)


def turned(image: Image, turn: float) -> Image:
    """Returns an RGB image whose hue is turned, in full turns."""
    if turn == 0.0:
        return image
    from PIL import Image as Pillow

    hsv = np.array(as_pillow(image).convert("HSV"))
    hsv[:, :, 0] += np.uint8(round(turn * 256) % 256)  # wraps around
    return _as_image(Pillow.fromarray(hsv, "HSV").convert("RGB"), image)


def _luma(image: Image) -> np.ndarray:
    """Returns the grey values of an image, [height, width, 1] float32."""
    if image.shape[2] == 1:
        return image.astype(np.float32)
    grey: np.ndarray = image @ _LUMA
    return grey[:, :, None]


def _enhanced(name: str) -> Callable[[Image, float, float], Image]:
    """Returns an operation that multiplies a quality of the image by 1 ± 0.9."""

    def run(image: Image, strength: float, sign: float) -> Image:
        from PIL import ImageEnhance

        enhancer = getattr(ImageEnhance, name)(as_pillow(image))
        return _as_image(enhancer.enhance(1.0 + sign * 0.9 * strength), image)

    return run


def _image_ops(name: str) -> Callable[[Image, float, float], Image]:
    def run(image: Image, strength: float, sign: float) -> Image:
        del strength, sign
        from PIL import ImageOps

        return _as_image(getattr(ImageOps, name)(as_pillow(image)), image)

    return run


def _posterize(image: Image, strength: float, sign: float) -> Image:
    del sign
    lost = np.uint8(round(4 * strength))
    return image >> lost << lost


def _solarize(image: Image, strength: float, sign: float) -> Image:
    del sign
    threshold = 256.0 * (1.0 - strength)
    return np.where(image >= threshold, np.uint8(255) - image, image)


def _affine(matrix: Callable[[float, int], list[float]]) -> Callable[[Image, float, float], Image]:
    """Returns an operation that maps pixels by an affine function of their place.

    Args:
      matrix: returns [a, b, c, d, e, f] for the signed strength and the size of the image: pixel
        (x, y) is taken from (a x + b y + c, d x + e y + f), relative to the centre.
    """

    def run(image: Image, strength: float, sign: float) -> Image:
        from PIL import Image as Pillow

        size = image.shape[0]
        a, b, c, d, e, f = matrix(sign * strength, size)
        m = size / 2  # Pillow gives the centre of the first pixel the coordinates 0.5, 0.5
        data = (a, b, c + m - a * m - b * m, d, e, f + m - d * m - e * m)
        fill = _GREY if image.shape[2] == 1 else (_GREY,) * 3
        source = as_pillow(image)
        found = source.transform(
            source.size, Pillow.Transform.AFFINE, data, Pillow.Resampling.BILINEAR, fillcolor=fill
        )
        return _as_image(found, image)

    return run


def _rotation(strength: float, size: int) -> list[float]:
    del size
    angle = np.deg2rad(30.0 * strength)
    return [np.cos(angle), np.sin(angle), 0.0, -np.sin(angle), np.cos(angle), 0.0]


def _as_image(found: Any, image: Image) -> Image:
    return np.asarray(found).reshape(image.shape)


OPERATIONS: dict[str, Callable[[Image, float, float], Image]] = {
    "identity": lambda image, strength, sign: image,
    "autocontrast": _image_ops("autocontrast"),
    "equalize": _image_ops("equalize"),
    "rotate": _affine(_rotation),
    "solarize": _solarize,
    "colour": _enhanced("Color"),
    "posterize": _posterize,
    "contrast": _enhanced("Contrast"),
    "brightness": _enhanced("Brightness"),
    "sharpness": _enhanced("Sharpness"),
    "shear_x": _affine(lambda s, size: [1.0, 0.3 * s, 0.0, 0.0, 1.0, 0.0]),
    "shear_y": _affine(lambda s, size: [1.0, 0.0, 0.0, 0.3 * s, 1.0, 0.0]),
    "translate_x": _affine(lambda s, size: [1.0, 0.0, 0.45 * s * size, 0.0, 1.0, 0.0]),
    "translate_y": _affine(lambda s, size: [1.0, 0.0, 0.0, 0.0, 1.0, 0.45 * s * size]),
}
"""{name: function(square image, strength in [0, 1], sign ±1)} of RandAugment."""
