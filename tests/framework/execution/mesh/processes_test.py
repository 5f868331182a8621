"""Several processes train together on loopback: equal to one process, also after one was lost."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import processes
import pytest
from clusters import (
    AN_END_S,
    DEADLINE_S,
    LOST,
    Trainer,
    built,
    free_addresses,
    losses,
    start_together,
    write_package,
)

from tekso.framework.exit_codes import ExitCode

MODEL = "--model=ending.experiments.Small"
ONE_LAYER = "--set=task.model.stack.num_layers=1"
LAYOUTS = {
    "data:2": ("batch:data", 1),
    "data:2;model:2": ("batch:data;mlp:model;vocab:model", 2),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("outside"))


def arguments(logdir: Path, mesh: str, devices: int) -> list[str]:
    return [
        MODEL,
        f"--logdir={logdir}",
        "--execution=mesh_sharded",
        f"--cpu_devices={devices}",
        f"--set=execution.mesh={mesh}",
        f"--set=execution.rules={LAYOUTS[mesh][0]}",
        ONE_LAYER,
        "--deterministic",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "victim", "setting", "own"),
    [
        # Batches of 4 examples, and one of 3 in training and in each evaluation, which the two
        # devices cannot divide.
        ("data:2", 1, "input.short=True,eval_inputs.dev.short=True", ({"0-2"}, {"2-4"})),
        # Without evaluations, which each process traces, too.
        (
            "data:2;model:2",
            0,
            "learner.accumulation_steps=2,eval_inputs={},run.keep_best.eval_input=None",
            ({"0-1", "2-3"}, {"1-2", "3-4"}),
        ),
    ],
)
def test_lost_process_is_named_and_the_same_command_continues(
    package: Path,
    tmp_path: Path,
    mesh: str,
    victim: int,
    setting: str,
    own: tuple[set[str], set[str]],
) -> None:
    devices = LAYOUTS[mesh][1]
    one_device = [MODEL, f"--logdir={tmp_path / 'alone'}", "--cpu_devices=1"]
    one_device += ["--execution=data_parallel", "--set=execution.towers=1"]
    one_device += [ONE_LAYER, "--set=execution.xla=none"]
    settings = [f"--set={each}" for each in setting.split(",")]
    alone = Trainer(package, *one_device, *settings, **processes.OP_BY_OP)
    code, _, err = alone.end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    expected = losses(tmp_path / "alone")
    assert list(expected) == list(range(1, 21))

    logdir = tmp_path / "together"
    args = [*arguments(logdir, mesh, devices), *settings]
    started = start_together(2, package, args, ending=(victim, 14, signal.SIGKILL))
    deadline = time.monotonic() + DEADLINE_S
    assert started[victim].end(deadline)[0] == -signal.SIGKILL
    lost_at = time.monotonic()
    code, _, err = started[1 - victim].end(lost_at + AN_END_S)
    lost = LOST.match(err)
    assert code == ExitCode.PROCESS_LOST and lost and int(lost[1]) == victim, err
    assert int(lost[3]) in (4, 8, 10, 12)  # 10 is the best
    before = losses(logdir)
    assert max(before) >= 10

    deadline = time.monotonic() + DEADLINE_S
    log = tmp_path / "built"
    again = start_together(2, package, args, BUILT=str(log))
    ends = [trainer.end(deadline) for trainer in again]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert f"resuming from {logdir}/checkpoints/step_{int(lost[3]):08d}" in ends[0][1]
    for process in range(2):
        short = {"0-3"} if "short" in setting else own[process]
        expected_rows = {s: short if s == 17 else own[process] for s in range(int(lost[3]), 20)}
        found_rows = built(log, process)
        assert {s: found_rows[s] for s in expected_rows} == expected_rows
        if "short" in setting:
            assert built(log, process, "dev.")[2] == {"0-3"}  # the last batch of an evaluation
    found = losses(logdir)
    assert list(found) == list(range(1, 21))
    assert {step: found[step] for step in before} == before  # to the last bit
    # Sums over devices are taken in another order than in one process.
    assert found == pytest.approx(expected, rel=1e-6)
    assert losses(logdir, "dev") == pytest.approx(losses(tmp_path / "alone", "dev"), rel=1e-6)
    assert "loss" not in ends[1][1], "one process reports the run"

    if mesh != "data:2":  # the other one: its batches are uneven
        return
    deadline = time.monotonic() + DEADLINE_S
    evaluating = [f"--logdir={logdir}", "--mode=eval", "--format=json", f"--cpu_devices={devices}"]
    ends = [trainer.end(deadline) for trainer in start_together(2, package, evaluating)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert json.loads(ends[0][1])["dev"]["loss"] == pytest.approx(losses(logdir, "dev")[20])
    assert ends[1][1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["mesh_sharded", "data_parallel"])
def test_process_killed_in_the_middle_of_a_sharded_write(
    package: Path, tmp_path: Path, execution: str
) -> None:
    cluster = f"--cluster={','.join(free_addresses(2))}"
    args = [*arguments(tmp_path, "data:2;model:2", 2), "--steps=10"]
    if execution == "data_parallel":  # all processes have the whole state, and divide it
        args = [MODEL, f"--logdir={tmp_path}", "--steps=10", ONE_LAYER]
        args += ["--execution=data_parallel", "--deterministic", "--set=execution.xla=none"]
    args.append("--set=run.checkpoint_buffer_mb=0")  # steps wait as those of a large state
    deadline = time.monotonic() + DEADLINE_S
    first = Trainer(package, *args, cluster, "--process=0")
    second = Trainer(package, *args, cluster, "--process=1", END_AT_FILE="2")
    assert second.end(deadline)[0] == -signal.SIGKILL
    code, _, err = first.end(time.monotonic() + AN_END_S)
    lost = LOST.match(err)
    assert code == ExitCode.PROCESS_LOST and lost and (lost[1], lost[3]) == ("1", "4"), err
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_00000004", ".unfinished_step_00000008"}
    before = losses(tmp_path)

    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in start_together(2, package, args)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert f"resuming from {tmp_path}/checkpoints/step_00000004" in ends[0][1]
    found = losses(tmp_path)
    assert {step: found[step] for step in before} == before  # to the last bit
    last = tmp_path / "checkpoints" / "step_00000010"
    sizes = [path.stat().st_size for path in sorted(last.glob("tensors.data-*"))]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)  # a file of each process

    alone = [f"--logdir={tmp_path}", "--mode=eval", "--format=json", "--execution=data_parallel"]
    alone += ["--set=execution.towers=1", "--set=execution.xla=none"]
    evaluation = Trainer(package, *alone, **processes.OP_BY_OP)
    code, out, err = evaluation.end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    assert json.loads(out)["dev"]["loss"] == pytest.approx(losses(tmp_path, "dev")[10], rel=1e-6)


# ../data_parallel_processes_test.py sends a signal to one of four processes.
@pytest.mark.matrix
def test_signal_to_one_process_stops_all_at_the_same_step(package: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, "data:2", 1)
    started = start_together(2, package, args, ending=(1, 9, signal.SIGTERM))
    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in started]
    assert [code for code, _, _ in ends] == [143, 143], ends
    stopped = re.search(r"stopped by SIGTERM after step (\d+) of 20", ends[0][1])
    assert stopped, ends[0]
    assert int(stopped[1]) == max(losses(tmp_path)) < 12
    newest = max((tmp_path / "checkpoints").glob("step_*"))
    assert newest.name == f"step_{int(stopped[1]):08d}"


@pytest.mark.slow
def test_different_settings_are_reported_to_all(package: Path, tmp_path: Path) -> None:
    addresses = ",".join(free_addresses(2))
    args = [*arguments(tmp_path, "data:2", 1), f"--cluster={addresses}"]
    deadline = time.monotonic() + DEADLINE_S
    started = [Trainer(package, *args, f"--process={p}", f"--seed={p}") for p in range(2)]
    for code, _, err in (trainer.end(deadline) for trainer in started):
        assert code == ExitCode.FAILED
        assert "differ from those of process 0: run.seed : 0 -> 1" in err
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_processes_draw_over_a_mesh_what_one_device_draws(package: Path, tmp_path: Path) -> None:
    train = ["--model=lm.python_source.Tiny", "--execution=mesh_sharded", "--cpu_devices=2"]
    layout = ["--set=execution.mesh=model:2", "--set=execution.rules=heads:model;vocab:model"]
    short = ["--steps=1", "--set=input.batch_size=4", "--set=task.decode.max_new_tokens=8"]
    short += ["--set=eval_inputs.dev.max_batches=1", "--set=task.model.stack.num_layers=1"]
    logdir = f"--logdir={tmp_path}"
    code, _, err = Trainer(package, logdir, *train, *layout, *short).end(
        time.monotonic() + DEADLINE_S
    )
    assert code == 0, err

    decode = [logdir, "--mode=decode", "--format=json"]
    decoding = Trainer(package, *decode, **processes.OP_BY_OP)
    code, alone, err = decoding.end(time.monotonic() + DEADLINE_S)
    assert code == 0, err
    spread = [*decode, "--cpu_devices=1", "--set=execution.decode_on=mesh"]
    deadline = time.monotonic() + DEADLINE_S
    ends = [trainer.end(deadline) for trainer in start_together(2, package, spread)]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert json.loads(ends[0][1])["records"] == json.loads(alone)["records"] != []
    assert ends[1][1] == ""
