"""Tests of stored benchmarks, and that the documents have their tables."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_records import Record, record, result

from benchmarks import documents, publish, stored, table
from benchmarks.workloads import TINY, WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {
    "processor": "AMD EPYC",
    "family_model": " (Zen 4; family 25, model 17)",
    "features": "AVX-512 BF16, AVX-512, AVX2",
    "cores": 2,
    "memory_bytes": 2**33,
    "system": "Linux",
    "load_before": 0.11,
}
NAME = "amd_epyc_zen_4_family_25_model_17_2_cores_avx_512_bf16"


def measured(
    workloads: dict[str, dict[str, list[Record]]], *, load: float = 0.11, **changes: Any
) -> Record:
    """Returns a result of the machine that can be stored."""
    common: Record = {
        "date": "2026-01-02 03-04",
        "commit": "af5668a6",
        "machine": {**MACHINE, "load_before": load},
        "turns": 2,
        "isa": "own",
        "sizes": {name: table.sizes(WORKLOADS[name]) for name in workloads},
    }
    return {**result({}), **common, "workloads": workloads, **changes}


def both(tekso: float, pytorch: float) -> dict[str, list[Record]]:
    """Returns records of two turns of two frameworks."""
    versions = {"python": "3.11", "torch": "2.13"}
    return {
        "tekso": [record(tekso, tekso + 1, tekso + 90), record(tekso + 2)],
        "pytorch": [record(pytorch, versions=versions), record(pytorch + 2, versions=versions)],
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / stored.FOLDER).parent.mkdir()  # git keeps no empty folder
    for name in ("README.md", "docs/speed.md"):
        (tmp_path / name).write_text(
            f"# Title\n\n{documents.BEGIN}\n\nold\n\n{documents.END}\n\nThe end.\n"
        )
    return tmp_path


def run(checkout: Path, *results: Record) -> int:
    files = []
    for number, one in enumerate(results):
        files.append(checkout / f"{number}.json")
        files[-1].write_text(json.dumps(one))
    return publish.main([str(path) for path in files], root=checkout)


def rows_of(document: Path) -> list[list[str]]:
    """Returns the cells of the tables of a document, without the lines under the headers."""
    lines = [line for line in document.read_text().splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [row for row in cells if row[0] != "---"]


def test_the_documents_have_the_tables_of_the_stored_results() -> None:
    for path, text in publish.publish([], ROOT).items():
        assert path.read_text() == text, "run `python -m benchmarks.publish`"


def test_turns_that_the_page_names_are_stored() -> None:
    page = (ROOT / "docs" / "speed.md").read_text()
    named = re.findall(r"(\d+) and (\d+) ms with `(\w+)`", page)
    assert len(named) == 2
    files = [json.loads(path.read_text()) for path in (ROOT / stored.FOLDER).glob("*.json")]
    for first, second, workload in named:
        rows = [row for file in files for row in file["workloads"].get(workload, [])]
        peers = [row["peers"].get("pytorch_compile") for row in rows]
        turns = [[round(turn["step_ms"][0]) for turn in peer] for peer in peers if peer]
        assert turns == [[int(first), int(second)]], workload


def test_stored_results_are_of_the_registered_workloads_and_of_tekso_s_model() -> None:
    for path in (ROOT / stored.FOLDER).glob("*.json"):
        found = stored.read(path)
        assert stored.text(found) == path.read_text()
        assert path.stem == stored.name_of(found["machine"], found["isa"])
        for name, measurements in found["workloads"].items():
            for one in measurements:
                now = table.sizes(WORKLOADS[name])
                assert one["sizes"] == now, f"{path}, {name}: measure it again, or remove it"
                assert table.faults({"workloads": {name: one["peers"]}}) == []


def test_a_result_is_stored_with_a_line_for_each_process_and_written_into_both_documents(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flax = [{"skipped": "cannot be installed: no network"}]
    by_peer = {**both(10.0, 30.0), "flax": flax}
    assert run(checkout, measured({"lstm": by_peer, "resnet": both(5.0, 4.0)})) == 0
    file = checkout / stored.FOLDER / f"{NAME}.json"
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"Written: {file.relative_to(checkout)}",
        "Written: README.md",
        "Written: docs/speed.md",
    ]
    assert not printed.err

    lines = file.read_text().splitlines()
    assert [line for line in lines if '"step_ms": [11.0]' in line and '"losses": [4.0' in line]
    assert sum('"step_ms"' in line for line in lines) == 8
    found = json.loads(file.read_text())
    assert found["machine"] == {name: MACHINE[name] for name in found["machine"]}
    (lstm,) = found["workloads"]["lstm"]
    assert (lstm["date"], lstm["load_before"], lstm["commit"]) == (
        "2026-01-02 03-04",
        0.11,
        "af5668a6",
    )

    speed = checkout / "docs" / "speed.md"
    assert rows_of(speed) == [
        ["workload", "framework", *table.HEADER[1:-1], "measured", "load before"],
        ["`lstm`", "Tekso", "11.5", "11.0 to 12.0", "1.00", "2.0", "1,024", "2026-01-02", "0.1"],
        ["`lstm`", "PyTorch", "31.0", "30.0 to 32.0", "2.70", "2.0", "1,024", "2026-01-02", "0.1"],
        ["`resnet`", "Tekso", "6.5", "6.0 to 7.0", "1.00", "2.0", "1,024", "2026-01-02", "0.1"],
        ["`resnet`", "PyTorch", "5.0", "4.0 to 6.0", "0.77", "2.0", "1,024", "2026-01-02", "0.1"],
    ]
    text = " ".join(speed.read_text().split())
    assert "#### AMD EPYC (Zen 4; family 25, model 17), AVX-512 BF16" in text
    assert (
        "2 cores; AVX-512 BF16, AVX-512, AVX2. float32. Each figure is the median of 2 turns"
        in text
    )
    assert "a turn is the median of 5 steps in a new process" in text
    assert "Versions: python 3.11, torch 2.13. Commit of Tekso: af5668a6." in text
    assert "Without figures: `lstm` in `flax` (cannot be installed: no network)." in text
    assert rows_of(checkout / "README.md") == [
        ["ms per step", "Tekso", "PyTorch", "PyTorch, tuned malloc", "measured", "load before"],
        ["`lstm`", "11.5 (11.0 to 12.0)", "31.0 (30.0 to 32.0), × 2.70", "–", "2026-01-02", "0.1"],
    ]
    for document in (speed, checkout / "README.md"):
        text = document.read_text()
        assert text.startswith(f"# Title\n\n{documents.BEGIN}\n\n")
        assert text.endswith(f"\n\n{documents.END}\n\nThe end.\n")
        assert "old" not in text
    before = [path.read_text() for path in (file, speed)]
    assert run(checkout, measured({"lstm": by_peer, "resnet": both(5.0, 4.0)})) == 0
    assert [path.read_text() for path in (file, speed)] == before


def test_newer_rows_replace_those_of_their_frameworks_and_keep_their_date_and_load(
    checkout: Path,
) -> None:
    first = {
        "lstm": {**both(10.0, 30.0), "flax": [record(40.0), record(42.0)]},
        "resnet": both(5.0, 4.0),
    }
    later = {"lstm": {**both(20.0, 21.0), "flax": [{"skipped": "no memory"}]}}
    newer = measured(later, date="2026-02-03 04-05", load=0.9)
    expected = [  # the earlier Flax stays, beside the Tekso of its run
        ["`lstm`", "Tekso", "11.5", "1.00", "2026-01-02", "0.1"],
        ["`lstm`", "Flax", "41.0", "3.57", "2026-01-02", "0.1"],
        ["`lstm`", "Tekso", "21.5", "1.00", "2026-02-03", "0.9 (not idle)"],
        ["`lstm`", "PyTorch", "22.0", "1.02", "2026-02-03", "0.9 (not idle)"],
        ["`resnet`", "Tekso", "6.5", "1.00", "2026-01-02", "0.1"],
        ["`resnet`", "PyTorch", "5.0", "0.77", "2026-01-02", "0.1"],
    ]
    for order in ((measured(first), newer), (newer, measured(first))):
        for path in (checkout / stored.FOLDER).glob("*"):
            path.unlink()
        assert run(checkout, *order) == 0
        rows = rows_of(checkout / "docs" / "speed.md")[1:]
        assert [[*row[:3], row[4], *row[-2:]] for row in rows] == expected
        readme = rows_of(checkout / "README.md")[1:]
        assert [(row[0], row[2]) for row in readme] == [("`lstm`", "22.0 (21.0 to 23.0), × 1.02")]

    flax = {"lstm": {"tekso": [record(8.0), record(8.0)], "flax": [record(16.0), record(18.0)]}}
    assert run(checkout, measured(flax, date="2026-03-04 05-06")) == 0
    rows = rows_of(checkout / "docs" / "speed.md")[1:]
    assert [(row[1], row[-2]) for row in rows[:4]] == [
        ("Tekso", "2026-02-03"),
        ("PyTorch", "2026-02-03"),
        ("Tekso", "2026-03-04"),
        ("Flax", "2026-03-04"),
    ]


def test_measurements_of_other_sizes_of_a_workload_are_replaced(checkout: Path) -> None:
    old = stored.added(None, measured({"lstm": both(1.0, 2.0)}, sizes={"lstm": "dim 3"}))
    only_tekso = {"lstm": {"tekso": [record(3.0), record(4.0)]}}
    found = stored.added(old, measured(only_tekso, date="2026-02-03 04-05"))
    assert [one["date"] for one in found["workloads"]["lstm"]] == ["2026-02-03 04-05"]


def test_machines_and_limited_instructions_have_files_of_their_own(checkout: Path) -> None:
    lstm = {"lstm": both(10.0, 30.0)}
    features = {**MACHINE, "features": "AVX2"}
    limited = measured(lstm, isa="avx2")
    assert run(checkout, measured(lstm), measured(lstm, machine=features), limited) == 0
    assert {path.stem for path in (checkout / stored.FOLDER).glob("*.json")} == {
        NAME,
        NAME.replace("avx_512_bf16", "avx2"),
        NAME.replace("avx_512_bf16", "limited_to_avx2"),
    }
    speed = (checkout / "docs" / "speed.md").read_text()
    assert "#### AMD EPYC (Zen 4; family 25, model 17), limited to AVX2" in speed
    assert speed.count("Limited to AVX2 by environment variables") == 1
    assert len(rows_of(checkout / "README.md")) == 4  # two tables: not the limited one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": {"lstm": table.sizes(TINY["lstm"])}}, "lstm has other sizes than those that"),
        (
            {"workloads": {"lstm": {"tekso": [record(1.0)] * 2, "pytorch": [record(1.0)]}}},
            "lstm, pytorch: a single turn has no spread; measure with --turns=3",
        ),
        (
            {"workloads": {"lstm": {"tekso": [record(1.0), record(math.nan)]}}},
            "lstm, tekso: a time of a step is not a positive number",
        ),
        ({"workloads": {}}, "it has no workloads"),
        ({"workloads": {"lstm": {"tekso": [{"skipped": "no"}]}}}, "lstm was not measured in Tekso"),
        (
            {"workloads": {"lstm": {"tekso": [record(1.0, losses=[math.nan] * 3)] * 2}}},
            "lstm, tekso: not Tekso's model",
        ),
        ({"machine": {}}, "it is not from `make benchmarks` of this version (KeyError: "),
    ],
)
def test_what_has_no_spread_or_another_model_is_not_stored(
    changes: Record, message: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"workloads": {"lstm": both(10.0, 30.0)}}
    assert run(checkout, measured(**good), measured(**{**good, **changes})) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith(f"benchmarks: {checkout / '1.json'} cannot be stored: ")
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not (checkout / stored.FOLDER).exists()
    assert "old" in (checkout / "README.md").read_text()


def test_files_that_are_no_results_and_documents_without_markers_are_one_line(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish.main([str(checkout / "none.json")], root=checkout) == 1
    assert "none.json cannot be stored: No such file" in capsys.readouterr().err
    (checkout / "bad.json").write_text("{")
    assert publish.main([str(checkout / "bad.json")], root=checkout) == 1
    assert "bad.json cannot be stored: Expecting" in capsys.readouterr().err
    damaged = checkout / stored.FOLDER / "one.json"
    damaged.parent.mkdir()
    damaged.write_text("<<<<<<< HEAD\n")
    assert run(checkout) == 1
    assert f"benchmarks: {damaged} is damaged: Expecting" in capsys.readouterr().err
    damaged.unlink()
    (checkout / "README.md").write_text(documents.BEGIN)
    assert publish.main([], root=checkout) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"benchmarks: {checkout / 'README.md'} does not have the lines ")
    assert printed.count("\n") == 1


def test_a_machine_that_was_not_idle_is_a_warning(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkout, measured({"lstm": both(10.0, 30.0)}, load=3.25)) == 0
    warning = f"benchmarks: warning: {checkout / '0.json'}: the load average was 3.2\n"
    assert capsys.readouterr().err == warning
    assert rows_of(checkout / "README.md")[1][-1] == "3.2 (not idle)"
    assert run(checkout) == 0
    assert rows_of(checkout / "README.md")[1][-1] == "3.2 (not idle)"


def test_without_stored_results_the_documents_say_so(checkout: Path) -> None:
    assert run(checkout) == 0
    for name in ("README.md", "docs/speed.md"):
        assert f"{documents.BEGIN}\n\nNo result is stored yet.\n\n" in (checkout / name).read_text()
