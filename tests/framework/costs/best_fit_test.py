"""The simulated allocator: rules by hand, and the bytes that TensorFlow counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import processes
import pytest

from tekso.framework import onednn
from tekso.framework.costs.best_fit import BestFit

PROGRAM = Path(__file__).with_name("best_fit_program.py")
MIB = 1 << 20


def test_a_piece_is_divided_only_if_it_is_twice_as_large() -> None:
    memory = BestFit()
    memory.take("a", 2 * MIB)  # the whole of the first region
    memory.give_back("a")
    memory.take("b", MIB + 1)
    assert memory.held == 2 * MIB  # less than half would be left
    memory.give_back("b")
    memory.take("c", MIB)
    assert memory.held == MIB
    memory.take("d", MIB // 2)
    memory.take("e", MIB // 2)
    assert memory.held == memory.peak == 2 * MIB


def test_neighbours_that_are_free_become_one_piece() -> None:
    memory = BestFit()
    for name in "abcd":
        memory.take(name, MIB // 2)
    for name in "acbd":
        memory.give_back(name)
    assert memory.held == 0
    memory.take("e", 2 * MIB)  # fits into the first region again
    memory.give_back("e")
    memory.take("f", 3 * MIB)  # only a region of twice the size has as much
    assert memory.held == 4 * MIB


def test_the_smallest_piece_that_is_large_enough_is_taken() -> None:
    memory = BestFit()
    for name, size in {"a": 768, "between": 256, "b": 512, "end": 256}.items():
        memory.take(name, size)
    memory.give_back("a")
    memory.give_back("b")
    memory.take("c", 512)
    assert memory.held == 512 + 2 * 256  # of 768, 256 would be lost


def test_equal_arrays_of_one_name_take_a_piece_each() -> None:
    memory = BestFit()
    memory.take("a", 2 * MIB)
    memory.give_back("a")
    memory.take("list", 1.5 * MIB, count=6)
    assert memory.held == 1.5 * MIB  # one array of as many bytes would take 2 MiB
    memory.give_back("list")
    assert memory.held == 0
    memory.take("b", 2 * MIB)  # the pieces are one again
    assert memory.held == memory.peak == 2 * MIB


def test_a_large_piece_loses_at_most_128_mib() -> None:
    memory = BestFit()
    memory.take("a", 1024 * MIB)
    memory.give_back("a")
    memory.take("b", 900 * MIB)
    assert memory.held == 1024 * MIB  # 124 MiB more
    memory.give_back("b")
    memory.take("c", 896 * MIB)
    assert memory.held == 896 * MIB


def test_sizes_are_multiples_of_256_and_the_peak_can_be_forgotten() -> None:
    memory = BestFit()
    memory.take("a", 1)
    memory.take("b", 257)
    assert memory.held == 3 * 256
    memory.give_back("a")
    memory.give_back("a")  # nothing
    assert (memory.held, memory.peak) == (2 * 256, 3 * 256)
    memory.forget_peak()
    memory.rename("b", "c")
    memory.give_back("b")
    assert memory.held == memory.peak == 2 * 256


@pytest.mark.skipif(not onednn.is_enabled(), reason="without oneDNN, TensorFlow uses malloc")
@pytest.mark.parametrize("seed", [0, 1])
def test_tensorflow_counts_as_many_bytes(seed: int) -> None:
    done = processes.run([PROGRAM, str(seed)])
    assert done.returncode == 0, done.stderr
    asked, counted, simulated = np.array(json.loads(done.stdout.splitlines()[-1])).T
    many = asked > 10 * MIB
    assert np.max(counted[many] / asked[many]) > 1.05  # what the simulation is for
    np.testing.assert_allclose(simulated[many], counted[many], rtol=0.02)
    assert np.mean(simulated[:100] == counted[:100]) > 0.95
