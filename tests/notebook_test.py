"""Tests that the notebook of the documentation works, and shows HTML and pictures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import processes
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"
PROGRAM = Path(__file__).with_name("notebook_program.py")


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


class Tags(HTMLParser):
    """Checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


@pytest.mark.slow
def test_every_cell_of_the_notebook_works(tmp_path: Path) -> None:
    done = processes.run([PROGRAM, str(NOTEBOOK)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = re.split(r"(?m)^== cell \d+: ", done.stdout)[1:]
    params, model, fit, figures, samples, plot, gradient, session = cells[1:]
    tags = Tags()
    tags.feed(params.partition("\n")[2])
    assert not tags.open
    assert "learner.schedule" not in tags.text  # nodes are named within their parent
    assert re.search(r"initial_value\n0\.005\n\[", tags.text)  # with the place that set it
    assert model.startswith("Shown html") and "85,002 weights" in model
    assert fit.startswith("Shown png") and plot.startswith("Shown png")
    assert (tmp_path / "cell_6.png").read_bytes().startswith(b"\x89PNG")
    assert 0.5 < float(re.findall(r"'accuracy': ([\d.]+)", figures)[0]) <= 1
    assert samples.count("(label ") == 10
    assert "shape=(3, 2)" in gradient and "(64, 8, 8, 1)" in session
