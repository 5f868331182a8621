"""Measures the memory and the time that an input of a large corpus needs.

    python tests/corpus_memory.py FOLDER MEGABYTES KIND TOKENIZER

writes a corpus of random words to FOLDER unless it is there, opens the input twice, and prints for
each time the seconds to the first batch, the peak memory above that of an empty process, and a
digest of some batches.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np

import conftest  # noqa: F401  registers the checkout
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.input.sources import digest
from tekso.framework.input.text_files import TextFiles
from tekso.framework.input.tokenizers import Bytes
from tekso.framework.input.words import Words

KINDS = ("stream", "packed", "pairs", "packed_pairs")
TOKENIZERS: dict[str, Any] = {
    "bytes": Bytes.Params(),
    "words": Words.Params(vocab_size=5000),
    "pieces": SentencePiece.Params(vocab_size=1000, train_bytes=300_000),
}


def write_corpus(folder: Path, num_bytes: int) -> None:
    """Writes lines of 2 to 17 random words to two files, in the second in reverse order."""
    drawn = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(drawn.choice(letters, size)) for size in drawn.integers(2, 9, 4000)]
    chosen = [drawn.integers(0, len(words), size) for size in drawn.integers(2, 18, 10_000)]
    lines = [[words[i] for i in line.tolist()] for line in chosen]
    texts = [" ".join(line) for line in lines], [" ".join(line[::-1]) for line in lines]
    with open(folder / "a.txt", "w") as first, open(folder / "b.txt", "w") as second:
        while first.tell() < num_bytes:
            order = drawn.permutation(len(lines)).tolist()
            for file, side in zip((first, second), texts, strict=True):
                file.write("".join(f"{side[i]}\n" for i in order))


def params_of(folder: Path, kind: str, tokenizer: str) -> Any:
    """Returns the Params of an input."""
    shared = {"batch_size": 16, "tokenizer": TOKENIZERS[tokenizer]}
    if kind.endswith("pairs"):
        from tekso.tasks.mt.bucketed_pairs import BucketedPairs
        from tekso.tasks.mt.packed_pairs import PackedPairs
        from tekso.tasks.mt.parallel_files import ParallelFiles

        corpus: Any = ParallelFiles.Params(
            source_files=str(folder / "a.txt"), target_files=str(folder / "b.txt")
        )
        pairs: Any = PackedPairs if kind == "packed_pairs" else BucketedPairs
        return pairs.Params(corpus=corpus, source_length=64, target_length=64, **shared)
    from tekso.tasks.lm.input import TextStream
    from tekso.tasks.lm.packed_text import PackedText

    corpus = TextFiles.Params(
        files=str(folder / "a.txt"), unit="line" if kind == "packed" else "file"
    )
    form = PackedText if kind == "packed" else TextStream
    return form.Params(corpus=corpus, length=64, **shared)


def peak_bytes() -> int:
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: list[str]) -> None:
    """Writes the corpus and measures."""
    folder, kind, tokenizer = Path(argv[1]), argv[3], argv[4]
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "a.txt").exists():
        write_corpus(folder, int(float(argv[2]) * 1e6))
    small = folder / f"small-{kind}-{tokenizer}"
    small.mkdir(exist_ok=True)
    if not (small / "a.txt").exists():
        write_corpus(small, 300_000)
    params_of(small, kind, tokenizer).instantiate(assets_dir=str(small / "assets")).batch(0)
    empty = peak_bytes()  # with all modules and buffers of one chunk
    for _ in range(2):
        begin = time.monotonic()
        input = params_of(folder, kind, tokenizer).instantiate(
            assets_dir=str(folder / f"{kind}-{tokenizer}")
        )
        input.batch(0)
        seconds = time.monotonic() - begin
        batches = [input.batch(step) for step in (0, 3, 10**6)]
        arrays = (array.tobytes() for batch in batches for array in batch.values())
        found = {
            "corpus_bytes": sum(
                os.path.getsize(folder / name)
                for name in (("a.txt", "b.txt") if kind.endswith("pairs") else ("a.txt",))
            ),
            "seconds_to_first_batch": round(seconds, 2),
            "peak_bytes": peak_bytes() - empty,
            "empty_bytes": empty,
            "digest": digest(arrays),
            "description": input.describe(),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv)
