"""The package of `line_experiments` on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_experiments import EXPERIMENTS


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `lines`."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "lines").mkdir()
    (folder / "lines" / "__init__.py").write_text("")
    (folder / "lines" / "experiments.py").write_text(EXPERIMENTS)
    return folder


@pytest.fixture
def here(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's folder as working directory, as somebody has it who types commands."""
    monkeypatch.chdir(package)
    return package
