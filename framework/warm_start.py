"""Params of a warm start: which weights of a checkpoint a new run begins with."""

from __future__ import annotations

from typing import Literal

from tekso.framework.params import REQUIRED, Configurable, param


class WarmStart(Configurable):
    """One checkpoint that a new run takes initial weights from.

    A pattern is a regular expression that has to match the whole path of a weight of the new run.
    Statistics, such as the moving averages of BatchNorm, are weights too. The optimizer, the
    schedule and the step count start anew.
    """

    class Params(Configurable.Params):
        """Params of WarmStart."""

        checkpoint: str = param(
            "The folder of a run, whose newest good checkpoint is read, or of a checkpoint; "
            "RUN/best or RUN/STEP; or a safetensors file, or a folder of its shards.",
            default=REQUIRED,
        )
        use: Literal["evaluation", "training"] = param(
            "Which weights: those that evaluation uses, which are the moving averages where the "
            "run kept them, or those that training continues from.",
            default="evaluation",
        )
        only: list[str] = param(
            "Patterns of the weights that this checkpoint initializes; empty: all.", default=[]
        )
        rules: dict[str, str] = param(
            "{pattern: path in the checkpoint}, for weights that have another path there. The "
            r"first pattern that matches decides; \1 is its first group.",
            default={},
        )
        ignore: list[str] = param(
            "Patterns of weights that keep their random initial values.", default=[]
        )
        partial: list[str] = param(
            "Patterns of weights that may have another shape in the checkpoint: the common part "
            "of each dim is copied, from its beginning; the rest keeps its initial values.",
            default=[],
        )
        tokenizers: bool = param(
            "Whether the new run uses the tokenizers that the other run learned, instead of "
            "learning its own.",
            default=True,
        )
