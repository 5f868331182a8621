"""What is known of an input before any data is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tekso.framework.params import REQUIRED, Params
from tekso.framework.params import tree as params_tree


@dataclasses.dataclass(frozen=True)
class KnownText:
    """The parts of a text input that are known without its data.

    Attributes:
      params: Params of the input.
      tokenizer: its tokenizer.
    """

    params: Any
    tokenizer: Any

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.tokenizer.vocab_size)


class UnreadInput:
    """What the Params determine about an input before any data is read."""

    def __init__(self, params: Any) -> None:
        self.params = params

    @property
    def inputs(self) -> dict[str, UnreadInput] | None:
        """The same for the inputs of several tasks, by name; None: it is one input."""
        inputs = self.params.inputs if "inputs" in self.params else None
        if not isinstance(inputs, Mapping):
            return None
        return {name: UnreadInput(own) for name, own in inputs.items()}

    @property
    def vocab_size(self) -> int | None:
        """The size that the Params set, or that all tokenizers of this class have."""
        tokenizer = self.params.tokenizer if "tokenizer" in self.params else None
        for params in (tokenizer, self.params):
            given = params.vocab_size if params is not None and "vocab_size" in params else None
            if given not in (None, REQUIRED):
                found: int | None = given
                return found
        fixed = getattr(getattr(tokenizer, "owner", None), "token_bytes", None)
        return len(fixed) if isinstance(fixed, tuple) else None


def unset_error(params: Params, method: str, name: str) -> ValueError:
    """Returns the error that a method reads what is known only of an input with its data.

    Args:
      params: Params of the task, some of whose sizes may be open.
      method: name of the method that completes them.
      name: the attribute of the input.
    """
    walked = params_tree.walk(params)
    unset = [params.path_of(path) for path, value, _ in walked if value is REQUIRED]
    if not unset:
        return ValueError(
            f"{method} reads {name!r} of the training input, whose data is not read here, although "
            "all sizes are set: read it only if the size that it determines is not set (is "
            "REQUIRED)"
        )
    settings = " ".join(f"--set {path}=10" for path in unset)
    return ValueError(
        f"{' and '.join(unset)} {'are' if unset[1:] else 'is'} not set: {method} reads {name!r} of "
        f"the training input, whose data is not read here. Set it, as in {settings}, or give the "
        "folder of a run with a checkpoint (--logdir)"
    )
