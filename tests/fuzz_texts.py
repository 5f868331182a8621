"""Reads damaged texts and files of every kind: each is read, or is an error that says where.

    python tests/fuzz_texts.py --cases=1000000 --seed=0 [--only=params,tsv]

Every case takes a valid sample of one kind (Params text, a value of --set, the description of a
checkpoint, metrics.jsonl, TFRecord, text, TSV, JSON lines, parallel files), changes its bytes, and
reads it. It fails if the error is not one that the reader declares, or if its message does not say
where the damage is. To repeat a case, give its number: --case=17.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import json
import os
import random
import re
import shutil
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

if __name__ == "__main__":
    import conftest  # noqa: F401  # registers this checkout as tekso
from tekso.framework import registry
from tekso.framework.execution.shards import of_arrays
from tekso.framework.input.errors import InputError
from tekso.framework.input.record_frames import masked_checksum
from tekso.framework.input.text_files import TextFiles
from tekso.framework.input.tfrecords import TfRecords
from tekso.framework.params import Params
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoints import CheckpointError, Checkpoints, Description
from tekso.framework.run.metrics_log import MetricsLog, history
from tekso.tasks.mt.pair_files import JsonLines, Tsv
from tekso.tasks.mt.parallel_files import ParallelFiles

PIECES = [
    *(b"\0 \xff \xc3\x28 \xe2\x80\xa8 \xef\xbb\xbf \r \r\n \n \t , : = # ' \" \\".split(b" ")),
    *(b"( ) [ ] { } [[[[[[[[ {}{} None true nan inf -inf 1e999 -0 0x1f 1_0".split(b" ")),
    b"9" * 40,
    b"-1",
    b"[" * 3000,
    b"(" * 3000,
    b'{"a":' * 2000,
    b"a" * 5000,
    b"\xf0\x9f\x98\x80",
    b"..",
    b"*",
    b"os:system",
    b"tekso.framework.learner:Learner",
    b'Params("os:system")',
    b"__class__",
    b"",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of text.

    Attributes:
      samples: valid texts.
      read: reads a text; it may write files to a folder.
      errors: the errors that the reader declares.
      where: matches every message of such an error.
    """

    samples: list[bytes]
    read: Callable[[bytes, Path], Any]
    errors: tuple[type[Exception], ...]
    where: str


def _tree() -> Any:
    return registry.get("lm.text_files.Bytes")().tree()


def _read_params(data: bytes, folder: Path) -> None:
    Params.from_text(data.decode("utf-8", "replace"), origin="params.txt")


def _set(data: bytes, folder: Path) -> None:
    path, _, value = data.decode("utf-8", "replace").partition("=")
    _TREE.copy().set_text(path, value)


def _read_checkpoint(data: bytes, folder: Path) -> None:
    path = folder / "step_00000003"
    if not path.exists():
        shutil.copytree(_CHECKPOINT, path)
    (path / "checkpoint.json").write_bytes(data)
    checkpoint = checkpoint_files.open_verified(str(path))
    for key in checkpoint.keys:
        checkpoint.read(key)
    checkpoint.description.at(4, {})


def _read_metrics(data: bytes, folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(data)
    log = MetricsLog(str(path))
    log.keep_until(2)
    history(log.read(), "dev/loss")
    log.close()


def _records_of(source: type[Any], *names: str, **params: Any) -> Callable[[bytes, Path], None]:
    """Returns a reader of a corpus; with several files, a form feed separates them."""

    def read(data: bytes, folder: Path) -> None:
        parts = data.split(b"\f", len(names) - 1)
        given = dict(params)
        for i, name in enumerate(names):
            path = folder / f"{name}.data"
            path.write_bytes(parts[i] if i < len(parts) else b"")
            given[name] = str(path)
        made = source.Params(**given, dev_fraction=0.0).instantiate()
        for _ in made.records():
            pass

    return read


def _tfrecord(*records: bytes) -> bytes:
    found = b""
    for data in records:
        length = struct.pack("<Q", len(data))
        found += length + struct.pack("<I", masked_checksum(length))
        found += data + struct.pack("<I", masked_checksum(data))
    return found


def _made_checkpoint() -> str:
    folder = tempfile.mkdtemp(prefix="fuzz-checkpoint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    checkpoints = Checkpoints(folder)
    checkpoints.prepare()
    state = {"weights/a": np.ones((2, 3), np.float32), "learner/n": np.zeros((), np.int64)}
    about = Description(step=0, model="m", params=_TREE.to_text(), input={"seed": 3})
    checkpoints.save(lambda: of_arrays(state), about.at(3, {"dev/loss": 1.5}))
    checkpoints.close()
    return f"{folder}/step_00000003"


_TREE = _tree()
_CHECKPOINT = _made_checkpoint()
_LINES = [{"step": i, "split": split, "loss": 0.5} for i in range(4) for split in ("train", "dev")]
_PAIRS = [("a dog", "ein Hund"), ("two dogs", "zwei Hunde"), ("\u00e9t\u00e9", "Sommer")]
_SET = [
    b"run.steps=5",
    b"task.model.*.dropout_rate=0.1",
    b"learner.frozen=['a','b*']",
    b"learner.optimizer=tekso.framework.optimizers.sgd:Momentum",
    b"run.warm_start={}",
    b"input.files=a/*.txt",
    b"execution.towers=None",
]
_TEXTS = r"byte \d+|no (text|record|pair|line)|nothing|max_skipped|lines"

KINDS: dict[str, Kind] = {
    "params": Kind(
        [_TREE.to_text().encode()],
        _read_params,
        (ValueError, TypeError),
        r"line \d+|empty|must describe",
    ),
    "set": Kind(_SET, _set, (AttributeError, ValueError, TypeError), r"."),
    "checkpoint": Kind(
        [Path(_CHECKPOINT, "checkpoint.json").read_bytes()],
        _read_checkpoint,
        (CheckpointError,),
        r".",
    ),
    "metrics": Kind(["\n".join(map(json.dumps, _LINES)).encode()], _read_metrics, (), r"."),
    "tfrecord": Kind(
        [_tfrecord(b"one", b"two words", b"", b"4" * 50)],
        _records_of(TfRecords, "files"),
        (InputError,),
        _TEXTS,
    ),
    "text": Kind(
        [b"one line\nanother\n\nlast"], _records_of(TextFiles, "files"), (InputError,), _TEXTS
    ),
    "tsv": Kind(
        ["\n".join(map("\t".join, _PAIRS)).encode()],
        _records_of(Tsv, "files"),
        (InputError,),
        _TEXTS,
    ),
    "json": Kind(
        ["\n".join(json.dumps({"source": s, "target": t}) for s, t in _PAIRS).encode()],
        _records_of(JsonLines, "files"),
        (InputError,),
        _TEXTS,
    ),
    "parallel": Kind(
        ["\f".join("\n".join(side) for side in zip(*_PAIRS, strict=True)).encode()],
        _records_of(ParallelFiles, "source_files", "target_files"),
        (InputError,),
        _TEXTS,
    ),
}


def changed(data: bytes, draw: random.Random) -> bytes:
    """Returns a text with up to four changes."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice([0, 1, 1, 2, 8, 60]))
        new = draw.choice(
            [
                draw.choice(PIECES),
                bytes([draw.randrange(256)]),
                data[at:end] * 2,
                data[draw.randrange(len(data) + 1) :][: draw.randint(1, 40)],
                b"",
            ]
        )
        data = data[:at] + new + data[end:]
    return data


def problem(kind: Kind, data: bytes, folder: Path) -> str:
    """Returns what is wrong with how a text is read, or ""."""
    try:
        kind.read(data, folder)
    except kind.errors as error:
        if not re.search(kind.where, str(error)):
            return f"the error does not say where: {type(error).__name__}: {str(error)[:300]}"
    except Exception:
        return traceback.format_exc(limit=-4)
    return ""


def problems(cases: Iterator[int] | range, seed: int, kinds: list[str]) -> Iterator[str]:
    """Yields a report of every case that fails."""
    with tempfile.TemporaryDirectory() as folder:
        for number in cases:
            draw = random.Random(f"{seed}:{number}")
            name = draw.choice(kinds)
            data = changed(draw.choice(KINDS[name].samples), draw)
            found = problem(KINDS[name], data, Path(folder))
            if found:
                yield f"case {number} of seed {seed}, {name}: {data[:200]!r}\n{found}"


def main() -> int:
    """Runs the cases; returns 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--case", type=int, help="run only this case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    options = parser.parse_args()
    cases = range(options.cases) if options.case is None else range(options.case, options.case + 1)
    count = 0
    for text in problems(cases, options.seed, options.only.split(",")):
        count += 1
        print(text, flush=True)
    print(f"{len(cases)} cases, {count} problems")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
