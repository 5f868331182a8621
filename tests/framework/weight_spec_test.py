"""Specs of a layer's weights: copied from those of the layers below."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tekso.framework.initializers import Normal, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import param


class Scale(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [2, 5], dims=("embed", "mlp"), init=Normal.Params())
        self.weight("seen", [2], dims=("embed",), init=Zeros.Params(), trainable=False)


class Unseen(Scale):
    def specs(self) -> dict[str, Any]:
        specs = super().specs()
        del specs["seen"]
        return specs


class Pair(Layer):
    class Params(Layer.Params):
        """Params of Pair."""

        seen: bool = param("Whether the specs have the statistic.", default=True)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_stack("inner", (Scale if self.params.seen else Unseen).Params(), 3)


class Outer(Layer):
    class Params(Pair.Params):
        """Params of Outer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("pair", [Pair.Params(seen=self.params.seen)] * 2)


class Top(Layer):
    class Params(Pair.Params):
        """Params of Top."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("outer", [Outer.Params(seen=self.params.seen)] * 2)


def test_specs_copy_each_weight_once_however_deep_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []
    copy = dataclasses.replace

    def counted(spec: Any, **changes: Any) -> Any:
        copies.append(changes["path"])
        return copy(spec, **changes)

    monkeypatch.setattr(dataclasses, "replace", counted)
    specs = Top.Params().instantiate().specs()
    assert copies == list(specs) and len(copies) == 2 * 2 * 2


def test_specs_that_a_layer_below_overrides_are_used() -> None:
    specs = Top.Params(seen=False).instantiate().specs()
    assert list(specs) == [f"outer/{i}/pair/{j}/inner/w" for i in range(2) for j in range(2)]
    w = specs["outer/1/pair/0/inner/w"]
    assert (w.path, w.template) == ("outer/1/pair/0/inner/w", "outer/1/pair/0/inner/*/w")
    assert (w.shape, w.dims, w.stacked) == ((3, 2, 5), ("layers", "embed", "mlp"), 1)
