"""Files: names, errors with close names, atomic writing; local and in TensorFlow's memory."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tekso.framework import files
from tekso.framework.run.metrics_log import MetricsLog


@pytest.fixture(params=["local", "ram"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = str(tmp_path) if request.param == "local" else f"ram://{tmp_path.name}"
    files.make_folder(path)
    return path


def test_what_is_written_is_read_back_whole_and_in_part(folder: str) -> None:
    path = files.join(folder, "below", "a.bin")
    files.write_atomically(path, b"0123456789")
    assert files.exists(path)
    assert files.read(path) == b"0123456789"
    assert files.read(path, 3) == b"3456789"
    assert files.read(path, 3, 4) == b"3456"
    assert files.size_bytes(path) == 10


def test_text_is_utf8_and_keeps_its_line_ends(folder: str) -> None:
    path = files.join(folder, "a.txt")
    files.write_atomically(path, "é\r\nb")
    assert files.read(path) == b"\xc3\xa9\r\nb"


def test_glob_is_sorted_and_names_each_file_once(folder: str) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        files.write_atomically(files.join(folder, name), "x")
    star = files.join(folder, "*.txt")
    found = files.glob(f"{files.join(folder, 'b.txt')}, {star},{files.join(folder, '*.md')}")
    assert [files.base_name(path) for path in found] == ["a.txt", "b.txt", "c.md"]


def test_a_list_in_python_or_json_is_understood_as_well_as_commas(tmp_path: Path) -> None:
    for name in ("a.txt", "b, c.txt"):
        (tmp_path / name).write_text("x")
    for quote in "'\"":
        text = ", ".join(f"{quote}{tmp_path / name}{quote}" for name in ("a.txt", "b, c.txt"))
        found = files.glob(f" [{text}]")
        assert [files.base_name(path) for path in found] == ["a.txt", "b, c.txt"]


def test_a_list_whose_quotes_the_shell_took_is_an_error_that_says_how_to_write_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing matches.*; write a list as a\.txt,b$"):
        files.glob("[a.txt, b]")


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(folder: str) -> None:
    path = files.join(folder, "a.txt")
    files.write_atomically(path, "old")
    with pytest.raises(KeyboardInterrupt), files.writing_atomically(path) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert files.read(path) == b"old"
    assert files.glob(files.join(folder, "*")) == [path]


def test_errors_of_writing_name_the_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path, kind in (("folder", IsADirectoryError), ("file/below", NotADirectoryError)):
        with pytest.raises(kind) as error:
            files.write_atomically(f"{tmp_path}/{path}", "x")
        assert error.value.filename == f"{tmp_path}/{path.partition('/')[0]}"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_missing_file_is_a_file_not_found_error(folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(files.join(folder, "nothing.txt"))


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # so that opening it does not wait
    yield path
    os.close(held)


def test_a_fifo_is_not_opened_as_a_file(fifo: str) -> None:
    for mode in ("rb", "ab", "a"):
        with pytest.raises(OSError, match=rf"is a FIFO, not a file: '{fifo}'$"):
            files.open(fifo, mode)
    with pytest.raises(OSError, match="is a FIFO, not a file"):
        MetricsLog(fifo).open()
    with files.open(fifo, streams=True) as file:
        assert not file.seekable()


def test_a_fifo_is_not_replaced_by_a_file(fifo: str) -> None:
    with pytest.raises(OSError, match="is a FIFO, not a file"):
        files.write_atomically(fifo, "text")
    assert stat.S_ISFIFO(os.stat(fifo).st_mode) and os.listdir(os.path.dirname(fifo)) == ["fifo"]


def test_a_device_and_a_socket_are_not_opened_as_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="is a device, not a file: '/dev/zero'"):
        files.read("/dev/zero")
    with files.open("/dev/zero", streams=True) as file:
        assert file.read(3) == bytes(3)
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as own:
        own.bind("one")
        with pytest.raises(OSError, match="is a socket, not a file: 'one'"):
            files.open("one")


def test_no_match_names_the_close_files(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"did you mean '.*/shakespeare\.txt'"):
        files.glob(str(tmp_path / "shakspeare.txt"))


def test_no_match_lists_what_the_folder_has(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"\*\.txt.*has 'a\.md'"):
        files.glob(str(tmp_path / "*.txt"))


def test_no_match_in_an_empty_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is empty"):
        files.glob(str(tmp_path / "*.txt"))


def test_a_missing_folder_is_named_with_a_close_one(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no folder '.*/text'; did you mean '.*/texts'"):
        files.glob(str(tmp_path / "text" / "*.txt"))


def test_a_folder_in_the_place_of_a_file_is_an_error_that_says_how_to_mean_its_files(
    tmp_path: Path,
) -> None:
    with pytest.raises(IsADirectoryError, match=r"is a folder; its files are .*/\*"):
        files.glob(str(tmp_path))


def test_two_stars_reach_all_folders_below(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x.py", "a/y.py", "a/b/z.py"):
        (tmp_path / name).write_text("x")
    found = files.glob(str(tmp_path / "**" / "*.py"))
    assert [os.path.basename(path) for path in found] == ["z.py", "y.py", "x.py"]


def test_a_name_with_signs_of_a_pattern_is_a_name_if_there_is_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert files.glob(str(tmp_path / "a[1].txt")) == [str(tmp_path / "a[1].txt")]


def test_a_folder_is_copied_with_the_folders_in_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"new")
    (tmp_path / "c" / "b").mkdir(parents=True)
    (tmp_path / "c" / "b" / "x").write_bytes(b"old")
    files.copy_folder(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "c" / "b" / "x").read_bytes() == b"new"
