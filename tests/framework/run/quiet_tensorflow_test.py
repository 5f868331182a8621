"""What the import of TensorFlow prints, and what the garbage collector does meanwhile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tekso.framework.run import quiet_tensorflow
from tekso.framework.run.quiet_tensorflow import without_chatter, without_collecting


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_in_the_block_nor_what_it_leaves_afterwards() -> None:
    with without_collecting():
        assert not gc.isenabled()
        module = {"objects": [[]]}
    assert gc.isenabled()
    assert not any(found is module for found in gc.get_objects())
    later = [module]
    assert any(found is later for found in gc.get_objects())


def test_a_collector_that_was_off_stays_off_and_an_error_turns_it_on_again() -> None:
    with pytest.raises(ImportError), without_collecting():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with without_collecting():
        pass
    assert not gc.isenabled()


FAKE_TENSORFLOW = """
import os
assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ
os.write(2, b"I0000 port.cc:153] oneDNN custom operations are on. You may see\\n")
os.write(2, b"E0000 a line that matters\\n")
raise ImportError("only the first lines of its import are needed")
"""


@pytest.mark.parametrize("module", ["session", "lab"])
def test_sessions_and_labs_hide_what_tensorflow_says_about_itself(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / "tensorflow.py").write_text(FAKE_TENSORFLOW)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport tekso.framework.run.{module}"
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
        "import IPython\nimport tekso.framework.run.session"
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

    monkeypatch.setattr(quiet_tensorflow.tempfile, "TemporaryFile", missing)
    with without_chatter():
        os.write(2, b"oneDNN custom operations are on\n")
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "oneDNN custom operations are on\nlater\n"
