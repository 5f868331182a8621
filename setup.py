"""Packages the rooms (`framework/`, `models/`, ...) under the namespace `tekso`.

Every folder with an `__init__.py` inside a room is found by itself; there is no list to keep.
There is no `tekso/__init__.py`: `tekso` is a namespace, and the rooms are its packages.
"""

from __future__ import annotations

import site
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

from setuptools import find_packages, setup

ROOMS = ("framework", "models", "tasks", "params", "tools")

TENSORFLOW = "2.21"  # the oldest release that is accepted, and the one that is tested


def package_folders() -> dict[str, str]:
    """Returns installed package -> folder, as `tekso.models.layers` -> `models/layers`."""
    found = find_packages(where=".", include=[*ROOMS, *(f"{room}.*" for room in ROOMS)])
    return {f"tekso.{package}": package.replace(".", "/") for package in found}


def installed_distributions() -> Iterable[Distribution]:
    """Returns what is installed where Tekso is being installed.

    pip builds in an isolated environment, which hides the installed packages from `sys.path`; they
    still lie in the `site-packages` of the interpreter that runs.
    """
    folders = [*sys.path, *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:  # a virtual environment does not see the user's packages
        folders.append(site.getusersitepackages())
    return distributions(path=list(dict.fromkeys(folders)))


def tensorflow_requirement(installed: Iterable[Distribution]) -> str:
    """Returns the requirement on TensorFlow that never brings a second one.

    `tensorflow`, `tensorflow-cpu`, `tf-nightly` and others are different distributions of the same
    package `tensorflow`. pip takes them for strangers and would write one over the other. So the
    one that is installed is required; where there is none, `tensorflow`.
    """
    provided = set()
    for distribution in installed:
        name = distribution.metadata["Name"]
        top_level = (distribution.read_text("top_level.txt") or "").split()
        if name and "tensorflow" in top_level:
            provided.add(name.lower().replace("_", "-"))
    # `tensorflow` itself needs one of the others on some machines: then it is the one to name.
    name = "tensorflow" if "tensorflow" in provided else min(provided, default="tensorflow")
    # "dev0" admits the versions of nightly builds, which are pre-releases to pip.
    return f"{name}>={TENSORFLOW}" + (".dev0" if "nightly" in name else "")


if __name__ == "__main__":
    folders = package_folders()
    setup(
        name="tekso",
        version="0.1.0",
        description="A modular research framework on TensorFlow: one model, any execution",
        python_requires=">=3.11",
        packages=list(folders),
        package_dir=folders,
        package_data={"": ["py.typed"], "tekso.tools": ["new_task_template/*/*"]},
        install_requires=[
            tensorflow_requirement(installed_distributions()),
            "absl-py",
            "babel",
            "importlib_resources",  # tensorflow-datasets needs it to prepare, and does not say so
            "matplotlib",
            "numpy",
            "psutil",
            "rich",
            "sacrebleu",
            "sentencepiece",
            "tensorboard",
            "tensorflow-datasets",
        ],
        extras_require={
            "test": [
                "ai-edge-litert",
                "hypothesis",
                "import-linter",
                "mypy~=2.4.1",  # a new release of mypy or ruff finds new faults
                "pytest>=9",
                "pytest-timeout",
                "pytest-xdist",
                "ruff~=0.17.5",
                "scikit-learn",  # the data of docs/first_task.md
                "setuptools>=64",  # the wheel is built in a test, without a network
                "wheel",
            ],
        },
        entry_points={
            "console_scripts": [
                "tekso-trainer=tekso.tools.entry:trainer",
                "tekso-vocab=tekso.tools.entry:vocab",
                "tekso-benchmark=tekso.tools.entry:benchmark",
                "tekso-pipeline-benchmark=tekso.tools.entry:pipeline_benchmark",
                "tekso-worker=tekso.tools.entry:worker",
                "tekso-ckpt=tekso.tools.entry:ckpt",
                "tekso-decode=tekso.tools.entry:decode",
                "tekso-new-task=tekso.tools.entry:new_task",
            ],
        },
    )
