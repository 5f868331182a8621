"""Compares the files of a checkpoint with its description, without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

from tekso.framework import files
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError
from tekso.framework.run.file_checksum import checksum
from tekso.framework.run.lease import DESCRIPTION


def check_files(
    path: str,
    description: Description,
    *,
    verified: Callable[[str], bool] = lambda name: True,
) -> None:
    """Checks the sizes and checksums of the files of a checkpoint.

    Args:
      path: folder of the checkpoint.
      description: of the checkpoint.
      verified: whether the bytes of a file, given its name, are compared with its checksum.

    Raises:
      DamagedCheckpointError: a file is missing, truncated or changed; the text says which.
    """
    if not description.files:
        raise DamagedCheckpointError(f"{DESCRIPTION} names no files")
    for name, wanted in description.files.items():
        try:
            size = files.size_bytes(files.join(path, name))
            if size != wanted.get("size_bytes"):
                raise DamagedCheckpointError(
                    f"{name} has {size:,} bytes, but {wanted.get('size_bytes', 0):,} were written"
                )
            if verified(name) and checksum(files.join(path, name)) != wanted:
                raise DamagedCheckpointError(f"the bytes of {name} have changed (sha256 differs)")
        except OSError as error:
            raise DamagedCheckpointError(f"{name} cannot be read: {error.strerror}") from error
