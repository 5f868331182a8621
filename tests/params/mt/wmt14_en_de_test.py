"""The Transformers of Vaswani et al. 2017: exact counts, and what is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tekso.framework import registry
from tekso.framework.run.inspection import model_record, task_of
from tekso.params.mt import wmt14_en_de
from tekso.tools import experiment_flags


def formula(d: int, f: int, vocab: int) -> int:
    attention, feed_forward, norm = 4 * d * d, 2 * d * f + f + d, 2 * d
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    return 6 * (encoder_layer + decoder_layer) + vocab * d


@pytest.mark.parametrize(
    ("name", "d", "f", "millions"), [("Base", 512, 2048, 65), ("Big", 1024, 4096, 213)]
)
def test_counts_are_exact_and_near_those_of_the_paper(
    name: str, d: int, f: int, millions: int
) -> None:
    tree = registry.get(f"mt.wmt14_en_de.{name}")().tree()

    total = model_record("", task_of(tree))["total_weights"]

    assert total == formula(d, f, 37_000)
    # Its vocabulary is "about 37,000"; 4,000 tokens more would make Base 65 million.
    assert total / 1e6 == pytest.approx(millions, rel=0.035)


def test_counts_at_other_sizes_follow_the_architecture() -> None:
    tree = registry.get("mt.wmt14_en_de.Base")().tree()
    tree.set({"task.model.dim": 24, "*hidden_dim": 50, "input.tokenizer.vocab_size": 777})

    assert model_record("", task_of(tree))["total_weights"] == formula(24, 50, 777)


def test_text_files_take_the_settings_of_the_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for language, word in (("en", "line"), ("de", "Zeile")):
        lines = [f"{word} {number}\n" for number in range(3000)]
        (tmp_path / f"train.{language}").write_text("".join(lines))
    (block,) = re.findall(r"\n\n((?:    --set .*\n)+)", wmt14_en_de.__doc__ or "")
    tree = registry.get("mt.wmt14_en_de.Base")().tree()
    settings = [*re.findall(r"--set (\S+)", block), "input.tokenizer.vocab_size=300"]

    experiment_flags.change(tree, execution=None, settings=settings)

    assets = {"assets_dir": str(tmp_path)}
    train = tree.input.instantiate(**assets)
    held_out = {
        name: params.instantiate(**assets, train=tree.input).inner.num_pairs
        for name, params in tree.eval_inputs.items()
    }
    assert held_out["test"] == 3 and held_out["dev"] > 0
    assert train.num_pairs + sum(held_out.values()) == 3000
