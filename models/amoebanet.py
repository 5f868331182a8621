"""AmoebaNet-B and -D by (L, D): L normal cells with D channels in the first third.

    stem ─ 2 reduction cells ─ L/3 cells ─ reduction ─ L/3 cells ─ reduction ─ L/3 cells ─ linear

The channels of a state double with every reduction cell. Two published layouts differ in the first
three layers, and in the first cell, which in "tensorflow" reads the stem also as it is:

    layout       channels of stem, first and second reduction cell
    tensorflow   32, D/4, D/2        B(18, 512), 1,001 classes: 557,286,057 trainable weights
    gpipe        D/4, D/2, D         D(18, 208), 1,000 classes: 81,505,540 trainable weights

Source: Real et al. 2019; Huang et al. 2018, "GPipe", table 1; layouts and cells as in the public
TensorFlow code (without its auxiliary head) and in torchgpipe.
"""

from __future__ import annotations

from typing import Any, Literal

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece, of_layers
from tekso.framework.theta import Theta
from tekso.models.image_model import PooledImageModel
from tekso.models.layers.amoeba_cell import BATCH_NORM, CELLS, AmoebaCell, Kind
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.drop_path import linear_rates
from tekso.models.layers.normalization import Norm


class AmoebaNet(PooledImageModel):
    """An AmoebaNet for images; see the module. A pipeline can cut between any two cells.

    Shapes:
      x: [batch, height, width, channels], numbers of any type, any height and width
      returns: logits [batch, classes], float32 or wider
    Children:
      stem: ConvNorm; cells/0, cells/1, …; classifier: Linear, dims ("channels", "classes")
    Raises:
      ValueError: num_layers is not a positive multiple of 3, or filters not one of 4.
    Source: Real et al. 2019, "Regularized evolution for image classifier architecture search".
    """

    class Params(PooledImageModel.Params):
        """Params of AmoebaNet."""

        variant: Literal["B", "D"] = param("Which cells; see amoeba_cell.CELLS.", default="D")
        num_layers: int = param("L, the number of normal cells.", default=REQUIRED)
        filters: int = param("D, channels of a state in the first third.", default=REQUIRED)
        layout: Literal["tensorflow", "gpipe"] = param("See the module.", default="gpipe")
        norm: Norm.Params = param("Normalisation of the convolutions.", default=BATCH_NORM)
        drop_path_rate: float = param(
            "Probability of dropping an operation of the last cell; increases linearly from 0.",
            default=0.0,
        )
        dropout_rate: float = param("Dropout before the classifier.", default=0.0)
        classifier_init: Initializer.Params = param(
            "Initializer of the classifier.", default=GlorotUniform.Params()
        )

    stem: ConvNorm
    cells: list[AmoebaCell]

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_layers < 3 or p.num_layers % 3 or p.filters < 4 or p.filters % 4:
            raise ValueError(
                f"AmoebaNet: num_layers {p.num_layers} must be a multiple of 3, and filters "
                f"{p.filters} a multiple of 4"
            )
        stem = ConvNorm.Params(
            dtype=p.dtype,
            input_dim=p.channels,
            output_dim=self._first_dims()[0],
            strides=(2, 2),
            padding="VALID" if p.layout == "tensorflow" else "SAME",
            norm=p.norm,
        )
        self.child("stem", stem)
        self.child_list("cells", self._cell_params())
        self.classify_pooled(self.cells[-1].output_dim, p.classifier_init, p.dropout_rate)

    def _first_dims(self) -> tuple[int, int, int]:
        """Returns the channels of the stem and of the first two reduction cells."""
        d = self.params.filters
        return (32, d // 4, d // 2) if self.params.layout == "tensorflow" else (d // 4, d // 2, d)

    def _cell_params(self) -> list[AmoebaCell.Params]:
        p = self.params
        stem, *first = self._first_dims()
        plan: list[tuple[Kind, int]] = [("reduction", dim) for dim in first]
        for group in range(3):
            dim = p.filters * 2**group
            plan += [("reduction", dim)] if group > 0 else []
            plan += [("normal", dim)] * (p.num_layers // 3)
        cells: list[AmoebaCell.Params] = []
        dims, reduced = [stem, stem], False
        for (kind, dim), rate in zip(plan, linear_rates(p.drop_path_rate, len(plan)), strict=True):
            cell = AmoebaCell.Params(
                dtype=p.dtype,
                variant=p.variant,
                kind=kind,
                dim=dim,
                before_dim=dims[0],
                previous_dim=dims[1],
                previous_reduced=reduced,
                prepare_before="none" if p.layout == "tensorflow" and not cells else "fit",
                norm=p.norm,
                drop_path_rate=rate,
            )
            cells.append(cell)
            dims = [dims[1], dim * len(CELLS[p.variant, kind].outputs)]
            reduced = kind == "reduction"
        return cells

    def pieces(self) -> list[Piece]:
        """Returns the stem, one piece per cell, and the classifier: L + 6 pieces."""
        return [
            Piece("stem", {"stem": self.stem}, self._run_stem),
            *of_layers("cells", self.cells, self._run_cell),
            self.classifier_piece(),
        ]

    def _run_stem(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self.stem.fprop(theta.stem, self.images(flow["x"], ctx), ctx)
        return {**flow, "x": x, "before": x}

    def _run_cell(self, i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x, before = flow["x"], flow["before"]
        y = self.cells[i].fprop(theta.cells[i], x, ctx.fold(i), before=before)
        return {**flow, "x": y, "before": x}

    def _run_classifier(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = ops.activate(ctx, "relu", flow["x"])
        return super()._run_classifier(theta, {**flow, "x": x, "before": None}, ctx)
