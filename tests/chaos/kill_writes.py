"""Kills processes at random moments of writing sharded checkpoints, and checks what is left.

    python tests/chaos/kill_writes.py --kills=30 --seed=1 --sizes=2,4

Each life of a run has one of the given numbers of processes. They write one checkpoint after the
other, of which each has some rows, until one of them, or all, are killed (SIGKILL). Afterwards

- every checkpoint is that of its step to the last bit, and the newest is not older than the last
  one that was complete before the kill;
- readers of other numbers of rows get the same bits;
- the processes that were not killed have ended by themselves, with the error of a lost process;
- the next life removes what was incomplete.

The exit code is 1 if this does not hold.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = Path(__file__).resolve().parent
SHAPES = {"weights/table": (1003, 700), "weights/bias": (37,), "learner/slot": (1003, 700)}
DEADLINE_S = 60.0
LOST = 8  # ExitCode.PROCESS_LOST


def values(key: str, step: int) -> Any:
    """Returns what a tensor is after a step."""
    import numpy as np

    drawn = np.random.default_rng([step, list(SHAPES).index(key)])
    return drawn.standard_normal(SHAPES[key], np.float32)


def rows(key: str, process: int, size: int) -> slice:
    """Returns the rows that a process has."""
    count = SHAPES[key][0]
    return slice(process * count // size, (process + 1) * count // size)


def state(step: int, process: int, size: int) -> Iterator[Any]:
    """Yields the shards of a process."""
    from tekso.framework.execution.shards import chunks, whole

    for key, shape in SHAPES.items():
        where = (rows(key, process, size), *whole(shape)[1:])
        if where[0].start < where[0].stop:
            yield from chunks(key, shape, "float32", values(key, step).__getitem__, where)


def write(folder: Path, addresses: tuple[str, ...], process: int, done: int) -> int:
    """Writes checkpoints until this process, or another one, is killed.

    Args:
      folder: folder of the checkpoints.
      addresses: of all processes.
      process: index of this process.
      done: file descriptor that gets a byte after every checkpoint.
    """
    from tekso.framework.cluster import Cluster
    from tekso.framework.run.checkpoints import Checkpoints, Description
    from tekso.framework.run.cluster_token import Token
    from tekso.framework.run.following import FollowingCheckpoints
    from tekso.framework.run.process_group import ConnectedProcessGroup, LostProcessError

    size = len(addresses)
    try:
        with ConnectedProcessGroup(
            Cluster(addresses, process),
            token=Token(b"a secret of 16 characters", "a test"),
            timeout_s=DEADLINE_S,
            log=lambda text: None,
            last_words=lambda text: None,
        ) as group:
            kind = Checkpoints if group.is_first else FollowingCheckpoints
            checkpoints = kind(str(folder), group=group, warn=refuse)
            checkpoints.prepare()
            if group.is_first and any(not n.startswith("step_") for n in os.listdir(folder)):
                raise AssertionError(f"left after the start: {os.listdir(folder)}")
            found = checkpoints.resume()
            step = 0 if found is None else found.step
            if found is not None:
                for key, shape in SHAPES.items():
                    where = (rows(key, process, size), *(slice(0, n) for n in shape[1:]))
                    same(found.read_slice(key, where), values(key, step)[where], key, step)
                found.release()
            while True:
                step += 1
                checkpoints.save(
                    lambda step=step: state(step, process, size),
                    Description(step=step, model="m", params="p"),
                )
                checkpoints.wait()
                os.write(done, b".")
    except LostProcessError:
        return LOST


def check(folder: Path, oldest: int) -> int:
    """Checks every checkpoint, whole and by three readers; returns 0."""
    from tekso.framework.run.checkpoints import Checkpoints

    checkpoints = Checkpoints(str(folder), warn=refuse)
    steps = checkpoints.steps()
    if (steps[-1] if steps else 0) < oldest:
        raise AssertionError(f"checkpoint {oldest} was complete, but there are only {steps}")
    for step in steps:
        found = checkpoints.open(str(step))
        for key, shape in SHAPES.items():
            want = values(key, step)
            same(found.read(key), want, key, step)
            for reader in range(3):
                where = (rows(key, reader, 3), *(slice(0, n) for n in shape[1:]))
                same(found.read_slice(key, where), want[where], key, step)
        found.release()
    return 0


def same(have: Any, want: Any, key: str, step: int) -> None:
    import numpy as np

    if not np.array_equal(np.asarray(have), want):
        raise AssertionError(f"{key} of step {step} differs")


def refuse(text: str) -> None:
    raise AssertionError(f"a warning: {text}")


def fork(action: Callable[[], int]) -> int:
    """Returns the id of a fork that runs the action; TensorFlow runs ops only in forks."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = action()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int:
    """Waits for a fork; returns its exit code, or kills it after a deadline."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"a process did not end within {DEADLINE_S:g} s")


def live(folder: Path, size: int, drawn: random.Random) -> tuple[str, float]:
    """Starts a run and kills it; returns what was killed, and the longest end of the others."""
    import clusters

    addresses = tuple(clusters.free_addresses(size))
    received, sent = os.pipe()
    pids = [fork(lambda p=p: write(folder, addresses, p, sent)) for p in range(size)]
    os.close(sent)
    for _ in range(size * drawn.randint(1, 3)):  # some checkpoints are complete
        if not os.read(received, 1):  # nobody can write any more
            raise AssertionError(f"exit codes {[ended(pid) for pid in pids]} before a checkpoint")
    complete = newest(folder)
    time.sleep(drawn.uniform(0.0, 0.15))
    killed = pids if drawn.random() < 0.25 else [drawn.choice(pids)]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    is_within = any(name.startswith(".") for name in os.listdir(folder))
    codes = [ended(pid) for pid in pids]
    seconds = time.monotonic() - begin
    os.close(received)
    wanted = [-signal.SIGKILL if pid in killed else LOST for pid in pids]
    if codes != wanted:
        raise AssertionError(f"exit codes {codes}, expected {wanted}")
    if ended(fork(lambda: check(folder, complete))):
        raise AssertionError(f"the checkpoints after a kill of {len(killed)} of {size}")
    who = "all" if killed is pids else "process 0" if killed == pids[:1] else "another process"
    return f"{who}, {'within' if is_within else 'between'} writes", seconds


def newest(folder: Path) -> int:
    steps = [int(name[5:]) for name in os.listdir(folder) if name.startswith("step_")]
    return max(steps, default=0)


def main() -> int:
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
    importlib.import_module("conftest")  # of the root: it registers this checkout
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1, help="chooses moments and processes")
    parser.add_argument("--sizes", default="2,4", help="numbers of processes, with commas")
    flags = parser.parse_args()
    sizes = [int(size) for size in flags.sizes.split(",")]
    importlib.import_module("tekso.framework.run.following")  # and TensorFlow, once for all forks
    drawn, counts, longest = random.Random(flags.seed), collections.Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as name:
        for number in range(flags.kills):
            size = sizes[number % len(sizes)]
            what, seconds = live(Path(name), size, drawn)
            counts[f"{size} processes: {what}"] += 1
            longest = max(longest, seconds)
        print(f"{flags.kills} kills, newest checkpoint {newest(Path(name))}, no bit lost")
    for text, count in sorted(counts.items()):
        print(f"  {count:3} x {text}")
    print(f"  all others had ended after at most {longest:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
