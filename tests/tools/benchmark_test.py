"""Tests of tekso-benchmark: its figures and its errors."""

from __future__ import annotations

import json
import subprocess
import sys

import processes
import pytest

from tekso.tools import benchmark

TINY = [
    "task.model.vocab_size=50",
    "task.model.dim=16",
    "task.model.stack.num_layers=1",
    "task.model.stack.layer.feed_forward.hidden_dim=24",
    "input.vocab_size=50",
    "input.length=8",
    "input.batch_size=6",
    "execution.xla=none",
]


def test_figures_of_a_registered_experiment() -> None:
    command = ["-m", "tekso.tools.benchmark", "--model=lm.benchmark.Small"]
    command += ["--steps=4", "--warmup=2", "--format=json", *(f"--set={s}" for s in TINY)]
    done = processes.run(command, optimized=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["tokens_per_step"] == 48
    step = record["step_ms"]
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert record["tokens_per_second"] == pytest.approx(48 / step["median"] * 1000)
    assert record["time_to_first_step_s"] > record["build_s"] + record["first_step_s"] > 0
    assert record["peak_memory_bytes"] > 100 * 2**20  # TensorFlow alone takes more
    # Tied table, one layer (attention, feed-forward, two norms), the last norm.
    d, f = 16, 24
    assert record["total_weights"] == 50 * d + 4 * d * (d + 1) + 2 * d * f + f + d + 6 * d
    assert record["first_loss"] > 0
    assert {"python", "numpy"} < set(record["versions"])
    rate = record["tokens_per_step"] / record["input_ms"]["median"] * 1000
    assert record["input_tokens_per_second"] == pytest.approx(rate)
    assert 0 <= record["wait_ms"]["min"] <= record["wait_ms"]["median"]
    text = benchmark.text(record)
    assert "tokens/s" in text and "with prefetching a step waits" in text
    assert f"step {step['median']:.1f} ms, the median of 4 steps ({step['min']:.1f} to" in text
    single = benchmark.text({**record, "steps": 1})
    assert f"step {step['median']:.1f} ms, of a single step, without a spread\n" in single


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--model is missing"),
        (["--model=lm.benchmark.Smal"], "did you mean lm.benchmark.Small?"),
        (["--model=lm.benchmark.Small", "--set", "input.lenght=3"], "did you mean input.length?"),
        (["--model=lm.benchmark.Small", "--set", "input.length"], "expected path=value"),
        (["--model=lm.benchmark.Small", "--execution=pipeline"], "execution 'pipeline' is unknown"),
        (["--model=lm.benchmark.Small", "--steps=0"], "--steps=0"),
        (["--model=lm.benchmark.Small", "--stepps=3"], "did you mean --steps?"),
        (["lm.benchmark.Small"], "'lm.benchmark.Small' is not a flag"),
    ],
)
def test_wrong_command_lines_say_what_is_wrong(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["tekso-benchmark", *args]) == 2
    assert message in capsys.readouterr().err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["tekso-benchmark", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in ("model", "steps", "warmup", "set", "format"))


def test_peak_memory_is_not_that_of_the_process_before() -> None:
    held = bytearray(600 * 2**20)  # noqa: F841  what this process holds when it starts the other
    code = "from tekso.tools.benchmark import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert 0 < int(done.stdout) < 300 * 2**20
