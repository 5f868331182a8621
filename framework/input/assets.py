"""What is learned from the data once and then kept beside a run: tables of tokenizers.

Beside an asset lies a JSON of the same name (`characters.txt.json`), written last: what it was made
from, and with which settings.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tekso.framework import files
from tekso.framework.input.skips import InputError
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
    """The asset of a name: read from `assets_dir`, or made from the training text and kept there.

    Args:
      name: file name.
      assets_dir: folder of assets; None keeps nothing.
      settings: what it is made with; the same are asked for when it is read again.
      training: text to make it from. None takes what is there.
      make: makes the bytes of the asset from the texts.

    Raises:
      InputError: it was made from something else, is damaged, or cannot be made.
    """
    path = files.join(assets_dir, name) if assets_dir else ""
    if path and files.exists(path + _ABOUT):
        about, data = _read(path)
        _check(path, about, settings, training)
        return data
    if training is None:
        where = f"is not in {assets_dir}" if assets_dir else "has no folder of assets to lie in"
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
        about = json.loads(files.read(path + _ABOUT))
        data = files.read(path)
        if (len(data), zlib.crc32(data)) != (about["size_bytes"], about["crc32"]):
            raise ValueError("its checksum is wrong")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} is damaged ({error}). A model that was trained with it needs it back; if there"
            f" is none, remove it and {path}{_ABOUT}, and it will be made again."
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
            f"{path} was made with {'; '.join(changed)}. Go back to the old setting, or begin in "
            "a new logdir."
        )
    if training is None or not training.verify or _INHERITED in about:
        return
    if training.fingerprint() != about["fingerprint"]:
        raise InputError(
            f"{path} was made from other training text ({about['made_from']}) than is read now "
            f"({training.name}): a file has changed, or the folder belongs to another experiment. "
            "Give the old text, or begin in a new logdir."
        )


def learned_assets(folder: str) -> list[str]:
    """Returns the names of the assets in a folder."""
    names = [name for name in files.names(folder) if name.endswith(_ABOUT)]
    return [name.removesuffix(_ABOUT) for name in names]


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
