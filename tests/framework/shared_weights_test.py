"""Weights that exist once: which path stores them, and what cannot be shared."""

from __future__ import annotations

import pytest

from tekso.framework.initializers import Zeros
from tekso.framework.shared_weights import SharedWeights
from tekso.framework.weight_spec import WeightSpec


def specs(**shapes: tuple[int, ...]) -> dict[str, WeightSpec]:
    zero = Zeros.Params().instantiate()
    paths = {name.replace("_", "/"): shape for name, shape in shapes.items()}
    return {p: WeightSpec(p, s, (None,) * len(s), zero, template=p) for p, s in paths.items()}


THREE = specs(a_x_w=(2, 3), a_x_v=(3,), b_x_w=(2, 3), b_x_v=(3,), c_x_w=(2, 3), c_x_v=(3,))


def shared(pairs: dict[str, str], own: tuple[str, ...] = ()) -> SharedWeights:
    return SharedWeights(THREE, pairs, own, where="task")


def test_chains_end_at_the_weight_that_is_stored_once() -> None:
    found = shared({"c/x": "b/x", "b/x": "a/x"})
    assert list(found.specs(THREE)) == ["a/x/w", "a/x/v"]
    assert found.several == {"a/x/w", "a/x/v"}
    assert found.flat({"a/x/w": 1, "a/x/v": 2}) == {
        f"{task}/x/{name}": value for task in "abc" for name, value in (("w", 1), ("v", 2))
    }
    assert found.statistic("c/x/mean") == "a/x/mean"
    assert [(part.path, part.weights, part.tensors) for part in found.parts] == [
        ("c/x", 9, 2),
        ("b/x", 9, 2),
    ]


def test_own_weights_and_single_weights() -> None:
    found = shared({"b/x": "a/x"}, own=(".*/v",))
    assert found.several == {"a/x/w"}
    assert "b/x/v" in found.specs(THREE)
    assert shared({"b/x/w": "c/x/w"}).several == {"c/x/w"}
    assert shared({}).several == set()


@pytest.mark.parametrize(
    ("pairs", "own", "reason"),
    [
        ({"b/y": "a/x"}, (), r"task.shared\['b/y'\]: no weight is at or below 'b/y'; did you mean"),
        ({"b/x": "a/x", "a/x": "b/x"}, (), r"leads back to itself \(a/x/w → b/x/w → a/x/w\)"),
        ({"b/x": "a/x"}, (".*/u",), r"task.own: '.*/u' matches no weight"),
        ({"b/x/w": "a/x/v"}, (), r"shape of b/x/w is \[2, 3\] and of a/x/v \[3\]"),
    ],
)
def test_what_cannot_be_shared_is_named_in_one_line(
    pairs: dict[str, str], own: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        shared(pairs, own)
    assert "\n" not in str(caught.value)


def test_parts_with_different_weights_are_refused() -> None:
    given = {**THREE, **specs(a_x_u=(4,))}
    with pytest.raises(ValueError, match=r"a/x has weights that b/x does not have: 'a/x/u'"):
        SharedWeights(given, {"b/x": "a/x"}, (), where="task")
    assert SharedWeights(given, {"b/x": "a/x"}, ["a/x/u"], where="task").several
