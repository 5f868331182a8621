"""Installs the top-level folders (`framework/`, `models/`, ...) as packages of `tekso`.

Every folder inside them that has an `__init__.py` is found automatically. There is no
`tekso/__init__.py`: `tekso` is a namespace package.
"""

from __future__ import annotations

import site
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions

from setuptools import find_packages, setup

PACKAGES = ("framework", "models", "tasks", "params", "tools")

TENSORFLOW = "2.21"  # the oldest supported release, and the tested one


def package_folders() -> dict[str, str]:
    """Returns {package: folder}, such as {"tekso.models.layers": "models/layers"}."""
    found = find_packages(where=".", include=[*PACKAGES, *(f"{package}.*" for package in PACKAGES)])
    return {f"tekso.{package}": package.replace(".", "/") for package in found}


def installed_distributions() -> Iterable[Distribution]:
    """Returns the distributions in the environment where Tekso is being installed.

    pip builds in an isolated environment, which hides the installed packages from `sys.path`. They
    are still in the `site-packages` of the running interpreter.
    """
    folders = [*sys.path, *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:  # not a virtual environment: add the packages of the user
        folders.append(site.getusersitepackages())
    return distributions(path=list(dict.fromkeys(folders)))


def tensorflow_requirement(installed: Iterable[Distribution]) -> str:
    """Returns a requirement that never installs a second TensorFlow.

    `tensorflow`, `tensorflow-cpu`, `tf-nightly` and others are different distributions of the same
    package `tensorflow`, and pip would install one over the other. The requirement is therefore the
    installed distribution, or `tensorflow` if there is none.
    """
    provided = set()
    for distribution in installed:
        name = distribution.metadata["Name"]
        top_level = (distribution.read_text("top_level.txt") or "").split()
        if name and "tensorflow" in top_level:
            provided.add(name.lower().replace("_", "-"))
    # On some machines `tensorflow` depends on one of the others. Then require `tensorflow`.
    name = "tensorflow" if "tensorflow" in provided else min(provided, default="tensorflow")
    # "dev0" allows nightly builds, which pip treats as pre-releases.
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
        package_data={
            "": ["py.typed"],
            "tekso.params": ["results/*.json"],
            "tekso.tools": ["new_task_template/*/*"],
        },
        install_requires=[
            tensorflow_requirement(installed_distributions()),
            "absl-py",
            "babel<2.19",  # the data of mt.cldr and their stored results are of its version of CLDR
            "google-crc32c",
            "importlib_resources",  # tensorflow-datasets imports it without requiring it
            "matplotlib",
            "numpy",
            "pillow",
            "psutil",
            "regex",
            "rich",
            "sacrebleu",
            "safetensors",
            "sentencepiece",
            "tensorboard",
            "tensorflow-datasets",
        ],
        extras_require={
            # the documentation as a site: `make docs`
            "docs": ["mkdocs-material~=9.7", "mkdocstrings-python~=2.0"],
            # average precision of boxes; the handwritten digits of image.digits
            "images": ["pycocotools>=2.0.8", "scikit-learn"],
            "speech": ["jiwer>=4", "soundfile"],
            "sweep": ["optuna>=4"],  # tekso-sweep --search
            "test": [
                "ai-edge-litert",
                "hypothesis",
                "import-linter",
                "ipykernel>=7",  # a test executes docs/notebook.ipynb
                "jiwer>=4",  # of the extra "speech"
                "mkdocs-material~=9.7",  # of the extra "docs"
                "mkdocstrings-python~=2.0",
                "mypy~=2.4.1",  # a new release of mypy or ruff may report new errors
                "nbclient>=0.10",
                "optuna>=4",  # of the extra "sweep"
                "pycocotools>=2.0.8",  # of the extra "images"
                "pytest>=9",
                "pytest-timeout",
                "pytest-xdist",
                "ruff~=0.17.5",
                "scikit-learn",  # the data of docs/first_task.md and docs/vision.md
                "soundfile",  # of the extra "speech"
                "setuptools>=64",  # a test builds the wheel without a network
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
                "tekso-compare=tekso.tools.entry:compare",
                "tekso-results=tekso.tools.entry:results",
                "tekso-sweep=tekso.tools.entry:sweep",
                "tekso-new-task=tekso.tools.entry:new_task",
            ],
        },
    )
