"""Generation with a cache against recomputation without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sampling import sample

from tekso.framework.context import StepContext
from tekso.framework.initializers import Normal
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta
from tekso.models.decoding.recomputation import Recomputed, extendable
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import RotaryPositions
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import RepeatedStack, SharedStack, Stack, StackBase
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.lstm_lm import LstmLm
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.generation import Generator, PromptBlock

VOCAB = 11
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5, 8]]


def lstm() -> Layer:
    """An LSTM whose weights are large enough for varied answers."""
    return LstmLm.Params(
        vocab_size=VOCAB,
        embedding_dim=6,
        embedding=Embedding.Params(init=Normal.Params(stddev=2.0)),
        stack=RecurrentStack.Params(cell=LstmCell.Params(hidden_dim=6), num_layers=2),
    ).instantiate()


def transformer() -> Layer:
    """A Transformer with rotary positions, as in `lm.python_source`."""
    return _transformer(None, RotaryPositions.Params())


def learned_positions() -> Layer:
    """A Transformer with as many learned positions as the longest text of these tests."""
    return _transformer(LearnedPositions.Params(max_length=17), None)


def repeated() -> Layer:
    """A Transformer whose layers are one body in a loop, inside the loop over tokens."""
    return _transformer(None, RotaryPositions.Params(), RepeatedStack)


def _transformer(positions: Any, rotary: Any, stack: type[StackBase] = Stack) -> Layer:
    # Large embeddings and a softmax of its own, for varied answers.
    attention = MultiHeadAttention.Params(mask="causal", num_heads=2, positions=rotary)
    layer = TransformerLayer.Params(
        attention=attention, feed_forward=FeedForward.Params(hidden_dim=10)
    )
    return TransformerLm.Params(
        vocab_size=VOCAB,
        dim=8,
        embedding=Embedding.Params(init=Normal.Params(stddev=2.0)),
        positions=positions,
        softmax=Softmax.Params(init=Normal.Params(stddev=0.7)),
        stack=stack.Params(num_layers=2, layer=layer),
    ).instantiate()


class Shifted(Layer):
    """A causal layer without a cache: the sum of an element and the one before it."""

    class Params(Layer.Params):
        dim: int = param("Size of the last dim.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [self.params.dim], dims=("embed",), init=Normal.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        return x + tf.pad(x, [[0, 0], [1, 0], [0, 0]])[:, :-1] * (1.0 + theta.w)


def without_a_cache(stack: type[StackBase] = Stack) -> Layer:
    """A model with a custom layer that has neither `init_cache` nor `extend_step`."""
    return TransformerLm.Params(
        vocab_size=VOCAB,
        dim=8,
        embedding=Embedding.Params(init=Normal.Params(stddev=2.0)),
        softmax=Softmax.Params(init=Normal.Params(stddev=0.7)),
        stack=stack.Params(num_layers=2, layer=Rematerialize.Params(layer=Shifted.Params(dim=8))),
    ).instantiate()


MODELS = pytest.mark.parametrize(
    "make_model",
    sample(
        [lstm, transformer, learned_positions, repeated, without_a_cache],
        quick=[lstm, transformer, without_a_cache],
    ),
)
# Rows of a Transformer with prompts of several lengths are recomputed by a test below.
TWO_MODELS = pytest.mark.parametrize(
    "make_model", [lstm, pytest.param(transformer, marks=pytest.mark.matrix)]
)


def run(model: Layer, program: Any, prompts: Any, **how: Any) -> list[list[int]]:
    """Returns prompts and what was drawn after them, row by row."""
    block = PromptBlock.of(prompts)
    arrays = [tf.constant(a) for a in (block.head, block.tail, block.lengths)]
    drawn = program.call(Generator(model, **how).generate, *arrays)
    rows = zip(drawn["ids"].numpy(), drawn["lengths"].numpy(), strict=True)
    return [row[:length].tolist() for row, length in rows]


def recomputed(model: Layer, program: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from the logits of the whole text before it."""
    ids = list(prompt)
    for _ in range(count):
        logits = model.logits(program.theta, tf.constant([ids]), StepContext())
        ids.append(int(np.argmax(logits[0, -1])))
    return ids


GREEDY, TOP_K = {"temperature": 0.0}, {"top_k": VOCAB}


@pytest.mark.parametrize(
    "how", sample([GREEDY, {"temperature": 5.0}, TOP_K], quick=[GREEDY, TOP_K])
)
def test_forbidden_tokens_are_never_drawn(how: dict[str, Any], program_of: Any) -> None:
    model = lstm()
    program = program_of(model)
    free = run(model, program, PROMPTS, max_new_tokens=20, **how)
    new = [row[len(prompt) :] for prompt, row in zip(PROMPTS, free, strict=True)]
    forbidden = tuple(sorted({token for row in new for token in row}))[:3]
    found = run(model, program, PROMPTS, max_new_tokens=20, forbidden_ids=forbidden, **how)
    drawn = {t for prompt, row in zip(PROMPTS, found, strict=True) for t in row[len(prompt) :]}
    assert len(forbidden) > 1 and drawn and not drawn & set(forbidden)


@MODELS
def test_greedy_equals_recomputation_without_a_cache(
    make_model: Callable[[], Layer], program_of: Any
) -> None:
    model = make_model()
    program = program_of(model)
    found = run(model, program, PROMPTS, max_new_tokens=7, temperature=0.0)
    assert found == [recomputed(model, program, p, 7) for p in PROMPTS]
    assert len({tuple(row[-7:]) for row in found}) > 1  # the model does look at the prompt


@pytest.mark.slow
@TWO_MODELS
def test_limits_of_sampling_are_greedy(make_model: Callable[[], Layer], program_of: Any) -> None:
    model = make_model()
    program = program_of(model)
    greedy = run(model, program, PROMPTS, max_new_tokens=7, temperature=0.0)
    assert run(model, program, PROMPTS, max_new_tokens=7, temperature=1e-6) == greedy
    assert run(model, program, PROMPTS, max_new_tokens=7, top_k=1) == greedy
    assert run(model, program, PROMPTS, max_new_tokens=7, temperature=3.0) != greedy


@TWO_MODELS
def test_a_sample_depends_on_seed_and_row_and_not_on_other_prompts(
    make_model: Callable[[], Layer], program_of: Any
) -> None:
    model = make_model()
    together = run(model, program_of(model), [PROMPTS[0], PROMPTS[1]], max_new_tokens=9)
    twice = run(model, program_of(model), [PROMPTS[0]] * 2, max_new_tokens=9)
    assert twice[0] == together[0] != twice[1]
    other = program_of(model)
    other.seed = 2
    assert run(model, other, [PROMPTS[0]] * 2, max_new_tokens=9)[0] != twice[0]


@TWO_MODELS
def test_a_row_ends_with_the_stop_token(make_model: Callable[[], Layer], program_of: Any) -> None:
    model = make_model()
    program = program_of(model)
    free = run(model, program, PROMPTS, max_new_tokens=12)
    stop = free[1][len(PROMPTS[1]) + 2]
    for before, row, prompt in zip(
        free, run(model, program, PROMPTS, max_new_tokens=12, stop_id=stop), PROMPTS, strict=True
    ):
        new = before[len(prompt) :]
        end = new.index(stop) + 1 if stop in new else len(new)
        assert row == prompt + new[:end]


@pytest.mark.parametrize(
    ("make_model", "window"),
    sample(
        [(lstm, 2), (lstm, 3), (lstm, 7), (learned_positions, 6), (without_a_cache, 6)],
        quick=[(lstm, 3), (without_a_cache, 6)],
    ),
)
def test_a_full_window_slides_by_half(
    make_model: Callable[[], Layer], window: int, program_of: Any
) -> None:
    """Greedy tokens equal those from the last tokens alone, by the rule written out here."""
    model = make_model()
    program = program_of(model)
    prompt, count = [3, 1, 4, 1, 5, 9], 12
    ids, kept = list(prompt), window // 2
    origin = 0 if len(prompt) <= window else len(prompt) - kept
    for _ in range(count):
        logits = model.logits(program.theta, tf.constant([ids[origin:]]), StepContext())
        ids.append(int(np.argmax(logits[0, -1])))
        if len(ids) - origin > window:
            origin = len(ids) - kept
    found = run(model, program, [prompt], max_new_tokens=count, temperature=0.0, window=window)
    assert found == [ids]


@pytest.mark.parametrize("stack", [Stack, RepeatedStack, SharedStack])
def test_only_models_without_a_cache_are_recomputed(stack: type[StackBase]) -> None:
    model = without_a_cache(stack)
    assert isinstance(extendable(model), Recomputed)
    for cached in (lstm(), _transformer(None, None, stack)):
        assert extendable(cached) is cached


def test_prompt_blocks_split_at_the_shortest_prompt() -> None:
    block = PromptBlock.of(PROMPTS)
    np.testing.assert_array_equal(block.head, [[3, 1, 4], [1, 5, 9], [5, 3, 5]])
    np.testing.assert_array_equal(block.tail, [[0, 0], [2, 6], [8, 0]])
    np.testing.assert_array_equal(block.lengths, [3, 5, 4])


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_missing_and_empty_prompts_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptBlock.of(prompts)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        Generator(None, max_new_tokens=0)
    with pytest.raises(ValueError, match="window is 1"):
        Generator(None, max_new_tokens=3, window=1)
