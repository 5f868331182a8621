"""Params are typed: mypy, and so an editor, knows the fields and rejects a typo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = '''
from __future__ import annotations

from tekso.framework.params import REQUIRED, Configurable, Params, param


class Init(Configurable):
    class Params(Configurable.Params):
        """Params of Init."""

        scale: float = param("Factor.", default=1.0)


class Linear(Configurable):
    class Params(Configurable.Params):
        """Params of Linear."""

        input_dim: int = param("Size.", default=REQUIRED)
        init: Init.Params = param("Initializer.", default=Init.Params(scale=3.0))

    params: Params

    def input_dim(self) -> int:
        return self.params.input_dim


params: Linear.Params = Linear.Params(input_dim=3).copy().set(input_dim=4).freeze()
scale: float = params.init.scale
params.init.scael = 3.0  # error: attr-defined
params.input_dim = "x"  # error: assignment
Linear.Params(inputdim=3)  # error: call-arg
Linear.Params(input_dim="x")  # error: arg-type
'''


def test_mypy_knows_the_fields_and_rejects_typos(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="checks what mypy says of typed Params")
    file = tmp_path / "typed_params.py"
    file.write_text(CODE)
    config = Path(__file__).resolve().parents[3] / "pyproject.toml"
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += [f"--config-file={config}", f"--cache-dir={tmp_path / 'cache'}", str(file)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    found = [
        (int(line.split(":")[1]), line.rpartition("[")[2].rstrip("]"))
        for line in shown.splitlines()
        if ": error: " in line
    ]
    wanted = [
        (number, line.partition("# error: ")[2])
        for number, line in enumerate(CODE.splitlines(), start=1)
        if "# error: " in line
    ]
    assert found == wanted, shown
