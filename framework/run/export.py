"""Exports a checkpoint as a SavedModel and LiteRT files; needs no execution."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tekso.framework import files, task_results
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.input import Input
from tekso.framework.run import disk_space, inspection, litert, litert_files, saved_model
from tekso.framework.run.checkpoint_files import Checkpoint
from tekso.framework.run.weights import weights_of
from tekso.framework.task import Task

_ABOUT = ".json"  # suffix of the file that describes an asset
_TOKENIZERS = ("source_tokenizer", "target_tokenizer", "tokenizer")  # attributes of inputs


class ExportError(ValueError):
    """An experiment cannot be exported; the text says why."""


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """How functions are exported.

    Attributes:
      batch_size: number of examples that are computed together.
      lengths: rows are padded to the next of these lengths; empty: the lengths of the task.
      litert: LiteRT files to write in addition: "float32", "int8"; each computes one example.
    """

    batch_size: int = 8
    lengths: tuple[int, ...] = ()
    litert: tuple[litert.Numbers, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exported:
    """The files and functions that were exported.

    Attributes:
      path: folder of the SavedModel.
      functions: the functions by the names of their signatures.
      litert: LiteRT files, by path.
      not_litert: functions that only the SavedModel has, if LiteRT files are wanted.
      texts: the functions that also take texts, by name; their SavedModel is in `texts_path`.
    """

    path: str
    functions: Mapping[str, ExportedFunction]
    litert: Mapping[str, litert_files.LiteRtFile]
    not_litert: Sequence[str]
    texts: Mapping[str, ExportedTexts]

    @property
    def texts_path(self) -> str:
        """Folder of the SavedModel whose functions take texts."""
        return files.join(self.path, saved_model.TEXTS)


def export(
    model: str,
    tree: Any,
    checkpoint: Checkpoint,
    *,
    assets_dir: str,
    path: str,
    settings: ExportSettings,
) -> Exported:
    """Writes the functions that the task of an experiment exports; the write is atomic.

    Args:
      model: key of the experiment.
      tree: Params of the experiment.
      checkpoint: the weights.
      assets_dir: folder of the run's assets, such as tokenizers.
      path: folder to write, which must not exist.
      settings: how to export.

    Raises:
      ExportError: the task exports nothing, or nothing as LiteRT although it is wanted; or a length
        is invalid.
      CheckpointError: the checkpoint does not fit the task.
      LiteRtError: a function cannot be converted or calibrated.
    """
    input = inspection.input_if_readable(tree, assets_dir)
    task = task_results.complete(tree.task, input).instantiate()
    functions = task_results.exports(task, input)
    if not functions:
        name = type(task).__name__
        why = f"{name}.exports() returned nothing"
        if type(task).exports is Task.exports:
            why = (
                f"{name} has no exports(): return {{name: ExportedFunction(…)}} from it, of "
                "tekso.framework.exports; docs/own_model.md has an example"
            )
        raise ExportError(f"{model} has nothing to export: {why}")
    functions = _with_lengths(functions, settings.lengths)
    not_litert = not_for_litert(model, functions) if settings.litert else []
    texts = task_results.text_exports(task, input)
    weights = weights_of(task, checkpoint)
    module = saved_model.ExportModule(task, weights, seed=tree.run.seed)
    light = litert_files.converted(
        module,
        functions,
        settings.litert,
        lambda: tree.input.instantiate(seed=tree.run.seed, assets_dir=assets_dir),
    )
    place = f"{path}.unfinished.{os.getpid()}" if files.is_local(path) else path
    try:
        saved_model.write(
            place,
            module,
            functions,
            batch_size=settings.batch_size,
            about={
                "model": model,
                "checkpoint": checkpoint.path,
                "step": checkpoint.step,
                "vocabularies": _vocabularies(input),
                **({"litert": {one.name: one.record() for one in light}} if light else {}),
            },
            assets=_assets(assets_dir),
            texts=texts,
        )
        for one in light:
            files.write_atomically(files.join(place, one.name), one.data)
        if place != path:
            files.rename(place, path)
    except BaseException as error:
        if place != path:
            shutil.rmtree(place, ignore_errors=True)
        if isinstance(error, Exception) and (full := disk_space.full_file(path, error)):
            raise full from error
        raise
    files_by_path = {files.join(path, one.name): one for one in light}
    return Exported(path, functions, files_by_path, not_litert, texts)


def _with_lengths(
    functions: Mapping[str, ExportedFunction], lengths: tuple[int, ...]
) -> dict[str, ExportedFunction]:
    """Returns the functions with other lengths; a function gets those up to its own maximum."""
    if not lengths:
        return dict(functions)
    longest = max(one.lengths[-1] for one in functions.values())
    if list(lengths) != sorted(set(lengths)) or lengths[0] < 1 or lengths[-1] > longest:
        raise ExportError(
            f"lengths {', '.join(map(str, lengths))}: expected ascending lengths from 1 to "
            f"{longest}, the maximum number of tokens of the model"
        )
    changed = {}
    for name, one in functions.items():
        own = [length for length in lengths if length <= one.lengths[-1]]
        changed[name] = dataclasses.replace(one, lengths=own or one.lengths[-1:])
    return changed


def not_for_litert(model: str, functions: Mapping[str, ExportedFunction]) -> list[str]:
    """Returns the names of the functions that only a SavedModel has.

    Raises:
      ExportError: these are all functions.
    """
    names = [name for name, one in functions.items() if not one.for_litert]
    if len(names) == len(functions):
        raise ExportError(
            f"no function of {model} is exported as LiteRT ({', '.join(names)}): export a "
            "SavedModel alone, without --litert"
        )
    return names


def _vocabularies(input: Input) -> dict[str, Any]:
    """Returns the meaning of every id, for each tokenizer of an input, as JSON data."""
    found: dict[str, Any] = {}
    distinct: dict[str, Any] = {}
    for name in _TOKENIZERS:
        tokenizer = getattr(input, name, None)
        same = next((key for key, one in distinct.items() if one is tokenizer), None)
        if tokenizer is None or same is not None:
            found |= {name: {"same_as": same}} if same is not None else {}
            continue
        distinct[name] = tokenizer
        found[name] = {
            "kind": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "end_id": tokenizer.end_id,
            "bytes_of_ids": [bytes(part).hex() for part in tokenizer.token_bytes],
        }
    inputs = getattr(input, "inputs", None)
    if isinstance(inputs, Mapping):  # of several tasks
        return {name: _vocabularies(one) for name, one in inputs.items()}
    first = next((one.vocab_size for one in distinct.values()), 0)
    for number, language in enumerate(getattr(input, "languages", ())):
        found.setdefault("languages", {})[language] = first + number
    return found


def _assets(assets_dir: str) -> dict[str, str]:
    """Returns the assets of a run, {name: path}: files that are described by a JSON file."""
    found: dict[str, str] = {}
    for prefix, folder in _folders(assets_dir).items():
        names = files.names(folder) if files.is_folder(folder) else []
        found |= {
            f"{prefix}{name}": files.join(folder, name)
            for name in names
            if f"{name}{_ABOUT}" in names
        }
    return found


def _folders(assets_dir: str) -> dict[str, str]:
    """Returns the folders of assets, by prefix of their names.

    A task, and a side of a translation (source or target), have a folder each.
    """
    found = {"": assets_dir}
    names = files.names(assets_dir) if files.is_folder(assets_dir) else []
    for name in names:
        if files.is_folder(folder := files.join(assets_dir, name)):
            found |= {f"{name}_{below}": own for below, own in _folders(folder).items()}
    return found
