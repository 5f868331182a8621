"""All file access: names, reading and atomic writing, on local and remote file systems.

Paths with a scheme (`gs://`, `ram://`) use `tf.io.gfile`. All other paths use Python's own file
functions, which are faster and have better error messages. Every failure is an `OSError`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import errno
import glob as local_glob
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import IO, Any

from tekso.framework.spelling import close_matches

_MAGIC = "*?["
_UNFINISHED = ".unfinished."
_NOT_REGULAR = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def is_local(path: str) -> bool:
    """Returns whether a path has no scheme, so that it names a file on this machine."""
    return "://" not in path


def join(folder: str, *names: str) -> str:
    """Returns the path of a file or folder from its folder and names."""
    return os.path.join(folder, *names)


def base_name(path: str) -> str:
    """Returns the last component of a path."""
    return os.path.basename(path)


def patterns(text: str) -> list[str]:
    """Returns the patterns in a comma-separated text; the form '["a", "b"]' is accepted too."""
    if text.strip().startswith(("['", '["')):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            listed = ast.literal_eval(text.strip())
            if isinstance(listed, list) and all(isinstance(part, str) for part in listed):
                return listed
    return [part.strip() for part in text.split(",") if part.strip()]


def glob(pattern: str | Sequence[str], *, what: str = "file") -> list[str]:
    """Returns the files that match, sorted and without duplicates.

    Args:
      pattern: one or several patterns, in a text separated by commas. `*`, `?` and `[a-z]` are
        supported, and for local files also `**` (any folders) and `~`.
      what: what the files are, for error messages.

    Raises:
      FileNotFoundError: a pattern matches no file; the message suggests similar names.
      IsADirectoryError: a pattern names a folder.
    """
    found: list[str] = []
    for one in patterns(pattern) if isinstance(pattern, str) else pattern:
        matches = _matches(one)
        plain = [path for path in matches if not is_folder(path)]
        if not plain:
            if matches:
                raise IsADirectoryError(
                    f"{what}: {matches[0]} is a folder; its files are {join(matches[0], '*')}"
                )
            text = pattern.strip() if isinstance(pattern, str) else ""
            is_list = len(text) > 2 and text[0] == "[" and text[-1] == "]"
            hint = f"; write a list as {','.join(patterns(text[1:-1]))}" if is_list else ""
            raise FileNotFoundError(f"{what}: {_no_match(one)}{hint}")
        found += plain
    return sorted(set(found))


def exists(path: str) -> bool:
    """Returns whether a file or folder exists."""
    return os.path.exists(path) if is_local(path) else _gfile().exists(path)


def is_folder(path: str) -> bool:
    """Returns whether a path is a folder."""
    return os.path.isdir(path) if is_local(path) else _gfile().isdir(path)


def size_bytes(path: str) -> int:
    """Returns the size of a file."""
    with _named(path):
        return os.path.getsize(path) if is_local(path) else int(_gfile().stat(path).length)


def stamp(path: str) -> tuple[int, int] | None:
    """Returns the size in bytes and the time of the last change in ns; None: no such file."""
    try:
        with _named(path):
            if is_local(path):
                status = os.stat(path)
                return status.st_size, status.st_mtime_ns
            remote = _gfile().stat(path)
            return int(remote.length), int(remote.mtime_nsec)
    except OSError:
        return None


def open(path: str, mode: str = "rb", *, streams: bool = False) -> IO[Any]:
    """Opens a file. Text is UTF-8, and line ends are not converted.

    Args:
      path: the file.
      mode: as of Python's `open`.
      streams: whether it may be a FIFO or a device, such as /dev/stdin, which is read as it
        arrives. Otherwise these are errors: opening a FIFO would wait for another program, and a
        device may have no end.
    """
    with _named(path):
        if not is_local(path):
            found: IO[Any] = _gfile().GFile(path, mode)
            return found
        if not streams:
            check_regular(path)
        if "b" in mode:
            return builtins.open(path, mode)
        return builtins.open(path, mode, encoding="utf-8", newline="")


def check_regular(path: str) -> None:
    """Raises an OSError if a local path is a FIFO, a socket or a device."""
    try:
        kind = _NOT_REGULAR.get(stat.S_IFMT(os.stat(path).st_mode))
    except FileNotFoundError:
        return
    if kind is not None:
        raise OSError(errno.EINVAL, f"is a {kind}, not a file", path)


def read(path: str, start: int = 0, size: int | None = None) -> bytes:
    """Returns the bytes of a file: all from `start` on, or `size` of them."""
    with _named(path), open(path) as file:
        if start:
            file.seek(start)
        data: bytes = file.read() if size is None else file.read(size)
        return data


def write_atomically(path: str, data: bytes | str, *, parents: bool = True) -> None:
    """Writes a whole file; if that fails, the previous file is unchanged.

    Args:
      path: the file.
      data: its contents; text is written as UTF-8.
      parents: whether to create the folders above it; see `make_folder`.
    """
    with writing_atomically(path, parents=parents) as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


@contextlib.contextmanager
def writing_atomically(path: str, *, parents: bool = True) -> Iterator[IO[bytes]]:
    """Yields a file to write to, which is renamed to `path` when the block ends without an error.

    Args:
      path: the file.
      parents: whether to create the folders above it; see `make_folder`.
    """
    unfinished = f"{path}{_UNFINISHED}{os.getpid()}"
    with _named(path):
        if parents:
            make_folder(os.path.dirname(path))
        if is_local(path):
            check_regular(path)  # as root, a device would be replaced for the whole system
        try:
            with open(unfinished, "wb") as file:
                yield file
                file.flush()
                if is_local(path):
                    os.fsync(file.fileno())
            if is_local(path):
                os.replace(unfinished, path)
            else:
                _gfile().rename(unfinished, path, overwrite=True)
        except BaseException:
            with contextlib.suppress(OSError):
                remove(unfinished)
            raise


def is_unfinished(name: str) -> bool:
    """Returns whether a name is a temporary file of `writing_atomically`.

    Such a file remains if the process was killed while it wrote.
    """
    return _UNFINISHED in name


def append(path: str, text: str) -> None:
    """Appends to a text file; creates the file if it does not exist."""
    with _named(path), open(path, "a") as file:
        file.write(text)


def make_folder(path: str, *, parents: bool = True) -> None:
    """Creates a folder, unless it exists.

    Args:
      path: the folder.
      parents: whether to create the folders above it. If not, a missing local one is an error, so
        that a folder that was moved away does not appear again.
    """
    if path:
        with _named(path):
            if is_local(path):
                try:
                    pathlib.Path(path).mkdir(parents=parents, exist_ok=True)
                except FileExistsError as error:
                    raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path) from error
            else:
                _gfile().makedirs(path)


def copy_folder(folder: str, new_folder: str) -> None:
    """Copies the contents of a folder, including its folders; replaces files with the same names.

    Each file is written atomically.
    """
    make_folder(new_folder)
    for name in names(folder):
        source, target = join(folder, name), join(new_folder, name)
        if is_folder(source):
            copy_folder(source, target)
        else:
            write_atomically(target, read(source))


def remove(path: str) -> None:
    """Removes a file."""
    with _named(path):
        os.remove(path) if is_local(path) else _gfile().remove(path)


def remove_folder(path: str) -> None:
    """Removes a folder with its contents, if it exists."""
    with _named(path):
        if exists(path):
            shutil.rmtree(path) if is_local(path) else _gfile().rmtree(path)


def rename(path: str, new_path: str) -> None:
    """Renames a file or a folder; atomically on a local file system."""
    with _named(path):
        os.rename(path, new_path) if is_local(path) else _gfile().rename(path, new_path)


def names(folder: str) -> list[str]:
    """Returns the sorted names of the files and folders in a folder."""
    with _named(folder):
        found = os.listdir(folder) if is_local(folder) else _gfile().listdir(folder)
        return sorted(name.rstrip("/") for name in found)


def sync(path: str) -> None:
    """Waits until a local file, or the names in a local folder, are on the disk."""
    if is_local(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Error messages.


def _no_match(pattern: str) -> str:
    folder, name = os.path.split(pattern)
    if any(sign in folder for sign in _MAGIC):
        return f"nothing matches {pattern!r}"
    shown = folder or "."
    if not is_folder(os.path.expanduser(shown)):
        return f"nothing matches {pattern!r}: there is no folder {shown!r}{_hint(shown)}"
    there = _names(os.path.expanduser(shown))
    close = close_matches(name, there, cutoff=0.5)
    if close:
        return f"nothing matches {pattern!r}; did you mean {_listed(folder, close)}?"
    if not there:
        return f"nothing matches {pattern!r}: the folder {shown!r} is empty"
    more = f" and {len(there) - 5} more" if len(there) > 5 else ""
    here = f" (which is {os.getcwd()})" if shown == "." else ""
    listed = _listed("", there[:5])
    return f"nothing matches {pattern!r}: the folder {shown!r}{here} has {listed}{more}"


def near(path: str) -> str:
    """Returns "; did you mean …?" for a missing file beside one of a similar name, or ""."""
    if not is_local(path):
        return ""
    folder, name = os.path.split(os.path.expanduser(path).rstrip("/"))
    if not is_folder(folder or "."):
        return _hint(folder)
    close = close_matches(name, _names(folder or "."), count=1)
    return f"; did you mean {(join(folder, close[0]) if folder else close[0])!r}?" if close else ""


def _hint(folder: str) -> str:
    above, name = os.path.split(folder.rstrip("/"))
    if not is_folder(above or "."):
        return ""
    close = close_matches(name, _names(above or "."), count=1)
    return f"; did you mean {join(above, close[0])!r}?" if close else ""


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return names(folder)
    return []


def _listed(folder: str, names: Sequence[str]) -> str:
    return ", ".join(repr(join(folder, name) if folder else name) for name in names)


# The two kinds of file systems.


def _matches(pattern: str) -> list[str]:
    if not is_local(pattern):
        with _named(pattern):
            return list(_gfile().glob(pattern))
    pattern = os.path.expanduser(pattern)
    if os.path.exists(pattern):  # a file name may itself contain *, ? or [
        return [pattern]
    return local_glob.glob(pattern, recursive=True)


def _gfile() -> Any:
    import tensorflow as tf  # slow to import, and not needed for local files

    return tf.io.gfile


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Adds the path to errors, and converts TensorFlow's errors to Python's `OSError`s."""
    if is_local(path):
        try:
            yield
        except OSError as error:
            named = error.filename is not None and not is_unfinished(str(error.filename))
            if not named and error.errno is not None:  # errors of writes name no file
                raise OSError(error.errno, error.strerror, path) from error
            raise
        return
    import tensorflow as tf

    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file", path) from error
    except (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, "permission denied", path) from error
    except tf.errors.ResourceExhaustedError as error:
        raise OSError(errno.ENOSPC, "no space left", path) from error
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message, path) from error
