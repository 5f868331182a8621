"""Implements --model, --import, --execution and --set for all tools."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import, so the functions below import these modules when they run
    from tekso.framework.experiment import Experiment, Tree


def load(model: str | None, packages: Sequence[str]) -> None:
    """Imports TensorFlow without its log output, and the user's packages.

    Args:
      model: value of --model; a typo in its module is reported before the slow imports.
      packages: values of --import.

    Raises:
      UsageError: the module or package does not exist.
    """
    from tekso.framework import registry
    from tekso.framework.run import quiet_tensorflow

    if model and not packages and not registry.has_module(model):
        package, dot, _ = model.partition(".")
        if dot and os.path.isdir(package):
            raise UsageError(
                f"--model={model}: {package} is your own package: add --import={package}"
            )
        experiment(model)
    quiet_tensorflow.import_tensorflow()
    for package in packages:
        try:
            registry.import_package(package)
        except ModuleNotFoundError as error:
            if not error.name or not f"{package}.".startswith(f"{error.name}."):
                raise
            raise UsageError(
                f"--import={package}: there is no package {error.name!r} in {os.getcwd()} or "
                "among the installed packages"
            ) from None


def experiment(model: str) -> type[Experiment]:
    """Returns the experiment that is registered under a key.

    Raises:
      UsageError: there is none; the message suggests similar keys.
    """
    from tekso.framework import registry

    try:
        return registry.get(model)
    except registry.UnknownExperimentError as error:
        raise UsageError(f"--model={model}: {error}") from None


def change(
    tree: Tree.Params,
    *,
    execution: str | None,
    settings: Sequence[str],
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> None:
    """Changes a tree by flags: first the execution, then --set, then other flags.

    Args:
      tree: the Params to change.
      execution: value of --execution.
      settings: values of --set, "path=value".
      flags: {flag: (path, value)}; None as the value changes nothing.

    Raises:
      UsageError: a path is unknown, a value has the wrong type or is out of range.
    """
    from tekso.framework import execution as executions

    if execution is not None:
        _choose_execution(tree, execution)
    if any(setting.strip().startswith("execution.") for setting in settings):
        executions.import_all()
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected path=value")
        _set_text(tree, path.strip(), value, flag=f"--set {setting}", origin="--set")
    for flag, (path, value) in (flags or {}).items():
        if value is not None:
            _set_text(tree, path, str(value), flag=f"--{flag}={value}", origin=f"--{flag}")
    try:
        tree.run.instantiate()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _set_text(tree: Tree.Params, path: str, value: str, *, flag: str, origin: str) -> None:
    try:
        tree.set_text(path, value, origin=origin)
    except (AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"{flag}: {error}{_of_another_execution(tree, path)}") from None


def _of_another_execution(tree: Tree.Params, path: str) -> str:
    """Returns a hint for errors: the executions that have a field which the chosen one lacks."""
    from tekso.framework import execution

    first, _, rest = path.partition(".")
    field = rest.partition(".")[0]
    if first != "execution" or not field or field in tree.execution:
        return ""
    others = [name for name in execution.EXECUTIONS if field in execution.by_name(name).Params()]
    return "".join(f"; --execution={name} has it" for name in others)


def _choose_execution(tree: Tree.Params, name: str) -> None:
    from tekso.framework import execution

    try:
        chosen = execution.by_name(name)
    except execution.ExecutionError as error:
        raise UsageError(f"--execution={name}: {error}") from None
    if tree.execution.owner is not chosen:
        tree.execution = chosen.Params()
