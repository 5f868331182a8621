"""Implements --model, --import, --execution and --set for all tools."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tekso.tools import other_frameworks
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
        if not all(package.split(".")):  # Python takes './my_lab' for a relative import
            raise UsageError(
                f"--import={package}: not the name of a package, as in --import=my_lab"
                f"{_module_of(package)}"
            )
        try:
            registry.import_package(package)
        except ModuleNotFoundError as error:
            if not error.name or not f"{package}.".startswith(f"{error.name}."):
                raise
            raise UsageError(
                f"--import={package}: there is no package {error.name!r} in {os.getcwd()} or "
                f"among the installed packages{_module_of(package)}"
            ) from None


def _module_of(path: str) -> str:
    """Returns the end of an error about --import if its value is a path: the name of the module."""
    relative = os.path.relpath(path or os.curdir).removesuffix(".py")
    exists = os.path.exists(path) or os.path.exists(f"{path}.py")
    if not exists or relative in ("", os.curdir) or relative.startswith(os.pardir):
        return ""
    return f"; write its name, as in Python: --import={relative.replace(os.sep, '.')}"


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
      UsageError: a path is unknown, or a value has the wrong type.
      ValueError: a number of `run` is out of range.
    """
    from tekso.framework import execution as executions

    if execution is not None:
        _choose_execution(tree, execution)
    paths = [path for path, value in (flags or {}).values() if value is not None]
    if any(path.strip().startswith("execution.") for path in [*settings, *paths]):
        executions.import_all()
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected path=value")
        _set_text(tree, path.strip(), value, flag=f"--set {setting}", origin="--set")
    for flag, (path, value) in (flags or {}).items():
        if value is not None:
            _set_text(tree, path, str(value), flag=f"--{flag}={value}", origin=f"--{flag}")
    tree.run.instantiate()  # checks its numbers, before the slow parts of a start


def _set_text(tree: Tree.Params, path: str, value: str, *, flag: str, origin: str) -> None:
    try:
        if path in tree:
            value = _part(tree, path, value)
        tree.set_text(path, value, origin=origin)
    except (AttributeError, ValueError, TypeError) as error:
        hint = (
            _of_another_execution(tree, path)
            or _of_schedule(tree, path)
            or _of_another_framework(tree, path)
        )
        raise UsageError(f"{flag}: {error}{hint}") from None


def _part(tree: Tree.Params, path: str, value: str) -> str:
    """Returns the text of a value; for a part of the experiment, the reference of its class.

    Raises:
      ValueError: the value names no class of this part.
    """
    from tekso.framework import experiment
    from tekso.framework.params import Params, arguments, references

    base = experiment.base_class(path)
    if not base:
        return value
    module, _, name = base.rpartition(".")
    kind = getattr(importlib.import_module(module), name).Params
    try:
        return references.of_params(type(arguments.parse(kind, value)))
    except ValueError as error:
        with contextlib.suppress(ValueError):  # a class of the user that only has the methods
            found = arguments.parse(Params, value)
            if not experiment.is_of_another_kind(path, found):
                return value
        raise ValueError(f"{path}: {error}{_field_for(tree, path, value)}") from None


def _field_for(tree: Tree.Params, path: str, value: str) -> str:
    """Returns a hint for errors: the field of a part that takes the class which a text names."""
    from tekso.framework.params import Params, arguments

    for name, field in tree.get(path).fields().items():
        if isinstance(field.type, type) and issubclass(field.type, Params):
            with contextlib.suppress(ValueError):
                arguments.parse(field.type, value)
                return f"; did you mean {path}.{name}={value}?"
    return ""


def _of_another_execution(tree: Tree.Params, path: str) -> str:
    """Returns a hint for errors: the executions that have a field which the chosen one lacks."""
    from tekso.framework import execution

    first, _, rest = path.partition(".")
    field = rest.partition(".")[0]
    if first != "execution" or not field or field in tree.execution:
        return ""
    others = [name for name in execution.EXECUTIONS if field in execution.by_name(name).Params()]
    return "".join(f"; --execution={name} has it" for name in others)


def _of_schedule(tree: Tree.Params, path: str) -> str:
    """Returns a hint for errors: the fields of the schedule that give the learning rate."""
    if path.rpartition(".")[2] not in ("learning_rate", "lr") or "learner.schedule" not in tree:
        return ""
    schedule = tree.get("learner.schedule")
    for name in ("value", "initial_value", "scale", "factor"):
        if name in schedule.fields():
            return f"; the learning rate is set by learner.schedule.{name}"
    return "; the learning rate is set by learner.schedule"


def _of_another_framework(tree: Tree.Params, path: str) -> str:
    """Returns a hint for errors: what Tekso has for an option of another framework."""
    found = "" if path in tree else other_frameworks.hint(path.rpartition(".")[2])
    return f"; {found}" if found else ""


def _choose_execution(tree: Tree.Params, name: str) -> None:
    from tekso.framework import execution
    from tekso.framework.params import references

    try:
        chosen = execution.by_name(name)
    except execution.ExecutionError as error:
        hint = other_frameworks.execution_hint(name)
        raise UsageError(f"--execution={name}: {error}{hint and f'; {hint}'}") from None
    if tree.execution.owner is not chosen:
        reference = references.of_params(chosen.Params)
        tree.set_text("execution", reference, origin="--execution")
