"""Finds the globs of files in the Params of the inputs, in fields such as `files`."""

from __future__ import annotations

from typing import Any

from tekso.framework.experiment import Tree
from tekso.framework.input.sources import Source
from tekso.framework.params import Params
from tekso.framework.params import tree as params_tree

TRAINING = "input"
"""Path of the training input."""


def unset(tree: Tree.Params) -> list[str]:
    """Returns which settings of the sources are empty without which there is no data."""
    roots = {TRAINING: tree.input}
    roots |= {f"eval_inputs.{name}": params for name, params in tree.eval_inputs.items()}
    found = []
    for root, node in roots.items():
        inputs = [(root, node), *((path, value) for path, value, _ in params_tree.walk(node, root))]
        replaced = {f"{path}.corpus" for path, one in inputs if _has_files(one)}
        split: Any = node.get("split") if "split" in node else "train"
        for path, params in inputs:
            owner = getattr(type(params), "owner", None)
            if path not in replaced and isinstance(owner, type) and issubclass(owner, Source):
                found.append(owner.unset(params, split))
    return [one for one in dict.fromkeys(found) if one]


def _has_files(node: Any) -> bool:
    """Whether an input reads its own `files` instead of its corpus."""
    has_both = isinstance(node, Params) and "corpus" in node and "files" in node
    return has_both and bool(node.get("files"))


def of_inputs(tree: Tree.Params) -> dict[str, str]:
    """Returns {path: glob}, without those that no input of the experiment reads.

    These are the globs of splits that are not evaluated, and those of a corpus that `files` of its
    input replaces. A field that a class outside of Tekso adds need not be a glob: it is left out.
    """
    splits = {p.get("split") for p in tree.eval_inputs.values() if "split" in p}
    unused = tuple(f"{split}_" for split in ("dev", "test") if split not in splits)
    nodes = {TRAINING: tree.input}
    nodes |= {f"eval_inputs.{name}": params for name, params in tree.eval_inputs.items()}
    nodes |= {
        path: value
        for root, node in nodes.items()
        for path, value, _ in params_tree.walk(node, root)
        if isinstance(value, Params)
    }
    globs = {
        f"{path}.{name}": value
        for path, node in nodes.items()
        for name in node.fields()
        if name.endswith("files") and _is_own(type(node), name)
        if isinstance(value := node.get(name), str) and value
    }

    def is_read(path: str) -> bool:
        parent, _, name = path.rpartition(".")
        replaced = f"{parent.removesuffix('.corpus')}.files" in globs and parent.endswith(".corpus")
        return not replaced and not name.startswith(unused)

    return {path: value for path, value in globs.items() if is_read(path)}


def _is_own(params: type, name: str) -> bool:
    """Whether a class of Tekso declares a field of Params; a subclass may override it."""
    own = (cls for cls in params.__mro__ if cls.__module__.split(".")[0] == "tekso")
    return any(name in vars(cls) for cls in own)
