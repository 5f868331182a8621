"""Tests of the namespace `tekso`: in a checkout, in child processes, installed, and in a wheel."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("framework", "models", "tasks", "params", "tools")


def plain_environment() -> dict[str, str]:
    """Returns the environment without the PYTHONPATH that conftest.py sets."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packaged files, so that a build leaves no files in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run(sys.executable, "-m", "pip", "wheel", *options, f"--wheel-dir={folder}", ".", cwd=source)
    (path,) = folder.glob("tekso-*.whl")
    return path


@pytest.fixture(scope="module")
def setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tekso_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The namespace.


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_imported_by_its_tekso_name(package: str) -> None:
    module = importlib.import_module(f"tekso.{package}")
    assert module.__file__ is not None
    assert Path(module.__file__) == ROOT / package / "__init__.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_package_refuses_its_folder_name(package: str) -> None:
    code = f"import {package}"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=plain_environment(),
        capture_output=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert f"but its name is 'tekso.{package}'" in result.stderr.decode()


def test_a_process_that_a_test_starts_imports_the_checkout(tmp_path: Path) -> None:
    code = "import tekso.framework as package; print(package.__file__)"
    file = run(sys.executable, "-c", code, cwd=tmp_path).strip()
    assert Path(file).resolve() == ROOT / "framework" / "__init__.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_typing_links_are_relative(package: str) -> None:
    link = ROOT / ".typing" / "tekso" / package
    assert link.is_symlink()
    assert not Path(os.readlink(link)).is_absolute()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    bare = [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not bare, f"without __init__.py, these would be missing from the wheel: {bare}"


# The wheel.


def test_wheel_holds_every_file_of_the_packages(source: Path, wheel: Path) -> None:
    expected = {
        f"tekso/{path.relative_to(source)}"
        for package in PACKAGES
        for path in (source / package).rglob("*")
        if path.is_file()
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_wheel_modules_are_found_by_name(wheel: Path, tmp_path: Path) -> None:
    """Other tests import the modules, which are those of the checkout."""
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    files = [path.relative_to(unpacked).with_suffix("") for path in unpacked.rglob("*.py")]
    names = sorted(".".join(file.parts).removesuffix(".__init__") for file in files)
    assert len(names) > 300
    code = (
        "import functools, sys\n"
        "from importlib.machinery import PathFinder\n"
        "@functools.cache\n"
        "def found(name):\n"  # importlib.util.find_spec would import packages, and TensorFlow
        "    package = name.rpartition('.')[0]\n"
        "    path = found(package).submodule_search_locations if package else None\n"
        "    return PathFinder.find_spec(name, path)\n"
        "for name in sys.argv[2:]:\n"
        "    assert found(name).origin.startswith(sys.argv[1]), (name, found(name))\n"
        "import tekso.tools.entry, tekso.framework.registry\n"
        "assert tekso.tools.entry.__file__.startswith(sys.argv[1])\n"
    )
    environment = plain_environment() | {"PYTHONPATH": str(unpacked)}
    command = [sys.executable, "-W", "error:::tekso", "-c", code, str(unpacked), *names]
    run(*command, cwd=tmp_path, env=environment)


def test_wheel_names_the_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        entry_points = archive.read(name).decode()
    assert "tekso-trainer = tekso.tools.entry:trainer" in entry_points
    for line in entry_points.splitlines():
        if "=" in line:
            module, _, function = line.split("=")[1].strip().partition(":")
            assert hasattr(importlib.import_module(module), function), line


def test_wheel_has_the_extras_of_the_readme(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    needed = re.findall(r'^Requires-Dist: ([\w-]+).*; extra == "(\w+)"$', metadata, re.M)
    table = (ROOT / "README.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M))
    assert set(rows) == {extra for _, extra in needed}
    for extra in ("images", "speech"):
        assert set(rows[extra].split(", ")) == {package for package, own in needed if own == extra}


def test_editable_installation_imports_the_source(source: Path, tmp_path: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--ignore-installed"]
    command = [sys.executable, "-m", "pip", "install", *options, f"--prefix={tmp_path}", "-e", "."]
    run(*command, cwd=source)
    (site_packages,) = tmp_path.glob("lib/python*/site-packages")
    code = (
        "import site, sys\n"
        "site.addsitedir(sys.argv[1])\n"
        "import tekso.framework.params, tekso.models.layers\n"
        "print(tekso.framework.params.__file__)\n"
    )
    # -S: without the packages of this environment, in which Tekso may be installed.
    command = [sys.executable, "-S", "-c", code, str(site_packages)]
    file = run(*command, cwd=tmp_path, env=plain_environment()).strip()
    assert Path(file) == source / "framework" / "params" / "__init__.py"
    assert (tmp_path / "bin" / "tekso-trainer").exists()


# The requirement on TensorFlow.


class FakeDistribution(importlib.metadata.Distribution):
    def __init__(self, name: str, top_level: str | None) -> None:
        self.files_by_name = {"METADATA": f"Name: {name}\nVersion: 1.0\n"}
        if top_level is not None:
            self.files_by_name["top_level.txt"] = top_level

    def read_text(self, filename: str) -> str | None:
        return self.files_by_name.get(filename)

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("names", "requirement"),
    [
        ([], "tensorflow>=2.21"),
        (["tensorflow"], "tensorflow>=2.21"),
        (["tensorflow_cpu"], "tensorflow-cpu>=2.21"),
        (["tf_nightly"], "tf-nightly>=2.21.dev0"),
        (["tensorflow", "tensorflow_intel"], "tensorflow>=2.21"),
    ],
)
def test_required_is_the_tensorflow_that_is_installed(
    setup_module: ModuleType, names: list[str], requirement: str
) -> None:
    others = [FakeDistribution("tensorflow_datasets", "tensorflow_datasets\n")]
    others.append(FakeDistribution("numpy", None))
    installed = [FakeDistribution(name, "tensorflow\n") for name in names]
    assert setup_module.tensorflow_requirement([*others, *installed]) == requirement


def test_the_tensorflow_of_this_environment_is_found(setup_module: ModuleType) -> None:
    # Even if pip hides it: an isolated build has no installed packages on sys.path.
    installed = importlib.metadata.distributions(path=site.getsitepackages())
    provided = {
        distribution.metadata["Name"].lower().replace("_", "-")
        for distribution in installed
        if "tensorflow" in (distribution.read_text("top_level.txt") or "").split()
    }
    requirement = setup_module.tensorflow_requirement(setup_module.installed_distributions())
    assert requirement.split(">=")[0] in provided


def test_there_is_one_tensorflow() -> None:
    owners = {
        distribution.metadata["Name"]
        for distribution in importlib.metadata.distributions()
        if "tensorflow" in (distribution.read_text("top_level.txt") or "").split()
    }
    assert len(owners) == 1, f"these write over each other: {sorted(owners)}"
