"""--list: prints the registered experiments."""

from __future__ import annotations

from tekso.framework.json_text import to_json
from tekso.tools.command_errors import OK, UsageError


def run(pattern: str, *, as_json: bool) -> int:
    """Prints the experiments whose keys match a pattern; returns the exit code.

    Raises:
      UsageError: no key matches.
    """
    from tekso.framework import registry
    from tekso.framework.run import inspection

    entries = registry.list_experiments(pattern)
    if not entries:
        close = registry.like(pattern)[:10]
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else "--list without a pattern shows all; --import=… adds those of your own package"
        )
        raise UsageError(f"--list={pattern}: no experiment matches; {hint}")
    rows = [inspection.list_record(entry) for entry in entries]
    print(to_json(rows, indent=1) if as_json else inspection.list_text(rows))
    return OK
