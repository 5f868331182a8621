"""The standard library as text: which files, which split, and that it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest

from tekso.framework.input.errors import InputError
from tekso.tasks.lm.compression import compressed_bits_per_byte
from tekso.tasks.lm.python_source import PythonSource, find


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for i in range(80):
        path = tmp_path / ("json" if i % 2 else "xml/dom") / f"m{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {i}\n")
    for name in ("site-packages/a.py", "__pycache__/b.py", "test/c.py", "xml/test/d.py", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("left out")
    (tmp_path / "json" / "__init__.py").write_text("")
    return tmp_path


def texts(root: Path, split: Any, **kwargs: Any) -> set[str]:
    source = PythonSource.Params(root=str(root), **kwargs).instantiate(split=split)
    return {text for _, text in source.records()}


def test_files_are_found_by_relative_path_without_packages_and_tests(library: Path) -> None:
    names = find(str(library), exclude=["test"])
    assert names == sorted(names)
    assert len(names) == 81
    assert {"json/m1.py", "xml/dom/m2.py", "json/__init__.py"} <= set(names)


def test_every_file_is_in_one_split_which_does_not_depend_on_the_others(library: Path) -> None:
    shares = {"dev_fraction": 0.2, "test_fraction": 0.2}
    parts = [texts(library, split, **shares) for split in ("train", "dev", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 80
    assert len(parts[0]) > 30 and parts[1] and parts[2]
    for path in list(library.glob("json/*.py"))[::2]:
        path.unlink()
    fewer = [texts(library, split, **shares) for split in ("train", "dev", "test")]
    assert all(after <= before for after, before in zip(fewer, parts, strict=True))


def test_the_split_never_changes_between_versions() -> None:
    from tekso.framework.input.splits import split_of

    names = ["os.py", "json/decoder.py", "statistics.py", "ssl.py", "asyncio/base_events.py"]
    assert [split_of(name, 0.05, 0.05) for name in names] == ["dev", "test", "dev", "test", "train"]


def test_what_is_no_utf8_is_skipped_and_empty_files_are_not_counted(library: Path) -> None:
    bad = library / "json" / "bad.py"
    bad.write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    everything = {"dev_fraction": 0.0, "test_fraction": 0.0}
    source = PythonSource.Params(root=str(library), **everything).instantiate()
    assert source.num_files == 80
    assert source.num_bytes == sum(len(f"x = {i}\n") for i in range(80))
    assert [(skip.file, skip.offset) for skip in source.skipped().named] == [(str(bad), 23)]
    with pytest.raises(InputError, match="max_skipped=0"):
        PythonSource.Params(root=str(library), max_skipped=0, **everything).instantiate()


def test_a_folder_without_python_says_what_to_do(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"no \*\.py file in .*: point root at"):
            PythonSource.Params(root=str(root)).instantiate()


def test_the_library_of_this_interpreter_is_a_real_text() -> None:
    dev = PythonSource.Params().instantiate(split="dev")
    assert dev.num_files >= 15 and dev.num_bytes > 200_000
    assert dev.describe().startswith("standard library of Python 3.")
    text = "".join(text for _, text in dev.records())
    assert "def " in text and "import " in text


def test_compressors_are_measured_in_bits_per_byte() -> None:
    figures = compressed_bits_per_byte(["ab" * 5000, "ab" * 5000])
    assert set(figures) == {"gzip", "xz"}
    assert all(0 < value < 0.1 for value in figures.values())
    with pytest.raises(ValueError, match="no text"):
        compressed_bits_per_byte([])


LIMITED = """
import lzma, resource, sys
sys.path.insert(0, sys.argv[1])
import conftest
from tekso.framework import out_of_memory
from tekso.tasks.lm.compression import compressed_bits_per_byte

text = "".join(str(i * i) for i in range(20_000))
wanted = len(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
limit = out_of_memory.used_bytes() + (100 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(compressed_bits_per_byte([text])["xz"] == 8 * wanted / len(text))
"""


def test_a_small_text_is_compressed_with_little_memory_to_the_same_size() -> None:
    done = processes.run(["-c", LIMITED, str(Path(__file__).parents[3])])
    assert done.stdout == "True\n", done.stderr
