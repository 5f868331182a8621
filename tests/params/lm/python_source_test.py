"""The default experiments: sizes, and what a change of the command line reaches."""

from __future__ import annotations

from tekso.framework import registry
from tekso.framework.run import inspection


def weights(tree: object) -> int:
    return inspection.model_record("", inspection.task_of(tree))["total_weights"]


def test_tiny_is_four_layers_of_width_128_over_bytes() -> None:
    d, layers = 128, 4
    a_layer = 4 * d * d + 2 * d * 4 * d + 2 * d
    tree = registry.get("lm.python_source.Tiny")().tree()
    assert weights(tree) == layers * a_layer + d + 2 * 256 * d
    assert (tree.input.length, tree.input.batch_size) == (128, 16)


def test_every_second_layer_of_tiny_moe_has_eight_experts_of_the_dense_size() -> None:
    d, experts = 128, 8
    tiny = weights(registry.get("lm.python_source.Tiny")().tree())
    tree = registry.get("lm.python_source.TinyMoe")().tree()
    assert weights(tree) == tiny + 2 * ((experts - 1) * 2 * d * 4 * d + d * experts)
    task = inspection.task_of(tree)
    moe = [path for path in task.specs() if path.endswith("router/w")]
    assert moe == [f"model/stack/layers/{i}/feed_forward/router/w" for i in (1, 3)]


def test_tiny_lstm_is_two_layers_of_256_units() -> None:
    units, embedding = 256, 128
    layers = sum(4 * units * (inputs + units + 1) for inputs in (embedding, units))
    tree = registry.get("lm.python_source.TinyLstm")().tree()
    assert weights(tree) == 256 * embedding + layers + 256 * units + 256


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
