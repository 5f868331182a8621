"""The commands of tekso-ckpt that only read. They import neither TensorFlow nor the experiment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tekso.framework.exit_codes import ExitCode
from tekso.tools.command_errors import UsageError


class Found(NamedTuple):
    """What a command found.

    Attributes:
      record: for --format=json.
      text: for a person.
      exit_code: of the command.
    """

    record: Any
    text: str
    exit_code: ExitCode = ExitCode.OK


class Command(NamedTuple):
    """A command that only reads.

    Attributes:
      usage: its arguments.
      counts: the numbers of arguments that it takes.
      run: the function; its arguments are those of the command.
    """

    usage: str
    counts: tuple[int, ...]
    run: Callable[..., Found]


def run(name: str, words: Sequence[str], **options: Any) -> Found:
    """Runs a command.

    Args:
      name: one of COMMANDS.
      words: its arguments.
      options: its flags.

    Raises:
      UsageError: the number of arguments is wrong.
      CheckpointError: a checkpoint cannot be read.
    """
    command = COMMANDS[name]
    if len(words) not in command.counts:
        raise UsageError(
            f"{name} takes {command.usage}, but {len(words)} arguments are given: {' '.join(words)}"
            if words
            else f"{name} takes {command.usage}"
        )
    return command.run(*words, **options)


def verify(path: str) -> Found:
    """Verifies a checkpoint, all checkpoints of a run, or safetensors files."""
    from tekso.framework.run import stored_state, verification
    from tekso.framework.run.checkpoint_errors import DeletedCheckpointError

    found: dict[str, list[str]] = {}
    for one in stored_state.checkpoints_of(path):
        with contextlib.suppress(DeletedCheckpointError):  # by a run in progress
            found[one] = list(verification.problems(stored_state.read_stored(one)))
    lines = [f"{one}: {text}" for one, texts in found.items() for text in texts]
    lines += [f"{one}: good" for one, texts in found.items() if not texts]
    record = [{"path": one, "problems": texts} for one, texts in found.items()]
    code = ExitCode.DAMAGED if any(found.values()) else ExitCode.OK
    return Found(record, "\n".join(lines), code)


COMMANDS = {
    "verify": Command("PATH", (1,), verify),
}
