"""The segmentation task on volumes: a class for every voxel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedInput, ExportedOutput
from tekso.framework.input.input import Input
from tekso.framework.input.skips import BadRecordError, Origin, reason_of
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.task import Program
from tekso.framework.theta import Theta
from tekso.models.unet import UNet3D
from tekso.tasks.classification.task import LABELS, X
from tekso.tasks.image.file_answers import AnswersFiles, FileAnswer
from tekso.tasks.image.image_input import with_image_sizes
from tekso.tasks.image.image_task import AnswerExport
from tekso.tasks.segmentation.task import Segmentation
from tekso.tasks.segmentation.volume_input import Volumes, check, cropped, normalized, volumes_of
from tekso.tasks.segmentation.volume_sources import read_volume
from tekso.tasks.unset_sizes import set_sizes


class VolumeSegmentation(Segmentation):
    """Segmentation of volumes: the loss and the metrics of `Segmentation`, over voxels.

    The model maps "x" to logits [batch, depth, height, width, classes], such as a `UNet3D`. Its
    Params `channels` and `classes` are taken from the input if they are not set. Decoding of files
    reads the array "volume" of .npz files.

    Shapes:
      batch: the arrays of `Volumes`
      loss returns: sums over the voxels, scalars
      predict returns: "logits" [batch, depth, height, width, num_classes], "labels" [batch, depth,
        height, width] int32
    """

    class Params(Segmentation.Params):
        """Params of VolumeSegmentation."""

        model: Layer.Params = param("From volumes to scores.", default=UNet3D.Params())
        decode: str = param(
            ".npz files that --mode=decode reads: globs, separated by commas. Empty: volumes of "
            "the split dev.",
            default="",
        )
        num_decoded: int = param("Volumes that are decoded if no files are given.", default=10)

    export = AnswerExport(
        name="segment",
        doc="The likeliest class of every voxel of volumes of the shape of training.",
        outputs={LABELS: ExportedOutput("int32, [examples, depth, height, width]")},
    )

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets num_classes, and the sizes of the model, where they are not set."""
        params = with_image_sizes(params, input)
        if "volume_shape" in input.params:
            sizes = {"channels": input.params.channels, "classes": params.num_classes}
            set_sizes(params.model, {**sizes, "image_size": max(input.params.volume_shape)})
        return params

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of volumes."""
        return len(batch[X]), "volumes"

    def images_in(self, input: Input) -> Volumes:
        """See `ImageTask`."""
        return volumes_of(input)

    def size_of(self, images: Any, index: int) -> tuple[int, int]:
        """Returns height and width of a volume; see `ImageTask`."""
        _, height, width = images.params.volume_shape
        return height, width

    def file_answers(
        self, program: Program, input: Input, paths: Sequence[str]
    ) -> Iterator[FileAnswer]:
        """Yields the answer for the centre of every volume; see `AnswersFiles`."""
        p, names = input.params, tuple(getattr(input, "class_names", ()))
        check(p)
        for path in paths:
            record: dict[str, Any] = {"kind": self.record_kind, "file": path}
            x = np.zeros([p.batch_size, *p.volume_shape, p.channels], np.float32)
            try:
                volume = read_volume(path)
                place = cropped(volume.shape[:3], p.volume_shape, None)
                own = normalized(volume[place], p, Origin(path))
            except (BadRecordError, OSError) as error:
                yield FileAnswer({**record, "error": reason_of(error)})
                continue
            depth, height, width = own.shape[:3]
            x[0, :depth, :height, :width] = own
            labels = np.asarray(program.call(self.answer, x)[LABELS])[0, :depth, :height, :width]
            one = {LABELS: labels}
            record.update(self.found(one, (height, width), names))
            yield FileAnswer(record, None, one)

    @classmethod
    def makes_pictures(cls) -> bool:
        """Returns False: a volume is no picture."""
        return cls.picture not in (AnswersFiles.picture, Segmentation.picture)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns the function `segment` of volumes of the shape of training."""
        p = input.params
        mean, deviation = (np.asarray(v, np.float32) for v in (p.mean, p.deviation))

        def function(theta: Theta, volumes: tf.Tensor, ctx: StepContext) -> dict[str, tf.Tensor]:
            return self.answer(theta, (volumes - mean) / deviation, ctx)

        values = ExportedInput(
            "values of the voxels", tf.float32, shape=(*p.volume_shape, p.channels)
        )
        return {
            self.export.name: ExportedFunction(
                doc=self.export.doc,
                function=function,
                inputs={"volumes": values},
                outputs=dict(self.export.outputs),
                for_litert=False,
            )
        }
