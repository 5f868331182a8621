"""Makes the `tekso.*` names work from a plain checkout, so that `pytest` needs no installation.

The rooms lie in top-level folders (`framework/`) and are imported by their installed names
(`tekso.framework`). In this process the namespace `tekso` is given the checkout as its path; the
processes that tests start get `.typing/` on PYTHONPATH, whose `tekso/` holds a link to each room.
Both come before an installed Tekso: the tests always test the checkout that they lie in.
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
    """Makes `tekso.<room>` mean `<root>/<room>` in this process and in those that it starts."""
    spec = importlib.machinery.ModuleSpec("tekso", loader=None, is_package=True)
    spec.submodule_search_locations = [str(root)]
    sys.modules["tekso"] = importlib.util.module_from_spec(spec)

    links = str(root / ".typing")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in inherited if path and path != links]
    os.environ["PYTHONPATH"] = os.pathsep.join([links, *kept])


map_namespace(ROOT)
importlib.import_module("tekso.framework")  # sets up TensorFlow, which some tests import first
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes of TensorFlow between the tests
