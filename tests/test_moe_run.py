"""``moe_tail``'s kernel, run as PTX in Python (`tests/ptx.py`): the oracle's bits, and deferred re-arming."""

from __future__ import annotations

import dataclasses
import functools
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import DTYPES, assert_bitwise
from ptx import Kernel, Launch, Memory, compile_ptx, run

from jax_twoshot import cubin, protocol, reference
from jax_twoshot.protocol import GENERATIONS_DEFERRED, NORM_THREADS

EPS = 1e-5
CALLS = ((1, 48, 3), (6, 48, 1), (3, 1600, 2), (2, 48, 9), (3, 48, 8), (1, 48, 2))
"""Rows, width, experts of a token; of the widest, a thread of one CTA has several chunks."""
MOST = 3 * 1600
SLOTS = 7
SPECIAL = [0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 3e38, -1e-8]
FAILED = 2


@functools.cache
def kernel(tp: int, owners: int, name: str) -> Kernel:
    return compile_ptx(cubin.moe_tail_kernel(tp, name, False, "sm_90a", 1, owners=owners).compile().ptx)


class Group:
    """Ranks of one process, or the stand-in for them, each with its buffers as a workspace makes them."""

    def __init__(self, tp: int, name: str, owners: int | None = None, seed: int = 0) -> None:
        self.tp, self.owners, self.format = tp, owners or tp, protocol.FORMATS[name]
        self.kernel, self.dtype = kernel(tp, self.owners, name), DTYPES[name]
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        size = MOST * self.format.itemsize
        self.layout = protocol.Layout.for_capacity(
            tp, size, GENERATIONS_DEFERRED, one_shot_bytes=size if self.owners == 1 else 0
        )
        self.memory = Memory(bytearray(1 << 22))
        self.bases = [self.memory.allocate(self.layout.bytes) for _ in range(self.owners)]
        for base in self.bases:
            self.memory.data[base : base + self.layout.bytes] = self.armed(self.layout.bytes)
        self.control = [self.memory.allocate(32) for _ in self.bases]
        self.status = [self.memory.allocate(32) for _ in self.bases]
        self.streams: list[list[Launch]] = [[] for _ in self.bases]
        self.calls: list[tuple[Any, list[list[int]]]] = []

    def armed(self, size: int) -> bytes:
        return struct.pack("<I", self.format.sentinel) * (size // 4)

    def normals(self, *shape: int) -> np.ndarray:
        special = self.numbers.random(shape) < 0.05
        numbers = np.where(special, self.numbers.choice(SPECIAL, shape), self.numbers.standard_normal(shape))
        with np.errstate(over="ignore"):
            return numbers.astype(np.float32).astype(self.dtype)

    def call(self, rows: int, width: int, k: int, ctas: int) -> None:
        """Another call in every rank's stream."""
        index = self.numbers.integers(-2, SLOTS + 2, (self.tp, rows, k)).astype(np.int32)
        scale = self.numbers.standard_normal(index.shape).astype(np.float32)
        scale[(index < 0) | (index >= SLOTS)] = np.nan
        own = self.normals(self.tp, SLOTS, width), index, scale, self.normals(self.tp, rows, width)
        same = self.normals(rows, width), self.normals(width)
        places = []
        for rank, base in enumerate(self.bases):
            operands = (*(a if self.owners == 1 else a[rank] for a in own), *same)
            results = [self.memory.allocate(same[0].nbytes) for _ in range(2)]
            scalars = [rows, width // self.format.chunk, SLOTS, k, int(np.float32(EPS).view(np.int32))]
            parameters = [*map(self.put, operands), *results, *scalars, *self.arguments(rank, base)]
            self.streams[rank].append(Launch(self.kernel, parameters, ctas, NORM_THREADS))
            places.append(results)
        self.calls.append((reference.moe_tail(*own, *same, EPS), places))

    def arguments(self, rank: int, base: int) -> list[int]:
        from jax_twoshot.kernels.launch import Arguments

        given = {
            "slot_chunks": self.layout.slot_chunks,
            "rank": rank,
            "base": base,
            "control": self.control[rank],
            "status": self.status[rank],
            "generations": self.layout.generations,
        }
        names = [field.name for field in dataclasses.fields(Arguments)]
        return [*(given.get(name, 0) for name in names[: names.index("peers")]), *self.bases * (self.tp // self.owners)]

    def put(self, array: np.ndarray) -> int:
        place = self.memory.allocate(array.nbytes)
        self.memory.data[place : place + array.nbytes] = array.tobytes()
        return place

    def run(self) -> list[tuple[Any, list[list[np.ndarray]]]]:
        """What each call must give, and what it gave each rank."""
        run(self.memory, self.streams, self.random.randrange(1 << 30))
        return [(want, [[self.get(at, want[0]) for at in places] for places in ranks]) for want, ranks in self.calls]

    def get(self, place: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(bytes(self.memory.data[place : place + like.nbytes]), like.dtype).reshape(like.shape)

    def is_armed(self, generations: Sequence[int]) -> bool:
        """Whether nothing but the sentinel is in these generations of every rank's buffers."""
        size = self.layout.tp * self.layout.slot_bytes
        starts = [f(g, *place) for g in generations for f, place in self.regions]
        return all(
            self.memory.data[base + start : base + start + size] == self.armed(size)
            for base in self.bases
            for start in starts
        )

    @property
    def regions(self) -> list[tuple[Any, tuple[int, ...]]]:
        return [(self.layout.recv_offset, (0, 0)), (self.layout.gather_offset, (0,))]


@pytest.mark.parametrize(
    ("tp", "owners", "name"),
    [(2, None, "bfloat16"), (3, None, "bfloat16"), (2, None, "float32"), (4, 1, "bfloat16")],
    ids=["2 ranks", "3 ranks", "FP32", "stand-in for 4"],
)
def test_calls_follow_each_other(tp: int, owners: int | None, name: str) -> None:
    """Bits of the oracle on every rank; of the generations only the last call's is not armed again, and the control
    block says how much of it the next call has to re-arm."""
    group = Group(tp, name, owners, seed=tp)
    for rows, width, k in CALLS:
        group.call(rows, width, k, ctas=1 if rows * width == MOST else group.random.choice([1, 2]))
    for number, (want, ranks) in enumerate(group.run()):
        for rank, got in enumerate(ranks):
            assert_bitwise(got, list(want), (number, rank))
    last = (len(CALLS) - 1) % GENERATIONS_DEFERRED
    assert group.is_armed([g for g in range(GENERATIONS_DEFERRED) if g != last])
    assert not group.is_armed([last])
    for control in group.control:
        words = struct.unpack_from("<8I", group.memory.data, control)
        assert words[:4] == (len(CALLS) % GENERATIONS_DEFERRED, 0, 0, len(CALLS))
        assert words[4 + last] == CALLS[-1][0] * CALLS[-1][1] // group.format.chunk


def test_a_failed_workspace_waits_for_nothing_and_writes_nan() -> None:
    group = Group(2, "bfloat16")
    group.call(*CALLS[0], ctas=1)
    group.streams[1].clear()
    group.memory.store(group.control[0] + 8, 4, FAILED)
    ((_, ranks),) = group.run()
    assert all(np.isnan(result.astype(np.float32)).all() for result in ranks[0])
    assert group.is_armed(range(GENERATIONS_DEFERRED)), "nothing was pushed"
