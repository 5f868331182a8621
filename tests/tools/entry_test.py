"""Tests that Ctrl-C during imports ends a command at once, with a message and exit code 130."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tekso.framework.exit_codes import ExitCode
from tekso.tools import entry

ROOT = Path(__file__).resolve().parents[2]

# Sends SIGINT when a module is about to be imported, and swallows what an import raises of it.
PROGRAM = """
import importlib.abc, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if pytest is in the background
module = sys.argv.pop(1)

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("swallowed")
        return None

sys.meta_path.insert(0, Interrupting())
from tekso.tools import entry
sys.exit(entry.trainer())
"""


@pytest.mark.parametrize("module", ["tekso.tools.trainer", "absl", "tensorflow.python"])
def test_an_interrupt_while_importing_ends_the_command(module: str, tmp_path: Path) -> None:
    arguments = ["--model=lm.python_source.Tiny", f"--logdir={tmp_path}/run", "--steps=1"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "tekso-trainer: interrupted\n")
    assert "swallowed" not in done.stdout


def test_an_interrupt_after_the_imports_can_be_cleaned_up_after() -> None:
    code = """
import os, signal, sys, types
from tekso.tools import entry
signal.signal(signal.SIGINT, signal.default_int_handler)

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("cleaned up")
        return 7

sys.modules["tekso.tools.vocab"] = types.SimpleNamespace(main=main)
sys.exit(entry.vocab())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "cleaned up\n", "")


def test_every_command_is_there() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    commands = [s for s in strings if isinstance(s, str) and "=tekso." in s]
    assert len(commands) == 11
    for command in commands:
        name, _, target = command.partition("=")
        module, _, function = target.partition(":")
        assert module == "tekso.tools.entry"
        (tool,) = getattr(entry, function).args
        assert name == f"tekso-{tool.replace('_', '-')}" and tool == function
        assert callable(importlib.import_module(f"tekso.tools.{tool}").main)
