"""Runs the trainer with a limit of the address space, as `ulimit -v` sets it; prints its peak.

    python tests/address_space.py LIMIT_BYTES FLAGS…        0: no limit

The last line of the output is the peak of the address space in bytes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent.parent))
import conftest  # noqa: F401  registers the checkout
from tekso.tools import trainer

_M_ARENA_MAX = -8


def main(argv: list[str]) -> int:
    """See the module."""
    # Every further arena of malloc reserves 64 MB, and their number depends on timing.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    if limit := int(argv[1]):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    code = trainer.main(["tekso-trainer", *argv[2:]])
    status = Path("/proc/self/status").read_text()
    print(1024 * int(status.partition("VmPeak:")[2].split()[0]))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
