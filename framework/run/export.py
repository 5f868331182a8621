"""Exporting a checkpoint: a SavedModel, and LiteRT files beside it. No execution is needed."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping
from typing import Any

from tekso.framework import files, task_results
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.input import Input
from tekso.framework.run import inspection, litert, saved_model
from tekso.framework.run.checkpoint_files import Checkpoint
from tekso.framework.run.weights import weights_of
from tekso.framework.task import Task

_ABOUT = ".json"  # beside what a run learned from its data
_TOKENIZERS = ("source_tokenizer", "target_tokenizer", "tokenizer")  # of inputs


class ExportError(ValueError):
    """An experiment cannot be exported; the text says why."""


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """How functions are exported.

    Attributes:
      batch_size: examples that are computed together.
      lengths: rows are filled up to the next of these; empty: as the task says.
      litert: which LiteRT files are written besides: "float32", "int8"; each of one example.
    """

    batch_size: int = 8
    lengths: tuple[int, ...] = ()
    litert: tuple[litert.Numbers, ...] = ()


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
      path: folder of the SavedModel.
      functions: by the names of their signatures.
      litert: {path of the file: its bytes}.
      texts: of the functions that also take texts, by name; what takes them is in `texts_path`.
    """

    path: str
    functions: Mapping[str, ExportedFunction]
    litert: Mapping[str, int]
    texts: Mapping[str, ExportedTexts]

    @property
    def texts_path(self) -> str:
        """Folder of the SavedModel that takes texts."""
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
    """Writes what the task of an experiment exports; complete at `path`, or not at all.

    Args:
      model: key of the experiment.
      tree: its Params.
      checkpoint: the weights.
      assets_dir: what the run has learned from its data.
      path: folder to write, which must not exist.
      settings: how.

    Raises:
      ExportError: the task has nothing to export, or a length is none that it can have.
      CheckpointError: the checkpoint does not fit the task.
      LiteRtError: a function cannot be converted.
    """
    input = inspection.input_if_readable(tree, assets_dir)
    task = task_results.complete(tree.task, input).instantiate()
    functions = task_results.exports(task, input)
    if not functions:
        name = type(task).__name__
        why = f"{name}.exports() returned nothing"
        if type(task).exports is Task.exports:
            why = f"{name} has no exports(): return {{name: ExportedFunction(…)}} from it"
        raise ExportError(f"{model} has nothing to export: {why}")
    functions = _with_lengths(functions, settings.lengths)
    texts = task_results.text_exports(task, input)
    weights = weights_of(task, checkpoint)
    module = saved_model.ExportModule(task, weights, seed=tree.run.seed)
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
            },
            assets=_assets(assets_dir),
            texts=texts,
        )
        sizes = {}
        for name, numbers in _converted(functions, settings):
            data = litert.convert(module, functions[name], numbers=numbers)
            file = f"{name}_{numbers}.tflite"
            files.write_atomically(files.join(place, file), data)
            sizes[files.join(path, file)] = len(data)
        if place != path:
            files.rename(place, path)
    except BaseException:
        if place != path:
            shutil.rmtree(place, ignore_errors=True)
        raise
    return Exported(path, functions, sizes, texts)


def _with_lengths(
    functions: Mapping[str, ExportedFunction], lengths: tuple[int, ...]
) -> dict[str, ExportedFunction]:
    """The functions with other lengths, each with those that are not too long for it."""
    if not lengths:
        return dict(functions)
    longest = max(one.lengths[-1] for one in functions.values())
    if list(lengths) != sorted(set(lengths)) or lengths[0] < 1 or lengths[-1] > longest:
        raise ExportError(
            f"lengths {', '.join(map(str, lengths))}: want ascending ones from 1 to {longest}, the "
            "most tokens that the model sees at once"
        )
    changed = {}
    for name, one in functions.items():
        own = [length for length in lengths if length <= one.lengths[-1]]
        changed[name] = dataclasses.replace(one, lengths=own or one.lengths[-1:])
    return changed


def _converted(
    functions: Mapping[str, ExportedFunction], settings: ExportSettings
) -> list[tuple[str, litert.Numbers]]:
    names = [name for name, one in functions.items() if one.for_litert]
    return [(name, numbers) for name in names for numbers in settings.litert]


def _vocabularies(input: Input) -> dict[str, Any]:
    """What every id stands for, of each tokenizer of an input, as JSON can hold it."""
    found: dict[str, Any] = {}
    told: dict[str, Any] = {}
    for name in _TOKENIZERS:
        tokenizer = getattr(input, name, None)
        same = next((key for key, one in told.items() if one is tokenizer), None)
        if tokenizer is None or same is not None:
            found |= {name: {"same_as": same}} if same is not None else {}
            continue
        told[name] = tokenizer
        found[name] = {
            "kind": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "end_id": tokenizer.end_id,
            "bytes_of_ids": [bytes(part).hex() for part in tokenizer.token_bytes],
        }
    first = next((one.vocab_size for one in told.values()), 0)
    for number, language in enumerate(getattr(input, "languages", ())):
        found.setdefault("languages", {})[language] = first + number
    return found


def _assets(assets_dir: str) -> dict[str, str]:
    """{name: path} of what a run learned from its data: files that have a JSON beside them."""
    found: dict[str, str] = {}
    for prefix, folder in {"": assets_dir, **_sides(assets_dir)}.items():
        names = files.names(folder) if files.is_folder(folder) else []
        found |= {
            f"{prefix}{name}": files.join(folder, name)
            for name in names
            if f"{name}{_ABOUT}" in names
        }
    return found


def _sides(assets_dir: str) -> dict[str, str]:
    """Where what was learned from one side alone lies."""
    return {f"{side}_": files.join(assets_dir, side) for side in ("source", "target")}
