"""Assets of a run: tables of tokenizers, which are learned from the data once and then stored.

Next to each asset there is a JSON file of the same name (`characters.txt.json`) with the data and
the settings that the asset was made from. The JSON file is written last.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tekso.framework import bounded, files
from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import TrainingText

_ABOUT = ".json"
_INHERITED = "inherited_from"


def obtain(
    name: str,
    *,
    assets_dir: str | None,
    settings: Mapping[str, Any],
    training: TrainingText | None,
    make: Callable[[Iterable[str]], bytes],
) -> bytes:
    """Returns an asset: reads it from `assets_dir`, or makes it from the training text.

    A new asset is stored in `assets_dir`.

    Args:
      name: file name.
      assets_dir: folder of assets; None: do not store it.
      settings: settings that it is made with; a stored asset must have the same.
      training: text to make it from. None: it must be in `assets_dir`.
      make: makes the bytes of the asset from the texts.

    Raises:
      InputError: it was made from other data or settings, is damaged, or cannot be made.
    """
    path = files.join(assets_dir, name) if assets_dir else ""
    if path and files.exists(path + _ABOUT):
        about, data = _read(path)
        _check(path, about, settings, training)
        return data
    if training is None:
        where = f"is not in {assets_dir}" if assets_dir else "cannot be loaded without assets_dir"
        raise InputError(
            f"{name} {where}, and there is no training text to make it from: train first"
        )
    data = make(training.texts())
    if path:
        about = {
            "made_from": training.name,
            "fingerprint": training.fingerprint(),
            "settings": dict(settings),
            "size_bytes": len(data),
            "crc32": zlib.crc32(data),
        }
        files.write_atomically(path, data)
        files.write_atomically(path + _ABOUT, json.dumps(about, indent=1) + "\n")
    return data


def _read(path: str) -> tuple[dict[str, Any], bytes]:
    try:
        about = bounded.read_json(path + _ABOUT)
        data = files.read(path)
        if (len(data), zlib.crc32(data)) != (about["size_bytes"], about["crc32"]):
            raise ValueError("its checksum is wrong")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} is damaged ({error}). If a model was trained with it, restore it; otherwise "
            f"remove it and {path}{_ABOUT}, and it will be made again."
        ) from error
    return about, data


def _check(
    path: str, about: dict[str, Any], settings: Mapping[str, Any], training: TrainingText | None
) -> None:
    made_with = about["settings"]
    changed = [
        f"{key}={made_with.get(key)!r}, now {value!r}"
        for key, value in settings.items()
        if made_with.get(key) != value
    ]
    if changed:
        raise InputError(
            f"{path} was made with {'; '.join(changed)}. Restore the old setting, or use a new "
            "logdir."
        )
    if training is None or not training.verify or _INHERITED in about:
        return
    if training.fingerprint() != about["fingerprint"]:
        raise InputError(
            f"{path} was made from different training text ({about['made_from']}) than the current "
            f"text ({training.name}): a file has changed, or the folder belongs to another "
            "experiment. Use the old text, or a new logdir."
        )


def learned_assets(folder: str) -> list[str]:
    """Returns the names of the assets in a folder; other files in it have no JSON file beside."""
    names = set(files.names(folder))
    return sorted(name for name in names if f"{name}{_ABOUT}" in names)


def inherit(name: str, folder: str, new_folder: str) -> None:
    """Copies an asset to the folder of another run, which then need not have the same text.

    Raises:
      InputError: it is damaged.
    """
    about, data = _read(files.join(folder, name))
    path = files.join(new_folder, name)
    files.make_folder(new_folder)
    files.write_atomically(path, data)
    about = {**about, _INHERITED: files.join(folder, name)}
    files.write_atomically(path + _ABOUT, json.dumps(about, indent=1) + "\n")
