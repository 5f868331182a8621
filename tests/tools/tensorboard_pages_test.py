"""Screenshots of TensorBoard show the run that was trained, and no TensorBoard is left."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import stand_in_browser

from tekso.tools import browser, pictures, tensorboard_pages

TENSORBOARD = """
import http.server, json, sys
from urllib.parse import parse_qs, urlsplit

PLUGINS, READ = {plugins}, {read}
asked = 0

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        asked += path == "/data/plugins_listing"
        answer = {{
            "/data/plugins_listing": {{name: {{"enabled": asked > 1}} for name in PLUGINS}},
            "/data/plugin/histograms/tags": {{"digits/events/weights": {{"layer/w": {{}}}}}},
        }}.get(path, "a page")
        if path.startswith("/data/plugin/") and "run" in query:
            last = 200 if asked > READ.get(query["run"][0], 2) else 190
            answer = [[0.5, 10, 1.0], [1.5, last, 1.0]]
            if asked == 1:
                return self.send_error(404)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass

assert "--port=0" in sys.argv and "--host=127.0.0.1" in sys.argv, sys.argv
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
url = f"http://127.0.0.1:{{server.server_port}}/"
print(f"TensorBoard 2.21.0 at {{url}} (Press CTRL+C to quit)", file=sys.stderr, flush=True)
server.serve_forever()
"""
PLUGINS = ["timeseries", "histograms", "distributions", "profile_redirect"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the test starts; nothing is trained."""
    found: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(tensorboard_pages, "_POLL_S", 0.005)
    monkeypatch.setattr(tensorboard_pages, "train", lambda logdir, **_: logdir.mkdir(parents=True))
    return found


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes a program take the place of TensorBoard."""

    def use(text: str) -> None:
        path = tmp_path / "tensorboard.py"
        path.write_text(text)
        monkeypatch.setattr(tensorboard_pages, "_PROGRAM", ("-S", "-E", str(path)))

    return use


@pytest.mark.parametrize("plugins", [PLUGINS, [*PLUGINS, "profile"]])
def test_screenshots_are_taken_when_the_whole_run_is_read(
    plugins: list[str],
    started: list[subprocess.Popen[bytes]],
    use: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use(TENSORBOARD.format(plugins=plugins, read={"digits/events/weights": 3}))
    listings, urls = [], []
    get = tensorboard_pages.Server._get

    def counted(server: tensorboard_pages.Server, path: str) -> object:
        listings.extend([path] * (path == "data/plugins_listing"))
        return get(server, path)

    def shot(program: str, url: str, *, folder: Path) -> bytes:
        urls.append(url)
        with urllib.request.urlopen(url) as answer:
            return answer.read() + program.encode()

    monkeypatch.setattr(tensorboard_pages.Server, "_get", counted)
    monkeypatch.setattr(browser, "screenshot", shot)
    before = signal.getsignal(signal.SIGTERM)
    drawn = tensorboard_pages.pictures("my browser", folder=tmp_path)
    names = ["curves", "weights", "histograms", "distributions"]
    names += ["profile"] if "profile" in plugins else []
    assert drawn == {f"tensorboard.{name}.png": b'"a page"my browser' for name in names}
    assert len(listings) == 4  # only then the histograms of the last step are read
    assert [url.rpartition("#")[2] for url in urls[:3]] == ["timeseries"] * 2 + ["histograms"]
    assert "tagFilter=%5E%28loss%7C" in urls[0] and "tagFilter=%5E%28norm%7C" in urls[1]
    assert len(started) == 1 and started[0].returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("text", "deadline_s", "message"),
    [
        (
            "import sys; sys.exit('no port is free')",
            3.0,
            "^TensorBoard ended with code 1: no port is free$",
        ),
        (
            TENSORBOARD.format(plugins=PLUGINS, read={"digits/events/dev": 10**9}),
            3.0,
            r"^TensorBoard did not show all of the run \(missing: digits/events/dev\) in 3 s$",
        ),
        (
            TENSORBOARD.format(plugins=PLUGINS[1:], read={}),
            3.0,
            r"^TensorBoard did not show all of the run \(missing: page timeseries\) in 3 s$",
        ),
        (
            "import signal; signal.pause()",
            0.0,
            r"^TensorBoard did not print its address in 0 s$",
        ),
    ],
    ids=["ended", "curve", "page", "address"],
)
def test_a_tensorboard_that_shows_no_run_is_ended_and_says_why(
    text: str,
    deadline_s: float,
    message: str,
    started: list[subprocess.Popen[bytes]],
    use: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    use(text)
    seconds = [0.0]  # one for each time that the pages are asked for
    get = tensorboard_pages.Server._get

    def slow(server: tensorboard_pages.Server, path: str) -> object:
        seconds[0] += path == "data/plugins_listing"
        return get(server, path)

    monkeypatch.setattr(tensorboard_pages.Server, "_get", slow)
    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=time.sleep)
    monkeypatch.setattr(tensorboard_pages, "time", clock)
    messages = tmp_path / "messages.txt"
    with (
        pytest.raises(RuntimeError, match=message),
        tensorboard_pages.serving(tmp_path, messages=messages, deadline_s=deadline_s) as server,
    ):
        server.wait_for_run()
    assert len(started) == 1 and started[0].returncode is not None


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_tensorboard_and_the_command(
    number: signal.Signals,
    code: int,
    started: list[subprocess.Popen[bytes]],
    use: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(TENSORBOARD.format(plugins=PLUGINS, read={}))
    program = stand_in_browser.write(tmp_path)
    monkeypatch.setattr(browser, "screenshot", lambda *_, **__: signal.raise_signal(number))
    flags = ["--tensorboard", f"--browser={program}"]
    # A shell lets the commands that it runs in the background ignore this signal, tests too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = pictures.main(["pictures", str(tmp_path / "drawn"), *flags])
    except SystemExit as error:
        ended = error.code
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == code and started[0].returncode == -signal.SIGTERM
    assert [*(tmp_path / "drawn").iterdir()] == []
    assert capsys.readouterr().out == ""


def test_what_is_missing_for_screenshots_is_named_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("schedules", "sharding", "training_step"):
        monkeypatch.setattr(pictures, name, lambda: "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(browser, "MAC_PATHS", ())
    command = ["pictures", str(tmp_path / "drawn")]
    assert pictures.main([*command, "--tensorboard"]) == 1
    assert "no browser was found, which screenshots need" in capsys.readouterr().err
    assert pictures.main([*command, "--tensorboard", "--browser=/none"]) == 2
    assert "--browser=/none: there is no such program" in capsys.readouterr().err
    assert pictures.main([*command, f"--browser={sys.executable}"]) == 2
    assert "--browser is for screenshots, which --tensorboard takes" in capsys.readouterr().err
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    assert pictures.main([*command, "--tensorboard", f"--browser={sys.executable}"]) == 1
    assert "TensorBoard is not installed: pip install tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "drawn").exists()


def test_a_training_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'digits: gone' >&2\nexit 4\n")
    (tmp_path / "python").chmod(0o755)
    message = r"^the training of image\.digits\.Mlp ended with code 4: digits: gone$"
    with pytest.raises(RuntimeError, match=message):
        tensorboard_pages.train(tmp_path / "run", messages=tmp_path / "messages.txt")


ASKS_FOR_RUNS = """
with urllib.request.urlopen(sys.argv[-1].partition("?")[0] + "data/runs", timeout=60) as answer:
    with here.with_suffix(".runs").open("a") as file:
        file.write(json.dumps(sorted(json.load(answer))) + "\\n")
"""


@pytest.mark.slow
def test_the_browser_gets_the_pages_of_a_tensorboard_with_the_run(tmp_path: Path) -> None:
    picture = stand_in_browser.png(browser.WIDTH, browser.HEIGHT)
    end = f"{stand_in_browser.SHOOTS}\n{ASKS_FOR_RUNS}"
    program = stand_in_browser.write(tmp_path, picture=picture, end=end)
    interpreter = processes.interpreter(tmp_path / "python")  # of the trainer and of TensorBoard
    code = f"import sys; sys.executable = {interpreter!r}; from tekso.tools import pictures; "
    command = ["-c", f"{code}sys.exit(pictures.main(sys.argv))", str(tmp_path / "drawn")]
    done = processes.run([*command, "--tensorboard", f"--browser={program}"], timeout=300)
    assert done.returncode == 0, done.stderr
    names = [f"tensorboard.{name}.png" for name in tensorboard_pages.PAGES]
    if importlib.util.find_spec("xprof") is None:
        names.remove("tensorboard.profile.png")
    assert re.findall(r"drawn/(.*\.png)$", done.stdout, re.MULTILINE) == names
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {
        *names, "schedules.svg", "sharding.svg", "step.svg",
    }  # fmt: skip
    assert (tmp_path / "drawn" / names[0]).read_bytes() == picture
    requests = stand_in_browser.requests(program)
    assert len(requests) == len(names)
    for request in requests:
        assert request["code"] == 200 and "<title>TensorBoard</title>" in request["page"]
    runs = {json.dumps([f"digits/events/{split}" for split in ("dev", "train", "weights")])}
    assert {*(tmp_path / "browser.runs").read_text().splitlines()} == runs
    with pytest.raises(OSError):  # nobody answers there any more
        urllib.request.urlopen(requests[0]["url"], timeout=60)
