"""The all-reduce's kernels, run as PTX in Python (`tests/ptx.py`): sums, re-arming and epochs, without a GPU."""

from __future__ import annotations

import random
import struct

import ml_dtypes
import numpy as np
import pytest
from ptx import Launch, Memory, compile_ptx, run
from test_kernels import Variant, compiled

from jax_twoshot import protocol, reference

FORMAT = protocol.FORMATS["bfloat16"]
MOST = 8 * 700
"""Elements of the largest message: several chunks for each thread of a CTA."""
GUARD = 0x1234
SPECIAL = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0xFF7F], np.uint16)
"""Zeros, subnormals, infinities, a NaN, the largest."""
FAILED = 2


class Group:
    """Ranks of one process, each with its buffers, as a workspace makes them."""

    def __init__(self, tp: int, multicast: bool, seed: int) -> None:
        self.tp, self.random, self.numbers = tp, random.Random(seed), np.random.default_rng(seed)
        self.kernels = {
            algorithm: compile_ptx(compiled(Variant(tp, "bfloat16", multicast, "sm_90a", algorithm)).ptx)
            for algorithm in protocol.ALGORITHMS
        }
        size = MOST * FORMAT.itemsize
        self.layout = protocol.Layout.for_capacity(tp, size, one_shot_bytes=size)
        self.memory = Memory(bytearray(1 << 21))
        self.bases = [self.memory.allocate(self.layout.bytes) for _ in range(tp)]
        for base in self.bases:
            self.memory.data[base : base + self.layout.bytes] = self.armed
        if multicast:
            self.memory.multicast, self.memory.targets = 1 << 40, self.bases
        self.control = [self.memory.allocate(16) for _ in range(tp)]
        self.status = [self.memory.allocate(32) for _ in range(tp)]
        self.streams: list[list[Launch]] = [[] for _ in range(tp)]
        self.calls: list[tuple[np.ndarray, list[int]]] = []

    @property
    def armed(self) -> bytes:
        return struct.pack("<I", FORMAT.sentinel) * (self.layout.bytes // 4)

    def part(self, elements: int) -> np.ndarray:
        """Of one rank: normal numbers and special ones."""
        bits = self.numbers.standard_normal(elements).astype(ml_dtypes.bfloat16).view(np.uint16)
        return np.where(self.numbers.random(elements) < 0.4, self.numbers.choice(SPECIAL, elements), bits)

    def call(self, elements: int, algorithm: str, ctas: int) -> None:
        """Another call in every rank's stream, every other one in place."""
        parts = np.stack([self.part(elements) for _ in range(self.tp)])
        outs = []
        for rank in range(self.tp):
            x, out = (self.memory.allocate(2 * elements + 16) for _ in range(2))
            out = x if len(self.calls) % 2 else out
            self.memory.data[out : out + 2 * elements + 16] = struct.pack("<H", GUARD) * (elements + 8)
            self.memory.data[x : x + 2 * elements] = parts[rank].tobytes()
            mine = (self.memory.multicast, self.control[rank], self.status[rank], 0, self.layout.generations, 1)
            values = [x, out, elements, self.layout.slot_chunks, rank, self.bases[rank], *mine, *self.bases]
            self.streams[rank].append(Launch(self.kernels[algorithm], values, ctas))
            outs.append(out)
        self.calls.append((parts, outs))

    def results(self) -> list[list[np.ndarray]]:
        """Of each call and rank, after it has been made sure that nothing beyond is written."""
        run(self.memory, self.streams, self.random.randrange(1 << 30))
        every = []
        for parts, outs in self.calls:
            size = parts.shape[1]
            got = [np.frombuffer(bytes(self.memory.data[out : out + 2 * size + 16]), np.uint16) for out in outs]
            assert all((g[size:] == GUARD).all() for g in got)
            every.append([g[:size] for g in got])
        return every

    def is_armed(self) -> bool:
        return all(self.memory.data[base : base + self.layout.bytes] == self.armed for base in self.bases)


@pytest.mark.parametrize("multicast", [False, True], ids=["peers", "multicast"])
@pytest.mark.parametrize("tp", [2, 3])
def test_calls_of_both_algorithms_follow_each_other(tp: int, multicast: bool) -> None:
    """Bits of the oracle on every rank; what was read is armed again; the epoch and the count have advanced."""
    group = Group(tp, multicast, seed=10 * tp + multicast)
    sizes = [1, 7, 9, 8 * tp - 1, 8 * tp, 1000, 1024, 1025, 8 * 257, 8 * 300 + 5, MOST - 3, MOST, 8]
    for number, size in enumerate(sizes):
        algorithm = protocol.ALGORITHMS[number % 2] if number < 2 else group.random.choice(protocol.ALGORITHMS)
        group.call(size, algorithm, ctas=group.random.choice([1, 2, 3]))
    for (parts, _), results in zip(group.calls, group.results(), strict=True):
        want = reference.all_reduce(parts.view(ml_dtypes.bfloat16)).view(np.uint16)
        for got in results:
            np.testing.assert_array_equal(got, want)
    assert group.is_armed()
    words = [struct.unpack_from("<4I", group.memory.data, control) for control in group.control]
    assert words == [(len(sizes) % 2, 0, 0, len(sizes))] * tp


@pytest.mark.parametrize("algorithm", protocol.ALGORITHMS)
def test_a_failed_workspace_waits_for_nothing_and_writes_nan(algorithm: str) -> None:
    group = Group(2, multicast=False, seed=1)
    for size in (9, MOST):
        group.call(size, algorithm, ctas=1)
    group.streams[1].clear()
    group.memory.store(group.control[0] + 8, 4, FAILED)
    for results in group.results():
        assert (results[0] == FORMAT.nan).all()
    assert group.is_armed(), "nothing was pushed"
