"""What is read of runs, and how they are grouped."""

from __future__ import annotations

import json
from pathlib import Path

from compared_runs import two_groups, write

from tekso.tools.comparison import runs


def test_runs_are_grouped_by_all_params_but_the_seed_and_named_by_what_differs(
    tmp_path: Path,
) -> None:
    found = [runs.read(path) for path in two_groups(tmp_path, [1.0, 1.2], [2.0])]
    groups = runs.groups(found)
    assert [(g.name, [r.seed for r in g.runs]) for g in groups] == [
        ("initial_value=0.1", ["0", "1"]), ("initial_value=0.3", ["0"])
    ]  # fmt: skip
    (seed, rate) = sorted(runs.differences(found), key=lambda one: one.path, reverse=True)
    assert seed.path == "run.seed" and rate.path == "learner.schedule.initial_value"
    assert rate.values[2] == runs.ParamValue("0.3", "--set")
    assert found[0].params["task.prompt"] == runs.ParamValue('"a  # b"', "params/lm/some.py:8")
    assert found[0].unit == "tokens" and runs.main_metric(found) == "dev/loss"
    assert found[1].curves["dev/loss"][-1] == runs.Point(4, 40.0, 9.0, 1.2)
    assert found[0].seconds == {"start": 1.0, "step": 8.0}


def test_settings_of_what_is_recorded_make_no_groups(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0, seed=n) for n, name in enumerate("ab")]
    for path, value in zip(paths, (0, 5), strict=True):
        with Path(path, "params.txt").open("a") as file:
            for field in ("weight_figures", "log", "eval", "checkpoint"):
                file.write(f"run.{field}_every_steps : {value}\n")
    (group,) = runs.groups([runs.read(path) for path in paths])
    assert len(group.runs) == 2


def with_devices(path: str, devices: str, processes: int = 1) -> str:
    """Adds checkpoints to a run, the newest of which was written on these devices."""
    for step, found in ((2, "9 GPU"), (4, devices)):
        folder = Path(path, "checkpoints", f"step_{step:08d}")
        folder.mkdir(parents=True)
        conditions = {"devices": found, "processes": processes}
        (folder / "checkpoint.json").write_text(json.dumps({"conditions": conditions}))
    Path(path, "checkpoints", "step_00000006").mkdir()  # is being written
    return path


def test_runs_of_one_seed_on_other_devices_are_groups_that_name_them(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "abc"]
    with_devices(paths[0], "1 CPU")
    with_devices(paths[1], "2 CPU")
    with_devices(paths[2], "2 CPU", processes=2)
    found = [runs.read(path) for path in paths]
    assert [g.name for g in runs.groups(found)] == [
        "devices=1 CPU", "devices=2 CPU", "devices=2 CPU, 2 processes",
    ]  # fmt: skip
    assert [d.path for d in runs.differences(found)] == ["devices"]


def test_runs_of_other_seeds_or_on_unknown_devices_stay_one_group(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(seed), loss=1.0, seed=seed) for seed in range(2)]
    for path, devices in zip(paths, ("1 CPU", "2 CPU"), strict=True):
        with_devices(path, devices)
    seeds = [runs.read(path) for path in paths]
    assert len(runs.groups(seeds)) == 1
    assert [d.path for d in runs.differences(seeds)] == ["run.seed", "devices"]
    unknown = runs.read(write(tmp_path / "unknown", loss=1.0))
    assert len(runs.groups([seeds[0], unknown])) == 1
    assert runs.differences([seeds[0], unknown]) == []


def test_samples_are_the_newest_text_of_each_evaluation_and_its_first_characters(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a", loss=1.0, text=5000 * "x")
    (tmp_path / "a" / "decoded" / "dev").mkdir(parents=True)
    for step in (3, 12, 9):
        file = tmp_path / "a" / "decoded" / "dev" / f"step_{step:09d}.txt"
        file.write_text(f"of step {step}")
    found = runs.read(path).samples
    assert found == {"samples.txt": 4000 * "x", "decoded/dev": "of step 12"}


def test_a_key_with_spaces_is_a_path() -> None:
    line = 'eval_inputs["a b"].batch_size : 8  # --set'
    assert runs.params_of(line) == {'eval_inputs["a b"].batch_size': runs.ParamValue("8", "--set")}


def test_curves_by_tokens_do_not_depend_on_how_often_training_is_logged() -> None:
    seen = {2: 20, 10: 100, 12: 132}
    records = [
        *({"step": i, "split": "train", "loss": 1.0, "tokens_seen": n} for i, n in seen.items()),
        *({"step": i, "split": "dev", "loss": 2.0} for i in (1, 5, 10, 11, 18)),
    ]
    points = runs.curves_of(records, "tokens")["dev/loss"]
    assert [(p.step, p.seen) for p in points] == [
        (1, 10.0), (5, 50.0), (10, 100.0), (11, 116.0), (18, 198.0)
    ]  # fmt: skip
    points = runs.curves_of(records[-5:], "")["dev/loss"]
    assert {point.seen for point in points} == {None}


def test_groups_of_another_class_are_named_by_the_class_without_its_own_fields(
    tmp_path: Path,
) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "abc"]
    for path, name, field in zip(paths, "ABB", ["", "mesh : 2", "mesh : 4"], strict=True):
        with open(f"{path}/params.txt", "a", encoding="utf-8") as file:
            file.write(f'execution : Params("some.module:{name}")\n')
            file.write(f"execution.{field}\n" if field else "")
    found = [runs.read(path) for path in paths]
    assert [g.name for g in runs.groups(found[:2])] == ["execution=A", "execution=B"]
    assert [g.name for g in runs.groups(found[1:])] == ["mesh=2", "mesh=4"]
    assert [g.name for g in runs.groups(found)] == [
        "execution=A",
        "execution=B, mesh=2",
        "execution=B, mesh=4",
    ]


def test_numbers_of_steps_are_groups_if_they_are_what_is_compared(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{steps}_{i}", loss=1.0, seed=i) for steps in (4, 8) for i in (0, 1)]
    for path in paths[2:]:
        file = Path(path, "params.txt")
        file.write_text(file.read_text().replace("run.steps : 4", "run.steps : 8"))
    found = [runs.read(path) for path in paths]
    assert [(g.name, len(g.runs)) for g in runs.groups(found)] == [("steps=4", 2), ("steps=8", 2)]
    # A longer run of another seed is one more run.
    assert [len(group.runs) for group in runs.groups([found[0], found[3]])] == [2]


def test_the_default_metric_is_one_that_all_runs_have(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, loss=1.0) for name in "ab"]
    assert runs.main_metric([runs.read(path) for path in paths]) == "dev/loss"
    for path in paths:
        with Path(path, "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "split": "dev", "bits_per_byte": 2.0}\n')
        wanted = "dev/loss" if path == paths[0] else "dev/bits_per_byte"
        assert runs.main_metric([runs.read(path) for path in paths]) == wanted


def test_the_time_of_a_run_includes_what_follows_its_last_figures(tmp_path: Path) -> None:
    path = write(tmp_path / "a", loss=1.0)
    more = {"start": 1.0, "step": 8.0, "decoding": 3.0}
    for spent in (more, {"start": 1.0}, {"start": 0.1, "step": 0.1, "other": 0.1}):
        record = {"step": 4, "split": "train", "seconds": spent}
        Path(path, "progress.jsonl").write_text(f"{json.dumps(record)}\n")
        wanted = more if spent == more else {"start": 1.0, "step": 8.0}  # the longer time
        assert runs.read(path).seconds == wanted


def test_damaged_times_of_a_record_count_as_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a", loss=1.0)
    with Path(path, "metrics.jsonl").open("a") as file:
        for step, seconds in ((5, {"step": "x", "start": 3}), (6, 4)):
            record = {"step": step, "split": "dev", "loss": 1.0, "seconds": seconds}
            file.write(f"{json.dumps(record)}\n")
    run = runs.read(path)
    assert run.seconds == {"start": 3.0}
    assert [point.seconds for point in run.curves["dev/loss"]][-2:] == [3.0, None]
