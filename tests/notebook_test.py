"""Tests that the notebook of the documentation works, and shows HTML and pictures."""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import processes
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebook.ipynb"


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


COMPILED = """\
import time
y = tf.function(lambda x: x + 1.0, jit_compile=True)(1.0).numpy()
time.sleep(1.0)  # until the kernel has sent what was written to stderr
y
"""
"""A cell that makes TensorFlow write log lines, unless its level is set."""


class Kernel:
    """Executes a notebook in a kernel of its own, over sockets of a folder.

    Attributes:
      messages: (number of the code cell, type, id of the display, data by type) of all outputs.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
            monkeypatch.setenv(name, str(folder / name.lower()))  # nothing of the user's
        self._folder = folder
        self.messages: list[tuple[int, str, str | None, dict[str, str]]] = []

    def run(self, sources: Sequence[str]) -> None:
        """Executes code cells.

        Raises:
          nbclient.exceptions.CellExecutionError: a cell failed.
        """
        import nbformat
        from jupyter_client.manager import AsyncKernelManager
        from nbclient import NotebookClient

        new = nbformat.v4
        notebook = new.new_notebook(cells=[new.new_code_cell(source) for source in sources])
        sockets = str(self._folder / "kernel")
        client = NotebookClient(
            notebook,
            km=AsyncKernelManager(kernel_name="python3", transport="ipc", ip=sockets),
            timeout=processes.DEFAULT_TIMEOUT_S,
            resources={"metadata": {"path": str(self._folder)}},
        )
        handle = client.process_message

        def noted(message: Any, cell: Any, number: int) -> Any:
            content = message["content"]
            shown = (content.get("transient") or {}).get("display_id")
            if "data" in content or message["msg_type"] == "stream":
                data = content.get("data") or {content["name"]: content["text"]}
                self.messages.append((number, message["msg_type"], shown, data))
            return handle(message, cell, number)

        client.process_message = noted
        # Under pytest, a kernel would not show what is written to the descriptor of stderr.
        unset = {"TF_CPP_MIN_LOG_LEVEL", "PYTEST_CURRENT_TEST"}
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # or the kernel prints a warning
        client.execute(env=environment)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    with tempfile.TemporaryDirectory(prefix="tekso-") as folder:  # names of sockets must be short
        yield Kernel(Path(folder), monkeypatch)


@pytest.mark.slow
def test_jupyter_executes_the_notebook_and_shows_html_and_a_plot_that_is_drawn_again(
    kernel: Kernel,
) -> None:
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    fits = [i for i, source in enumerate(sources) if "lab.fit(" in source]
    kernel.run([*sources, COMPILED])
    messages = kernel.messages
    assert [m for m in messages if m[1] == "stream"] == []  # neither stderr nor stdout

    results = {number: data for number, kind, _, data in messages if kind == "execute_result"}
    assert sorted({*range(1, len(cells) + 1)} - {*results}) == fits
    params, model, figures, samples, plot, gradient, session, compiled = results.values()
    tags = Tags()
    tags.feed(params["text/html"])
    assert not tags.open and params["text/html"].startswith("<details open><summary>")
    assert "learner.schedule" not in tags.text  # nodes are named within their parent
    # With the cell that set it.
    assert re.search(r"initial_value\n0\.005\n\[", tags.text)
    assert "85,002 weights" in model["text/html"]
    assert base64.b64decode(plot["image/png"]).startswith(b"\x89PNG")
    assert 0.5 < float(re.findall(r"'accuracy': ([\d.]+)", figures["text/plain"])[0]) <= 1
    assert samples["text/html"].count("(label ") == 10
    assert "shape=(3, 2)" in gradient["text/plain"] and "(64, 8, 8, 1)" in session["text/plain"]
    assert "2.0" in compiled["text/plain"]

    live = [(kind, shown, data) for number, kind, shown, data in messages if number == fits[0]]
    assert [kind for kind, _, _ in live][:3] == ["display_data", *["update_display_data"] * 2]
    assert len({shown for _, shown, _ in live}) == 1 and live[0][1]
    drawn = [data["image/png"] for _, _, data in live[1:]]
    assert len({*drawn}) == len(drawn) >= 2  # each has more steps
    assert live[-1][2]["text/plain"].endswith("at step 200")
