"""The logdir of a run: the paths of its files, its experiment, and a lock for one writer.

    params.txt  params.diff.txt  command.txt     what was run
    checkpoints/  assets/  events/               state, tokenizers, TensorBoard
    metrics.jsonl  curves.png  samples.txt       results
    decoded/NAME/                                texts and pictures of an evaluation input

A logdir belongs to one experiment, and one process at a time writes to it. `claim` locks the file
`.lock`, and `check` compares it with the file that is there now. If they differ, the logdir was
removed, moved or replaced, and another process may be writing under its path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from tekso.framework import bounded, files
from tekso.framework.exit_codes import ExitCode
from tekso.framework.params import Params, references

PARAMS = "params.txt"
_MODEL = "# model: "
_ORIGIN = "  # "
_SETTING = re.compile(rf"^(\S+) : .*  # (?:--\w+|{re.escape(PARAMS)})$", re.MULTILINE)
_LOCK = ".lock"
_MEND = (
    "Training with --model, and the flags in command.txt, writes the file again; the checkpoints "
    "do not need it"
)
_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class LogdirError(Exception):
    """A logdir cannot be used for this run; the text says why and what to do."""


class NoRunError(LogdirError):
    """A logdir has no run, so it names no experiment."""

    exit_code = ExitCode.WRONG_USAGE


class LogdirInUseError(LogdirError):
    """Another process trains in the logdir."""

    exit_code = ExitCode.LOGDIR_IN_USE


class DamagedParamsError(LogdirError):
    """The file params.txt of a logdir cannot be read."""

    exit_code = ExitCode.DAMAGED


class LogdirLostError(LogdirError):
    """The logdir was removed, moved or replaced, or cannot be written any more."""

    exit_code = ExitCode.LOGDIR_LOST


class Logdir:
    """The paths of the files in a logdir, and the files that identify its run."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or "/"
        self._lock: int | None = None
        self._is_new = False

    def file(self, name: str) -> str:
        """Returns the path of a file or folder in the logdir."""
        return files.join(self.path, name)

    @property
    def checkpoints(self) -> str:
        """Folder of the checkpoints."""
        return self.file("checkpoints")

    @property
    def assets(self) -> str:
        """Folder of the assets that inputs create once, such as tokenizers."""
        return self.file("assets")

    @property
    def events(self) -> str:
        """Folder of the TensorBoard events."""
        return self.file("events")

    @property
    def metrics(self) -> str:
        """File of the metrics, JSON lines."""
        return self.file("metrics.jsonl")

    @property
    def progress(self) -> str:
        """File of the time and the units so far at each checkpoint and at the end, JSON lines."""
        return self.file("progress.jsonl")

    @property
    def curves(self) -> str:
        """Picture of the curves."""
        return self.file("curves.png")

    @property
    def samples(self) -> str:
        """File of the decoded samples."""
        return self.file("samples.txt")

    def decoded(self, name: str) -> str:
        """Returns the folder of the decoded outputs of an evaluation input."""
        return files.join(self.file("decoded"), name)

    def write_decoded(
        self, name: str, title: str, text: str, images: Mapping[str, bytes], *, prefix: str = ""
    ) -> None:
        """Writes the decoded outputs of an evaluation input; pictures replace earlier ones.

        Raises:
          OSError: a file cannot be written.
        """
        folder = self.decoded(name)
        if text:
            files.write_atomically(files.join(folder, f"{title}.txt"), text.rstrip() + "\n")
        for image, picture in images.items():
            files.write_atomically(files.join(folder, f"{prefix}{image}.png"), picture)

    def model(self) -> str | None:
        """Returns the key of the experiment of this logdir; None if it has none.

        Raises:
          DamagedParamsError: params.txt does not begin with this key.
        """
        path = self.file(PARAMS)
        try:
            text = bounded.read(path).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        line = text.partition("\n")[0]
        if not line.startswith(_MODEL):
            raise DamagedParamsError(
                f"{path} is damaged: its first line is not '{_MODEL}…'. {_MEND}"
            )
        return line.removeprefix(_MODEL).strip()

    def experiment(self) -> tuple[str, Any]:
        """Returns the key of the experiment of this logdir, and the tree in params.txt.

        Raises:
          NoRunError: the logdir has no params.txt.
          LogdirError: params.txt names a class of a package that is not imported.
          DamagedParamsError: params.txt cannot be read.
        """
        path, model = self.file(PARAMS), self.model()
        if model is None:
            raise NoRunError(f"{path} does not exist: name the experiment with --model")
        try:
            text = bounded.read(path).decode("utf-8")
            return model, Params.from_text(text, origin=PARAMS)
        except (ValueError, ImportError) as error:
            if advice := references.import_advice(error):
                raise LogdirError(f"{path}: {advice}") from error
            raise DamagedParamsError(
                f"{path} cannot be read: {error}. If it needs a package of yours, add "
                f"--import=your.package. If it is damaged: {_MEND}"
            ) from error

    def settings(self) -> set[str]:
        """Returns the paths of values in params.txt that flags gave, now or in an earlier start."""
        return set(_SETTING.findall(self._params_text()))

    def _params_text(self) -> str:
        try:
            return bounded.read(self.file(PARAMS)).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def check_model(self, model: str) -> None:
        """Raises a LogdirError if the logdir belongs to another experiment; names both."""
        owner = None
        with contextlib.suppress(DamagedParamsError):  # the owner is unknown
            owner = self.model()
        if owner is not None and owner != model:
            raise LogdirError(
                f"{self.path} is the logdir of {owner}, but the model is {model}: use another "
                f"--logdir, or --model={owner} to continue that run"
            )

    def problem(self) -> str:
        """Returns why the logdir cannot be created where it should be; "" if it can."""
        place = os.path.abspath(self.path)
        if not files.is_local(self.path):
            return ""
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        if os.path.isdir(place):
            if place == os.path.abspath(self.path) or shutil.disk_usage(place).total:
                return ""
            return f"{self.path} cannot be created: {place} is a file system without a disk"
        what = "it" if place == os.path.abspath(self.path) else place
        return f"{self.path} cannot be a logdir: {what} is a file"

    def claim(self, model: str, *, warn: Callable[[str], None] = logging.warning) -> None:
        """Creates the logdir, and locks it for this process and this experiment.

        Args:
          model: key of the experiment.
          warn: called with the text of a warning.

        Raises:
          LogdirError: it belongs to another experiment that trained a step or has a checkpoint,
            or it cannot be created.
          LogdirInUseError: another process trains in it.
        """
        self._is_new = files.is_local(self.path) and not files.exists(self.path)
        try:
            files.make_folder(self.path)
        except (FileExistsError, NotADirectoryError):
            raise LogdirError(self.problem()) from None
        owner = None
        try:
            owner = self.model()
        except DamagedParamsError:
            warn(f"{self.file(PARAMS)} is damaged, and is written again")
        is_left = owner not in (None, model) and self._failed_before_a_step()
        if not is_left:
            self.check_model(model)
        if files.is_local(self.path):
            self._take_lock(warn)
        if is_left:
            warn(f"{self.path} is of {owner}, which ended before its first step: {model} takes it")
            if files.exists(self.assets):  # of the data and tokenizers of that start
                files.remove_folder(self.assets)
        for name in files.names(self.path):  # files that a killed process was writing
            if files.is_unfinished(name):
                files.remove(self.file(name))

    def _failed_before_a_step(self) -> bool:
        """Whether a run began here, but has neither a figure nor a checkpoint."""
        if not files.exists(self.metrics) or files.size_bytes(self.metrics):
            return False
        return not files.exists(self.checkpoints) or not files.names(self.checkpoints)

    def _take_lock(self, warn: Callable[[str], None]) -> None:
        """Locks the logdir for this process; the lock is released whenever the process ends."""
        path = self.file(_LOCK)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            if error.errno in _HELD:
                raise LogdirInUseError(
                    f"another process (id {holder or 'unknown'}) is training in {self.path}: wait "
                    "until it ends, or use another --logdir"
                ) from None
            if error.errno not in _WITHOUT_LOCKS:
                raise
            lock = self._replace_lock(path)
            warn(
                f"the file system of {self.path} has no locks ({error.strerror}): a run that is "
                "started in this logdir ends the one that is training there"
            )
        self._lock = lock
        with contextlib.suppress(OSError):  # a full disk: the lock works without the process id
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self.check()  # the file may have been removed before it was locked

    @staticmethod
    def _replace_lock(path: str) -> int:
        """Returns a new file at the path of the lock; `check` of an earlier owner then fails."""
        new = f"{path}.new.{os.getpid()}"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.replace(new, path)
        return lock

    def check(self) -> None:
        """Checks that the claimed logdir is still there; does nothing if it was not claimed.

        It is cheap, and called before every write: a write by path would otherwise create the
        folder again, or go to the folder of another process.

        Raises:
          LogdirLostError: it was removed, moved or replaced.
        """
        if self._lock is None:
            return
        try:
            if os.path.samestat(os.stat(self.file(_LOCK)), os.fstat(self._lock)):
                return
            how = "was replaced"
        except FileNotFoundError:
            how = "was replaced" if files.exists(self.path) else "was removed"
        except OSError as error:
            how = f"is no longer accessible ({error.strerror})"
        if (place := self.place()) is not None:
            how = f"was moved to {place}"
        raise LogdirLostError(f"{self.path} {how} during the run")

    def place(self) -> str | None:
        """Returns the path where the claimed logdir is now; None if it was removed or replaced."""
        if self._lock is None:
            return None
        with contextlib.suppress(OSError):  # without /proc, a moved logdir counts as removed
            lock = os.readlink(f"/proc/self/fd/{self._lock}")
            if os.path.samestat(os.stat(lock), os.fstat(self._lock)):
                return os.path.dirname(lock)
        return None

    def release(self) -> None:
        """Releases the lock, so that another process can train here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove_if_unused(self) -> None:
        """Removes the logdir if `claim` created it, and the run failed before it wrote anything."""
        if self._lock is None or not self._is_new:
            return
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            if set(files.names(self.path)) <= {_LOCK, files.base_name(self.checkpoints)}:
                if files.exists(self.checkpoints):
                    os.rmdir(self.checkpoints)
                os.remove(self.file(_LOCK))
                os.rmdir(self.path)

    def write_params(self, model: str, tree: Params, defaults: Params) -> None:
        """Writes params.txt, and params.diff.txt with the changes to the registered Params.

        Values that were read from params.txt keep the origins that it has.
        """
        text = _with_origins(tree.to_text(origins=True), self._params_text())
        self.write(PARAMS, f"{_MODEL}{model}\n{text}")
        self.write("params.diff.txt", defaults.diff(tree) or "as registered\n")

    def add_command(self, command: Sequence[str]) -> None:
        """Appends a command to command.txt, with the time and the working directory."""
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"# {now}, in {os.getcwd()}\n{shlex.join(command)}\n"
        files.append(self.file("command.txt"), text)

    def write(self, name: str, text: str) -> None:
        """Writes a text file atomically."""
        files.write_atomically(self.file(name), text)


def _with_origins(text: str, before: str) -> str:
    """Returns a text of Params whose values from `before`, an earlier text, have its origins."""
    end = f"{_ORIGIN}{PARAMS}"
    known = {line.rpartition(_ORIGIN)[0]: line for line in before.splitlines() if _ORIGIN in line}
    lines = (
        known.get(line.removesuffix(end), line) if line.endswith(end) else line
        for line in text.splitlines()
    )
    return "\n".join(lines) + "\n"
