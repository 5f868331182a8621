"""Parses the command lines of the tools with absl flags; errors suggest similar flags."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from tekso.framework.spelling import close_matches
from tekso.tools import command_errors
from tekso.tools.command_errors import UsageError

_WIDTH = 80  # of the terminals that are narrowest in practice
_VALUE_NAMES = {
    "assets_dir": "folder",
    "checkpoint": "step",
    "execution": "name",
    "import": "package",
    "language": "name",
    "logdir": "folder",
    "model": "key",
    "rematerialize": "names",
    "schedules": "names",
    "set": "path=value",
    "task": "name",
    "tpu": "name",
}
"""{flag: name of its value}, for every command that has the flag."""


def parse(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses the flags, discarding earlier values; returns the arguments that are not flags.

    Raises:
      UsageError: a flag is unknown, or its value is wrong.
    """
    values.unparse_flags()
    for name in values:
        values[name].unparse()
    try:
        rest: list[str] = values(list(argv))[1:]
    except flags.Error as error:
        raise UsageError(f"{_flag_error(values, error)}; --help lists the flags") from None
    return rest


def _flag_error(values: flags.FlagValues, error: flags.Error) -> str:
    if not isinstance(error, flags.UnrecognizedFlagError):
        text = str(error).replace("\n", " ")
        text = re.sub(r"invalid literal for int\(\).*", "expected a whole number", text)
        return re.sub(r"could not convert string to float.*", "expected a number", text)
    close = flags_with_value(values, error.flagname)
    close = close or close_matches(error.flagname, list(values), count=2)
    hint = f"; did you mean {' or '.join(f'--{name}' for name in close)}?" if close else ""
    return f"there is no flag --{error.flagname}{hint}"


def flags_with_value(values: flags.FlagValues, value: str) -> list[str]:
    """Returns "format=json" for "json": the flags that have a word as one of their values."""
    return [
        f"{name}={value}"
        for name in values
        if value in (getattr(values[name].parser, "enum_values", None) or ())
    ]


def help_text(
    values: flags.FlagValues,
    *,
    usage: str,
    purpose: str,
    value_names: Mapping[str, str],
) -> str:
    """Returns the text of --help.

    Args:
      values: the flags.
      usage: an example of a command line.
      purpose: a sentence or two. Its lines are kept; those after an indented one are indented more.
      value_names: {flag: name of its value}, besides those that all commands share; other flags
        show "N" or "text", by type.
    """
    lines = [f"usage: {usage}", "", *_wrapped_lines(purpose[:1].upper() + purpose[1:]), ""]
    for name in values:
        flag = values[name]
        if name != flag.name:
            continue  # an abbreviation
        shown = f"  --{name}"
        if not flag.boolean:
            shown += f"={_value(flag, {**_VALUE_NAMES, **value_names})}"
        text = _plain(flag.help)
        if flag.default not in (None, [], False, ""):
            is_list = isinstance(flag.default, list)
            text += f" Default: {','.join(flag.default) if is_list else flag.default}."
        indent = " " * 6
        lines += [*_wrapped_choices(shown), *_wrap(text, indent, indent)]
    return "\n".join(lines)


def _wrap(text: str, first: str = "", later: str = "") -> list[str]:
    """Returns the lines of a text; a hyphenated name such as "tekso-trainer" is not divided."""
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )


def _wrapped_lines(text: str) -> list[str]:
    """Returns the lines of a text, each wrapped; an indented one goes on with more indent."""
    return [
        line
        for one in text.splitlines()
        for line in (_wrap(one, later=" " * 6 if one.startswith(" ") else "") or [""])
    ]


def _wrapped_choices(shown: str) -> list[str]:
    """Returns a flag and its choices, "--name=a|b|c", in lines that end after a "|"."""
    spaced = shown.replace("|", "| ")
    indent = " " * (shown.index("=") + 1 if "=" in shown else 0)
    lines = textwrap.wrap(spaced, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("| ", "|") for line in lines]


def _plain(text: str) -> str:
    """Returns the help of a flag without the text that absl adds."""
    text = text.removesuffix(";\n    repeat this option to specify a list of values")
    return re.sub(r"^<[^>]*>: ", "", text)


def _value(flag: Any, value_names: Mapping[str, str]) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        return "|".join(choices)
    is_number = flag.flag_type() in ("int", "float")
    return value_names.get(flag.name, "N" if is_number else "text")


def define_common(values: flags.FlagValues) -> None:
    """Defines the flags that every tool has: --traceback and --help."""
    flags.DEFINE_boolean(
        "traceback", False, "Print the whole traceback of every error.", flag_values=values
    )
    flags.DEFINE_boolean("help", False, "Print this text.", short_name="h", flag_values=values)


def define_network(values: flags.FlagValues) -> None:
    """Defines the flag that allows addresses that other machines can reach."""
    flags.DEFINE_boolean(
        "allow_unauthenticated_network",
        False,
        "Listen at an address that other machines can reach. TensorFlow's gRPC has no "
        "authentication: anyone who connects to its port can run any op, and read and write files. "
        "Use it only where a firewall or a private network keeps everyone else away.",
        flag_values=values,
    )


def asks_for_version(argv: Sequence[str]) -> bool:
    """Whether a command line is only --version."""
    return list(argv[1:]) == ["--version"]


def version_text(program: str) -> str:
    """Returns the answer to --version, without an import of TensorFlow."""
    return f"{program} {importlib.metadata.version('tekso')}"


def run_words(
    program: str,
    argv: Sequence[str] | None,
    action: Callable[[list[str]], int | None],
    *,
    text: str | None,
) -> int:
    """Runs a tool that has arguments, and only the flags that every tool has; see `run`.

    Args:
      program: name of the command.
      argv: the command line; None for `sys.argv`.
      action: a function of the arguments. It may return an exit code.
      text: what --help prints, the docstring of the tool.
    """
    values = flags.FlagValues()  # type: ignore[no-untyped-call]
    define_common(values)
    return run(program, values, argv, action, help_text=lambda: (text or "").strip())


def run(
    program: str,
    values: Any,
    argv: Sequence[str] | None,
    action: Callable[[list[str]], int | None],
    *,
    help_text: Callable[[], str],
) -> int:
    """Runs a tool; returns the exit code, one of `ExitCode`.

    Args:
      program: name of the command.
      values: its flags, including those of `define_common`.
      argv: the command line; None for `sys.argv`.
      action: a function of the arguments that are not flags. It may return an exit code.
      help_text: returns the text of --help.
    """
    given = list(sys.argv if argv is None else argv)

    def act() -> int:
        if asks_for_version(given):
            print(version_text(program))
            return command_errors.OK
        words = parse(values, given)
        if values.help:
            print(help_text())
            return command_errors.OK
        return action(words) or command_errors.OK

    return command_errors.run(program, act, show_traceback="--traceback" in given)
