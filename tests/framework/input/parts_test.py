"""The parts of a batch that processes build, joined, are the batch, for every kind of input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from input_parts import part_of
from small_boxes import Rectangles
from small_captions import Bars
from small_masks import Squares
from small_pictures import Blobs

from tekso.framework import registry
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import Batch, ExampleInput, Input
from tekso.framework.input.mixtures import Mixture
from tekso.framework.input.sources import InMemory
from tekso.framework.input.task_inputs import OneTask, TaskInputs
from tekso.framework.input.words import Words
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.sources import InMemorySpeech
from tekso.tasks.captioning.input import CaptionedImages
from tekso.tasks.detection.input import BoxImages
from tekso.tasks.detection.steps import BoxFlip, SsdCrop
from tekso.tasks.image.input import Images
from tekso.tasks.image.mixing import Mixup
from tekso.tasks.image.steps import Flip, PadAndCrop
from tekso.tasks.lm.bucketed_text import BucketedText
from tekso.tasks.lm.input import TextStream
from tekso.tasks.lm.packed_text import PackedText
from tekso.tasks.lm.synthetic import SyntheticTokens
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.input import PaddedPairs
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.pairs import InMemoryPairs
from tekso.tasks.segmentation.input import MaskImages
from tekso.tasks.segmentation.shape_volumes import ShapeVolumes
from tekso.tasks.segmentation.volume_input import Volumes

WORDS = ["a", "bb", "ccc", "dddd", "eeeee"]
TEXTS = [" ".join(WORDS[i % 5] for i in range(n, n + n % 4 + 1)) for n in range(40)]
PAIRS = [(text, text[::-1][: 1 + i % 7]) for i, text in enumerate(TEXTS)]
SIZE = 12


class Numbers(Arrays):
    """Example i is the number i."""

    def load(self, split: str) -> dict[str, np.ndarray]:
        return {"x": np.arange(31)}


class Changing(SyntheticTokens):
    """Overrides `batch` alone."""

    def batch(self, step: int) -> Batch:
        batch = super().batch(step)
        batch["ids"] = np.where(np.arange(len(batch["ids"]))[:, None] == 7, step, batch["ids"])
        return batch


class Noises(InMemorySpeech):
    """Recordings of 0.1 to 0.4 seconds."""

    def recordings(self, split: Any) -> list[tuple[Any, str]]:
        rng = np.random.default_rng(1)
        return [(rng.normal(0, 0.1, 800 + 60 * len(text)), text) for text in TEXTS]


TOKENS = {"length": 4, "vocab_size": 9, "num_tokens": 150}
TEXT = {"corpus": InMemory.Params(train=TEXTS, dev=TEXTS[:17]), "length": 8}
OF_PAIRS = {
    "corpus": InMemoryPairs.Params(train=PAIRS, max_skipped=0),
    "source_length": 24,
    "target_length": 24,
}
KINDS: dict[type[Input], dict[str, Any]] = {
    Numbers: {},
    SyntheticTokens: TOKENS,
    Changing: TOKENS,
    TextStream: TEXT,
    PackedText: TEXT,
    BucketedText: TEXT | {"fill": "tokens"},
    PaddedPairs: OF_PAIRS,
    PackedPairs: OF_PAIRS,
    BucketedPairs: OF_PAIRS | {"fill": "tokens"},
    Images: {
        "source": Blobs.Params(count=40),
        "image_size": 8,
        "augment": [Flip.Params(), PadAndCrop.Params(padding=1)],
        "mix": [Mixup.Params()],
    },
    BoxImages: {
        "source": Rectangles.Params(count=40),
        "image_size": 8,
        "max_boxes": 2,
        "augment": [SsdCrop.Params(), BoxFlip.Params()],
    },
    MaskImages: {
        "source": Squares.Params(),
        "image_size": 8,
        "augment": [Flip.Params()],
    },
    Volumes: {
        "source": ShapeVolumes.Params(volume_shape=(10, 10, 10), num_train=40, num_held_out=14),
        "volume_shape": (8, 8, 8),
        "flips": ["depth"],
    },
    CaptionedImages: {
        "source": Bars.Params(),
        "image_size": 8,
        "tokenizer": Words.Params(vocab_size=30),
        "target_length": 7,
    },
    BucketedSpeech: {
        "corpus": Noises.Params(sample_rate=8000),
        "sample_rate": 8000,
        "max_seconds": 0.6,
        "bounds_s": [0.2],
    },
}


def inputs() -> Iterator[tuple[str, Input]]:
    for kind, settings in KINDS.items():
        for order in ("shuffled", "sequential", "once"):
            params = kind.Params(batch_size=SIZE, order=order, **settings)
            yield f"{kind.__name__} {order}", params.instantiate(seed=3)
    text = TextStream.Params(batch_size=SIZE, **TEXT)
    mixed = Mixture.Params(inputs=[text, text.copy().set(corpus=InMemory.Params(train=TEXTS[9:]))])
    yield "Mixture", mixed.set(batch_size=SIZE, weights=[0.3, 0.7]).instantiate(seed=3)
    held = HeldOut.Params(max_batches=2)
    for kind in (TextStream, Changing):
        train = kind.Params(batch_size=SIZE, **KINDS[kind])
        yield f"HeldOut of {kind.__name__}", held.instantiate(seed=3, train=train)
    tasks = TaskInputs.Params(inputs={"a": text, "b": text.copy().set(length=4)})
    yield "TaskInputs", tasks.instantiate(seed=3)
    yield "OneTask", OneTask.Params(task="b").instantiate(seed=3, train=tasks)


INPUTS = dict(inputs())


def test_every_kind_of_input_is_here() -> None:
    ours = [e for e in registry.list_experiments() if e.cls.__module__.startswith("tekso.")]
    for entry in ours:
        tree = entry.cls().tree()
        for params in (tree.input, *tree.eval_inputs.values()):
            known = (*KINDS, Mixture, HeldOut, Arrays, TaskInputs, OneTask)
            assert type(params).owner in known or issubclass(type(params).owner, Arrays), entry.key


@pytest.mark.parametrize("name", INPUTS)
def test_parts_joined_are_the_batch(name: str) -> None:
    one = INPUTS[name]
    for step in sorted({step % (one.num_batches or step + 1) for step in (0, 1, 6, 40)}):
        whole = one.batch(step)
        for parts in (1, 2, 5, SIZE):
            found = [part_of(one, step, part, parts) for part in range(parts)]
            case = f"step {step}, {parts} parts"
            for key, array in whole.items():
                joined = np.concatenate([part[key] for part in found])
                np.testing.assert_array_equal(joined, array, err_msg=case)
                assert {part[key].dtype for part in found} == {array.dtype}, case
            sizes = [len(next(iter(part.values()))) for part in found]
            expected = np.array_split(next(iter(whole.values())), parts)
            assert sizes == [len(rows) for rows in expected], case


@pytest.mark.parametrize("name", INPUTS)
def test_only_the_examples_of_a_part_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = INPUTS[name]
    if "Changing" in name:
        pytest.skip("it overrides batch() alone, so its batches are built whole")
    for kind in (type(one), ExampleInput):
        owner = next(base for base in kind.__mro__ if "batch" in vars(base))
        monkeypatch.setattr(owner, "batch", _not_called)
    size = one.num_rows(0)
    assert len(next(iter(part_of(one, 0, 1, 4).values()))) == size // 4
    ends = one.own_part(0, lambda size: ((0, 1), (size - 2, size)))  # as a process of a mesh
    assert len(next(iter(ends.values()))) == 3
    assert (ends.rows, ends.num_examples) == (((0, 1), (size - 2, size)), size)


def _not_called(self: Input, step: int) -> Batch:
    raise AssertionError("the whole batch is built")


def test_a_batch_that_does_not_divide_evenly_says_what_does() -> None:
    one = INPUTS["TextStream shuffled"]
    with pytest.raises(InputError, match=r"12 examples.*5 processes.*10, 15.*batch_size"):
        part_of(one, 0, 0, 5, even=True)
    with pytest.raises(InputError, match=r"12 examples.*13 processes.*at least 13"):
        part_of(one, 0, 0, 13)
