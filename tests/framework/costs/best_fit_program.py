"""Allocates and frees arrays, and prints the bytes that TensorFlow and the simulation count.

Started by a test in a process of its own, because an allocator remembers what was freed before.
The argument is the seed. The last line is JSON: [(bytes asked for, bytes that TensorFlow counts,
bytes of the simulation)] after each step.
"""

from __future__ import annotations

import json
import os
import random
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from tekso.framework.costs.best_fit import BestFit

KIB = 1024
SIZES = (256, 293, 512, 640, 1024, 2560, 3072, 4096, 9216, 40960)  # KiB


def main(seed: int) -> None:
    numbers, simulated = random.Random(seed), BestFit()
    arrays: dict[int, tuple[tf.Tensor, int]] = {}
    found = []
    for number in range(300):
        if arrays and numbers.random() < 0.48:
            one = numbers.choice(list(arrays))
            del arrays[one]
            simulated.give_back(one)
        else:
            size = KIB * numbers.choice(SIZES)
            arrays[number] = (tf.raw_ops.Empty(shape=[size // 4], dtype=tf.float32), size)
            simulated.take(number, size)
        counted = tf.config.experimental.get_memory_info("CPU:0")["current"]
        found.append((sum(size for _, size in arrays.values()), counted, simulated.held))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
