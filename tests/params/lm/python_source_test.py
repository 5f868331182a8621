"""The default experiments: sizes, and what a change of the command line reaches."""

from __future__ import annotations

from tekso.framework import inspection, registry


def weights(tree: object) -> int:
    return inspection.model_record("", inspection.task_of(tree))["total_weights"]


def test_tiny_is_four_layers_of_width_128_over_bytes() -> None:
    d, layers = 128, 4
    a_layer = 4 * d * d + 2 * d * 4 * d + 2 * d
    tree = registry.get("lm.python_source.Tiny")().tree()
    assert weights(tree) == layers * a_layer + d + 2 * 256 * d
    assert (tree.input.length, tree.input.batch_size) == (128, 16)


def test_small_is_four_layers_of_width_256_over_8192_pieces() -> None:
    d, layers = 256, 4
    a_layer = 4 * d * d + 2 * d * 4 * d + 2 * d
    tree = registry.get("lm.python_source.Small")().tree()
    assert weights(tree) == layers * a_layer + d + 8192 * d


def test_another_vocabulary_reaches_the_model() -> None:
    tree = registry.get("lm.python_source.Small")().tree()
    before = weights(tree)
    tree.set_text("input.tokenizer.vocab_size", "4096")
    assert weights(tree) == before - 4096 * 256


def test_the_learning_rate_falls_to_zero_at_the_end_of_any_run() -> None:
    from tekso.framework import schedules

    tree = registry.get("lm.python_source.Tiny")().tree()
    for steps in (500, 2400):
        learner = schedules.end_with_run(tree.learner, steps).instantiate()
        assert float(learner.schedule(steps)) == 0.0
        assert float(learner.schedule(steps // 2)) > 0.001
