"""Virtual environments of the other frameworks, in a cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_MARKER = "installed.txt"


class InstallError(Exception):
    """An environment cannot be made; the message is one line."""


def default_folder() -> Path:
    """Returns the cache folder of the user for this program."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tekso-benchmarks"


def python_of(folder: Path, requirements: Sequence[str]) -> Path:
    """Returns the Python of the environment in `folder`; installs it first if necessary.

    The environment is used again until the requirements change.

    Raises:
      InstallError: the environment cannot be made, or a requirement cannot be installed.
    """
    python, marker = folder / "bin" / "python", folder / _MARKER
    wanted = "\n".join((*requirements, sys.version.split()[0]))
    if marker.exists() and marker.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *requirements])
    marker.write_text(wanted)
    return python


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise InstallError(errors[-1] if errors else f"exit code {done.returncode}")
