"""Tests of the benchmarks: turns, tables, errors and, with tiny sizes, Tekso's own workloads."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from benchmark_records import Record, record, result

from benchmarks import environments, image_gradients, instruction_sets, run, table, turns
from benchmarks.frameworks import tekso_images
from benchmarks.machine import _family, feature_level
from benchmarks.peers import ENVIRONMENTS, PEERS, Peer
from benchmarks.workloads import TINY, WORKLOADS
from tekso.params.lm.benchmark import Small, Wide


def test_peers_take_turns_in_a_rotating_order_and_what_was_skipped_is_not_tried_again() -> None:
    order: list[tuple[str, str]] = []

    def fake(peer: str, workload: str) -> Record:
        order.append((workload, peer))
        return {"skipped": "no"} if peer == "flax" else record(float(len(order)))

    said: list[str] = []
    found = turns.measured(["tekso", "flax", "keras"], ["lstm", "resnet"], 2, fake, said.append)
    first = ["tekso", "flax", "keras"]
    assert order[:6] == [("lstm", peer) for peer in first] + [("resnet", peer) for peer in first]
    assert [peer for _, peer in order[6:]] == ["keras", "tekso"] * 2
    assert [one["step_ms"] for one in found["lstm"]["tekso"]] == [[1.0], [8.0]]
    assert found["lstm"]["flax"] == [{"skipped": "no"}]
    assert "turn 1 of 2, lstm, flax: skipped: no" in said


def test_rows_are_medians_of_turns_relative_to_tekso() -> None:
    by_peer = {
        "tekso": [record(10, 90, 11), record(20, 19, 21), record(12)],
        "pytorch": [record(30), record(24), record(18)],
        "flax": [{"skipped": "cannot be installed: no network"}],
    }
    tekso, pytorch, flax = table.rows(by_peer)
    assert tekso[:4] == ("Tekso", "12.0", "11.0 to 20.0", "1.00")
    assert pytorch[:4] == ("PyTorch", "24.0", "18.0 to 30.0", "2.00")
    assert pytorch[4:] == ("2.0", "1,024", "losses within 0e+00")
    assert flax[1] == "–"
    assert flax[-1] == "skipped: cannot be installed: no network"
    page = table.markdown(result(by_peer))
    assert "| PyTorch | 24.0 | 18.0 to 30.0 | 2.00 |" in page
    assert "python 3.11" in page
    assert "not idle" not in page
    plain = table.text(result(by_peer)).splitlines()
    assert any(line.startswith("Flax") and "no network" in line for line in plain)
    assert not table.faults(result(by_peer))


def test_a_single_turn_has_no_spread() -> None:
    by_peer = {"tekso": [record(10, 12, 14)], "pytorch": [record(18), {"skipped": "no memory"}]}
    assert [row[1:3] for row in table.rows(by_peer)] == [("12.0", "–"), ("18.0", "–")]
    said = "Each figure is of a single turn, without a spread, and a turn is the median of 5 steps"
    assert said in table.text(result(by_peer, turns=1))
    one = table.text(result(by_peer, turns=1, steps=1))
    assert "a turn is the time of a single step in a new process" in one
    assert "the median of 3 turns, and a turn is the median of 5" in table.text(result(by_peer))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_weights": 11}, "11 weights, expected 10"),
        ({"losses": [4.0, 3.0, 2.1]}, "losses [4.0, 3.0, 2.1]"),
        ({"losses": [4.0, math.nan, 2.0]}, "nan"),
    ],
)
def test_another_model_is_a_fault(changes: Record, message: str) -> None:
    by_peer = {"tekso": [record(10)], "keras": [record(9), record(9, **changes)]}
    (fault,) = table.faults(result(by_peer))
    assert fault.startswith("lstm, keras: not Tekso's model")
    assert message in fault
    assert message in table.rows(by_peer)[1][-1]


def test_a_busy_machine_is_named() -> None:
    busy = result({"tekso": [record(10)]})
    busy["machine"]["load_before"] = 3.25
    assert "the load average before the start was 3.2" in table.text(busy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only=lstm,pytorhc"], "'pytorhc' is neither a workload (transformer_small"),
        (["--only=pytorhc"], "did you mean pytorch?"),
        (["--turns=0"], "--turns is 0, must be at least 1"),
        (["--steps=-1"], "--steps is -1, must be at least 1"),
        (["--only=,"], "--only=, has no names"),
        (["--json=table.md"], "--json=table.md: the table gets this name"),
        (["--json=."], "--json=. is a folder"),
        (["--json=a_file/figures.json"], "cannot write a_file/figures.json: "),
    ],
)
def test_wrong_command_lines_are_one_line_before_anything_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("measured"))
    assert run.main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_failures_and_interrupts_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def interrupted(*_: Any) -> Record:
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "process", lambda *_: {"skipped": "no memory"})
    assert run.main(["--only=lstm,tekso"]) == 1
    assert capsys.readouterr().err == "benchmarks: the initial weights of lstm: no memory\n"
    monkeypatch.setattr(turns, "process", interrupted)
    assert run.main(["--only=lstm,tekso"]) == 130
    assert capsys.readouterr().err == "benchmarks: interrupted; no figures were written\n"


@pytest.mark.parametrize(
    ("only", "workloads", "peers"),
    [
        ("", list(WORKLOADS), list(PEERS)),
        ("lstm", ["lstm"], list(PEERS)),
        ("flax, lstm", ["lstm"], ["tekso", "flax"]),
        ("tekso", list(WORKLOADS), ["tekso"]),
    ],
)
def test_only_chooses_workloads_and_peers(
    only: str, workloads: list[str], peers: list[str]
) -> None:
    assert run.chosen(only) == (workloads, peers)


def test_a_peer_that_cannot_be_installed_is_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(folder: Path, requirements: Any) -> Path:
        raise environments.InstallError(f"no {requirements[0]}")

    def fake(python: Path, peer: Peer, workload: str, options: Any) -> Record:
        assert (python, peer.framework) == (Path(sys.executable), "tekso")
        return record(5.0)

    monkeypatch.setattr(environments, "python_of", no_network)
    monkeypatch.setattr(turns, "process", fake)
    file = tmp_path / "new" / "figures.json"
    assert run.main(["--only=lstm,flax", "--turns=2", f"--json={file}"]) == 0
    reason = f"cannot be installed: no {ENVIRONMENTS['flax'][0]}"
    assert reason in capsys.readouterr().out
    assert reason in file.with_suffix(".md").read_text()
    stored = json.loads(file.read_text())
    assert stored["workloads"]["lstm"]["flax"] == [{"skipped": reason}]
    assert [one["step_ms"] for one in stored["workloads"]["lstm"]["tekso"]] == [[5.0], [5.0]]
    assert {"processor", "features", "cores"} < set(stored["machine"])


def environment_program(failing: str | None) -> Callable[[Any], None]:
    def fake(command: list[str]) -> None:
        fake.commands.append(command)  # type: ignore[attr-defined]
        if failing in command:
            raise environments.InstallError("no such release")
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)

    fake.commands = []  # type: ignore[attr-defined]
    return fake


def test_an_environment_is_used_again_until_its_requirements_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fake = tmp_path / "one", environment_program(failing="broken")
    monkeypatch.setattr(environments, "_run", fake)
    for _ in range(2):
        assert environments.python_of(folder, ["a==1"]) == folder / "bin" / "python"
    commands: list[list[str]] = fake.commands  # type: ignore[attr-defined]
    assert len(commands) == 2
    assert commands[1][-1] == "a==1"
    for _ in range(2):  # an environment that is not complete is not used
        with pytest.raises(environments.InstallError, match="no such release"):
            environments.python_of(folder, ["broken"])
    assert len(commands) == 6


def test_a_failed_process_is_a_reason_not_an_exception(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first >&2\necho 'ImportError: no torch' >&2\nexit 3\n")
    program.chmod(0o755)
    found = turns.process(program, PEERS["pytorch"], "lstm", [])
    assert found == {"skipped": "failed with exit code 3: ImportError: no torch"}


def test_a_process_gets_the_variables_of_its_peer(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho noise\necho "{\\"pad\\": \\"$MALLOC_TOP_PAD_\\"}"\n')
    program.chmod(0o755)
    found = turns.process(program, PEERS["pytorch_malloc"], "lstm", [])
    assert found == {"pad": PEERS["pytorch_malloc"].variables["MALLOC_TOP_PAD_"]}
    assert turns.process(program, PEERS["pytorch"], "lstm", []) == {"pad": ""}


def test_a_limit_of_the_instructions_reaches_every_process_and_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []

    def fake(python: Path, peer: Peer, workload: str, options: Any) -> Record:
        if not any(option.startswith("--export") for option in options):
            given.append(dict(peer.variables))
        return record(5.0)

    monkeypatch.setattr(environments, "python_of", lambda *_: tmp_path)
    monkeypatch.setattr(turns, "process", fake)
    flags = ["--only=lstm,pytorch_malloc", "--turns=1", f"--json={tmp_path / 'figures.json'}"]
    assert run.main([*flags, "--isa=avx2"]) == 0
    assert instruction_sets.LIMITS in capsys.readouterr().out
    limits = instruction_sets.VARIABLES["avx2"]
    assert given == [limits, {**PEERS["pytorch_malloc"].variables, **limits}]
    assert run.main(flags) == 0
    assert instruction_sets.LIMITS not in capsys.readouterr().out
    assert "ONEDNN_MAX_CPU_ISA" not in given[-1]


@pytest.mark.parametrize(
    ("vendor", "family", "model", "text"),
    [
        ("AuthenticAMD", 25, 17, " (Zen 4; family 25, model 17)"),
        ("AuthenticAMD", 25, 1, " (Zen 3; family 25, model 1)"),
        ("GenuineIntel", 6, 143, " (Sapphire Rapids; family 6, model 143)"),
        ("GenuineIntel", 6, 999, " (family 6, model 999)"),
        ("GenuineIntel", 25, 17, " (family 25, model 17)"),
    ],
)
def test_a_processor_is_named_by_its_design(
    vendor: str, family: int, model: int, text: str
) -> None:
    lines = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name: x\n"
    assert _family(lines) == text
    assert _family("model\t: 3\n") == ""


def test_the_commit_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, timeout=60)

    monkeypatch.setattr(turns, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert run._commit() == ""
    git("init", "--quiet")
    (tmp_path / "a").touch()
    git("add", "a")
    git("commit", "--quiet", "-m", "a")
    git("tag", "-a", "v1", "-m", "v1")
    commit = run._commit()
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    (tmp_path / "a").write_text("changed")
    assert run._commit() == f"{commit}-dirty"
    assert f"Commit of Tekso: {commit}." in table.text(
        result({"tekso": [record(1)]}, commit=commit)
    )


def test_feature_levels() -> None:
    assert feature_level(["sse2", "avx2"]) == "AVX2"
    assert feature_level(["avx2", "avx512f", "avx512_vnni"]) == "AVX-512 VNNI, AVX-512, AVX2"
    assert feature_level([]) == "unknown"


@pytest.mark.parametrize(
    ("name", "experiment"), [("transformer_small", Small), ("transformer_wide", Wide)]
)
def test_transformers_have_the_sizes_of_the_registered_experiments(
    name: str, experiment: type[Small]
) -> None:
    one: Any = WORKLOADS[name]
    tree = experiment().tree()
    model, input = tree.task.model, tree.input
    assert (model.vocab_size, model.dim, model.stack.num_layers) == (
        one.vocab_size,
        one.dim,
        one.num_layers,
    )
    layer = model.stack.layer
    assert (layer.attention.num_heads, layer.feed_forward.hidden_dim) == (
        one.num_heads,
        one.hidden_dim,
    )
    assert (input.length, input.batch_size) == (one.length, one.batch_size)


def test_weights_of_resnet_18() -> None:
    assert WORKLOADS["resnet"].num_weights == 11_689_512 - 900 * 513  # 100 classes, not 1,000


def test_only_later_losses_have_the_tolerance_of_the_workload() -> None:
    reference = {**record(10), "later_tolerance": 0.2}
    near, far, first = ([4.0, 3.1, 2.3], [4.0, 3.0, 2.5], [4.1, 3.0, 2.0])
    assert table.wrong_model({**record(10), "losses": near}, reference) is None
    assert table.wrong_model({**record(10), "losses": near}, record(10)) is not None
    for losses in (far, first):
        assert table.wrong_model({**record(10), "losses": losses}, reference) is not None


def test_arrays_are_compared_by_their_largest_elements() -> None:
    own = {
        "weights/a": np.array([1.0]),
        "batch/x": np.array([1.0]),
        "train/loss": np.array(2.0),
        "train/gradients/a/w": np.array([4.0, -8.0]),
        "train/gradients/b": np.zeros(2),
        "eval/logits": np.array([2.0, 4.0]),
    }
    other = {name: own[name] for name in own if name.startswith(("train", "eval"))}
    other |= {"train/gradients/a/w": np.array([4.0, -8.4]), "train/gradients/b": np.full(2, 1e-6)}
    lines, worst = image_gradients.comparison(own, other)
    assert worst == pytest.approx(0.05)
    assert lines == [
        "0.0e+00  train loss 2.000000000000",
        "5.0e-02  train gradients, 2 arrays; worst: a/w",
        "0.0e+00  eval logits",
    ]
    other["eval/logits"] = np.array([2.0, np.nan])
    assert image_gradients.comparison(own, other)[1] == np.inf
    other["eval/logits"], other["train/gradients/b"] = own["eval/logits"], np.zeros(1)
    assert image_gradients.comparison(own, other)[1] == np.inf
    with pytest.raises(KeyError):
        image_gradients.comparison({**own, "train/gradients/c": np.ones(1)}, other)


def test_the_models_that_are_compared_have_published_numbers_of_weights() -> None:
    published = {"resnet50": 25_557_032, "vit_ti": 5_717_416, "ssd300": 19_972_534}
    for name, count in published.items():
        specs = tekso_images.CASES[name].params().instantiate().specs().values()
        assert sum(math.prod(spec.shape) for spec in specs if spec.trainable) == count


def test_weights_of_amoebanet_d() -> None:
    """Published counts of AmoebaNet-D (6, 64) and (18, 256), as GPipe divides them."""
    one: Any = WORKLOADS["amoebanet"]
    assert (one.num_layers, one.filters) == (6, 64)
    assert dataclasses.replace(one, classes=1000).num_weights == 3_701_096
    wide = dataclasses.replace(one, classes=1000, num_layers=18, filters=256)
    assert wide.num_weights == 122_470_120


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TINY if name != "transformer_wide"])
def test_tekso_measures_a_workload_and_exports_its_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights.npz"
    python = Path(processes.interpreter(tmp_path / "python"))
    # One of them is traced and compiled as in a benchmark, which takes longer than the steps.
    is_traced = name == "transformer_small"
    given = processes.GRAPH_OPTIMIZER_OFF if is_traced else processes.OP_BY_OP
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    # LLVM takes longer to optimize than the steps take.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    options = ["--tiny", "--steps=1", "--warmup=1", f"--export={file}"]
    found = turns.process(python, PEERS["tekso"], name, options)
    assert "skipped" not in found, found
    trains = name != "front_end"
    assert found["num_weights"] == found["expected_weights"]
    assert (found["num_weights"] > 1000) == trains
    assert found["time_to_first_step_s"] > 0
    assert found["step_ms"][0] > 0
    assert len(found["losses"]) == 3
    assert np.isfinite(found["losses"]).all()
    if name in ("beam_search", "front_end"):
        assert len(set(found["losses"])) == 1
        assert (found["losses"][0] < 0) == trains
    else:
        assert found["losses"][0] > found["losses"][2]
    with np.load(file) as stored:
        sizes = sum(stored[key].size for key in stored.files if "moving_" not in key)
    assert sizes == found["num_weights"]
