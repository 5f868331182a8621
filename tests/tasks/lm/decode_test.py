"""Decoding for people: prompts and files through a tokenizer, as text and records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tekso.framework.context import StepContext
from tekso.framework.input.characters import Characters
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import Bytes
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.lstm_lm import LstmLm
from tekso.tasks.lm.decode import TextDecoder
from tekso.tasks.lm.task import LanguageModel

TEXT = "def añadir(x):\n    return x + 1\n"


def make_task(**decode: Any) -> LanguageModel:
    model = LstmLm.Params(
        vocab_size=256,
        embedding_dim=6,
        embedding=Embedding.Params(),
        stack=RecurrentStack.Params(cell=LstmCell.Params(hidden_dim=6), num_layers=1),
    )
    settings = {"max_new_tokens": 5, "window": 8, **decode}
    return LanguageModel.Params(model=model, decode=TextDecoder.Params(**settings)).instantiate()


def text_input() -> Any:
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    batch = {"ids": np.stack([ids[:12], ids[12:24]])}
    return SimpleNamespace(tokenizer=Bytes.Params().instantiate(), batch=lambda step: batch)


def test_samples_continue_the_prompts(program_of: Any) -> None:
    task = make_task(prompts=["def ", "x ="], num_samples=2, temperature=0.5, top_p=0.9)
    decoded = task.decode(program_of(task), text_input())
    assert [r["prompt"] for r in decoded.records] == ["def ", "def ", "x =", "x ="]
    for record in decoded.records:
        assert record["kind"] == "sample"
        assert record["text"].startswith(record["prompt"])
        assert record["new_tokens"] == 5
        assert record["text"] in decoded.text
    assert decoded.records[0]["text"] != decoded.records[1]["text"]
    json.dumps(decoded.records)


def test_a_prompt_to_try_is_the_first_given_or_the_beginning_of_what_is_held_out() -> None:
    held_out = {"dev": text_input()}
    assert make_task(prompts=["", "x", "y"]).setting_to_try(held_out) == (
        'task.decode.prompts=["x"]'
    )
    assert make_task().setting_to_try(held_out) == 'task.decode.prompts=["def añadir("]'
    assert make_task(prompts=[""]).setting_to_try({}) is None
    set_again = make_task().params.copy()
    set_again.set_text(*make_task().setting_to_try(held_out).removeprefix("task.").split("=", 1))
    assert set_again.decode.prompts == ["def añadir("]


def test_what_of_a_prompt_the_vocabulary_does_not_have_is_named(program_of: Any) -> None:
    task = make_task(prompts=["añ+ø=ø→", "x", "x+β"], num_samples=2)
    training = TrainingText(lambda: [TEXT], lambda: "", "text")
    tokenizer = Characters.Params(vocab_size=256).instantiate(training=training)
    decoded = task.decode(program_of(task), SimpleNamespace(tokenizer=tokenizer))
    unknown = [["ø", "=", "→"], [], ["β"]]
    assert [r["unknown"] for r in decoded.records] == [one for one in unknown for _ in range(2)]
    assert decoded.text.startswith("warning: parts of the prompt are not in the vocabulary: 'ø'")
    assert decoded.text.count("warning: ") == 4


def test_a_ruler_above_each_sample_fits_into_80_columns(program_of: Any) -> None:
    task = make_task(prompts=["x", "long " * 50])
    text = task.decode(program_of(task), text_input()).text
    short, long = [line for line in text.splitlines() if line.startswith("--- 5 tokens after ")]
    assert short.startswith("--- 5 tokens after 'x' ---") and "… " in long and "long ' ---" in long
    assert len(short) == len(long) == 80


def test_an_empty_prompt_begins_a_text(program_of: Any) -> None:
    task = make_task(prompts=[""])
    (record,) = task.decode(program_of(task), text_input()).records
    assert record["prompt"] == ""
    assert record["new_tokens"] == 5


def test_without_prompts_examples_of_the_input_are_gone_on_from(program_of: Any) -> None:
    task = make_task(num_samples=2, prompt_tokens=6)
    decoded = task.decode(program_of(task), text_input())
    assert [r["prompt"] for r in decoded.records] == [
        TEXT.encode()[start : start + 6].decode("utf-8", "replace") for start in (0, 12)
    ]


def test_scores_equal_the_cross_entropy_of_the_task(program_of: Any, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(TEXT)
    task = make_task(score_files=[str(tmp_path / "*.py")], window=100)
    program = program_of(task)
    decoded = task.decode(program, text_input())
    record = decoded.records[-1]
    ids = [0, *TEXT.encode()]  # a text begins with the end-of-text token
    nats = task.model.token_cross_entropy(
        program.theta.model, np.array([ids[:-1]]), np.array([ids[1:]]), StepContext()
    )
    assert record["file"] == str(path)
    assert record["tokens"] == record["bytes"] == len(TEXT.encode())
    np.testing.assert_allclose(record["token_log_probs"], -nats.numpy()[0], atol=1e-5)
    assert record["log_prob"] == pytest.approx(-nats.numpy().sum(), rel=1e-5)
    assert record["loss"] == pytest.approx(nats.numpy().mean(), rel=1e-5)
    assert record["bits_per_byte"] == pytest.approx(nats.numpy().mean() / np.log(2), rel=1e-5)
    assert f"{record['bits_per_byte']:.4f} bits per byte" in decoded.text


def test_an_input_without_text_has_nothing_to_show(program_of: Any) -> None:
    task = make_task()
    assert task.decode(program_of(task), SimpleNamespace(tokenizer=None)) is None


def test_files_that_cannot_be_scored_are_named(program_of: Any, tmp_path: Path) -> None:
    (tmp_path / "picture.bin").write_bytes(b"ab\xff\xfe\x00")
    task = make_task(score_files=[str(tmp_path / "picture.bin")])
    with pytest.raises(ValueError, match=r"picture\.bin is not text, see byte"):
        task.decode(program_of(task), text_input())
    task = make_task(score_files=[str(tmp_path / "pictures.bin")])
    with pytest.raises(FileNotFoundError, match=r"score_files: .* did you mean .*picture\.bin"):
        task.decode(program_of(task), text_input())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_samples", 0),
        ("prompt_tokens", 0),
        ("max_new_tokens", -1),
        ("top_p", 2.0),
        ("window", 1),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"task\.decode\.{name} is {value}"):
        make_task(**{name: value})


def test_a_prompt_to_try_is_a_line_with_words() -> None:
    ids = np.frombuffer(b'026"]))\n## 12\nThe first words of a text, and others', np.uint8)
    held_out = SimpleNamespace(
        tokenizer=Bytes.Params().instantiate(), batch=lambda step: {"ids": ids[None].astype(int)}
    )
    assert make_task().setting_to_try({"dev": held_out}) == (
        'task.decode.prompts=["The first words of a"]'
    )
