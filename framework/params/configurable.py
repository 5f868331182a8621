"""Configurable: a class that has its own Params and is built from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tekso.framework.params.origins import hide_from_origins
from tekso.framework.params.params import Params as PlainParams
from tekso.framework.params.types import type_name

hide_from_origins(__file__)


class Configurable:
    """A class that is built from its nested Params: `Linear.Params(input_dim=3).instantiate()`."""

    class Params(PlainParams):
        """Params of a Configurable."""

    params: Any

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Rejects arguments that belong in Params, as in `Linear(input_dim=3)`.

            Raises:
              TypeError: the first argument is not Params.
            """
            params = args[0] if args else kwargs.get("params")
            if (args or kwargs) and not isinstance(params, PlainParams):
                fields = cls.Params._fields
                given = [f"{k}={_short(v)}" for k, v in kwargs.items() if k in fields]
                hint = ""
                if len(given) < len(args) + len(kwargs):  # an unknown name, or no name at all
                    given.append("…")
                    hint = f"; the fields are {', '.join(fields)}"
                name = cls.__name__
                made = f"{name}.Params({', '.join(given)})"
                raise TypeError(
                    f"{name} is built from its Params: write {made} for a field or a child, and "
                    f"{made}.instantiate() for the object itself{hint}"
                )
            return super().__new__(cls)

    def __init__(self, params: Any) -> None:
        """Stores the frozen Params as `self.params`."""
        self.params = params.copy().freeze() if not params.is_frozen else params

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives the class its own Params, and makes the class their owner."""
        super().__init_subclass__(**kwargs)
        inherited = _most_derived(
            [base.Params for base in cls.__bases__ if issubclass(base, Configurable)]
        )
        own = cls.__dict__.get("Params")
        if own is None or own.__dict__.get("owner") is not None:
            bases = tuple(inherited) if own is None else (own,)
            namespace = {
                "__doc__": f"Params of {cls.__name__}.",
                "__module__": cls.__module__,
                "__qualname__": f"{cls.__qualname__}.Params",
            }
            own = cast("type[PlainParams]", type("Params", bases, namespace))
            cls.Params = own  # type: ignore[misc, assignment]
        for base in inherited:
            if not issubclass(own, base):
                raise TypeError(
                    f"{type_name(own)} must derive from {type_name(base)}: "
                    f"class Params({type_name(base)})"
                )
        own.owner = cls


Configurable.Params.owner = Configurable


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 30 else "…"


def _most_derived(classes: list[type[PlainParams]]) -> list[type[PlainParams]]:
    unique = list(dict.fromkeys(classes))
    return [one for one in unique if not any(o is not one and issubclass(o, one) for o in unique)]
