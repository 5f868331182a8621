"""oneDNN is on unless the user said otherwise; convolutions are right with it, without, and capped.

A process for each setting, since TensorFlow and oneDNN read them once. TensorFlow's own gradients,
of which some are wrong, are computed beside ours and reported, not required to be right or wrong.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest

from tekso.framework import onednn

PROGRAM = Path(__file__).with_name("onednn_program.py")
# Tekso is imported before TensorFlow, and so says whether it uses oneDNN.
START = """import runpy, sys, tekso.framework
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
X86 = platform.machine().lower() in ("x86_64", "amd64")

# What a CPU lacks is not used, so a level above the machine's own computes as that one does.
LEVELS = ("SSE41", "AVX2", "AVX512_CORE")
SETTINGS = {
    "off": {onednn.VARIABLE: "0"},
    "on": {onednn.VARIABLE: "1"},
    **{f"on, {n}": {onednn.VARIABLE: "1", "ONEDNN_MAX_CPU_ISA": n} for n in LEVELS},
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
}
BROKEN = ("on, SSE41", "on, AVX2")
SLOW_SETTINGS = ("off", "on", *BROKEN)
HAS_ONE_DNN = {"off": False, "AVX2": False}


def environment(changes: dict[str, str]) -> dict[str, str]:
    ours = (onednn.VARIABLE, *onednn.LIMITS)
    return {k: v for k, v in os.environ.items() if k not in ours} | changes


def cpu_has_avx512() -> bool:
    info = Path("/proc/cpuinfo")
    return not info.exists() or "avx512f" in info.read_text().split()


def run(form: str, setting: str) -> subprocess.CompletedProcess[str]:
    # TensorFlow's products of bfloat16 end the process where it is told to use oneDNN, and oneDNN
    # not to use AVX-512, on a CPU that has it.
    broken = setting in BROKEN and cpu_has_avx512()
    command = ["-c", START, str(PROGRAM), form, *(["bfloat16"] if broken else [])]
    changes = SETTINGS[setting]
    # TensorFlow reads this variable while it is imported, and oneDNN its limits when it first runs.
    if changes.get(onednn.VARIABLE) == os.environ.get(onednn.VARIABLE):
        return processes.run(command, env=environment(changes))
    return subprocess.run(
        [sys.executable, *command],
        env=environment(changes),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.skipif(not X86, reason="oneDNN is switched on x86 CPUs only")
@pytest.mark.parametrize(
    "setting",
    # The others compute as "off" and as "on" do: no oneDNN, or no level below the CPU's own.
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW_SETTINGS else pytest.mark.matrix)
        for name in SETTINGS
    ],
)
def test_windows_have_numpys_values_and_gradients(setting: str) -> None:
    done = run("tekso", setting)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["one_dnn"] is HAS_ONE_DNN.get(setting, True)
    assert report["cases"] > (190 if setting in BROKEN and cpu_has_avx512() else 250)
    assert report["wrong"] == {}


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="oneDNN is switched on x86 CPUs only")
@pytest.mark.parametrize("setting", [pytest.param("off", marks=pytest.mark.matrix), "on"])
def test_tensorflows_own_gradients_are_watched(setting: str) -> None:
    # Passes where TensorFlow is right in all of the table: then the forms by slices may go.
    done = run("plain", setting)
    assert done.returncode <= 0, done.stderr[-2000:]
    if done.returncode:  # a signal
        case = [line for line in done.stderr.splitlines() if line.startswith(("float", "bfloat"))]
        pytest.xfail(
            f"TensorFlow's kernel ended the process by {done.returncode} at or after a "
            f"convolution with {case[-1] if case else 'unknown sizes'}"
        )
    report = json.loads(done.stdout.splitlines()[-1])
    errors = [name for name, what in report["wrong"].items() if what.endswith("Error")]
    wrong = [f"{name} by {what}" for name, what in report["wrong"].items() if name not in errors]
    print("\n".join([*wrong, *(f"{name}: no gradient" for name in errors)]))
    if report["wrong"]:
        pytest.xfail(
            f"TensorFlow has no gradient in {len(errors)} of {report['cases']} cases, "
            f"and a wrong number in {len(wrong)}: {wrong[:3]}"
        )


@pytest.mark.parametrize(
    ("machine", "given", "limit", "loaded", "expected"),
    [
        ("x86_64", None, "", False, "1"),
        ("AMD64", None, "", False, "1"),
        ("x86_64", "0", "", False, "0"),
        ("x86_64", None, "", True, None),
        ("aarch64", None, "", False, None),
        ("x86_64", None, "ONEDNN_MAX_CPU_ISA=avx2", False, "0"),
        ("x86_64", None, "DNNL_MAX_CPU_ISA=SSE41", False, "0"),
        ("x86_64", None, "ONEDNN_MAX_CPU_ISA=AVX512_CORE", False, "1"),
        ("x86_64", "1", "ONEDNN_MAX_CPU_ISA=AVX2", False, "1"),
        ("x86_64", None, "ONEDNN_MAX_CPU_ISA=DEFAULT,DNNL_MAX_CPU_ISA=AVX2", False, "1"),
    ],
)
def test_one_dnn_is_turned_on_where_nobody_chose(
    machine: str,
    given: str | None,
    limit: str,
    loaded: bool,
    expected: str | None,
    monkeypatch: Any,
) -> None:
    for name in onednn.LIMITS:
        monkeypatch.delenv(name, raising=False)
    for variable in limit.split(",") if limit else ():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    # Set first, so that what enable() writes is taken back after the test.
    monkeypatch.setenv(onednn.VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(onednn.VARIABLE)
    modules = dict(sys.modules)
    modules.pop("tensorflow", None)
    monkeypatch.setattr(sys, "modules", modules | ({"tensorflow": sys} if loaded else {}))
    onednn.enable()
    assert os.environ.get(onednn.VARIABLE) == expected


@pytest.mark.skipif(not X86, reason="oneDNN is switched on x86 CPUs only")
@pytest.mark.parametrize("room", ["framework", "models", "tasks", "params", "tools"])
def test_every_room_turns_one_dnn_on_without_loading_tensorflow(room: str) -> None:
    code = (
        f"import sys, os, tekso.{room}; "
        f"print(os.environ['{onednn.VARIABLE}'], 'tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment({}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["1", "False"]
