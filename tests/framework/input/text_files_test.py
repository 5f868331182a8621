"""Text files: units, splits, and what is malformed."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError
from tekso.framework.input.text_files import TextFiles

IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def source(folder: Path, split: Any = "train", **kwargs: Any) -> TextFiles:
    kwargs = {"files": str(folder / "*.txt"), "dev_fraction": 0.0, **kwargs}
    one: TextFiles = TextFiles.Params(**kwargs).instantiate(split=split)
    return one


def all_of(one: TextFiles) -> list[Any]:
    return [record for _, record in one.records()]


def test_a_record_is_a_file_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"two\r\nlines\n")
    (tmp_path / "a.txt").write_bytes("é".encode())
    one = source(tmp_path)
    assert all_of(one) == ["é", "two\r\nlines\n"]
    assert [one[0], one[1]] == all_of(one)
    assert one.num_files == 2 and one.num_bytes == 13


def test_a_record_is_a_line_without_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo \r\n\r\n  three")
    one = source(tmp_path, unit="line")
    assert all_of(one) == ["one", "two ", "  three"]
    assert [one[i] for i in range(3)] == all_of(one)
    assert [one.origin(i).offset for i in range(3)] == [0, 5, 13]


@IN_FOLDER
@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"))))
def test_lines_are_those_of_the_text(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "a.txt").write_text("x\n" + "\n".join(lines), encoding="utf-8", newline="")
    assert all_of(source(tmp_path, unit="line")) == ["x", *(line for line in lines if line)]


@IN_FOLDER
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=10, max_size=40),
    dev=st.sampled_from([0.1, 0.25, 0.5]),
    test=st.sampled_from([0.1, 0.25]),
)
def test_the_end_of_a_file_is_held_out_by_characters(
    tmp_path: Path, text: str, dev: float, test: float
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    fractions = {"dev_fraction": dev, "test_fraction": test}
    parts = ["".join(all_of(source(tmp_path, s, **fractions))) for s in ("train", "test", "dev")]
    assert "".join(parts) == text
    assert len(parts[0]) == int(len(text) * (1.0 - dev - test))


def test_nine_tenths_of_a_text_are_its_first_characters(tmp_path: Path) -> None:
    text = "abcdefghijklmnopqrs"
    (tmp_path / "a.txt").write_text(text)
    assert all_of(source(tmp_path, dev_fraction=0.1)) == [text[: int(len(text) * 0.9)]]


def test_files_of_its_own_are_the_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("train")
    (tmp_path / "held.md").write_text("held")
    own = {"dev_files": str(tmp_path / "*.md"), "dev_fraction": 0.1}
    assert all_of(source(tmp_path, **own)) == ["train"]
    assert all_of(source(tmp_path, "dev", **own)) == ["held"]
    assert source(tmp_path, "dev", **own).describe() == f"text files {tmp_path}/*.md"
    assert source(tmp_path, **own).describe() == f"text files {tmp_path}/*.txt"
    assert source(tmp_path, "dev", dev_fraction=0.5).describe() == f"text files {tmp_path}/*.txt"


@pytest.mark.parametrize("unit", ["file", "line"])
def test_a_hash_splits_records_and_stays_when_others_come(tmp_path: Path, unit: Any) -> None:
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"text {i}\nmore of {i}")
    by_hash = {"holdout": "hash", "dev_fraction": 0.3, "test_fraction": 0.2, "unit": unit}

    def parts() -> list[set[str]]:
        return [set(all_of(source(tmp_path, s, **by_hash))) for s in ("train", "dev", "test")]

    before = parts()
    assert sum(map(len, before)) == len(set.union(*before)) == (60 if unit == "file" else 120)
    assert len(before[0]) > len(before[1]) > 0 and before[2]
    (tmp_path / "new.txt").write_text("new")
    assert all(old <= new for old, new in zip(before, parts(), strict=True))


@pytest.mark.parametrize(
    ("data", "reason", "offset"),
    [
        (b"", "empty", 0),
        (b"caf\xe9 au lait", "not UTF-8: byte 0xe9", 3),
        (b"ELF\0\1\2", "binary: a NUL byte", 3),
        ("x".encode("utf-16"), "not UTF-8: it begins with the byte order mark of UTF-16", 0),
    ],
)
def test_a_malformed_file_is_skipped_counted_and_named(
    tmp_path: Path, data: bytes, reason: str, offset: int
) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(data)
    one = source(tmp_path)
    assert all_of(one) == ["good"]
    report = one.skipped()
    assert report.count == 1
    skip = report.named[0]
    assert (skip.file, skip.offset, skip.reason) == (str(tmp_path / "bad.txt"), offset, reason)
    with pytest.raises(InputError, match=r"more than max_skipped=0.*(?s:.)*bad\.txt"):
        source(tmp_path, max_skipped=0)


def test_a_file_without_permission_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").write_text("secret")
    real = files.open

    def refuse(path: str, *mode: Any) -> Any:  # root may read every file
        if path.endswith("bad.txt"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *mode)

    monkeypatch.setattr(files, "open", refuse)
    one = source(tmp_path)
    assert all_of(one) == ["good"]
    assert "ermission denied" in one.skipped().named[0].reason


def test_a_dangling_link_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "bad.txt").symlink_to(tmp_path / "nowhere")
    one = source(tmp_path)
    assert all_of(one) == ["good"]
    assert "No such file" in one.skipped().named[0].reason


def test_a_line_that_is_no_text_is_skipped_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\nt\xffwo\nthree\n")
    one = source(tmp_path, unit="line")
    assert all_of(one) == all_of(one) == ["one", "three"]
    skip = one.skipped().named[0]
    assert (one.skipped().count, skip.offset, skip.reason) == (1, 5, "not UTF-8: byte 0xff")
    with pytest.raises(BadRecordError, match="byte 5: not UTF-8"):
        one[1]


def test_nothing_left_is_an_error_that_lists_what_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"nothing is left(?s:.)*a\.txt, byte 0: not UTF-8"):
        source(tmp_path)


def test_no_files_at_all_says_how_to_give_some() -> None:
    with pytest.raises(InputError, match=r"--set (corpus\.)?files='"):
        TextFiles.Params().instantiate()


def test_a_split_without_text_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="set test_files, or test_fraction"):
        source(tmp_path, "test")


def test_a_hash_that_holds_out_no_file_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    message = r"nothing to read: set dev_files, or a dev_fraction above 0\.001$"
    with pytest.raises(InputError, match=message):
        source(tmp_path, "dev", holdout="hash", dev_fraction=0.001)


def test_fractions_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="leave no training data"):
        source(tmp_path, dev_fraction=0.6, test_fraction=0.4)


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one text")
    first = source(tmp_path, dev_fraction=0.5)
    assert source(tmp_path, dev_fraction=0.5).fingerprint() == first.fingerprint()
    assert source(tmp_path, "dev", dev_fraction=0.5).fingerprint() != first.fingerprint()
    (tmp_path / "a.txt").write_text("two text")
    assert source(tmp_path, dev_fraction=0.5).fingerprint() != first.fingerprint()
