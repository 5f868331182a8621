"""Opens a checkpoint or safetensors files for reading, without TensorFlow and without Params.

    stored = open_stored("runs/bytes")                        # its newest complete checkpoint
    stored = open_stored("runs/bytes/checkpoints/step_00002000")
    stored = open_stored("runs/bytes/best")                   # or last, or a step
    stored = open_stored("bytes.safetensors")                 # or the folder of its shards

Nothing of the run is imported or executed, so it may be the run of somebody else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tekso.framework import files
from tekso.framework.run import checkpoint_paths, index_entries, safetensors_header
from tekso.framework.run.checkpoint_description import Description, describe
from tekso.framework.run.checkpoint_errors import (
    CheckpointError,
    DamagedCheckpointError,
    first_line,
)
from tekso.framework.run.checkpoint_paths import FOLDER, STEP
from tekso.framework.run.lease import DESCRIPTION, Lease
from tekso.framework.run.stored_tensors import (
    TensorInFiles,
    problems_of_cover,
    problems_of_files,
)
from tekso.framework.state import WEIGHTS

_PREFIX = "tensors"
_SAFETENSORS = ".safetensors"
_DESCRIPTION_IN_METADATA = "tekso.description"


@dataclasses.dataclass(frozen=True)
class StoredState:
    """Tensors on disk.

    Attributes:
      path: of the checkpoint or the safetensors files.
      description: of the checkpoint, or of the one that the file was exported from; None: it has no
        description, or a damaged one.
      tensors: by key, "weights/…" and "learner/…". The names in safetensors are weight paths.
      problems: what is wrong with the description, the index or header, and the places of tensors;
        the bytes are not read.
      metadata: {path of a safetensors file: its metadata}.
      lease: a run in progress does not delete the checkpoint while a variable refers to it.
    """

    path: str
    description: Description | None
    tensors: Mapping[str, TensorInFiles]
    problems: Sequence[str] = ()
    metadata: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    lease: Lease | None = None


def open_stored(path: str) -> StoredState:
    """Opens a checkpoint, the newest complete one of a run, or safetensors files.

    The places of all tensors are verified, so memory for a tensor is only allocated if its bytes
    are in the files.

    Raises:
      CheckpointError: there is none.
      DamagedCheckpointError: it is damaged; the text says what is wrong first.
      DeletedCheckpointError: a run in progress is deleting it.
    """
    paths = checkpoints_of(path)
    complete = [one for one in paths if files.exists(files.join(one, DESCRIPTION))]
    stored = read_stored((complete or paths)[-1])
    if stored.problems:
        more = f" ({len(stored.problems)} problems)" if len(stored.problems) > 1 else ""
        raise DamagedCheckpointError(f"{stored.path} is damaged: {stored.problems[0]}{more}")
    return stored


def checkpoints_of(path: str) -> list[str]:
    """Returns the checkpoints at a path: itself, the named one of a run, or all of a run by step.

    Raises:
      CheckpointError: there is none, or the best one is unknown.
    """
    path, name = checkpoint_paths.split(path)
    if name is not None:
        paths = checkpoints_of(path)
        complete = [one for one in paths if files.exists(files.join(one, DESCRIPTION))] or paths
        steps = {checkpoint_paths.step_of(files.base_name(one)) or 0: one for one in complete}
        return [checkpoint_paths.named(name, steps)]
    if not files.exists(path):
        raise CheckpointError(f"there is no {path}: give a run, a checkpoint or a safetensors file")
    if not files.is_folder(path):
        if not path.endswith(_SAFETENSORS):
            raise CheckpointError(f"{path} is neither a folder nor a file *{_SAFETENSORS}")
        return [path]
    names = files.names(path)
    if _is_checkpoint(path):
        return [path]
    folder = files.join(path, FOLDER) if FOLDER in names else path
    steps = {
        int(name.removeprefix(STEP)): files.join(folder, name)
        for name in files.names(folder)
        if name.startswith(STEP) and name.removeprefix(STEP).isdecimal()
    }
    if steps:
        return [one for _, one in sorted(steps.items())]
    if any(name.endswith(_SAFETENSORS) for name in names):
        return [path]
    raise CheckpointError(
        f"{path} has no checkpoint {folder}/{STEP}…, and no file "
        f"*{_SAFETENSORS}: give a run, a checkpoint or a safetensors file"
    )


def read_stored(path: str) -> StoredState:
    """Reads what is known of a checkpoint or safetensors files, also if they are damaged.

    Args:
      path: one of `checkpoints_of`.
    """
    if not files.is_folder(path):
        return _safetensors(path, [path])
    if _is_checkpoint(path):
        return _checkpoint(path)
    shards = [name for name in files.names(path) if name.endswith(_SAFETENSORS)]
    return _safetensors(path, [files.join(path, name) for name in shards])


def _is_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint, which may be damaged."""
    there = (DESCRIPTION, f"{_PREFIX}.index")
    return files.base_name(folder).startswith(STEP) or any(
        name in there for name in files.names(folder)
    )


def _checkpoint(path: str) -> StoredState:
    lease, problems, description = Lease(path), [], None
    try:
        description = describe(path)
    except DamagedCheckpointError as error:
        problems.append(str(error))
    prefix = files.join(path, _PREFIX)
    tensors: dict[str, TensorInFiles] = {}
    try:
        tensors, found = index_entries.read_index(prefix)
        problems += found
        problems += _problems_of_places(tensors, index_entries.data_files(prefix))
    except (ValueError, OSError) as error:
        problems.append(f"{_PREFIX}.index cannot be read: {first_line(error)}")
    return StoredState(path, description, tensors, problems, lease=lease)


def _safetensors(path: str, shards: Sequence[str]) -> StoredState:
    tensors: dict[str, TensorInFiles] = {}
    metadata, data, problems, description = {}, {}, [], None
    for shard in shards:
        name = files.base_name(shard)
        try:
            there, metadata[shard], data[shard], found = safetensors_header.read_header(shard)
        except (ValueError, OSError) as error:
            problems.append(f"{name}: {first_line(error)}")
            continue
        problems += found
        for key in there.keys() & {key.removeprefix(WEIGHTS) for key in tensors}:
            problems.append(f"{key}: it is in two files, one of which is {name}")
        tensors |= {WEIGHTS + k: dataclasses.replace(t, key=WEIGHTS + k) for k, t in there.items()}
        text = metadata[shard].get(_DESCRIPTION_IN_METADATA)
        try:
            description = description if text is None else Description.from_json(text)
        except (ValueError, TypeError) as error:
            problems.append(f"{name}: {_DESCRIPTION_IN_METADATA} is damaged: {first_line(error)}")
    problems += _problems_of_places(tensors, data)
    return StoredState(path, description, tensors, problems, metadata)


def _problems_of_places(
    tensors: Mapping[str, TensorInFiles], data: Mapping[str, tuple[int, int]]
) -> list[str]:
    covered = [text for _, t in sorted(tensors.items()) for text in problems_of_cover(t)]
    return covered + problems_of_files(tensors, data)
