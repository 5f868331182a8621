"""SSD: classes and boxes of objects for default boxes; by default SSD300 with a ResNet-34.

    image 300 ─ ResNet-34 to the third group ─ 38x38x256 ─ 1x1, 3x3/2 ─ 19x19x512 ─ … ─ 1x1x256
                                                  └ 3x3 heads              └ 3x3 heads     └ heads

SSD300 has 8,732 default boxes and 19,972,534 trainable weights with 81 classes: backbone 8,170,304,
further maps 3,574,400, heads of boxes 387,192 and of classes 7,840,638.

Source: Liu et al. 2016, "SSD: single shot multibox detector"; backbone and further maps as in
MLPerf 0.6: the third group of blocks has stride 1, and the further convolutions have a bias and a
ReLU, and no normalisation.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.pieces import Flow, Piece, of_layers
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.detection.default_boxes import SSD300, BoxLevels, default_boxes
from tekso.models.image_model import ImageModel
from tekso.models.layers.convolution import Conv2D
from tekso.models.layers.residual_blocks import BasicBlock, ResidualBlock, block_groups
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.stack import Stack
from tekso.models.resnet import Stem

_LEAST_HALVED = 5  # maps of this size and below lose a border instead


class Ssd(ImageModel):
    """A single-shot detector; see the module.

    Every further map has half the size of the one before while that is above 5; then, 2 less.

    Shapes:
      x: [batch, image_size, image_size, channels], numbers of any type
      returns: {"logits": [batch, boxes, classes], "codes": [batch, boxes, 4]}, float32 or wider;
        codes are relative to the default boxes (box_coding.py), in the order of default_boxes.py
    Children:
      stem; blocks/0, …: the backbone; maps/0, …: Stacks of two convolutions
      class_heads/0, …, box_heads/0, …: Conv2D, 3x3
    Attributes:
      levels: the maps of features and the shapes of their default boxes.
    Raises:
      ValueError: a size is not possible, or x is not of image_size.
    Source: Liu et al. 2016, section 2.1.
    """

    class Params(ImageModel.Params):
        """Params of Ssd."""

        image_size: int = param("Height and width of the images.", default=300)
        width: int = param("Channels of the stem; all other layers are in proportion.", default=64)
        num_blocks: list[int] = param("Blocks of each group of the backbone.", default=[3, 4, 6])
        stem: Stem.Params = param("First layer.", default=Stem.Params())
        block: ResidualBlock.Params = param("Every block.", default=BasicBlock.Params())
        steps: list[int] = param(
            "Distance of the default boxes on every map, in pixels.", default=list(SSD300.steps)
        )
        scales: list[float] = param(
            "Side of the square default box of every map in pixels, and one more.",
            default=list(SSD300.scales),
        )
        aspect_ratios: list[list[int]] = param(
            "Aspect ratios on every map; each has a wide and a high default box.",
            default=[list(ratios) for ratios in SSD300.aspect_ratios],
        )

    levels: BoxLevels
    stem: Stem
    blocks: list[ResidualBlock]
    maps: list[Stack]
    class_heads: list[Conv2D]
    box_heads: list[Conv2D]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if len(p.num_blocks) != 3:
            raise ValueError(f"Ssd: num_blocks {p.num_blocks} must be three numbers")
        self.levels = self._levels()
        stem = with_sizes(p.stem, input_dim=p.channels, output_dim=p.width)
        self.child("stem", stem.set(dtype=p.dtype))
        block = p.block.copy().set(dtype=p.dtype)
        self.child_list("blocks", block_groups(block, p.num_blocks, p.width, [1, 2, 1]))
        w, first = p.width, self.blocks[-1].output_dim
        map_sizes = self.levels.map_sizes
        plan: list[tuple[Any, ...]] = []
        for i, before in enumerate(map_sizes[:-1]):
            outer = (8 if i < 2 else 4) * w
            kind = (2, "FIXED") if before > _LEAST_HALVED else (1, "VALID")
            plan.append((plan[-1][2] if plan else first, outer // 2, outer, *kind))
        self.child_list("maps", [self._map(*sizes) for sizes in plan])
        dims, counts = [first, *(sizes[2] for sizes in plan)], self.levels.boxes_per_place()
        for name, outputs in (("class_heads", p.classes), ("box_heads", 4)):
            heads = [
                Conv2D.Params(dtype=p.dtype, input_dim=dim, output_dim=count * outputs)
                for dim, count in zip(dims, counts, strict=True)
            ]
            self.child_list(name, heads)

    def default_boxes(self) -> np.ndarray:
        """Returns the default boxes of the outputs, [boxes, 4] float32; see default_boxes.py."""
        return default_boxes(self.levels)

    def _levels(self) -> BoxLevels:
        p, stem = self.params, self.params.stem
        size = -(-p.image_size // stem.conv.strides[0])
        size = size if stem.pool is None else -(-size // stem.pool.strides[0])
        sizes, count = [-(-size // 2)], len(p.aspect_ratios)
        while len(sizes) < count:
            halves = sizes[-1] > _LEAST_HALVED
            sizes.append(-(-sizes[-1] // 2) if halves else sizes[-1] - 2)
        if not count or sizes[-1] < 1 or (len(p.steps), len(p.scales)) != (count, count + 1):
            raise ValueError(
                f"Ssd: image_size {p.image_size} and {count} lists of aspect_ratios give maps of "
                f"the sizes {sizes}, which must be positive; there are {len(p.steps)} steps and "
                f"{len(p.scales)} scales, but must be {count} and {count + 1}"
            )
        ratios = tuple(map(tuple, p.aspect_ratios))
        return BoxLevels(p.image_size, tuple(sizes), tuple(p.steps), tuple(p.scales), ratios)

    def _map(
        self, input_dim: int, hidden: int, output_dim: int, stride: int, padding: Any
    ) -> Stack.Params:
        conv = Conv2D.Params(dtype=self.params.dtype, activation="relu")
        layers: list[Layer.Params] = [
            conv.copy().set(input_dim=input_dim, output_dim=hidden, kernel_shape=(1, 1)),
            conv.copy().set(
                input_dim=hidden, output_dim=output_dim, strides=(stride, stride), padding=padding
            ),
        ]
        return Stack.Params(num_layers=2, layers=layers)

    def pieces(self) -> list[Piece]:
        """Returns the stem, the blocks, the maps with their heads, and the union of the outputs."""
        maps = []
        for i in range(len(self.class_heads)):
            layers: dict[str, Layer] = {
                f"class_heads/{i}": self.class_heads[i],
                f"box_heads/{i}": self.box_heads[i],
            }
            if i > 0:
                layers[f"maps/{i - 1}"] = self.maps[i - 1]
            maps.append(Piece(f"maps/{i}", layers, functools.partial(self._run_map, i)))
        return [
            Piece("stem", {"stem": self.stem}, self._run_stem),
            *of_layers("blocks", self.blocks, self._run_block),
            *maps,
            Piece("outputs", {}, self._run_outputs),
        ]

    def _run_stem(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x, size = self.images(flow["x"], ctx), self.params.image_size
        if x.shape[1:3] != (size, size):
            raise ValueError(f"Ssd: x is {x.shape}, but image_size is {size}")
        return {**flow, "x": self.stem.fprop(theta.stem, x, ctx)}

    def _run_block(self, i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self.blocks[i].fprop(theta.blocks[i], flow["x"], ctx.fold(i))}

    def _run_map(self, i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = flow["x"]
        if i > 0:
            x = self.maps[i - 1].fprop(theta.maps[i - 1], x, ctx)
        codes = self.box_heads[i].fprop(theta.box_heads[i], x, ctx)
        logits = self.class_heads[i].fprop(theta.class_heads[i], x, ctx)
        outputs = {
            f"codes{i}": _by_box(codes, 4, ctx),
            f"logits{i}": _by_box(logits, self.params.classes, ctx),
        }
        return {**flow, **outputs, "x": x}

    def _run_outputs(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        count, united = len(self.class_heads), {}
        for name in ("logits", "codes"):
            parts = [flow[f"{name}{i}"] for i in range(count)]
            united[name] = ctx.constrain(widen(tf.concat(parts, 1)), ("batch", None, None))
        used = {f"{name}{i}": None for name in united for i in range(count)}
        return {**flow, **used, "x": united}


def _by_box(y: tf.Tensor, size: int, ctx: StepContext) -> tf.Tensor:
    """Returns the outputs of a head in the order of the default boxes: shape, row, column.

    Shapes:
      y: [batch, height, width, shapes * size]
      returns: [batch, shapes * height * width, size]
    """
    y = ctx.constrain(y, ("batch", None, None, None))
    y = tf.reshape(y, [-1, y.shape[1], y.shape[2], y.shape[3] // size, size])
    y = tf.transpose(y, [0, 3, 1, 2, 4])
    return tf.reshape(y, [-1, y.shape[1] * y.shape[2] * y.shape[3], size])
