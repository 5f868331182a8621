"""Settings of all tests: Hypothesis has no deadlines, and the CPU time of each test is reported.

The summary lists the tests that used the most CPU time, including the processes that they started,
and says with `--cpu-minutes=N` if all tests together used more than N minutes of CPU time. That
decides nothing: the same tests take two to three times as long on another machine.
"""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import fork_server
import processes
import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

SLOWEST = 25
FIRST = (
    "tests/docs_test.py",
    "tests/shrunk_runs_test.py",
    "tests/framework/execution",
    "tests/tools",
    "tests/tasks",
)
"""Paths of the slow files, which run first: started last, one would run alone at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-minutes", type=float, help="CPU budget of all tests.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without slow tests if only those are run: importing them takes seconds."""
    if config.option.markexpr not in ("slow", "matrix") or collection_path.suffix != ".py":
        return None
    words = ("slow", "matrix", "sample(")
    return True if not any(w in collection_path.read_text().lower() for w in words) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "matrix" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


def _cpu_s() -> float:
    """Returns the CPU time of this process, of its ended child processes, and of their forks."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + processes.forks_cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    if session.config.getoption("numprocesses", None):
        return (yield)  # the test processes collect and import; this one only distributes tests
    from tekso.framework.run import lazy_keras, quiet_tensorflow  # after the root conftest.py

    with quiet_tensorflow.without_collecting():
        with lazy_keras.lazy_keras():
            importlib.import_module("tensorflow")  # before the test modules, which import Keras too
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_START] = _cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "teardown":
        report.cpu_s = _cpu_s() - item.stash[_START]
    return report


_START = pytest.StashKey[float]()


class _Times:
    """Sums the CPU times that all test processes report, and prints the summary."""

    def __init__(self) -> None:
        self.by_test: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.by_test[report.nodeid] = report.cpu_s

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        write = terminalreporter.write_line
        slowest = sorted(self.by_test.items(), key=lambda pair: -pair[1])[:SLOWEST]
        terminalreporter.section(f"the {SLOWEST} tests that used most CPU time, in seconds")
        for name, seconds in slowest:
            write(f"{seconds:8.1f}  {name}")
        used, budget = _all_cpu_minutes(), config.getoption("--cpu-minutes")
        write(f"{used:8.1f}  minutes of CPU time in total")
        if budget is not None and used > budget:
            write(f"That is above {budget:g} minutes. If this machine is as fast as that of")
            write("docs/development.md, make the slowest tests cheaper.")


def _all_cpu_minutes() -> float:
    """Returns the CPU time of this process and of the child processes that it waited for."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in found) / 60


def pytest_configure(config: pytest.Config) -> None:
    fork_server.collect_less()
    fork_server.leave_out_keras()
    if config.option.markexpr in ("not slow", "slow"):
        # LLVM takes longer to optimize a cluster than these tests take to run it.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Times(), "cpu-times")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    processes.stop()
