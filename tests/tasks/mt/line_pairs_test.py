"""Pairs in files: paired line by line, splits, and what is malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError
from tekso.tasks.mt.line_pairs import UnequalLinesError
from tekso.tasks.mt.pair_files import JsonLines, Tsv
from tekso.tasks.mt.pairs import Pair
from tekso.tasks.mt.parallel_files import ParallelFiles

IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
LINE = st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n\ufeff")).filter(
    lambda line: line and not line.isspace()
)


def parallel(folder: Path, split: Any = "train", **kwargs: Any) -> ParallelFiles:
    kwargs = {
        "source_files": str(folder / "*.en"),
        "target_files": str(folder / "*.de"),
        "dev_fraction": 0.0,
        **kwargs,
    }
    one: ParallelFiles = ParallelFiles.Params(**kwargs).instantiate(split=split)
    return one


def write(folder: Path, **files: str | bytes) -> None:
    for name, data in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(data.encode() if isinstance(data, str) else data)


def all_of(one: Any) -> list[Pair]:
    return [record for _, record in one.records()]


class TestParallelFiles:
    def test_files_are_sorted_and_paired_in_order(self, tmp_path: Path) -> None:
        write(tmp_path, b_en="three\n", a_en="one\r\ntwo", b_de="drei", a_de="eins\nzwei \n")
        one = parallel(tmp_path)
        expected = [Pair("one", "eins"), Pair("two", "zwei "), Pair("three", "drei")]
        assert all_of(one) == expected
        assert [one[i] for i in range(3)] == expected
        assert one.origin(1).file.endswith("a.en") and one.origin(1).offset == 5
        named = {
            f"{side}_files": f"{tmp_path}/b.{end},{tmp_path}/a.{end}"
            for side, end in (("source", "en"), ("target", "de"))
        }
        assert all_of(parallel(tmp_path, **named)) == [expected[2], *expected[:2]]

    @IN_FOLDER
    @given(pairs=st.lists(st.tuples(LINE, LINE), min_size=1, max_size=10), end=st.booleans())
    def test_line_i_belongs_to_line_i(
        self, tmp_path: Path, pairs: list[tuple[str, str]], end: bool
    ) -> None:
        for side, name in enumerate(("a.en", "a.de")):
            text = "\n".join(pair[side] for pair in pairs) + "\n" * end
            (tmp_path / name).write_bytes(text.encode())
        one = parallel(tmp_path)
        assert all_of(one) == [Pair(*pair) for pair in pairs]
        assert [one[i] for i in range(len(pairs))] == all_of(one)

    def test_unequal_numbers_of_lines_give_both_counts_and_files(self, tmp_path: Path) -> None:
        write(tmp_path, a_en="1\n2\n3\n", a_de="1\n2\n")
        with pytest.raises(UnequalLinesError, match=r"a\.en has 3 lines, .*a\.de has 2 lines") as e:
            parallel(tmp_path)
        assert e.value.counts == (3, 2)
        assert [Path(path).name for path in e.value.paths] == ["a.en", "a.de"]

    def test_unequal_numbers_of_files_name_them(self, tmp_path: Path) -> None:
        write(tmp_path, a_en="1", b_en="1", a_de="1")
        with pytest.raises(InputError, match=r"source_files has 2 files .*target_files has 1 "):
            parallel(tmp_path)

    def test_bad_lines_are_skipped_with_file_and_line(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            a_en=b"good\n\nbad \xff\nfine\n  \nlast\n",
            a_de=b"gut\nzwei\ndrei\nfu\0nf\nleer\nEnde\n",
        )
        one = parallel(tmp_path, max_skipped=4)
        assert all_of(one) == [Pair("good", "gut"), Pair("last", "Ende")]
        found = [(Path(skip.file).name, skip.offset, skip.reason) for skip in one.skipped().named]
        assert found == [
            ("a.en", 5, "line 2: empty"),
            ("a.en", 10, "line 3: not UTF-8: byte 0xff"),
            ("a.de", 16, "line 4: binary: a NUL byte"),
            ("a.en", 17, "line 5: blank"),
        ]
        assert all_of(one) and one.skipped().count == 4  # counted once
        with pytest.raises(BadRecordError, match="line 3: not UTF-8"):
            one[2]
        with pytest.raises(InputError, match=r"max_skipped=3 are malformed: 4 skipped"):
            all_of(parallel(tmp_path, max_skipped=3))

    def test_another_encoding_is_named(self, tmp_path: Path) -> None:
        write(tmp_path, a_en="one\n", a_de="eins\n".encode("utf-16"))
        with pytest.raises(InputError, match=r"a\.de is not UTF-8: .* mark of UTF-16; convert it"):
            parallel(tmp_path)

    def test_nothing_but_bad_lines_is_an_error(self, tmp_path: Path) -> None:
        write(tmp_path, a_en="\n\n", a_de="\n\n")
        with pytest.raises(InputError, match="nothing is left to read: 2 skipped"):
            all_of(parallel(tmp_path))
        write(tmp_path, a_en="", a_de="")
        with pytest.raises(InputError, match="there is nothing to read"):
            parallel(tmp_path)

    def test_the_end_of_every_file_is_held_out(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            for side in ("en", "de"):
                lines = "".join(f"{side} {name} {i}\n" for i in range(10))
                (tmp_path / f"{name}.{side}").write_text(lines)
        share = {"dev_fraction": 0.2, "test_fraction": 0.1}
        parts = [all_of(parallel(tmp_path, split, **share)) for split in ("train", "test", "dev")]
        assert [len(part) for part in parts] == [14, 2, 4]
        assert parts[2] == [Pair(f"en {n} {i}", f"de {n} {i}") for n in "ab" for i in (8, 9)]

    def test_a_hash_keeps_equal_sources_together(self, tmp_path: Path) -> None:
        sources = [f"source {i % 100}" for i in range(400)]
        write(
            tmp_path,
            a_en="\n".join(sources),
            a_de="\n".join(f"target {i}" for i in range(400)),
        )
        by_hash = {"holdout": "hash", "dev_fraction": 0.3, "test_fraction": 0.2}
        parts = [all_of(parallel(tmp_path, s, **by_hash)) for s in ("train", "dev", "test")]
        assert sum(map(len, parts)) == 400 and all(parts)
        found = [{pair.source for pair in part} for part in parts]
        assert sum(map(len, found)) == len(set.union(*found)) == 100
        assert len({pair.target for part in parts for pair in part}) == 400

    def test_files_of_their_own_are_held_out(self, tmp_path: Path) -> None:
        write(tmp_path, a_en="1\n2", a_de="I\nII", held_src="3", held_trg="III")
        own = {
            "dev_source_files": str(tmp_path / "held.src"),
            "dev_target_files": str(tmp_path / "held.trg"),
            "dev_fraction": 0.5,
        }
        assert all_of(parallel(tmp_path, **own)) == [Pair("1", "I"), Pair("2", "II")]
        dev = parallel(tmp_path, "dev", **own)
        assert all_of(dev) == [Pair("3", "III")]
        assert "held.src" in dev.describe() and "held.trg" in dev.describe()
        assert "held.src" not in parallel(tmp_path, **own).describe()
        with pytest.raises(InputError, match="dev_target_files is empty"):
            parallel(tmp_path, "dev", **{**own, "dev_target_files": ""})
        with pytest.raises(InputError, match="no test text: set test_source_files, or test_frac"):
            parallel(tmp_path, "test", **own)

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"source_files is empty: .*--set source_files="):
            ParallelFiles.Params().instantiate()
        with pytest.raises(FileNotFoundError, match="source_files: nothing matches"):
            parallel(tmp_path)

    def test_other_files_have_another_fingerprint(self, tmp_path: Path) -> None:
        write(tmp_path, a_en="1\n2", a_de="I\nII")
        before = parallel(tmp_path).fingerprint()
        assert parallel(tmp_path).fingerprint() == before
        write(tmp_path, a_de="I\nIII")
        assert parallel(tmp_path).fingerprint() != before


class TestTsv:
    def source(self, folder: Path, split: Any = "train", **kwargs: Any) -> Tsv:
        kwargs = {"files": str(folder / "*.tsv"), "dev_fraction": 0.0, **kwargs}
        one: Tsv = Tsv.Params(**kwargs).instantiate(split=split)
        return one

    def test_columns_are_the_sides(self, tmp_path: Path) -> None:
        write(tmp_path, a_tsv="one\teins\tmore\r\ntwo\tzwei\n")
        one = self.source(tmp_path)
        assert all_of(one) == [Pair("one", "eins"), Pair("two", "zwei")]
        swapped = self.source(tmp_path, source_column=1, target_column=0)
        assert swapped[1] == Pair("zwei", "two")

    def test_malformed_rows_are_skipped_with_their_line(self, tmp_path: Path) -> None:
        write(tmp_path, a_tsv="one\teins\ntwo\n\n\tdrei\nfour\tvier\n")
        one = self.source(tmp_path)
        assert all_of(one) == [Pair("one", "eins"), Pair("four", "vier")]
        assert [skip.reason for skip in one.skipped().named] == [
            "line 2: 1 columns, but column 1 is needed (the first is 0)",
            "line 3: empty",
            "line 4: source empty",
        ]

    def test_a_column_names_the_language(self, tmp_path: Path) -> None:
        write(tmp_path, a_tsv="de\tone\teins\nfr\tone\tun\nxx\tone\tein\n")
        columns = {"source_column": 1, "target_column": 2, "language_column": 0}
        one = self.source(tmp_path, languages=["fr", "de"], **columns)
        assert all_of(one) == [Pair("one", "eins", "de"), Pair("one", "un", "fr")]
        assert one.languages == ("fr", "de")
        reason = one.skipped().named[0].reason
        assert reason == "line 3: its language is 'xx', must be one of fr, de"

    def test_a_hash_looks_at_the_source_alone(self, tmp_path: Path) -> None:
        rows = "".join(f"{i % 50}\ttarget {i}\n" for i in range(200))
        write(tmp_path, a_tsv=rows)
        by_hash = {"holdout": "hash", "dev_fraction": 0.4}
        train, dev = (
            {pair.source for pair in all_of(self.source(tmp_path, split, **by_hash))}
            for split in ("train", "dev")
        )
        assert not train & dev and len(train | dev) == 50 and dev


class TestJsonLines:
    def source(self, folder: Path, **kwargs: Any) -> JsonLines:
        kwargs = {"files": str(folder / "*.jsonl"), "dev_fraction": 0.0, **kwargs}
        one: JsonLines = JsonLines.Params(**kwargs).instantiate()
        return one

    def test_fields_are_the_sides(self, tmp_path: Path) -> None:
        records = [
            {"source": "a\nb", "target": "ä"},
            {"source": "x", "target": "y", "more": [1]},
        ]
        write(tmp_path, a_jsonl="".join(json.dumps(record) + "\n" for record in records))
        assert all_of(self.source(tmp_path)) == [Pair("a\nb", "ä"), Pair("x", "y")]

    def test_a_dot_leads_into_an_object(self, tmp_path: Path) -> None:
        write(tmp_path, a_jsonl='{"translation": {"en": "one", "de": "eins"}, "to": "de"}\n')
        names = {"source_field": "translation.en", "target_field": "translation.de"}
        assert all_of(self.source(tmp_path, **names)) == [Pair("one", "eins")]
        one = self.source(tmp_path, language_field="to", languages=["de"], **names)
        assert all_of(one) == [Pair("one", "eins", "de")]

    def test_malformed_rows_are_skipped_with_their_line(self, tmp_path: Path) -> None:
        rows = ['{"source": "a", "target": "b"}', "{", "[]", '{"source": "a"}',
                '{"source": "a", "target": 3}', '{"source": "", "target": "b"}',
                '{"source": "\\ud800", "target": "b"}']  # fmt: skip
        write(tmp_path, a_jsonl="\n".join(rows))
        one = self.source(tmp_path)
        assert all_of(one) == [Pair("a", "b")]
        reasons = [skip.reason for skip in one.skipped().named]
        assert reasons[0].startswith("line 2: not valid JSON: Expecting property name")
        assert reasons[1:] == [
            "line 3: no field 'source'; the fields are: none",
            "line 4: no field 'target'; the fields are: source",
            "line 5: field 'target' must be text, is int",
            "line 6: source empty",
            "line 7: source a lone surrogate, which UTF-8 cannot encode",
        ]

    def test_no_files_say_how_to_give_some(self) -> None:
        with pytest.raises(InputError, match=r"files is empty: .*--set files="):
            JsonLines.Params().instantiate()
