"""TensorFlow is imported without Keras, which is there for whoever wants it."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tekso.framework.run.lazy_keras import lazy_keras


def test_keras_is_found_but_not_imported_within_the_block_and_imported_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in {"keras", *(name for name in sys.modules if name.partition(".")[0] == "keras")}:
        monkeypatch.setitem(sys.modules, name, sys)  # the end of the test removes what is imported
        del sys.modules[name]
    with lazy_keras():
        spec = importlib.util.find_spec("keras")
        assert spec is not None and spec.origin == str(tmp_path / "keras" / "__init__.py")
        with pytest.raises(ImportError, match="import of keras is deferred"):
            importlib.import_module("keras.src.optimizers")
        assert "keras" not in sys.modules
    assert importlib.import_module("keras").value == 3
    with lazy_keras():
        assert importlib.import_module("keras").value == 3  # imported before: as it is


@pytest.mark.slow
def test_keras_works_after_tensorflow_was_imported_without_it() -> None:
    code = (
        "import gc, sys\n"
        "from tekso.framework.run import quiet_tensorflow\n"
        "before = sum(one['collections'] for one in gc.get_stats())\n"
        "quiet_tensorflow.import_tensorflow()\n"
        "assert sum(one['collections'] for one in gc.get_stats()) - before < 5\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000\n"
        "import tensorflow as tf\n"
        "assert not {'keras', 'matplotlib'} & sys.modules.keys()\n"
        "from tensorflow.keras.layers import Dense\n"
        "import keras\n"
        "assert tf.keras.layers.Dense is Dense is keras.layers.Dense\n"
        "assert tf.keras.optimizers.Adam(0.1)\n"
        "import tensorflow_datasets, tensorboard\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
