"""Screenshots of TensorBoard's pages of a small run, for the documentation.

    train digits, 200 steps ─► TensorBoard on a free port ─► browser: a screenshot of each page
                               ▲ polled until it has read the last step

TensorBoard is ended in every case, also by Ctrl-C. The profile is shown if TensorBoard's profiler
plugin (the package `xprof`) is installed.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from tekso.framework.stopping_signals import stopping_signals
from tekso.tools import browser

_T = TypeVar("_T")
_PROGRAM = ("-m", "tensorboard.main")
_MODEL, _RUN, _STEPS = "image.digits.Mlp", "digits", 200
_SETTINGS = (
    f"--steps={_STEPS}",
    "--profile_steps=100-102",
    "--set=run.log_every_steps=10",
    "--set=run.eval_every_steps=50",
    "--set=run.weight_figures_every_steps=20",
)
_DEADLINE_S, _POLL_S, _END_S = 120.0, 0.1, 10.0
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Page:
    """A page of TensorBoard.

    Attributes:
      plugin: its name in TensorBoard.
      tags: a regular expression of the curves to show; "" for all.
    """

    plugin: str
    tags: str = ""


PAGES = {
    "curves": Page("timeseries", "^(loss|accuracy|learning_rate)$"),
    "weights": Page("timeseries", "^(norm|update_ratio)/"),
    "histograms": Page("histograms"),
    "distributions": Page("distributions"),
    "profile": Page("profile"),
}
"""{name of the picture: its page}."""


def check_installed() -> None:
    """Checks that TensorBoard can be started.

    Raises:
      RuntimeError: it is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise RuntimeError("TensorBoard is not installed: pip install tensorboard")


def pictures(program: str, *, folder: Path) -> dict[str, bytes]:
    """Returns {file name: screenshot} of the pages of a new run.

    Args:
      program: path of the browser.
      folder: an empty folder for the run and temporary files.

    Raises:
      RuntimeError: the training, TensorBoard or the browser failed, or took too long.
    """
    runs = folder / "runs"
    with _ending_by_signals():
        train(runs / _RUN, messages=folder / "trainer.txt")
        with serving(runs, messages=folder / "tensorboard.txt") as server:
            plugins = server.wait_for_run()
            return {
                f"tensorboard.{name}.png": browser.screenshot(
                    program, server.address(page), folder=folder
                )
                for name, page in PAGES.items()
                if page.plugin in plugins
            }


def train(logdir: Path, *, messages: Path) -> None:
    """Trains the model whose run TensorBoard shows."""
    words = [f"--model={_MODEL}", f"--logdir={logdir}", *_SETTINGS]
    with messages.open("wb") as file:
        command = [sys.executable, "-m", "tekso.tools.trainer", *words]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
        )
    if done.returncode:
        raise RuntimeError(f"the training of {_MODEL} {browser.ended(done.returncode, messages)}")


class Server:
    """A TensorBoard that runs in a process of its own.

    Args:
      process: the process.
      messages: the file with its stderr.
      deadline_s: seconds from now in which it must have read the run.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], *, messages: Path, deadline_s: float
    ) -> None:
        self._process, self._messages = process, messages
        self._end, self._deadline_s = time.monotonic() + deadline_s, deadline_s
        self._url = self._wait(self._printed_url, lambda: "print its address")

    def address(self, page: Page) -> str:
        """Returns the address of a page, which draws curves as SVG instead of in a worker."""
        query = {"darkMode": "false", "forceSVG": "true"}
        if page.tags:
            query["tagFilter"] = page.tags
        return f"{self._url}?{urlencode(query)}#{page.plugin}"

    def wait_for_run(self) -> set[str]:
        """Waits until the last step of the run has been read; returns the plugins that show it."""
        missing: list[str] = []

        def plugins() -> set[str] | None:
            listed = self._get("data/plugins_listing") or {}
            wanted = {page.plugin for page in PAGES.values()}
            wanted -= {"profile"} - {*listed}  # it is not installed
            active = {name for name, plugin in listed.items() if plugin["enabled"]}
            missing[:] = [f"page {name}" for name in sorted(wanted - active)] + self._unread()
            return None if missing else wanted

        return self._wait(plugins, lambda: f"show all of the run (missing: {', '.join(missing)})")

    def _unread(self) -> list[str]:
        """Returns the parts of the run of which TensorBoard has not read the last step."""
        weights = f"{_RUN}/events/weights"
        layers = (self._get("data/plugin/histograms/tags") or {}).get(weights, {})
        parts = [
            ("scalars", f"{_RUN}/events/train", "loss"),
            ("scalars", f"{_RUN}/events/dev", "loss"),
            ("histograms", weights, next(iter(layers), "")),
        ]
        unread = []
        for plugin, run, tag in parts:
            query = urlencode({"run": run, "tag": tag})
            points = self._get(f"data/plugin/{plugin}/{plugin}?{query}")  # [time, step, …]
            if not points or points[-1][1] < _STEPS:
                unread.append(run)
        return unread

    def _printed_url(self) -> str | None:
        printed = re.search(r"TensorBoard \S+ at (http://\S+/) ", self._messages.read_text())
        return printed and printed[1]

    def _get(self, path: str) -> Any:
        """Returns an answer of TensorBoard's HTTP interface; None if there is none yet."""
        try:
            with _NO_PROXY.open(f"{self._url}{path}", timeout=_END_S) as answer:
                return json.load(answer)
        except (OSError, ValueError, http.client.HTTPException):
            return None

    def _wait(self, ready: Callable[[], _T | None], what: Callable[[], str]) -> _T:
        while (found := ready()) is None:
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(f"TensorBoard {browser.ended(code, self._messages)}")
            if time.monotonic() >= self._end:
                raise RuntimeError(f"TensorBoard did not {what()} in {self._deadline_s:g} s")
            time.sleep(_POLL_S)
        return found


@contextlib.contextmanager
def serving(runs: Path, *, messages: Path, deadline_s: float = _DEADLINE_S) -> Iterator[Server]:
    """Runs TensorBoard on a free port that only this machine can reach.

    Args:
      runs: the folder whose runs it shows.
      messages: the file to which its stderr is written.
      deadline_s: seconds in which it must start and read the run.

    Raises:
      RuntimeError: it ended, or the deadline is over.
    """
    flags = [f"--logdir={runs}", "--host=127.0.0.1", "--port=0", "--load_fast=false"]
    with messages.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, *_PROGRAM, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        yield Server(process, messages=messages, deadline_s=deadline_s)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Makes signals raise an exception, as Ctrl-C does, so that child processes are ended first."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    numbers = [number for number in stopping_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
