"""Tests that forked programs act as separate processes and end with the process that asked."""

from __future__ import annotations

import gc
import importlib.util
import os
import select
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import fork_server
import processes
import pytest

FOREVER = "import signal, os; print(os.getpid(), flush=True); signal.pause()"


def ends(pid: int) -> bool:
    """Waits for the end of any process; returns whether it came within a minute."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor) as file:
        return bool(select.select([file], [], [], 60)[0])


def test_a_program_has_its_arguments_input_folder_environment_and_exit_code(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys; print(sys.argv, os.getcwd(), sys.stdin.read(), os.environ['MINE']);"
        "sys.exit('an error')"
    )
    env = {**os.environ, "MINE": "yes"}
    done = processes.run(["-c", code, "a", "b"], cwd=tmp_path, env=env, input="given")
    assert done.stdout == f"['-c', 'a', 'b'] {tmp_path} given yes\n"
    assert (done.returncode, done.stderr) == (1, "an error\n")
    assert "ZeroDivisionError" in processes.run(["-c", "1 / 0"]).stderr


def test_a_program_ends_its_threads_calls_what_is_registered_and_frees_its_objects() -> None:
    code = (
        "import atexit, sys, threading, time\n"
        "class Own:\n"
        "    def __del__(self): print('freed')\n"
        "own = Own()\n"
        "own.cycle = own\n"
        "atexit.register(print, 'registered')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "sys.exit(3)"
    )
    done = processes.run(["-c", code])
    assert (done.returncode, done.stdout) == (3, "thread\nregistered\nfreed\n"), done.stderr


def test_the_graph_optimizer_is_off_in_programs_that_ask_for_it() -> None:
    code = (
        "import tensorflow as tf;"
        "print(tf.config.optimizer.get_experimental_options()['disable_meta_optimizer'])"
    )
    assert processes.run(["-c", code]).stdout == "False\n"
    assert processes.run(["-c", code], optimized=False).stdout == "True\n"


def test_functions_are_computed_op_by_op_in_programs_that_ask_for_it() -> None:
    code = "import tensorflow as tf; tf.function(lambda: print(tf.executing_eagerly()))()"
    for more, printed in (
        ({}, "False"),
        ({"optimized": False}, "False"),
        ({"op_by_op": True}, "True"),
    ):
        assert processes.run(["-c", code], **more).stdout == f"{printed}\n"  # type: ignore[arg-type]


def test_tasks_are_not_checked_in_programs_that_ask_for_it() -> None:
    code = (
        "from tekso.framework.run import assembly, loss_check; "
        "print(loss_check.check(*[None] * 4), loss_check.check_restored(), "
        "assembly._check_functions(*[None] * 4))"
    )
    assert "TypeError" in processes.run(["-c", code]).stderr  # they need arguments
    done = processes.run(["-c", code], env={**os.environ, **fork_server.UNCHECKED})
    nothing = "Findings(warnings=[], unchecked=[], label_limits=())"
    assert done.stdout == f"{nothing} {nothing} None\n", done.stderr


def test_a_program_that_lasts_too_long_is_killed_and_its_last_words_reported() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as error:
        processes.run(["-c", FOREVER], timeout=1.0)
    assert ends(int(error.value.output))


def test_the_files_of_a_program_in_a_traceback_are_closed_without_a_warning() -> None:
    def run_too_long() -> None:
        with pytest.raises(subprocess.TimeoutExpired) as error:
            processes.run(["-c", FOREVER], timeout=0.01)
        assert any("process" in entry.locals for entry in error.traceback)  # and a cycle

    gc.freeze()  # so that a full collection, at any age of the cycle, skips all earlier objects
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run_too_long()
            gc.collect()
    finally:
        gc.unfreeze()
    assert [str(one.message) for one in found] == []


def test_a_signal_reaches_a_program_and_its_number_is_the_code() -> None:
    process = processes.start(["-c", FOREVER], live=True)
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_process_that_code_starts_is_a_fork(tmp_path: Path) -> None:
    python = processes.interpreter(tmp_path / "python")
    code = "import sys; print('tekso.framework.learner' in sys.modules, sys.argv[1:])"
    done = subprocess.run([python, "-c", code, "a b"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True ['a b']\n"), done.stderr


def test_a_forwarded_program_ends_with_the_command_that_asked_for_it() -> None:
    command = ["/bin/sh", "-c", f"exec {processes.forwarding('-c', FOREVER)}"]
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    pid = int(asking.stdout.readline())
    asking.kill()
    asking.communicate(timeout=60)
    assert ends(pid)


def test_the_cpu_time_of_forwarded_programs_is_counted() -> None:
    before = processes.forks_cpu_s()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    command = ["/bin/sh", "-c", f"exec {processes.forwarding('-c', code)}"]
    subprocess.run(command, check=True, timeout=60)
    processes.run(["-c", code])  # ends later: the messages of the server are in order
    assert processes.forks_cpu_s() - before >= 0.6


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_text") is None,
    reason="tensorflow-text, an extra, is not installed",
)
def test_forks_export_texts_without_keras() -> None:
    code = (
        "import sys, tensorflow_text as text; "
        "print(callable(text.SentencepieceTokenizer), 'keras.src' in sys.modules)"
    )
    done = processes.run(["-c", code])
    assert done.stdout == "True False\n", done.stderr


def test_programs_and_their_server_end_with_the_process_that_started_them() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import os, processes;"
        f"p = processes.start(['-c', {FOREVER!r}], live=True); print(p.stdout.readline());"
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    folder = str(Path(__file__).parent)
    asking = [sys.executable, "-c", code, folder]
    # The output ends when every process that has it open has ended: the program and the server.
    done = subprocess.run(asking, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert ends(int(done.stdout))
