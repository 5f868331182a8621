"""Crowns of trees in aerial images, from the package deepforest, which is not required.

pip download --no-deps deepforest==2.1.0
unzip deepforest-*.whl 'deepforest/data/*'
tekso-trainer --model=image.trees.Ssd --set input.source.folder=deepforest/data
"""

from __future__ import annotations

from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.params.image import boxes
from tekso.tasks.detection.scoring import DetectionScoring
from tekso.tasks.detection.voc import DeepforestTrees

BASELINES = {"greenest spots": 0.023}
"""{method: AP at the overlap 0.5 on the 20 tiles of dev}."""


@register
class Ssd(boxes.Ssd):
    """SSD on tiles of 300 × 300 pixels: 574 trees for training, 279 at another place for dev."""

    def task(self) -> Params:
        """One class. All trees of a tile can be found: up to 100."""
        scoring = DetectionScoring.Params(baselines=BASELINES)
        return super().task().set(num_classes=1, scoring=scoring)

    def input(self) -> Params:
        """Tiles, mirrored and in changed colours."""
        return super().input().set(source=DeepforestTrees.Params(), batch_size=8)

    def run(self) -> Params:
        """600 steps: 67 passes over the 72 training tiles."""
        return super().run().set(steps=600, eval_every_steps=200, checkpoint_every_steps=200)
