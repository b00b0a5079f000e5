"""Ranks of one process, or the stand-in for them, whose launches run as PTX (`ptx.py`): a workspace without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import random
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from helpers import assert_bitwise
from ptx import THREADS, Kernel, Launch, Memory, compile_ptx, run

from jax_twoshot import cubin
from jax_twoshot.protocol import Format, Layout

MEMORY = 1 << 22
CONTROL_WORDS = 8
FAILED = 2


@functools.cache
def compiled(kernel: cubin.Kernel) -> Kernel:
    return compile_ptx(kernel.compile().ptx)


class Ranks:
    """Each rank's buffers, and the launches of its stream.

    Attributes:
      layout: of the buffers.
      format: of the messages.
      tp: ranks of the group.
      owners: how many of them there are: all, or 1 that plays them.
      random, numbers: for the test's own draws.
    """

    def __init__(
        self, layout: Layout, format: Format, *, owners: int | None = None, multicast: bool = False, seed: int = 0
    ) -> None:
        self.layout, self.format = layout, format
        self.tp, self.owners = layout.tp, owners or layout.tp
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.memory = Memory(bytearray(MEMORY))
        self.bases = [self.put(self._armed(layout.bytes)) for _ in range(self.owners)]
        if multicast:
            self.memory.multicast, self.memory.targets = 1 << 40, self.bases
        self.control = [self.memory.allocate(4 * CONTROL_WORDS) for _ in self.bases]
        self.status = [self.memory.allocate(32) for _ in self.bases]
        self.streams: list[list[Launch]] = [[] for _ in self.bases]
        self._calls: list[tuple[Sequence[np.ndarray], list[list[int]]]] = []

    # ---- Calls ---------------------------------------------------------------------------------------------

    def call(
        self,
        kernel: cubin.Kernel,
        own: Iterable[np.ndarray],
        same: Iterable[np.ndarray],
        scalars: Sequence[int],
        want: Sequence[np.ndarray],
        ctas: int,
    ) -> None:
        """Another call in every stream.

        Args:
          kernel: which.
          own: operands that differ between ranks, ``[TP, ...]`` each. The stand-in's are whole.
          same: operands behind them that do not.
          scalars: of the launch.
          want: results of every rank.
          ctas: of the launch.
        """
        own, same, places = list(own), list(same), []
        for rank in range(self.owners):
            parts = own if self.owners < self.tp else [array[rank] for array in own]
            results = [self.memory.allocate(array.nbytes) for array in want]
            addresses = [*map(self.put, (*parts, *same)), *results]
            self.launch(rank, compiled(kernel), addresses, scalars, ctas, kernel.threads)
            places.append(results)
        self._calls.append((want, places))

    def launch(
        self,
        rank: int,
        kernel: Kernel,
        addresses: Sequence[int],
        scalars: Sequence[int],
        ctas: int,
        threads: int = THREADS,
    ) -> None:
        parameters = [*addresses, *scalars, *self._arguments(rank)]
        self.streams[rank].append(Launch(kernel, parameters, ctas, threads))

    def run(self) -> None:
        """Runs what has been launched, in an order of its own."""
        run(self.memory, self.streams, self.random.randrange(1 << 30))

    def results(self) -> list[tuple[Sequence[np.ndarray], list[list[np.ndarray]]]]:
        """Of each ``call``, after a run: what every rank should get, and what each got."""
        return [
            (want, [[self.get(*each) for each in zip(places, want, strict=True)] for places in ranks])
            for want, ranks in self._calls
        ]

    def run_and_compare(self) -> None:
        """Every result of every ``call`` is right, bit for bit, on each rank."""
        self.run()
        for number, (want, ranks) in enumerate(self.results()):
            for rank, got in enumerate(ranks):
                assert_bitwise(got, list(want), f"call {number}, rank {rank}")

    def fail(self, rank: int) -> None:
        """A wait of this rank has failed, for good."""
        self.memory.store(self.control[rank] + 8, 4, FAILED)

    # ---- Memory --------------------------------------------------------------------------------------------

    def put(self, array: np.ndarray) -> int:
        place = self.memory.allocate(array.nbytes)
        self.memory.data[place : place + array.nbytes] = array.tobytes()
        return place

    def get(self, place: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(bytes(self.memory.data[place : place + like.nbytes]), like.dtype).reshape(like.shape)

    def is_armed(self, generations: Iterable[int] | None = None) -> bool:
        """Whether nothing but the sentinel is in these generations of every rank's buffers; by default in all."""
        every = range(self.layout.generations) if generations is None else generations
        starts = [f for g in every for f in (self.layout.recv_offset(g, 0, 0), self.layout.gather_offset(g, 0))]
        armed = self._armed(self.layout.tp * self.layout.slot_bytes)
        return all((self.get(base + start, armed) == armed).all() for base in self.bases for start in starts)

    def control_words(self, rank: int) -> tuple[int, ...]:
        return struct.unpack_from(f"<{CONTROL_WORDS}I", self.memory.data, self.control[rank])

    def _armed(self, size: int) -> np.ndarray:
        return np.full(size // 4, self.format.sentinel, np.uint32)

    def _arguments(self, rank: int) -> list[int]:
        """The trailing parameters, in the order in which ``ffi/all_reduce_cuda.cc`` packs them."""
        from jax_twoshot.kernels.launch import Arguments

        given: dict[str, Any] = {
            "slot_chunks": self.layout.slot_chunks,
            "rank": rank,
            "base": self.bases[rank],
            "multicast": self.memory.multicast,
            "control": self.control[rank],
            "status": self.status[rank],
            "timeout_ns": 0,
            "generations": self.layout.generations,
            "overlap": 1,
        }
        names = [field.name for field in dataclasses.fields(Arguments)]
        assert names[: names.index("peers")] == list(given)
        return [*given.values(), *self.bases * (self.tp // self.owners)]
