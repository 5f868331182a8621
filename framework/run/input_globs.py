"""Finds the globs of files in the Params of the inputs, in fields such as `files`."""

from __future__ import annotations

from tekso.framework.experiment import Tree
from tekso.framework.params import tree as params_tree

TRAINING = "input"
"""Path of the training input."""


def of_inputs(tree: Tree.Params) -> dict[str, str]:
    """Returns {path: glob}, without those that no input of the experiment reads.

    These are the globs of splits that are not evaluated, and those of a corpus that `files` of its
    input replaces.
    """
    splits = {p.get("split") for p in tree.eval_inputs.values() if "split" in p}
    unused = tuple(f"{split}_" for split in ("dev", "test") if split not in splits)
    nodes = {TRAINING: tree.input}
    nodes |= {f"eval_inputs.{name}": params for name, params in tree.eval_inputs.items()}
    globs = {
        path: value
        for root, node in nodes.items()
        for path, value, _ in params_tree.walk(node, root)
        if path.endswith("files") and isinstance(value, str) and value
    }

    def is_read(path: str) -> bool:
        parent, _, name = path.rpartition(".")
        replaced = f"{parent.removesuffix('.corpus')}.files" in globs and parent.endswith(".corpus")
        return not replaced and not name.startswith(unused)

    return {path: value for path, value in globs.items() if is_read(path)}
