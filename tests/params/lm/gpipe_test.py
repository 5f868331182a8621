"""The GPipe experiments: exact counts, from specs alone, in little memory."""

from __future__ import annotations

import json
import pathlib

import processes
import pytest

from tekso.framework import registry
from tekso.framework.run.inspection import model_record, task_of

COUNT = """
import json
import pathlib
from tekso.framework import registry
from tekso.framework.run.inspection import model_record, task_of

record = model_record("", task_of(registry.get("lm.gpipe.Layers1663")().tree()))
# Not getrusage: its peak includes that of the process which started this one.
status = pathlib.Path("/proc/self/status").read_text()
megabytes = int(status.partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps([record["total_weights"], len(record["weights"]), megabytes]))
"""


def formula(num_layers: int, *, d: int = 2048, vocab: int = 32_000) -> int:
    return num_layers * (12 * d * d + 13 * d) + 2 * vocab * d + vocab


@pytest.mark.parametrize("num_layers", [3, 13, 103, 415])
def test_counts_are_exact(num_layers: int) -> None:
    tree = registry.get(f"lm.gpipe.Layers{num_layers}")().tree()

    record = model_record("", task_of(tree))

    assert record["total_weights"] == formula(num_layers)
    published = {3: 282_178_816, 13: 785_761_536}
    assert record["total_weights"] == published.get(num_layers, record["total_weights"])


def test_counts_at_other_sizes_follow_the_architecture() -> None:
    tree = registry.get("lm.gpipe.Layers3")().tree()
    tree.set(
        {
            "task.model.stack.num_layers": 5,
            "task.model.dim": 96,
            "task.model.stack.layer.feed_forward.hidden_dim": 4 * 96,
            "input.vocab_size": 777,
        }
    )

    assert model_record("", task_of(tree))["total_weights"] == formula(5, d=96, vocab=777)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="peak memory is read from /proc"
)
def test_deepest_is_counted_without_allocating() -> None:
    result = processes.run(["-c", COUNT])
    assert result.returncode == 0, result.stderr

    total, num_tensors, megabytes = json.loads(result.stdout)
    assert total == formula(1663) == 83_876_910_336
    assert num_tensors == 1663 * 16 + 3
    assert megabytes < 1500


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "batch_size"),
    [(3, 1, 32), (13, 1, 32), (103, 8, 32), (415, 32, 128), (1663, 128, 512)],
)
def test_accelerators_are_those_of_table_1(
    num_layers: int, num_stages: int, batch_size: int
) -> None:
    tree = registry.get(f"lm.gpipe.Layers{num_layers}")().tree()

    assert (tree.execution.num_stages, tree.input.batch_size) == (num_stages, batch_size)
    assert tree.execution.num_micro_batches == (1 if num_layers == 3 else batch_size)
    assert tree.execution.rematerialize == ("none" if num_layers == 3 else "all")
