"""The base class of errors about code of users that would compute wrong values everywhere."""

from __future__ import annotations


class MistakeError(Exception):
    """Code of a user has a mistake that an execution, a batch or a setting does not explain.

    It is no ValueError: code that tries whether something can be computed catches those, and would
    give another reason.
    """
