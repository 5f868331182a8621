"""tekso-new-task: creates a package for your own task: data, layer, experiment and tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

from absl import flags

from tekso.framework.commands import typed
from tekso.tools import command_flags
from tekso.tools.command_errors import UsageError

PROGRAM = "tekso-new-task"
USAGE = "my_task"
DEFAULT_KIND = "classification"
_KINDS = {
    "classification": ("shared", "classification"),
    "regression": ("shared", "regression"),
    "text": ("shared", "layer", "text"),
    "translation": ("shared", "layer", "translation"),
}
"""{kind of task: folders of the template whose files make up the package}."""
_SHORT = {"text": ', "--set=task.decode=None"', "translation": ', "--set=task.scoring=None"'}
"""{kind of task: arguments that switch off decoding in the test that trains a few steps}."""
_TEMPLATE = "new_task_template"
_SUFFIX = ".txt"  # so that no tool mistakes a file of the template for a module

# A separate FlagValues, so that --help lists only these flags.
FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]

flags.DEFINE_enum(
    "kind",
    DEFAULT_KIND,
    list(_KINDS),
    "Task of the package: classify arrays, predict numbers from the columns of a table, predict "
    "the next byte of text, or translate short texts.",
    flag_values=FLAGS,
)
command_flags.define_common(FLAGS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code: 0 success, 1 error, 2 wrong command line."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _run(words: list[str]) -> None:
    if len(words) != 1:
        given = f"{' '.join(words)!r} are several names" if words else "the package name is missing"
        raise UsageError(f"{given}: expected one, as in {_usage()}")
    folder = os.path.abspath(os.path.expanduser(words[0]))
    above, name = os.path.split(folder)
    _check(name, folder, given=words[0])
    _write(folder, name, kind=FLAGS.kind)
    _report(above, name)


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = (
        "Creates a small package that trains without changes, as a starting point. The argument "
        "is its folder, and the last part of the path is the package name."
    )
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names={})


def _check(name: str, folder: str, *, given: str) -> None:
    """Checks that a package of this name can be created and imported.

    Raises:
      UsageError: it cannot; the message says why.
    """
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        why = (
            "a keyword of Python"
            if keyword.iskeyword(name)
            else "not a name that Python can import"
        )
        close = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower()
        close = f"_{close}" if close[:1].isdigit() else close
        usable = close.isidentifier() and not keyword.iskeyword(close)
        hint = f"; did you mean {close}?" if usable and close != name else ""
        raise UsageError(f"{given}: {name!r} is {why}{hint}")
    if os.path.lexists(folder):
        raise UsageError(f"{given} exists: give another name")
    owner = _owner(name, os.path.dirname(folder))
    if owner:
        raise UsageError(
            f"{given}: {name} is {owner}, and one of them would hide the other: give another name"
        )


def _owner(name: str, above: str) -> str:
    """Returns what Python already imports under a name; "" if the name is free."""
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return "a module of Python itself"
    if name == "tekso":
        return "the name of Tekso"
    found = importlib.metadata.packages_distributions().get(name)
    if found:
        return f"a module of the installed {found[0]}"
    spec = importlib.util.find_spec(name)
    origin = spec.origin if spec is not None else None
    if spec is None or (origin and os.path.dirname(os.path.abspath(origin)) == above):
        module = os.path.join(above, f"{name}.py")
        return f"the module {module}" if os.path.exists(module) else ""
    return f"installed already ({origin or 'a package'})"


def _write(folder: str, name: str, *, kind: str) -> None:
    """Writes the package; on an error, nothing is left behind."""
    template = resources.files("tekso.tools").joinpath(_TEMPLATE)
    values = {"@PACKAGE@": name, "@SHORT@": _SHORT.get(kind, "")}
    unfinished = f"{folder}.unfinished.{os.getpid()}"
    try:
        os.makedirs(unfinished)
        for file in (file for part in _KINDS[kind] for file in template.joinpath(part).iterdir()):
            if file.name.endswith(_SUFFIX):
                text = file.read_text(encoding="utf-8")
                for placeholder, value in values.items():
                    text = text.replace(placeholder, value)
                path = os.path.join(unfinished, file.name.removesuffix(_SUFFIX))
                with open(path, "w", encoding="utf-8") as out:
                    out.write(text)
        os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _report(above: str, name: str) -> None:
    print(f"wrote {os.path.join(above, name)}:")
    for file in sorted(os.listdir(os.path.join(above, name))):
        print(f"  {file}")
    print("next commands:")
    if above != os.getcwd():
        print(f"  cd {shlex.quote(above)}")
    trainer, pytest = typed("tekso-trainer", folder=above), typed("pytest", folder=above)
    print(f"  {trainer} --import={name} --model={name}.experiments.Tiny --logdir=runs/{name}")
    print(f"  {pytest} {name}")
    print(f"contents and further commands: {name}/README.md")


if __name__ == "__main__":
    sys.exit(main())
