"""Params: typed, nested, documented configuration; see `params.py`."""

from tekso.framework.params.configurable import Configurable
from tekso.framework.params.params import (
    REQUIRED,
    Field,
    FrozenParamsError,
    OldField,
    Params,
    Required,
    param,
)
from tekso.framework.params.references import rename_class
from tekso.framework.params.versions import Migration, NewerVersionError

__all__ = [
    "REQUIRED",
    "Configurable",
    "Field",
    "FrozenParamsError",
    "Migration",
    "NewerVersionError",
    "OldField",
    "Params",
    "Required",
    "param",
    "rename_class",
]
