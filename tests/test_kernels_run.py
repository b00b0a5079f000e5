"""The all-reduce's kernels, run as PTX in Python (`tests/ptx.py`): sums, re-arming and epochs, without a GPU."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from ptx import compile_ptx
from ptx_ranks import Ranks
from test_kernels import Variant, compiled

from jax_twoshot import protocol, reference

FORMAT = protocol.FORMATS["bfloat16"]
MOST = 8 * 700
"""Elements of the largest message: several chunks for each thread of a CTA."""
GUARD = 0x1234
SPECIAL = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0xFF7F], np.uint16)
"""Zeros, subnormals, infinities, a NaN, the largest."""


class Group(Ranks):
    """Ranks whose calls are the all-reduce's."""

    def __init__(self, tp: int, multicast: bool, seed: int) -> None:
        size = MOST * FORMAT.itemsize
        layout = protocol.Layout.for_capacity(tp, size, one_shot_bytes=size)
        super().__init__(layout, FORMAT, multicast=multicast, seed=seed)
        self.kernels = {
            algorithm: compile_ptx(compiled(Variant(tp, "bfloat16", multicast, "sm_90a", algorithm)).ptx)
            for algorithm in protocol.ALGORITHMS
        }
        self.sums: list[tuple[np.ndarray, list[int]]] = []

    def part(self, elements: int) -> np.ndarray:
        """Of one rank: normal numbers and special ones."""
        bits = self.numbers.standard_normal(elements).astype(ml_dtypes.bfloat16).view(np.uint16)
        return np.where(self.numbers.random(elements) < 0.4, self.numbers.choice(SPECIAL, elements), bits)

    def all_reduce(self, elements: int, algorithm: str, ctas: int) -> None:
        """Another call in every rank's stream, every other one in place."""
        parts = np.stack([self.part(elements) for _ in range(self.tp)])
        outs = []
        for rank in range(self.tp):
            x, out = (self.memory.allocate(2 * elements + 16) for _ in range(2))
            out = x if len(self.sums) % 2 else out
            self.memory.data[out : out + 2 * elements + 16] = struct.pack("<H", GUARD) * (elements + 8)
            self.memory.data[x : x + 2 * elements] = parts[rank].tobytes()
            self.launch(rank, self.kernels[algorithm], [x, out], [elements], ctas)
            outs.append(out)
        self.sums.append((parts, outs))

    def run_all(self) -> list[list[np.ndarray]]:
        """Results of each call and rank, after it has been made sure that nothing beyond is written."""
        self.run()
        every = []
        for parts, outs in self.sums:
            size = parts.shape[1]
            got = [self.get(out, np.empty(size + 8, np.uint16)) for out in outs]
            assert all((g[size:] == GUARD).all() for g in got)
            every.append([g[:size] for g in got])
        return every


@pytest.mark.parametrize("multicast", [False, True], ids=["peers", "multicast"])
@pytest.mark.parametrize("tp", [2, 3])
def test_calls_of_both_algorithms_follow_each_other(tp: int, multicast: bool) -> None:
    """Bits of the oracle on every rank; what was read is armed again; the epoch and the count have advanced."""
    group = Group(tp, multicast, seed=10 * tp + multicast)
    sizes = [1, 7, 9, 8 * tp - 1, 8 * tp, 1000, 1024, 1025, 8 * 257, 8 * 300 + 5, MOST - 3, MOST, 8]
    for number, size in enumerate(sizes):
        algorithm = protocol.ALGORITHMS[number % 2] if number < 2 else group.random.choice(protocol.ALGORITHMS)
        group.all_reduce(size, algorithm, ctas=group.random.choice([1, 2, 3]))
    for (parts, _), results in zip(group.sums, group.run_all(), strict=True):
        want = reference.all_reduce(parts.view(ml_dtypes.bfloat16)).view(np.uint16)
        for got in results:
            np.testing.assert_array_equal(got, want)
    assert group.is_armed()
    words = [group.control_words(rank)[:4] for rank in range(tp)]
    assert words == [(len(sizes) % 2, 0, 0, len(sizes))] * tp


@pytest.mark.parametrize("wrap", [1 << 16, 1 << 32], ids=["2^16", "2^32"])
def test_the_count_of_calls_may_wrap(wrap: int) -> None:
    """It names no generation: that is the epoch's affair, which counts them through."""
    group, calls = Group(2, multicast=False, seed=2), 5
    for control in group.control:
        group.memory.store(control + 12, 4, wrap - 2)
    for number in range(calls):
        group.all_reduce(1000, protocol.ALGORITHMS[number % 2], ctas=1)
    for (parts, _), results in zip(group.sums, group.run_all(), strict=True):
        want = reference.all_reduce(parts.view(ml_dtypes.bfloat16)).view(np.uint16)
        for got in results:
            np.testing.assert_array_equal(got, want)
    assert group.is_armed()
    words = [group.control_words(rank)[:4] for rank in range(2)]
    assert words == [(calls % 2, 0, 0, (wrap - 2 + calls) % (1 << 32))] * 2


@pytest.mark.parametrize("algorithm", protocol.ALGORITHMS)
def test_a_failed_workspace_waits_for_nothing_and_writes_nan(algorithm: str) -> None:
    group = Group(2, multicast=False, seed=1)
    for size in (9, MOST):
        group.all_reduce(size, algorithm, ctas=1)
    group.streams[1].clear()
    group.fail(0)
    for results in group.run_all():
        assert (results[0] == FORMAT.nan).all()
    assert group.is_armed(), "nothing was pushed"
