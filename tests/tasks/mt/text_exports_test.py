"""Texts in and out: what a process without Tekso gets is what the search finds for the tokens."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.input.sentence_piece import SentencePiece, learn
from tekso.framework.run import saved_model
from tekso.framework.run.saved_model import ExportModule
from tekso.models.decoding.beam_search import BeamSearch
from tekso.params.mt.text_files import transformer
from tekso.tasks.mt.exports import translation_exports
from tekso.tasks.mt.task import Translation
from tekso.tasks.mt.text_exports import text_exports

LONGEST, VOCAB_SIZE = 9, 300
SEARCH = BeamSearch.Params(beam_size=3, num_hypotheses=2, max_length_extra=2, max_length_ratio=1.0)
TEXTS = ["a dog", "  two  dogs", "\u2581 a\u2581", "", " \u3000\t", "the house of the red dog" * 3]

LOADER = """
import json, sys
sys.modules["tekso"] = None  # an import of it is an error
import tensorflow as tf
import tensorflow_text

model = tf.saved_model.load(sys.argv[1])
found = model.signatures["translate"](texts=tf.constant(json.loads(sys.argv[2])))
texts = [[text.decode() for text in row] for row in found["texts"].numpy()]
print(json.dumps([texts, found["scores"].numpy().tolist()]))
"""


def needs_the_package() -> None:
    pytest.importorskip("tensorflow_text", reason="tensorflow-text, an extra, is not installed")


@functools.cache
def an_input(*languages: str) -> Any:
    """As much of a translation Input as texts need."""
    words = ["the", "red", "dog", "dogs", "house", "of", "a", "two"]
    model = learn([" ".join(words[i:] + words[:i]) for i in range(8)] * 9, vocab_size=VOCAB_SIZE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        path.write_bytes(model)
        made = SentencePiece.Params(vocab_size=VOCAB_SIZE, file=str(path)).instantiate()
    return types.SimpleNamespace(
        source_tokenizer=made, target_tokenizer=made, languages=list(languages)
    )


@functools.cache
def parts(extra: int = 0) -> tuple[Any, Any, ExportModule]:
    """A task with drawn weights, its exports, and the weights as they are exported."""
    model = transformer(num_layers=1, dim=16, hidden_dim=24, num_heads=2, dropout_rate=0.0)
    size = VOCAB_SIZE + extra
    model = model.set(source_vocab_size=size, target_vocab_size=size)
    task = Translation.Params(model=model).instantiate()
    weights = {
        path: 2 * spec.initial_value(7) if len(spec.shape) > 1 else spec.initial_value(7)
        for path, spec in task.specs().items()
    }
    end_id = an_input().target_tokenizer.end_id
    exports = translation_exports(task, SEARCH, end_id=end_id, longest=LONGEST, longest_target=9)
    return task, exports, ExportModule(task, weights, seed=0)


def wanted(text: str, *, before: tuple[int, ...] = (), extra: int = 0) -> tuple[list[str], Any]:
    """Texts and scores that the search finds for the tokens of one text alone."""
    if not text.strip():
        return [""] * 2, [float("-inf")] * 2
    task, _, module = parts(extra)
    tokenizer = an_input().source_tokenizer
    tokens = [*before, *tokenizer.encode(text).tolist()]
    ids = [*tokens[: LONGEST - 1], tokenizer.end_id]
    weights = {path: tf.convert_to_tensor(value) for path, value in module.weights.items()}
    batch = {
        "source_ids": tf.constant([ids]),
        "source_segment_ids": tf.ones([1, len(ids)], "int32"),
    }
    found = SEARCH.instantiate().search(
        task.model,
        task.theta(weights).model,
        batch,
        StepContext(mode="decode"),
        end_id=tokenizer.end_id,
    )
    rows = zip(found["ids"].numpy()[0], found["lengths"].numpy()[0], strict=True)
    texts = [tokenizer.decode([i for i in row[:n] if i != tokenizer.end_id]) for row, n in rows]
    return texts, found["scores"].numpy()[0]


def check(texts: Any, scores: Any, expected: Any) -> None:
    for text, score, (want_text, want_score) in zip(texts, scores, expected, strict=True):
        assert text == want_text
        # Sums of 11 float32 at most, in another order where rows are filled up.
        np.testing.assert_allclose(score, want_score, rtol=1e-5)


@pytest.mark.slow
def test_a_process_without_tekso_translates_texts(tmp_path: Path) -> None:
    needs_the_package()
    _, exports, module = parts()
    path = str(tmp_path / "out")
    texts = text_exports(an_input(), longest=LONGEST)
    kept = {name: exports[name] for name in ("translate", "greedy")}
    saved_model.write(path, module, kept, batch_size=2, about={}, assets={}, texts=texts)

    # export_mode_test.py loads an export in a process that has never imported Tekso.
    command = ["-c", LOADER, f"{path}/texts", json.dumps(TEXTS)]
    done = processes.run(command, cwd=tmp_path, optimized=False)
    assert done.returncode == 0, done.stderr
    found, scores = json.loads(done.stdout.splitlines()[-1])
    expected = [wanted(text) for text in TEXTS]
    check(found, scores, expected)
    assert len({tuple(text) for text in found}) == 5  # of six texts, two are blank


def test_the_language_comes_before_the_text() -> None:
    needs_the_package()
    _, exports, module = parts(2)
    texts = text_exports(an_input("de", "fr"), longest=LONGEST)["translate"]
    compute = module.signature(exports["translate"], batch_size=2)
    translate = saved_model.text_signature(compute, texts)
    languages = ["fr", "de", "de"]
    given = tf.constant(["a dog", "a dog", "of two"])
    found = translate(texts=given, languages=tf.constant(languages))
    expected = [
        wanted(text, before=(VOCAB_SIZE + ("fr", "de")[::-1].index(language),), extra=2)
        for text, language in zip(["a dog", "a dog", "of two"], languages, strict=True)
    ]
    check([[t.decode() for t in row] for row in found["texts"].numpy()], found["scores"], expected)
    with pytest.raises(tf.errors.InvalidArgumentError, match="languages must be in"):
        translate(texts=given, languages=tf.constant(["fr", "it", "de"]))


def test_without_the_package_or_sentence_piece_there_are_no_functions_of_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = types.SimpleNamespace(source_tokenizer=object(), languages=[])
    assert text_exports(other, longest=LONGEST) == {}
    monkeypatch.setitem(sys.modules, "tensorflow_text", None)
    assert text_exports(an_input(), longest=LONGEST) == {}
