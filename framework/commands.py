"""How to type a program in the user's shell, for messages that suggest a command.

tekso-trainer                        the shell finds this environment's program by name
.venv/bin/tekso-trainer              the program is below the working directory
/opt/tekso/bin/tekso-trainer         the program is elsewhere
python -m tekso.tools.trainer        this environment has no such program
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig

_MODULES = {"pytest": "pytest", "tensorboard": "tensorboard.main"}


def typed(program: str, *, folder: str | None = None) -> str:
    """Returns the shell command for a program of this environment, quoted.

    Args:
      program: name of the program, for example "tekso-trainer".
      folder: the working directory of the shell; None for the one of this process.
    """
    for scripts in (os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        path = os.path.join(scripts, program)
        if os.access(path, os.X_OK):
            return _typed(path, folder)
    module = _MODULES.get(program) or _module(program)
    return f"{_typed(sys.executable, folder)} -m {module}"


def _typed(path: str, folder: str | None) -> str:
    """Returns the name of a program if the shell finds this program by name, otherwise its path."""
    name = os.path.basename(path)
    found = shutil.which(name)
    if found and os.path.isabs(found) and _folder(found) == _folder(path):
        return shlex.quote(name)
    below = os.path.join(os.path.realpath(folder or os.getcwd()), "")
    path = os.path.join(_folder(path), name).removeprefix(below)
    return shlex.quote(path if os.sep in path else os.path.join(os.curdir, path))


def _folder(path: str) -> str:
    """Returns the folder of a program; a link (to the system's Python, say) is not followed."""
    return os.path.realpath(os.path.dirname(path))


def _module(program: str) -> str:
    name = program.removeprefix("tekso-").replace("-", "_")
    return f"tekso.tools.{name}"
