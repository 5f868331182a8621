"""The control groups (cgroups) that limit this process: of a container, a job or a service.

/proc/self/cgroup      "0::/path" in version 2, "4:memory:/path" in version 1
/sys/fs/cgroup/path    a file for each limit, in version 1 below a folder for each kind
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def limits(kind: str, *, file: str, files_of_version_1: tuple[str, ...]) -> Iterator[list[str]]:
    """Yields the words of the limit of the group of this process, and of those above it.

    Args:
      kind: "cpu" or "memory".
      file: name of the file with the limit.
      files_of_version_1: names of the files that have its words in version 1.
    """
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        root, names = (_GROUPS / kind, files_of_version_1) if kinds else (_GROUPS, (file,))
        # In a container, the group of the path may be outside, and its own group is the root.
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            try:
                yield [word for name in names for word in (folder / name).read_text().split()]
            except OSError:  # there is no such group
                continue
