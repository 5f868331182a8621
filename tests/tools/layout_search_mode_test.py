"""Tests of the command line --mode=inspect_sharding --auto."""

from __future__ import annotations

import json

import pytest

from tekso.tools import trainer

SMALL = (
    "--set=task.model.stack.num_layers=1",
    "--set=input.batch_size=8",
    "--set=input.length=32",
)


def main(*args: str) -> int:
    return trainer.main(["tekso-trainer", "--mode=inspect_sharding", "--auto", *SMALL, *args])


def test_any_experiment_is_searched_for_a_number_of_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("--model=lm.python_source.Tiny", "--devices=8", "--device=a100") == 0
    text = capsys.readouterr().out
    assert text.startswith("lm.python_source.Tiny\n")
    assert "layouts over 8 × a100 were compared by a" in text
    assert "(given)" not in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_mesh_of_an_experiment_is_searched_and_its_layout_is_ranked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("--model=lm.python_source.TinyMesh", "--format=json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["device"]) == ("lm.python_source.TinyMesh", "tpu_v3")
    assert {layout["mesh"] for layout in record["layouts"]} == {"data:2;model:4"}
    (asked,) = [layout for layout in record["layouts"] if layout["asked_for"]]
    assert asked["rules"] == "batch:data;mlp:model;heads:model;vocab:model"
    assert f"has rank {asked['place']}." in record["verdict"] or asked["place"] == 1


def test_layout_for_other_devices_than_are_searched_is_not_ranked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("--model=lm.python_source.TinyMesh", "--devices=4", "--format=json") == 0
    record = json.loads(capsys.readouterr().out)
    assert not any(layout["asked_for"] for layout in record["layouts"])


def test_what_is_missing_or_wrong_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--model=lm.python_source.Tiny"
    assert main(tiny) == 2
    assert "neither is given: add --devices=512, or" in capsys.readouterr().err
    assert main(tiny, "--devices=4", "--device=tpu3") == 2
    assert "no device type 'tpu3'; did you mean tpu_v3?" in capsys.readouterr().err
    assert trainer.main(["tekso-trainer", tiny, "--auto"]) == 2
    expected = "--auto works only with --mode=inspect_sharding or plan, not with train"
    assert expected in capsys.readouterr().err
