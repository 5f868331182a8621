"""Shrinks registered experiments by rule, so that a test can train every one of them.

Sizes become small, and a corpus becomes a few texts in memory. The kind of input, the tokenizer,
the task and the learner stay as they are.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
from small_boxes import Rectangles
from small_captions import Bars
from small_masks import Squares
from small_pictures import Blobs

from tekso import tasks
from tekso.framework import registry
from tekso.framework.input.sources import InMemory
from tekso.framework.params import Params
from tekso.framework.params import tree as params_tree
from tekso.models.amoebanet import AmoebaNet
from tekso.models.layers.amoeba_cell import AmoebaCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.stack import RepeatedStack, Stack
from tekso.tasks.asr.sources import InMemorySpeech
from tekso.tasks.asr.utterances import AnySpeech
from tekso.tasks.captioning.sources import CaptionSource
from tekso.tasks.detection.sources import BoxSource
from tekso.tasks.image.sources import ImageSource
from tekso.tasks.mt.pairs import InMemoryPairs
from tekso.tasks.multi.python_prose import Triggers
from tekso.tasks.segmentation.shape_volumes import ShapeVolumes
from tekso.tasks.segmentation.sources import MaskSource

LARGEST = {
    "batch_size": 16,
    "dim": 16,
    "embedding_dim": 16,
    "filters": 8,
    "head_dim": 4,
    "hidden_dim": 32,
    "image_size": 16,
    "length": 8,
    "max_labels": 6,
    "max_length": 16,
    "max_length_extra": 4,
    "max_new_tokens": 2,
    "model_dim": 16,
    "num_experts": 4,
    "num_filters": 4,
    "num_heads": 4,
    "num_layers": 1,
    "num_samples": 12,
    "num_tokens": 1000,
    "pairs": 2,
    "patch_size": 4,
    "projection_dim": 16,
    "source_length": 16,
    "target_length": 16,
    "train_bytes": 10_000,
    "vocab_size": 320,
    "warmup_steps": 2,
    "width": 8,
}
"""{name of a field: its largest value in a shrunk experiment}."""

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 2 + i % 4]) + "." for i in range(80)]


class FourCells(AmoebaNet):
    """An AmoebaNet that ends after its fourth cell, because a step of all seven compiles for long.

    The four have every kind of cell after every kind, but for two normal cells in a row.
    """

    class Params(AmoebaNet.Params):
        """Params of FourCells."""

    def _cell_params(self) -> list[AmoebaCell.Params]:
        return super()._cell_params()[:4]


class Noises(InMemorySpeech):
    """Recordings of noise, as long as their transcripts."""

    class Params(InMemorySpeech.Params):
        """Params of Noises."""

    def recordings(self, split: Any) -> list[tuple[Any, str]]:
        """Returns 80 recordings of 0.2 seconds: a decoder reads one letter at a time."""
        del split
        rng = np.random.default_rng(1)
        texts = [text[: 2 + i % 2] for i, text in enumerate(TEXTS)]
        return [(rng.normal(0, 0.1, 1200 + 200 * len(text)), text) for text in texts]


def experiments() -> dict[str, Params]:
    """Returns {key: shrunk tree} of all experiments that Tekso registers, not those of tests."""
    found = [e for e in registry.list_experiments() if e.cls.__module__.startswith("tekso.")]
    return {entry.key: shrunk(entry.cls().tree()) for entry in found}


NEEDS_FILE = ("lm.gpt.Gpt2",)
"""Experiments whose tokenizer reads a published file that is not shipped; they differ from another
experiment by this tokenizer only."""

NOTHING_DECODED = {
    "asr.prompts.Texts": "it scores texts for speech recognition, and has no prompts to continue",
    "image.emoji.DualEncoder": "it embeds pictures and texts, and generates neither",
    "lm.benchmark.Small": "it has no prompts",
    "lm.gpipe.Layers3": "it has no prompts",
}
"""{experiment: why --mode=decode rejects it}."""

NOTHING_EVALUATED = ("lm.benchmark.Small", "lm.gpipe.Layers3")
"""Experiments without an evaluation input."""


@functools.cache
def groups() -> dict[str, list[str]]:
    """Returns {first key: keys} of the experiments that differ by sizes and rates only."""
    found: dict[str, list[str]] = {}
    for key, tree in experiments().items():
        if key in NEEDS_FILE:
            continue
        found.setdefault(_form(tree), []).append(key)
    return {keys[0]: keys for keys in found.values()}


def with_other_executions() -> list[str]:
    """Returns, for each group and each execution that its first experiment does not have, a key."""
    found = []
    for keys in groups().values():
        kinds = set()
        for key in keys:
            execution = registry.get(key)().tree().execution
            inner = [v for _, v, _ in params_tree.walk(execution) if isinstance(v, Params)]
            kind = tuple(node.owner for node in (execution, *inner))
            if key != keys[0] and kind not in kinds:
                found.append(key)
            kinds.add(kind)
    return found


def shrunk(tree: Any) -> Any:
    """Returns a tree with small sizes and a corpus in memory."""
    for part in ("task", "input", "learner"):
        node = getattr(tree, part)
        for path, value, _ in params_tree.walk(node):
            if path.endswith("stack.layers") and value:  # layers that differ
                node.set({path: value[:2], path.removesuffix("layers") + "num_layers": 2})
        for path, value, _ in params_tree.walk(node):
            parent, _, name = path.rpartition(".")
            largest = LARGEST.get(name)
            if name == "num_blocks":  # of an image model: groups of blocks
                node.set({path: [1] * min(2, len(value))})
            if name == "num_layers" and _has_two_layers(node.get(parent)):
                largest = 2
            if name == "num_layers" and parent and issubclass(node.get(parent).owner, AmoebaNet):
                largest = 3
            if largest is not None and isinstance(value, int):
                node.set({path: min(value, largest)})
    for task, input in pairs(tree):
        _shrink_data(task, input)
        model = task.model if "model" in task else None
        if isinstance(model, AmoebaNet.Params):
            task.model = FourCells.Params().set({name: model.get(name) for name in model.fields()})
    return tree


def repeated(tree: Any) -> Any | None:
    """Returns a copy with a RepeatedStack of two layers for the last Stack of equal layers.

    None: the task has no such Stack, or has a RepeatedStack already; or there are several tasks,
    which have a stack each.
    """
    copy, found = tree.copy(), None
    if "tasks" in tree.task:
        return None
    for path, value, _ in params_tree.walk(copy.task):
        if isinstance(value, RepeatedStack.Params):
            return None
        if isinstance(value, Stack.Params) and value.layer is not None and not value.layers:
            found = path
    if found is None:
        return None
    stack = RepeatedStack.Params(num_layers=2, layer=copy.task.get(found).layer)
    copy.task.set({found: stack})
    return copy


def pairs(tree: Any) -> list[tuple[Any, Any]]:
    """Returns the tasks of a tree and their inputs: one, or those of a MultiTask."""
    if "tasks" not in tree.task:
        return [(tree.task, tree.input)]
    return [(task, tree.input.inputs[name]) for name, task in tree.task.tasks.items()]


def _shrink_data(task: Any, input: Any) -> None:
    if "bounds" in input and input.bounds:
        input.bounds = [8]
    if "volume_shape" in input:
        input.source = ShapeVolumes.Params(
            volume_shape=(10, 10, 10), num_shapes=1, num_train=8, num_held_out=4
        )
        input.set(volume_shape=(8, 8, 8), channels=1, batch_size=8)  # replicas split the batch
        task.num_classes = 4
    elif "source" in input:
        kinds: Any = {
            BoxSource: Rectangles,
            MaskSource: Squares,
            ImageSource: Blobs,
            CaptionSource: Bars,
        }
        (source,) = [s for base, s in kinds.items() if issubclass(input.source.owner, base)]
        input.source = source.Params(colours=input.channels)
    if "model" in task and "aspect_ratios" in task.model:  # of an SSD: maps of 4 and 2 pixels
        input.image_size = 32
        sizes = {"steps": [8, 16], "scales": [8.0, 16.0, 32.0], "aspect_ratios": [[2], [2]]}
        task.model.set(image_size=32, num_blocks=[1, 1, 1], **sizes)
    if "max_seconds" in input:
        input.set(max_seconds=0.5, bounds_s=[0.25])
    if "corpus" in input:
        input.corpus = _corpus(input)
    if issubclass(input.owner, Triggers):
        input.root = str(Path(tasks.__file__).parent / "multi")


def _has_two_layers(stack: Any) -> bool:
    """Whether a stack needs two layers: to be divided, because they differ, or by its kind."""
    needs_two = issubclass(stack.owner, RepeatedStack | RecurrentDecoder)
    return needs_two or bool("layers" in stack and stack.layers)


def _corpus(input: Any) -> Params:
    """Returns texts or pairs in memory; pairs name a language if those of the corpus do."""
    if issubclass(input.corpus.owner, AnySpeech):
        return Noises.Params(sample_rate=8000)
    if "source_length" not in input:
        return InMemory.Params(train=TEXTS)
    pairs: list[tuple[str, ...]] = [(text, text[::-1]) for text in TEXTS]
    corpus = input.corpus
    if len(corpus.get("locales") if "locales" in corpus else []) < 2 and (
        "language_column" not in corpus or corpus.language_column is None
    ):
        return InMemoryPairs.Params(train=pairs)
    languages = ["de", "fr"]
    named = [(*pair, languages[i % 2]) for i, pair in enumerate(pairs)]
    return InMemoryPairs.Params(train=named, languages=languages)


def _form(tree: Any) -> str:
    """Returns model, input and learner as text, with all numbers but 0 and 1 replaced."""
    several = "tasks" in tree.task
    whole = several or "student" in tree.task
    parts = [tree.task if whole else tree.get("task.model"), tree.input, tree.learner]
    smoothing = tree.task.label_smoothing if "label_smoothing" in tree.task else None
    text = "\n".join(part.to_text() for part in parts) + str(smoothing)
    return re.sub(r"\b(?!(?:0\.0|0|1|1\.0)\b)[0-9.]+(e-?[0-9]+)?", "N", text)
