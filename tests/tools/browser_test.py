"""A browser takes screenshots of pages, and what goes wrong is named."""

from __future__ import annotations

import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_browser

from tekso.tools import browser
from tekso.tools.command_errors import UsageError

SIZE = (browser.WIDTH, browser.HEIGHT)


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"the page {self.path}".encode())

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A page on a free port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/?a=b#curves"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("height", [browser.HEIGHT, browser.HEIGHT - 79])
def test_a_screenshot_is_the_picture_that_the_browser_took_of_the_page(
    url: str, tmp_path: Path, height: int
) -> None:
    picture = stand_in_browser.png(browser.WIDTH, height)
    program, work = stand_in_browser.write(tmp_path, picture=picture), tmp_path / "work"
    work.mkdir()
    assert browser.screenshot(str(program), url, folder=work) == picture
    (request,) = stand_in_browser.requests(program)
    assert request["url"] == url and request["code"] == 200
    assert request["page"] == "the page /?a=b"
    assert request["flags"]["window-size"] == "1280,900"
    assert {"headless", "no-first-run", "disable-background-networking"} < {*request["flags"]}
    profile = Path(request["flags"]["user-data-dir"])
    assert profile.is_relative_to(work) and [*work.iterdir()] == []


@pytest.mark.parametrize(("user", "has_sandbox"), [(0, False), (1000, True)])
def test_only_root_has_no_sandbox(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, has_sandbox: bool
) -> None:
    program = stand_in_browser.write(tmp_path, picture=stand_in_browser.png(*SIZE))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    browser.screenshot(str(program), url, folder=tmp_path)
    (request,) = stand_in_browser.requests(program)
    assert ("no-sandbox" not in request["flags"]) == has_sandbox


@pytest.mark.parametrize(
    ("picture", "end", "message"),
    [
        (b"", "", "ended without an error, but wrote no screenshot to .*page.png, .*: last line"),
        (b"", "sys.exit(3)", "browser ended with code 3: last line$"),
        (b"", "signal.raise_signal(signal.SIGTERM)", "was ended by SIGTERM: last line$"),
        (b"abc", stand_in_browser.SHOOTS, "wrote a file that is no PNG picture for http"),
        (
            stand_in_browser.png(*SIZE)[:-40],
            stand_in_browser.SHOOTS,
            "wrote a file that is no PNG picture for http",
        ),
        (
            stand_in_browser.png(*SIZE, blank=True),
            stand_in_browser.SHOOTS,
            "wrote a blank picture, of one colour, for http.*#curves$",
        ),
        (
            stand_in_browser.png(800, 600),
            stand_in_browser.SHOOTS,
            "wrote a picture of 800 x 600 pixels instead of 1280 x 900 for http",
        ),
    ],
    ids=["nothing", "code", "signal", "text", "damaged", "blank", "size"],
)
def test_a_screenshot_that_fails_says_why(
    url: str, tmp_path: Path, picture: bytes, end: str, message: str
) -> None:
    program, work = stand_in_browser.write(tmp_path, picture=picture, end=end), tmp_path / "work"
    work.mkdir()
    with pytest.raises(RuntimeError, match=message):
        browser.screenshot(str(program), url, folder=work)
    assert [*work.iterdir()] == []


def test_a_browser_that_takes_too_long_is_ended_with_its_processes(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            started.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    reads, writes = os.pipe()  # it is open at both ends as long as a process of the browser lives
    os.set_inheritable(writes, True)
    program = tmp_path / "browser"
    program.write_text("#!/bin/sh\nsleep 600 & wait\n")
    program.chmod(0o755)
    original = Recorded.__init__
    monkeypatch.setattr(
        Recorded, "__init__", lambda *args, **kwargs: original(*args, **kwargs, pass_fds=[writes])
    )
    with pytest.raises(RuntimeError, match=r"browser took longer than 0\.2 s for http"):
        browser.screenshot(str(program), url, folder=tmp_path, deadline_s=0.2)
    os.close(writes)
    assert started[0].returncode == -9
    assert os.read(reads, 1) == b""  # waits until the last process has ended
    os.close(reads)


def test_the_first_browser_on_the_path_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(browser, "MAC_PATHS", (str(tmp_path / "Chromium.app" / "Chromium"),))
    with pytest.raises(RuntimeError, match=r"looked for chromium, .*Chromium\.app.*--browser=PATH"):
        browser.found("")
    for name in ("Chromium.app/Chromium", "microsoft-edge", "google-chrome", "mine"):
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.touch(0o755)
        assert browser.found("") == str(tmp_path / "google-chrome" if name == "mine" else program)
    assert browser.found("mine") == browser.found(str(tmp_path / "mine")) == str(tmp_path / "mine")
    (tmp_path / "text").touch(0o644)
    for given in ("text", str(tmp_path / "text"), "none"):
        with pytest.raises(UsageError, match=f"^--browser={given}: there is no such program$"):
            browser.found(given)
