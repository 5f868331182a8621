"""Errors of memory are recognised, whatever raises them, and explained in one line."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework import out_of_memory
from tekso.framework.exit_codes import ExitCode, exit_code_of

OOM = "OOM when allocating tensor with shape[5,3] and type float on /device:CPU:0 by allocator cpu"
XLA = "Out of memory while trying to allocate 99 bytes."


def exhausted(text: str) -> Exception:
    return tf.errors.ResourceExhaustedError(None, None, text)


@pytest.fixture
def limit() -> Iterator[int]:
    """Limits the address space to 4 TB, which ends no allocation."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (4 * 10**12, before[1]))
    yield 4 * 10**12
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "no memory for an object of Python"),
        (MemoryError("Unable to allocate 3 GiB\nmore"), "Unable to allocate 3 GiB"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "[Errno 12] Cannot allocate memory"),
        (exhausted(f"{{{{function_node x}}}} {OOM} [Op:Fill] name: "), OOM),
        (exhausted(f"Graph execution error:\n\n{OOM}\n\t [[{{{{node a}}}}]]\nHint: some"), OOM),
        (tf.errors.InternalError(None, None, f"{XLA}\nBufferAssignment"), XLA),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (exhausted("Received message larger than max (5 vs. 4)"), None),
        (exhausted("/run/a.data; No space left on device [Op:SaveV2]"), None),
        (OSError(errno.ENOENT, "No such file"), None),
        (RuntimeError("can't start new thread"), None),  # without a limit: too many processes
        (ImportError("x.so: failed to map segment from shared object"), None),  # not executable
        (ValueError("memory"), None),
    ],
)
def test_what_could_not_be_allocated(error: Exception, reason: str | None) -> None:
    assert out_of_memory.shortage_of(error) == reason


def test_error_of_a_real_array() -> None:
    with pytest.raises(MemoryError) as caught:
        np.zeros(2**60, np.uint8)
    text = out_of_memory.explained(caught.value)
    assert text is not None and text.startswith("out of memory: Unable to allocate 1.00 EiB for")
    assert text.endswith(". Reduce the batch size or the model, and repeat the command")


def test_under_a_limit_the_text_names_it(limit: int) -> None:
    assert out_of_memory.limit_bytes() == limit
    with pytest.raises(out_of_memory.OutOfMemoryError) as caught:  # noqa: SIM117
        with out_of_memory.explaining(lambda: "after step 3", lambda: ", which resumes"):
            raise RuntimeError("can't start new thread")
    text = str(caught.value)
    assert text.startswith("out of memory after step 3: no memory for the stack of a thread. The")
    assert "The address space is limited to 4,000,000 MB (ulimit -v), of which " in text
    assert text.endswith("increase the limit, or reduce the batch size or the model, and repeat "
                         "the command, which resumes")  # fmt: skip
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert exit_code_of(caught.value) == ExitCode.FAILED
    assert out_of_memory.explained(caught.value) == text


def test_under_a_limit_a_library_may_not_fit(limit: int) -> None:
    error = ImportError("libjpeg.so.62: failed to map segment from shared object")
    assert out_of_memory.shortage_of(error) == "no memory for libjpeg.so.62"


def test_an_error_is_explained_once_and_others_pass() -> None:
    with pytest.raises(out_of_memory.OutOfMemoryError, match=r"^out of memory inside: x\. Reduce"):  # noqa: SIM117
        with out_of_memory.explaining(lambda: "outside", str):
            with out_of_memory.explaining(lambda: "inside", str):
                raise MemoryError("x")
    with pytest.raises(ValueError, match=r"^x$"), out_of_memory.explaining(str, str):
        raise ValueError("x")


def test_use_of_the_address_space_grows_with_a_mapping() -> None:
    before = out_of_memory.used_bytes()
    held = np.zeros(10**8, np.uint8)
    assert out_of_memory.used_bytes() >= before + held.nbytes


@pytest.mark.parametrize(("memory", "wanted"), [(2**63, 3 * 10**12), (10**12, 10**12)])
def test_tensors_get_three_quarters_of_what_is_left_or_the_memory_of_the_machine(
    limit: int, monkeypatch: pytest.MonkeyPatch, memory: int, wanted: int
) -> None:
    name = "TF_MKL_ALLOC_MAX_BYTES"
    monkeypatch.setenv(name, "")  # so that the end of the test removes what the function sets
    monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": memory // 4096, "SC_PAGE_SIZE": 4096}.get)
    out_of_memory.limit_tensors()
    used = out_of_memory.used_bytes()
    assert 0 <= wanted - int(os.environ[name]) <= (0 if wanted == memory else used)
    monkeypatch.setenv(name, "12345")
    out_of_memory.limit_tensors()
    assert os.environ[name] == "12345"


def test_tensors_have_no_limit_without_one_of_the_address_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TF_MKL_ALLOC_MAX_BYTES", raising=False)
    out_of_memory.limit_tensors()
    assert "TF_MKL_ALLOC_MAX_BYTES" not in os.environ


ARENAS = """
import resource, sys, threading
sys.path.insert(0, sys.argv[1])
import conftest
from tekso.framework import out_of_memory

if sys.argv[2] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
out_of_memory.save_address_space()
barrier = threading.Barrier(5)

def allocate():
    held = [bytes(1000) for _ in range(1000)]
    barrier.wait()
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
barrier.wait()
print(out_of_memory.used_bytes())
barrier.wait()
"""


def test_a_limit_keeps_malloc_from_reserving_arenas() -> None:
    root = str(Path(__file__).parents[2])
    free, limited = (
        int(processes.run(["-c", ARENAS, root, name]).stdout) for name in ("free", "limited")
    )
    assert free - limited >= 2 * 64 * 2**20  # one for each thread, or for half of them


LEFT = """
import mmap, resource, sys
sys.path.insert(0, sys.argv[1])
import conftest
from tekso.framework import out_of_memory
from tekso.framework.run.quiet_tensorflow import import_tensorflow

limit = out_of_memory.used_bytes() + (640 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import_tensorflow()
import tensorflow as tf

tf.zeros([1])
held = mmap.mmap(-1, limit - out_of_memory.used_bytes() - (520 << 20))
try:
    print(tf.zeros([128 << 20]).shape)
except tf.errors.ResourceExhaustedError as error:
    print(out_of_memory.shortage_of(error))
"""


@pytest.mark.slow  # TensorFlow waits 10 seconds for memory
def test_a_tensor_that_barely_fits_does_not_crash_tensorflow() -> None:
    """TensorFlow's allocator would need 16 MB more to note what it took."""
    done = processes.run(["-c", LEFT, str(Path(__file__).parents[2])])
    assert done.returncode == 0, done.stderr
    assert "(134217728,)" in done.stdout or "OOM when allocating tensor" in done.stdout
