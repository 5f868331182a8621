"""Takes a screenshot of a page with a browser of this machine: Chromium, Chrome or Edge.

    program = browser.found("")                  the first browser on PATH
    png = browser.screenshot(program, url, folder=work)

Nothing is downloaded. The browser has no window, and an empty profile that is removed afterwards.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tekso.tools.command_errors import UsageError

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "microsoft-edge",
    "chrome-headless-shell",
)
"""Programs that are looked for on PATH, in this order."""
MAC_PATHS = tuple(
    f"/Applications/{name}.app/Contents/MacOS/{name}"
    for name in ("Chromium", "Google Chrome", "Microsoft Edge")
)
"""Programs that macOS does not have on PATH."""

WIDTH, HEIGHT = 1280, 900  # pixels
# Since 2023 (`--headless=new`), the height of the window includes that of the address bar and tabs,
# which are not in the picture: 79 pixels for Chrome 114 on macOS.
_MOST_BARS = 200  # pixels
_VIRTUAL_MS = 20_000  # of timers and animations before the screenshot; requests stop this clock
_DEADLINE_S = 120.0


def found(given: str) -> str:
    """Returns the path of a browser.

    Args:
      given: a path or a name; "" for the first of `NAMES` and `MAC_PATHS` that exists.

    Raises:
      UsageError: there is no program `given`.
      RuntimeError: no browser was found.
    """
    if given:
        path = shutil.which(os.path.expanduser(given))
        if path is None:
            raise UsageError(f"--browser={given}: there is no such program")
        return path
    for name in (*NAMES, *MAC_PATHS):
        if path := shutil.which(name):
            return path
    raise RuntimeError(
        "no browser was found, which screenshots need: looked for "
        f"{', '.join(NAMES)} on PATH, and for {', '.join(MAC_PATHS)}; "
        "install one of them, or name another one that is based on Chromium with --browser=PATH"
    )


def screenshot(program: str, url: str, *, folder: Path, deadline_s: float = _DEADLINE_S) -> bytes:
    """Returns a screenshot of a page, as the bytes of a PNG file.

    Args:
      program: path of the browser.
      url: the page.
      folder: where a temporary folder is made for the profile of the browser and the screenshot.
        Browsers that are installed as a snap or a flatpak may write to few other folders than
        visible ones in the home folder.
      deadline_s: seconds after which the browser is ended.

    Raises:
      RuntimeError: the browser failed, took too long, or wrote no picture or a blank one.
    """
    with tempfile.TemporaryDirectory(
        prefix="screenshot-", dir=folder.resolve(), ignore_cleanup_errors=True
    ) as own:
        path, messages = Path(own) / "page.png", Path(own) / "messages.txt"
        command = [program, *_flags(path, profile=Path(own) / "profile"), url]
        # A file, because processes that outlive the browser would keep a pipe open.
        with messages.open("wb") as stderr:
            code = _run(command, stderr=stderr.fileno(), deadline_s=deadline_s)
        if code is None:
            raise RuntimeError(f"{program} took longer than {deadline_s:g} s for {url}")
        if code:
            raise RuntimeError(f"{program} {ended(code, messages)}")
        if not path.exists():
            last = last_line(messages)
            raise RuntimeError(
                f"{program} ended without an error, but wrote no screenshot to {path}, where a "
                "snap or a flatpak may not be allowed to write" + (f": {last}" if last else "")
            )
        picture = path.read_bytes()
    if problem := _problem(picture):
        raise RuntimeError(f"{program} wrote {problem} for {url}")
    return picture


def ended(code: int, messages: Path) -> str:
    """Returns how a process ended: its exit code or signal, and its last line on stderr."""
    last = last_line(messages)
    how = f"ended with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    return f"{how}: {last}" if last else how


def last_line(messages: Path) -> str:
    """Returns the last line of a file that is not empty; "" if there is none."""
    lines = messages.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _flags(path: Path, *, profile: Path) -> list[str]:
    flags = [
        "--headless",
        f"--screenshot={path}",
        f"--window-size={WIDTH},{HEIGHT}",
        "--force-device-scale-factor=1",  # else 2 on some screens
        "--hide-scrollbars",
        f"--virtual-time-budget={_VIRTUAL_MS}",
        f"--user-data-dir={profile}",
        "--no-first-run",
        "--no-default-browser-check",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-default-apps",
        "--disable-extensions",
        "--disable-gpu",
        "--disable-sync",
    ]
    if os.geteuid() == 0:
        # As root, Chromium refuses to start with its sandbox, which protects against malicious
        # pages. The only pages here are those of this machine.
        flags.append("--no-sandbox")
    return flags


def _run(command: list[str], *, stderr: int, deadline_s: float) -> int | None:
    """Returns the exit code of a browser, or None if it had to be ended."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,  # a group with the processes that it starts for its pages
    )
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _problem(picture: bytes) -> str:
    """Returns what is wrong with a screenshot, "" if nothing is."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(picture), formats=["PNG"]) as image:
            width, height = image.size
            is_blank = image.convert("RGB").getcolors(maxcolors=1) is not None
    except (OSError, SyntaxError, ValueError):  # of Pillow, for damaged files
        return "a file that is no PNG picture"
    if width != WIDTH or not HEIGHT - _MOST_BARS <= height <= HEIGHT:
        return f"a picture of {width} x {height} pixels instead of {WIDTH} x {HEIGHT}"
    if is_blank:
        return "a blank picture, of one colour,"
    return ""
