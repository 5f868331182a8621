"""An input of volumes with labels: crops, mirrors and normalises them on the host."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Input, Signature
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.windows import spatial_dims
from tekso.tasks.classification.task import LABELS, WEIGHTS, X
from tekso.tasks.image.image_input import LabelledInput
from tekso.tasks.image.steps import Image
from tekso.tasks.segmentation.input import NOT_COUNTED
from tekso.tasks.segmentation.sources import IGNORED
from tekso.tasks.segmentation.volume_sources import VolumeSource

_DIMS = spatial_dims(3)
_Place = tuple[slice, ...]


class Volumes(LabelledInput):
    """Volumes of one size with the class of every voxel.

    A volume that is larger than volume_shape is cropped: in training at random, in an evaluation
    (order "once") at the centre. One that is smaller is padded at the end with the mean; padding
    does not count. In training, a volume is mirrored along each dim in `flips` with probability
    1/2. The random numbers of an example are a function of (seed, epoch, index).

    Shapes:
      batch:
        "x": [batch, *volume_shape, channels] float32, (value - mean) / deviation
        "labels": [batch, *volume_shape] int32; -1 for voxels that do not count
        "weights": [batch] float32; 0 for padding and malformed volumes
    Raises:
      InputError: as the source; the training volumes have changed since the run began.
      ValueError: a number is out of range.
    """

    class Params(LabelledInput.Params):
        """Params of Volumes."""

        source: VolumeSource.Params = param("Where the volumes come from.", default=REQUIRED)
        volume_shape: tuple[int, int, int] = param(
            "Depth, height and width of the volumes of a batch.", default=REQUIRED
        )
        channels: int = param("Number of values of a voxel.", default=1)
        mean: list[float] = param(
            "Subtracted from the values; one number, or one per channel.", default=[0.0]
        )
        deviation: list[float] = param(
            "Divides the difference; one number, or one per channel.", default=[1.0]
        )
        flips: list[Literal["depth", "height", "width"]] = param(
            "Dims along which volumes of training are mirrored at random.", default=[]
        )

    unit = "volumes"
    source: VolumeSource

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        check(self.params)

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        rows = params.batch_size
        return {
            X: ((rows, *params.volume_shape, params.channels), np.dtype(np.float32)),
            LABELS: ((rows, *params.volume_shape), np.dtype(np.int32)),
            WEIGHTS: ((rows,), np.dtype(np.float32)),
        }

    def prepared(self, index: int, key: int) -> Batch:
        """Returns an example; see the class and `PreparedInput`."""
        p, origin, record = self.params, self.source.origin(index), self.source[index]
        random = np.random.Generator(np.random.Philox(key=key)) if self.is_training else None
        place = cropped(record.volume.shape[:3], p.volume_shape, random)
        x = normalized(record.volume[place], p, origin)
        labels = self._labels(record.labels[place], origin)
        room = [(0, n - m) for n, m in zip(p.volume_shape, labels.shape, strict=True)]
        x = np.pad(x, [*room, (0, 0)])
        labels = np.pad(labels, room, constant_values=NOT_COUNTED)
        if random is not None:
            drawn = random.integers(2, size=3)
            axes = tuple(d for d in range(3) if drawn[d] and _DIMS[d] in p.flips)
            x, labels = np.flip(x, axes), np.flip(labels, axes)
        return {X: x, LABELS: labels, WEIGHTS: np.ones((), np.float32)}

    def _labels(self, labels: np.ndarray, origin: Origin) -> np.ndarray:
        classes = self.num_classes or IGNORED
        counted = labels[labels != IGNORED]
        if counted.size and not 0 <= counted.min() <= counted.max() < classes:
            wrong = counted.min() if counted.min() < 0 else counted.max()
            raise BadRecordError(
                origin,
                f"its labels have the value {wrong}, but the source has {classes} classes: values "
                f"must be 0 to {classes - 1}, or {IGNORED} for voxels that do not count",
            )
        found: np.ndarray = np.where(labels == IGNORED, NOT_COUNTED, labels.astype(np.int32))
        return found

    def drawn(self, x: np.ndarray) -> Image:
        """Returns the section in the middle of the depth as grey pixels, for pictures."""
        plane = x[len(x) // 2].mean(-1)
        low, high = float(plane.min()), float(plane.max())
        grey = (plane - low) / max(high - low, 1e-9)
        found: np.ndarray = np.round(255 * grey).astype(np.uint8)[..., None]
        return found

    def section(self, labels: np.ndarray) -> np.ndarray:
        """Returns the labels of the section that `drawn` shows."""
        found: np.ndarray = labels[len(labels) // 2]
        return found

    def has_background_only(self) -> bool:
        """Returns False: labels are no image files, in which 255 may stand for a class."""
        return False


def check(params: Any) -> None:
    """Checks the numbers in the Params of `Volumes`.

    Raises:
      ValueError: one is out of range.
    """
    if min(*params.volume_shape, params.channels) < 1:
        raise ValueError(
            f"{params.path_of('volume_shape')} is {params.volume_shape} and channels is "
            f"{params.channels}, but must be at least 1"
        )
    for name in ("mean", "deviation"):
        if len(params.get(name)) not in (1, params.channels):
            raise ValueError(
                f"{params.path_of(name)} has {len(params.get(name))} numbers, but must have 1 or "
                f"{params.channels}: channels is {params.channels}"
            )
    if min(params.deviation) <= 0.0:
        raise ValueError(
            f"{params.path_of('deviation')} is {params.deviation}, but must be positive"
        )


def cropped(
    sizes: tuple[int, ...], wanted: tuple[int, ...], random: np.random.Generator | None
) -> _Place:
    """Returns where a volume is cropped: at random, or at the centre if `random` is None."""
    place = []
    for size, most in zip(sizes, wanted, strict=True):
        rest = max(size - most, 0)
        start = rest // 2 if random is None else int(random.integers(rest + 1))
        place.append(slice(start, start + most))
    return tuple(place)


def normalized(volume: np.ndarray, params: Any, origin: Origin) -> np.ndarray:
    """Returns (value - mean) / deviation, float32 of the same shape.

    Raises:
      BadRecordError: the volume has another number of channels, or values that are not finite.
    """
    if volume.shape[-1] != params.channels:
        raise BadRecordError(
            origin, f"the volume has {volume.shape[-1]} channels, but must have {params.channels}"
        )
    mean, deviation = (np.asarray(v, np.float32) for v in (params.mean, params.deviation))
    found: np.ndarray = (volume.astype(np.float32) - mean) / deviation
    if not np.isfinite(found).all():
        raise BadRecordError(origin, "the volume has values that are not finite")
    return found


def volumes_of(input: Input) -> Volumes:
    """Returns the input of volumes of an input, which may be a `HeldOut`.

    Raises:
      InputError: it reads no volumes.
    """
    inner = input.inner
    if not isinstance(inner, Volumes):
        raise InputError(f"{type(inner).__name__} reads no volumes: use Volumes as the input")
    return inner
