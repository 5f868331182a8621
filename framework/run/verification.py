"""Verifies a checkpoint or safetensors files: everything that can be known without the run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from tekso.framework import files
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError, first_line
from tekso.framework.run.file_checksum import checksum
from tekso.framework.run.stored_state import StoredState
from tekso.framework.run.stored_tensors import TensorInFiles, TensorReader
from tekso.framework.state import WEIGHTS

_SHA256_IN_METADATA = "tekso.sha256"


def problems(stored: StoredState) -> Iterator[str]:
    """Yields what is wrong, in a line each; reads every byte, a chunk at a time.

    - The description, index or header can be read. Every byte of the data files and every element
      of a tensor is in exactly one piece.
    - Tensors, shapes and dtypes are those of the description.
    - Sizes and SHA-256 of the files, and the CRC-32C of each piece, are those that were written.
    """
    yield from stored.problems
    description = stored.description
    if description is not None:
        yield from _of_description(stored.tensors, description)
        yield from _of_files(stored, description)
    known = {key for key, tensor in stored.tensors.items() if _is_known(tensor, stored)}
    with TensorReader() as reader:
        for key in sorted(stored.tensors.keys() - known):
            try:
                for _ in reader.chunks(stored.tensors[key]):
                    pass
            except DamagedCheckpointError as error:
                yield str(error)
    if not stored.problems:
        yield from _of_metadata(stored)


def _is_known(tensor: TensorInFiles, stored: StoredState) -> bool:
    """Whether a problem says already that a tensor cannot be read."""
    named = (f"{tensor.key}: ", f"{tensor.key.removeprefix(WEIGHTS)}: ")
    missing = tuple(f"{files.base_name(piece.file)} is missing" for piece in tensor.pieces)
    return any(text.startswith((*named, *missing)) for text in stored.problems)


def _of_description(
    tensors: Mapping[str, TensorInFiles], description: Description
) -> Iterator[str]:
    if not description.tensors or not tensors:  # of an earlier version; or a known problem
        return
    for key in sorted(description.tensors.keys() - tensors.keys()):
        yield f"{key}: it is in the description, but not in the files"
    for key in sorted(tensors.keys() - description.tensors.keys()):
        yield f"{key}: it is in the files, but not in the description"
    for key in sorted(tensors.keys() & description.tensors.keys()):
        about, tensor = description.tensors[key], tensors[key]
        if about.get("shape", list(tensor.shape)) != list(tensor.shape):
            yield (
                f"{key}: its shape is {list(tensor.shape)}, but {about['shape']} in the description"
            )
        if about.get("dtype", tensor.dtype) != tensor.dtype:
            yield f"{key}: its dtype is {tensor.dtype}, but {about['dtype']} in the description"


def _of_files(stored: StoredState, description: Description) -> Iterator[str]:
    """Compares the files; for a file that a problem names already, this adds nothing."""
    for name, wanted in description.files.items():
        if any(text.startswith(f"{name} ") for text in stored.problems):
            continue
        try:
            found = checksum(files.join(stored.path, name))
        except OSError as error:
            yield f"{name} cannot be read: {first_line(error)}"
            continue
        size, written = found["size_bytes"], wanted["size_bytes"]
        if size != written:
            yield f"{name} has {size:,} bytes, but {written:,} were written"
        elif found["sha256"] != wanted.get("sha256"):
            yield f"the bytes of {name} have changed (sha256 differs)"


def _of_metadata(stored: StoredState) -> Iterator[str]:
    """Compares the checksum of each safetensors file, if Tekso wrote it."""
    for path, metadata in stored.metadata.items():
        wanted = metadata.get(_SHA256_IN_METADATA)
        if wanted is None:
            continue
        digest = hashlib.sha256()
        with TensorReader() as reader:
            for key, tensor in sorted(stored.tensors.items()):
                if tensor.pieces[0].file == path:
                    digest.update(key.removeprefix(WEIGHTS).encode())
                    for chunk in reader.chunks(tensor):
                        digest.update(chunk.view("u1").data)
        if digest.hexdigest() != wanted:
            yield f"the bytes of tensors in {files.base_name(path)} have changed (sha256 differs)"
