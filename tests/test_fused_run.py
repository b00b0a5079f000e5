"""The kernels of ``all_reduce_rms_norm`` and ``matmul_all_reduce``, run as PTX in Python (`tests/ptx.py`): the oracle's
bits, re-arming and epochs, with ranks and in the stand-in for them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_bitwise, assert_within_matmul_bound
from ptx_ranks import Ranks

from jax_twoshot import cubin, protocol, reference

BF16 = protocol.FORMATS["bfloat16"]
EPS = 1e-5
ROWS = ((1, 48), (5, 48), (2, 4104), (3, 1600), (1, 48))
"""Rows and width of ``all_reduce_rms_norm``: a row of two blocks in the middle."""
PRODUCTS = ((1, 32, 64), (16, 64, 192), (3, 320, 64), (17, 32, 64))
"""Rows, K and width of ``matmul_all_reduce``: more tiles than CTAs, more steps of K than warps, more rows than 16."""
SPECIAL = [0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 3e38, -1e-8]

each_group = pytest.mark.parametrize(
    ("tp", "owners"), [(2, None), (4, 1)], ids=["2 ranks", "stand-in for 4"]
)


def group_for(tp: int, owners: int | None, most: int) -> Ranks:
    """Ranks whose messages have up to ``most`` elements."""
    layout = protocol.Layout.for_capacity(tp, most * BF16.itemsize, one_shot_bytes=most * BF16.itemsize)
    return Ranks(layout, BF16, owners=owners, seed=tp)


def check(group: Ranks, calls: int) -> None:
    """Bits of the oracle on every rank; all is armed again; the epoch and the count have advanced."""
    group.run_and_compare()
    assert group.is_armed()
    for rank in range(group.owners):
        assert group.control_words(rank)[:4] == (calls % protocol.GENERATIONS, 0, 0, calls)


@pytest.mark.parametrize("algorithm", protocol.ALGORITHMS)
@each_group
def test_rms_norm(tp: int, owners: int | None, algorithm: str) -> None:
    group = group_for(tp, owners, most=2 * 4104)

    def normals(*shape: int) -> np.ndarray:
        special = group.numbers.random(shape) < 0.002
        numbers = np.where(special, group.numbers.choice(SPECIAL, shape), group.numbers.standard_normal(shape))
        with np.errstate(over="ignore"):
            return numbers.astype(np.float32).astype(ml_dtypes.bfloat16)

    for rows, width in ROWS:
        row_chunks = width // BF16.chunk
        blocks, _ = protocol.norm_blocks(row_chunks)
        kernel = cubin.rms_norm_kernel(tp, "bfloat16", False, "sm_90a", algorithm, blocks, owners=owners)
        x, residual, weight = normals(tp, rows, width), normals(rows, width), normals(width)
        want = reference.all_reduce_rms_norm(x, residual, weight, EPS)
        scalars = [rows, row_chunks, int(np.float32(EPS).view(np.int32))]
        group.call(kernel, [x], [residual, weight], scalars, want, ctas=group.random.choice([1, 2]))
    check(group, len(ROWS))


@each_group
def test_matmul(tp: int, owners: int | None) -> None:
    """Integers, for which every order of K has the same bits."""
    group = group_for(tp, owners, most=16 * 192)
    for rows, depth, width in PRODUCTS:
        shapes = (tp, rows, depth), (tp, depth, width)
        a, w = (group.numbers.integers(-4, 5, shape).astype(ml_dtypes.bfloat16) for shape in shapes)
        kernel = cubin.matmul_kernel(tp, "bfloat16", False, "sm_90a", 1 if rows <= 16 else 2, owners=owners)
        parts = np.matmul(a.astype(np.float32), w.astype(np.float32)).astype(ml_dtypes.bfloat16)
        group.call(kernel, [a, w], [], [rows, depth, width], [reference.all_reduce(parts)], ctas=2)
    check(group, len(PRODUCTS))


def test_matmul_of_reals_is_within_its_bound_and_the_stand_in_has_the_bits_of_ranks() -> None:
    tp, rows, depth, width = 2, 5, 320, 64
    numbers = np.random.default_rng(0)
    a, w = (numbers.standard_normal(s).astype(ml_dtypes.bfloat16) for s in ((tp, rows, depth), (tp, depth, width)))
    everywhere = []
    for owners in (None, 1):
        group = group_for(tp, owners, most=rows * width)
        kernel = cubin.matmul_kernel(tp, "bfloat16", False, "sm_90a", 1, owners=owners)
        group.call(kernel, [a, w], [], [rows, depth, width], [np.empty((rows, width), a.dtype)], ctas=1)
        group.run()
        ((_, results),) = group.results()
        everywhere += [result for (result,) in results]
    assert_within_matmul_bound(everywhere[0], a, w)
    for result in everywhere[1:]:
        assert_bitwise(result, everywhere[0])
