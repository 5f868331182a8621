"""tekso-ckpt verify: on good checkpoints and on damage of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from stored_checkpoints import SPLIT, STATE, rewrite_index, save

from tekso.framework.run import stored_tensors
from tekso.framework.run.index_table import slice_key
from tekso.framework.run.stored_state import open_stored
from tekso.framework.run.stored_tensors import TensorReader
from tekso.framework.run.weight_files import write_weights
from tekso.tools import ckpt

HALF = b"weights/model/b/half"
DATA = "tensors.data-00000-of-00002"


def run(*words: object) -> int:
    return ckpt.main(["tekso-ckpt", *map(str, words)])


def test_a_checkpoint_and_its_export_are_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "run" / "checkpoints" / "step_00000007")
    assert run("verify", tmp_path / "run") == 0, capsys.readouterr().out
    assert capsys.readouterr().out == f"{path}: good\n"
    rewrite_index(path, lambda table: None)  # the test's writer: only the index has other bytes
    assert run("verify", path, "--format=json") == 4
    (report,) = json.loads(capsys.readouterr().out)
    (problem,) = report["problems"]
    assert problem.startswith("tensors.index has ") and "were written" in problem
    file = tmp_path / "w.safetensors"
    write_weights(str(file), {"w": STATE[SPLIT]}, {"format": "np"})
    assert run("verify", file) == 0
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert run("verify", file) == 4
    assert "the bytes of tensors in w.safetensors have changed" in capsys.readouterr().out


def without(table: dict[bytes, bytes], *where: list[int]) -> None:
    del table[slice_key(SPLIT, *where)]


def same_place(table: dict[bytes, bytes]) -> None:
    """Adds a tensor that has the bytes of another."""
    table[b"learner/copy"] = table[b"learner/model/a/w/momentum"]


def as_6_by_2(table: dict[bytes, bytes]) -> None:
    """Changes the shape [4, 3] of a weight to [6, 2]."""
    value = table[HALF].replace(b"\x08\x04", b"\x08\x06")
    table[HALF] = value.replace(b"\x08\x03", b"\x08\x02")


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (lambda t: without(t, [4, 2], [2, 3]), [f"{SPLIT}: the index lacks its piece at [4, 2]"]),
        (
            lambda t: t.update({slice_key(SPLIT, [0, 0], [4, 2]): t[b"learner/updates/applied"]}),
            [f"{SPLIT}: the index gives its piece at [0, 0] 8 bytes, but float32 of shape [4, 2]"],
        ),
        (same_place, ["learner/copy: it is in the files, but not in the description", "overlap"]),
        (
            lambda t: t.pop(b"weights/model/b/half"),
            ["leave 24 bytes between them", "half: it is in the description, but not in the files"],
        ),
        (
            lambda t: t.update({b"weights/model/b/half": b"\x08\x07"}),
            ["weights/model/b/half: it has data type 7 of TensorFlow"],
        ),
        (
            as_6_by_2,
            ["weights/model/b/half: its shape is [6, 2], but [4, 3] in the description"],
        ),
        (lambda t: t.update({b"learner/updates/applied": b"\x0a\x7f"}), ["truncated entry"]),
        (lambda t: t.update({b"learner/updates/applied": b"\x0f"}), ["unknown kind 7"]),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_is_described(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[dict[bytes, bytes]], object],
    problems: list[str],
) -> None:
    path = save(tmp_path / "step_00000007")
    rewrite_index(path, damage)
    assert run("verify", path) == 4
    printed = capsys.readouterr()
    assert all(problem in printed.out for problem in problems), printed.out
    assert not printed.err


def test_pieces_that_overlap_or_are_outside_are_found() -> None:
    def piece(start: tuple[int, ...], shape: tuple[int, ...]) -> stored_tensors.StoredPiece:
        return stored_tensors.StoredPiece("f", 0, 0, start, shape)

    def problems(*pieces: stored_tensors.StoredPiece) -> list[str]:
        tensor = stored_tensors.TensorInFiles("w", "float32", (4, 3), pieces)
        return stored_tensors.problems_of_cover(tensor)

    assert problems(piece((0, 0), (4, 1)), piece((0, 1), (2, 2)), piece((2, 1), (2, 2))) == []
    assert problems(piece((0, 0), (4, 1)), piece((3, 0), (1, 3))) == [
        "w: the pieces at [0, 0] and [3, 0] overlap"
    ]
    assert problems(piece((0, 0), (4, 1))) == ["w: its pieces have 4 of 12 elements"]
    assert problems(piece((1, 0), (4, 3))) == ["w: the piece at [1, 0] is outside of the tensor"]


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (
            lambda d, f: f.write_bytes(bytes([f.read_bytes()[0] ^ 1]) + f.read_bytes()[1:]),
            ["the bytes of tensors.data-00000-of-00002 have changed (sha256 differs)",
             f"{SPLIT} cannot be read: the bytes of {{d}}/{DATA} have changed"],
        ),
        (
            lambda d, f: f.write_bytes(f.read_bytes()[:-1]),
            ["has 79 bytes, but the tensors in it end at byte 80", "is truncated"],
        ),
        (lambda d, f: f.write_bytes(f.read_bytes() + b"x"), ["has 81 bytes, but the tensors in"]),
        (lambda d, f: f.unlink(), [f"{{d}}: tensors.data-00000-of-00002 is missing; {SPLIT}"]),
        (lambda d, f: (d / "checkpoint.json").unlink(), ["it has no checkpoint.json: writing it"]),
        (lambda d, f: (d / "checkpoint.json").write_text("{"), ["checkpoint.json is damaged"]),
        (lambda d, f: (d / "tensors.index").unlink(), ["tensors.index cannot be read"]),
        (
            lambda d, f: (d / "tensors.index").write_bytes((d / "tensors.index").read_bytes()[:99]),
            ["tensors.index cannot be read: it is not an index"],
        ),
    ],
)  # fmt: skip
def test_damaged_files_are_named_and_not_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path, Path], object],
    problems: list[str],
) -> None:
    path = save(tmp_path / "step_00000007")
    damage(path, path / "tensors.data-00000-of-00002")
    assert run("verify", path) == 4
    printed = capsys.readouterr()
    for problem in problems:
        assert problem.format(d=path) in printed.out, printed.out
    assert all(line.startswith(f"{path}: ") for line in printed.out.splitlines())
    assert not printed.err


def test_chunks_of_any_size_are_those_of_tensorflow(tmp_path: Path) -> None:
    path = save(tmp_path / "step_00000007")
    theirs = tf.train.load_checkpoint(f"{path}/tensors")
    stored = open_stored(str(path))
    assert stored.tensors.keys() == theirs.get_variable_to_shape_map().keys()
    for key, tensor in stored.tensors.items():
        for most in (1, 4, 7, 1000):
            with TensorReader() as reader:
                chunks = list(reader.chunks(tensor, most))
            assert max(chunk.size for chunk in chunks) <= most
            got = np.concatenate(chunks).reshape(tensor.shape)
            assert got.tobytes() == np.asarray(theirs.get_tensor(key)).tobytes(), (key, most)


def test_a_name_that_a_terminal_would_execute_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.safetensors"
    write_weights(str(file), {"w\x1b[2J": STATE[SPLIT]}, {"format": "np"})
    assert run("verify", file) == 4
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "its name has characters that cannot be printed" in printed
