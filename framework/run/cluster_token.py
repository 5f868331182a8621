"""The token of a cluster: a secret that its processes share, so that no stranger can join them.

It is the text of the file in `--cluster_token_file`, or of the environment variable
TEKSO_CLUSTER_TOKEN. Without both, it is in a file of the logdir that only its owner can read. The
first process that needs the file creates it. The token itself is never sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from typing import Any

from tekso.framework import files
from tekso.framework.cluster import ClusterError

VARIABLE = "TEKSO_CLUSTER_TOKEN"
FLAG = "--cluster_token_file"
FILE = ".cluster_token"
_SHORTEST, _LONGEST = 16, 4096  # characters
_WRITTEN_WITHIN_S = 5.0
_AGAIN_S = 0.05


@dataclasses.dataclass(frozen=True)
class Token:
    """A token.

    Attributes:
      secret: the secret.
      source: where it is from, for messages.
    """

    secret: bytes = dataclasses.field(repr=False)
    source: str

    def proof(self, *facts: Any) -> str:
        """Returns a text that only a process with this token can compute from the facts."""
        return hmac.new(self.secret, json.dumps(facts).encode(), hashlib.sha256).hexdigest()

    def proves(self, proof: Any, *facts: Any) -> bool:
        """Whether a received value is the proof of the facts."""
        if not isinstance(proof, str):
            return False
        return hmac.compare_digest(proof.encode(), self.proof(*facts).encode())


def find(file: str | None, environment: Mapping[str, str], logdir: str) -> Token:
    """Returns the token of a run.

    Args:
      file: value of --cluster_token_file.
      environment: os.environ.
      logdir: logdir of the run, which all processes share.

    Raises:
      ClusterError: there is no token, it is too short, or other users can read it.
    """
    if file:
        return _from_file(os.path.expanduser(file), FLAG)
    if environment.get(VARIABLE):
        return _token(environment[VARIABLE], VARIABLE)
    if not files.is_local(logdir):
        raise ClusterError(
            f"the processes of a run need a token, and {logdir} is not a local folder that could "
            f"hold it: set {VARIABLE} to the same secret in every process, or {FLAG}"
        )
    path = files.join(logdir, FILE)
    _create(path)
    return _from_file(path, path)


def _create(path: str) -> None:
    """Creates the file with a random token, unless it exists."""
    files.make_folder(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(made, f"{secrets.token_hex(32)}\n".encode())
        finally:
            os.close(made)


def _from_file(path: str, source: str) -> Token:
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        text = _read(path, source)
        if text.strip() or time.monotonic() > deadline:
            return _token(text, source)
        time.sleep(_AGAIN_S)  # another process has created it and is about to write it


def _read(path: str, source: str) -> str:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ClusterError(f"{source}: cannot read {path}: {error.strerror}") from None
    with os.fdopen(opened, "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise ClusterError(
                f"{source}: other users can read or change {path}, which contains the secret of "
                f"the processes of a run: chmod 600 {path}, or set {VARIABLE}"
            )
        return file.read(_LONGEST + 1).decode("utf-8", "replace")


def _token(text: str, source: str) -> Token:
    text = text.strip()
    if not _SHORTEST <= len(text) <= _LONGEST:
        raise ClusterError(
            f"{source}: a token has {_SHORTEST} to {_LONGEST} characters, but this one has "
            f"{len(text)}; openssl rand -hex 32 makes one"
        )
    return Token(text.encode(), source)
