"""Packages the rooms (`framework/`, `models/`, ...) under the namespace `tekso`.

Every folder with an `__init__.py` inside a room is found by itself; there is no list to keep.
There is no `tekso/__init__.py`: `tekso` is a namespace, and the rooms are its packages.
"""

from __future__ import annotations

from setuptools import find_packages, setup

ROOMS = ("framework", "models", "tasks", "params", "tools")


def folders() -> list[str]:
    """Returns every packaged folder, dotted and relative to the checkout (`models.layers`)."""
    return find_packages(where=".", include=[*ROOMS, *(f"{room}.*" for room in ROOMS)])


setup(
    name="tekso",
    version="0.1.0",
    description="A modular research framework on TensorFlow: one model, any execution",
    python_requires=">=3.11",
    packages=[f"tekso.{folder}" for folder in folders()],
    package_dir={f"tekso.{folder}": folder.replace(".", "/") for folder in folders()},
    install_requires=["numpy"],
)
