"""Products of matrices: every form against NumPy, and which products are compiled."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import cpu_features
from tekso.framework.primitives import products
from tekso.framework.primitives.fusion import Fuse, MarkedFusion, XlaFusion, no_fusion
from tekso.framework.primitives.products import product

TRANSPOSED = {"plain": {}, "first": {"transpose_a": True}, "second": {"transpose_b": True}}
SHAPES = [(2, 7, 5), (5, 7, 2), (4, 4, 4), (1, 3, 2)]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that XLA computes products faster on, for small ones too."""
    monkeypatch.setattr(products, "compiles_products", lambda: True)
    monkeypatch.setattr(products, "_MIN_FLOPS", 0)
    monkeypatch.setattr(products, "_MIN_WEIGHT_DIM", 1)
    monkeypatch.setattr(products, "_MIN_GRADIENT_DIM", 1)


def is_compiled(fuse: Fuse, a: tf.TensorSpec, b: tf.TensorSpec, **transposed: bool) -> bool:
    """Returns whether the graph of a product calls a compiled function."""

    @tf.function(autograph=False)
    def compute(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return product(a, b, fuse=fuse, **transposed)

    types = {op.type for op in compute.get_concrete_function(a, b).graph.get_operations()}
    assert ("MatMul" in types) != ("PartitionedCall" in types)
    return "PartitionedCall" in types


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("batched", [False, True])
def test_is_the_product(transposed: str, shape: tuple[int, int, int], *, batched: bool) -> None:
    check(transposed, shape, no_fusion, tf.float64, 1e-12, batched=batched)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("batched", [False, True])
def test_is_the_product_if_it_is_compiled(
    transposed: str, shape: tuple[int, int, int], *, batched: bool
) -> None:
    check(transposed, shape, XlaFusion(), tf.float32, 1e-5, batched=batched)


def check(
    transposed: str,
    shape: tuple[int, int, int],
    fuse: Fuse,
    dtype: tf.DType,
    rtol: float,
    *,
    batched: bool,
) -> None:
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(m, k)), rng.normal(size=(k, n))
    expected = a @ b
    if transposed == "first":
        a = a.T
    if transposed == "second":
        b = b.T
    given = [tf.constant(a, dtype), tf.constant(b, dtype)]
    found = product(*given, **TRANSPOSED[transposed], batched=batched, fuse=fuse)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


def test_compiles_large_products_of_wide_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "compiles_products", lambda: True)
    cases = {
        (512, 2048, 512, ""): True,
        (512, 2048, 512, "transpose_b"): True,
        (1024, 1024, 256, ""): False,
        (1024, 256, 1024, "transpose_b"): False,
        (100, 512, 512, ""): False,  # of few rows
        (256, 1024, 1024, "transpose_a"): True,
        (1024, 1024, 256, "transpose_a"): True,
        (300, 1024, 900, "transpose_a"): False,
        (128, 4096, 1024, "transpose_a"): False,
        (256, 1024, 256, "transpose_a"): False,
    }
    for (m, k, n, transposed), expected in cases.items():
        a = tf.TensorSpec([k, m] if transposed == "transpose_a" else [m, k])
        b = tf.TensorSpec([n, k] if transposed == "transpose_b" else [k, n])
        options = {transposed: True} if transposed else {}
        assert is_compiled(XlaFusion(), a, b, **options) == expected, (m, k, n, transposed)


@pytest.mark.usefixtures("compiling")
def test_compiles_float32_of_known_shape_where_clusters_are_functions() -> None:
    a, b = tf.TensorSpec([8, 4]), tf.TensorSpec([4, 2])
    assert is_compiled(XlaFusion(), a, b)
    for fuse in (no_fusion, MarkedFusion(min_elements=0)):
        assert not is_compiled(fuse, a, b)
    assert not is_compiled(XlaFusion(), tf.TensorSpec([None, 4]), b)
    for dtype in (tf.float64, tf.bfloat16):
        assert not is_compiled(
            XlaFusion(), tf.TensorSpec([8, 4], dtype), tf.TensorSpec([4, 2], dtype)
        )


def test_depends_on_the_threads_of_an_op_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = tf.config.threading
    for number, avx2 in itertools.product((0, 1, 2), (False, True)):
        monkeypatch.setattr(threads, "get_intra_op_parallelism_threads", lambda n=number: n)
        monkeypatch.setattr(cpu_features, "has_only_avx2", lambda has=avx2: has)
        assert products.compiles_products() == (number == 1 and avx2)


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc/cpuinfo")
@pytest.mark.parametrize("limit", ["", "AVX2", "avx2_vnni", "AVX512_CORE"])
def test_the_instructions_of_the_cpu(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2" if limit == "AVX512_CORE" else "")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    expected = "avx2" in flags and ("avx512f" not in flags or limit.lower().startswith("avx2"))
    assert cpu_features.has_only_avx2.__wrapped__() == expected
