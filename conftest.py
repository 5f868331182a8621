"""Makes `tekso.*` importable from a checkout, so that `pytest` needs no installation.

The packages are top-level folders (`framework/`), but are imported by their installed names
(`tekso.framework`). In this process, the checkout becomes the path of the namespace `tekso`. For
processes that tests start, `.typing/` is added to PYTHONPATH; `.typing/tekso/` has a link to each
package. Both precede an installed Tekso, so the tests always test the checkout that contains them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def map_namespace(root: Path) -> None:
    """Maps `tekso.<package>` to `<root>/<package>` in this process and in its child processes."""
    spec = importlib.machinery.ModuleSpec("tekso", loader=None, is_package=True)
    spec.submodule_search_locations = [str(root)]
    sys.modules["tekso"] = importlib.util.module_from_spec(spec)

    links = str(root / ".typing")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in inherited if path and path != links]
    os.environ["PYTHONPATH"] = os.pathsep.join([links, *kept])


map_namespace(ROOT)
importlib.import_module(
    "tekso.framework"
)  # before tests import TensorFlow, to set its environment variables
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides TensorFlow's log lines
