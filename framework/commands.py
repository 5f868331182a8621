"""How a program is typed: texts that tell a command give it as the user's shell finds it.

tekso-trainer                        the shell finds it, and it is that of this environment
.venv/bin/tekso-trainer              it lies below the working directory
/opt/tekso/bin/tekso-trainer         elsewhere
python -m tekso.tools.trainer        there is no such program in this environment
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig

_MODULES = {"pytest": "pytest", "tensorboard": "tensorboard.main"}


def typed(program: str, *, folder: str | None = None) -> str:
    """Returns how a program of this environment is typed in a shell, quoted.

    Args:
      program: its name, as "tekso-trainer".
      folder: where it is typed; None: in the working directory.
    """
    for scripts in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        path = os.path.join(scripts, program)
        if os.access(path, os.X_OK):
            return _typed(path, folder)
    module = _MODULES.get(program) or _module(program)
    return f"{_typed(sys.executable, folder)} -m {module}"


def _typed(path: str, folder: str | None) -> str:
    """The name of a program if the shell finds this one by it, or else its path."""
    name = os.path.basename(path)
    found = shutil.which(name)
    if found and os.path.isabs(found) and _folder(found) == _folder(path):
        return shlex.quote(name)
    below = os.path.join(os.path.realpath(folder or os.getcwd()), "")
    path = os.path.join(_folder(path), name).removeprefix(below)
    return shlex.quote(path if os.sep in path else os.path.join(os.curdir, path))


def _folder(path: str) -> str:
    """The folder of a program: not that of what the program links to, as to a system's Python."""
    return os.path.realpath(os.path.dirname(path))


def _module(program: str) -> str:
    name = program.removeprefix("tekso-").replace("-", "_")
    return f"tekso.tools.{name}"
