"""tekso-worker: provides the devices of this process to a trainer that drives them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from absl import flags

from tekso.framework.commands import typed
from tekso.tools import command_flags
from tekso.tools.command_errors import UsageError

PROGRAM = "tekso-worker"
USAGE = "--address=localhost:7000"

FLAGS: Any = flags.FlagValues()  # type: ignore[no-untyped-call]


def _define() -> None:
    flags.DEFINE_string(
        "address",
        None,
        "host:port to listen on, such as localhost:7000. Anyone who can connect to it can run any "
        "code.",
        flag_values=FLAGS,
    )
    command_flags.define_network(FLAGS)
    flags.DEFINE_integer(
        "threads", 1, "Number of ops that run at the same time.", lower_bound=1, flag_values=FLAGS
    )
    command_flags.define_common(FLAGS)


_define()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool until it is stopped; returns the exit code."""
    return command_flags.run(PROGRAM, FLAGS, argv, _run, help_text=_help)


def _run(words: list[str]) -> None:
    if words:
        raise UsageError(f"{' '.join(words)} is not a flag; expected {_usage()}")
    if not FLAGS.address:
        raise UsageError(f"--address is missing, as in {_usage()}")
    from tekso.framework import exposure
    from tekso.framework.execution.pipeline import remote

    allowed = FLAGS.allow_unauthenticated_network
    try:
        remote.split(FLAGS.address)
        exposure.check(FLAGS.address, source="--address", allowed=allowed)
        where = exposure.describe(FLAGS.address)
    except ValueError as error:
        raise UsageError(str(error)) from None
    server = remote.serve(FLAGS.address, threads=FLAGS.threads, or_open=allowed)
    print(f"{PROGRAM}: {where}; waiting for work; Ctrl-C stops it", flush=True)
    threading.Event().wait()
    del server


def _usage() -> str:
    return f"{typed(PROGRAM)} {USAGE}"


def _help() -> str:
    purpose = (__doc__ or "").partition(": ")[2]
    names = {"address": "host:port"}
    return command_flags.help_text(FLAGS, usage=_usage(), purpose=purpose, value_names=names)


if __name__ == "__main__":
    sys.exit(main())
