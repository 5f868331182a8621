"""--mode=export: exports a trained model for programs without Tekso."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tekso.framework import files
from tekso.framework.json_text import to_json
from tekso.tools.command_errors import OK, UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.experiment import Tree
    from tekso.framework.run.checkpoints import Checkpoint
    from tekso.framework.run.logdir import Logdir


def run(
    model: str,
    tree: Tree.Params,
    checkpoint: Checkpoint,
    logdir: Logdir,
    *,
    output: str | None,
    batch_size: int,
    lengths: Sequence[str],
    litert: Sequence[Literal["float32", "int8"]],
    as_json: bool,
) -> int:
    """Exports a checkpoint and prints what was written; returns the exit code.

    Args:
      model: key of the experiment.
      tree: its Params.
      checkpoint: checkpoint with the weights.
      logdir: logdir of the run.
      output: folder to write; None for "export" in the logdir.
      batch_size: number of examples computed together.
      lengths: lengths of rows, as decimal strings; empty for those of the task.
      litert: number formats of the LiteRT files.
      as_json: print one object instead of text.

    Raises:
      UsageError: the folder exists, or a length is not a number.
    """
    from tekso.framework.run import export

    path = os.path.expanduser(output) if output else logdir.file("export")
    path = path.rstrip("/")
    if files.exists(path):
        raise UsageError(f"{path} exists: give another --output, or move it away")
    if wrong := [text for text in lengths if not (text.isascii() and text.isdigit())]:
        raise UsageError(
            f"--export_lengths: {wrong[0]!r} is not a length; expected numbers, as in 16,64,128"
        )
    exported = export.export(
        model,
        tree,
        checkpoint,
        assets_dir=logdir.assets,
        path=path,
        settings=export.ExportSettings(
            batch_size=batch_size,
            lengths=tuple(map(int, lengths)),
            litert=tuple(dict.fromkeys(litert)),
        ),
    )
    if as_json:
        record = {
            "model": model,
            "checkpoint": checkpoint.path,
            "step": checkpoint.step,
            "output": path,
            "functions": list(exported.functions),
            "litert": {path: one.record() for path, one in exported.litert.items()},
            "not_litert": list(exported.not_litert),
            "texts": list(exported.texts),
        }
        print(to_json(record, indent=1))
    else:
        _report(exported, checkpoint)
    return OK


def _lengths_of_outputs(outputs: Mapping[str, Any]) -> str:
    """Returns which outputs of a function, whose rows have any length, are as long as its rows."""
    rows: dict[str, list[str]] = {}
    for name, one in outputs.items():
        rows.setdefault(one.length_of, []).append(name)
    fixed = rows.pop("", [])
    texts = [f"as long as the rows of {of}: {', '.join(names)}" for of, names in rows.items()]
    if fixed:
        texts.append(f"of a shape that does not depend on the rows: {', '.join(fixed)}")
    return "; ".join(texts)


def _report(exported: Any, checkpoint: Checkpoint) -> None:
    from tekso.framework.units import bytes_text

    print(f"exported {checkpoint.path} to {exported.path}:")
    for name, one in exported.functions.items():
        inputs = ", ".join([*one.inputs, *(["seed"] if one.is_random else [])])
        has_rows = any(input.has_length for input in one.inputs.values())
        rows = f"; rows of up to {one.lengths[-1]}" if has_rows else ""
        print(f"  {name}({inputs}) -> {', '.join(one.outputs)}{rows}")
        print(f"      {one.doc}")
        if has_rows:
            print(f"      {_lengths_of_outputs(one.outputs)}")
    for path, file in exported.litert.items():
        print(f"  {path}: {bytes_text(len(file.data))}")
        for line in file.lines():
            print(f"      {line}")
    if exported.not_litert:
        print(f"  only in the SavedModel, not as LiteRT: {', '.join(exported.not_litert)}")
    for name, texts in exported.texts.items():
        inputs = ", ".join(texts.inputs)
        print(f"  {exported.texts_path}: {name}({inputs}), with texts as inputs and outputs")
    first, one = next(iter(exported.functions.items()))
    given = ", ".join(f"{name}=…" for name in one.inputs)
    print("load it without Tekso, in Python:")
    print(f'  tf.saved_model.load("{exported.path}").signatures["{first}"]({given})')
    for name, texts in list(exported.texts.items())[:1]:
        given = ", ".join(f"{key}=…" for key in texts.inputs)
        packages = sorted({one.package for one in exported.texts.values() if one.package})
        after = "".join(f", after `import {package}`" for package in packages)
        print(f"and for texts{after}:")
        print(f'  tf.saved_model.load("{exported.texts_path}").signatures["{name}"]({given})')
