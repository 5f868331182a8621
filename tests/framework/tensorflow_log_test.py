"""Which of TensorFlow's log lines a program that imports Tekso first does not see."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tekso.framework.tensorflow_log import without_chatter

FAKE_TENSORFLOW = """
import os
assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ
os.write(2, b"I0000 port.cc:153] oneDNN custom operations are on. You may see\\n")
os.write(2, b"E0000 a line that matters\\n")
raise ImportError("only the first lines of its import are needed")
"""


@pytest.mark.parametrize("module", ["run.session", "run.lab", "run.weights", "layer", "learner"])
def test_all_modules_hide_what_tensorflow_says_about_itself(module: str, tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text(FAKE_TENSORFLOW)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport tekso.framework.{module}"
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert "E0000 a line that matters\n" in done.stderr
    assert "the first lines of its import" in done.stderr and "oneDNN" not in done.stderr


FAKE_IPYTHON = """
import types
def get_ipython():
    return types.SimpleNamespace(kernel=1)
"""


@pytest.mark.parametrize(("given", "used"), [(None, "3"), ("0", "0")])
def test_in_a_notebook_later_lines_of_tensorflow_are_kept_out_unless_they_are_wanted(
    given: str | None, used: str, tmp_path: Path
) -> None:
    (tmp_path / "IPython.py").write_text(FAKE_IPYTHON)
    (tmp_path / "tensorflow.py").write_text(
        "import os; raise ImportError(os.environ.get('TF_CPP_MIN_LOG_LEVEL'))"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import IPython\nimport tekso.framework.layer"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {} if given is None else {"TF_CPP_MIN_LOG_LEVEL": given}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stderr.splitlines()[-1] == f"ImportError: {used}"


def test_a_program_without_stderr_imports_a_session(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('reached')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "try:\n    import tekso.framework.run.session\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    shell = ["sh", "-c", 'exec "$0" "$@" 2>&-']
    done = subprocess.run(
        [*shell, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.stdout == "ImportError reached\n"


def test_without_a_folder_for_temporary_files_nothing_is_suppressed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "TemporaryFile", missing)
    with without_chatter():
        os.write(2, b"oneDNN custom operations are on\n")
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "oneDNN custom operations are on\nlater\n"


def test_tensorflow_is_found_as_without_the_hook(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("value = 7")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib.util, inspect, tekso.framework\n"
        "before = len(sys.meta_path)\n"
        "assert importlib.util.find_spec('tensorflow') and 'tensorflow' not in sys.modules\n"
        "import tensorflow\n"
        "source = inspect.getsource(tensorflow).strip()\n"
        "print(tensorflow.value, len(sys.meta_path) - before, source)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "7 -1 value = 7\n", done.stderr
