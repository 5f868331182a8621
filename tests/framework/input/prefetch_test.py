"""Prefetching: the same as without, errors in their turn, no thread left behind."""

from __future__ import annotations

import gc
import threading

import processes
import pytest

from tekso.framework.input.prefetch import Prefetch


def square(step: int) -> int:
    return step * step


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_prefetching_gives_what_direct_calls_give(depth: int) -> None:
    with Prefetch(square, start=3, stop=20, depth=depth) as batches:
        assert list(batches) == [square(step) for step in range(3, 20)]


@pytest.mark.parametrize("depth", [0, 2])
def test_nothing_comes_after_the_end(depth: int) -> None:
    with Prefetch(square, start=5, stop=5, depth=depth) as batches:
        assert list(batches) == []
        assert list(batches) == []


@pytest.mark.parametrize("depth", [0, 3])
def test_an_error_comes_after_the_batches_before_it(depth: int) -> None:
    def fetch(step: int) -> int:
        if step == 2:
            raise ValueError("no such batch")
        return step

    with Prefetch(fetch, depth=depth) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(ValueError, match="no such batch"):
            next(batches)


def test_an_error_says_of_which_step_it_is() -> None:
    def fetch(step: int) -> int:
        raise ValueError("no such batch")

    with Prefetch(fetch, start=7) as batches, pytest.raises(ValueError) as caught:
        next(batches)
    assert "step 7" in "".join(caught.value.__notes__)


def test_at_most_depth_batches_and_one_in_work_are_ahead() -> None:
    fetched = threading.Semaphore(0)
    steps: list[int] = []

    def fetch(step: int) -> int:
        steps.append(step)
        fetched.release()
        return step

    with Prefetch(fetch, depth=2) as batches:
        for _ in range(3):
            assert fetched.acquire(timeout=10)
        # Two lie ready, the third waits for room: nothing more can be begun.
        assert not fetched.acquire(timeout=0.05)
        next(batches)
        assert fetched.acquire(timeout=10)
        assert steps == [0, 1, 2, 3]


def test_closing_ends_the_thread_and_the_iteration() -> None:
    batches = Prefetch(square, depth=2)
    assert next(batches) == 0
    batches.close()
    batches.close()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())
    assert list(batches) == []


def test_a_forgotten_prefetch_ends_its_thread() -> None:
    batches = Prefetch(square)
    next(batches)
    del batches
    gc.collect()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_an_open_prefetch_does_not_keep_the_interpreter_from_ending() -> None:
    program = (
        "from tekso.framework.input.prefetch import Prefetch\n"
        "batches = Prefetch(lambda step: step)\n"
        "print(next(batches))\n"
    )
    done = processes.run(["-c", program], timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth is -1"):
        Prefetch(square, depth=-1)
