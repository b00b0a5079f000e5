"""Kernels that the tests call: named by the path of this file, and not imported, so that no compiler is needed."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64, const_expr, cute, range_constexpr

from jax_twoshot import cutedsl


@dataclass(frozen=True)
class Sum:
    """The sum over the ranks of whole chunks: x ``[parts, chunks]``, out ``[chunks]``.

    Attributes:
      deferred: what is stored was read again after the collect; the next call re-arms it.
      generation: which one, at compile time; -1: the epoch says.
    """

    deferred: bool = False
    generation: int = -1

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, chunks: Int32, arguments: cutedsl.Arguments) -> None:
        first = cute.arch.block_idx()[0] * cute.arch.block_dim()[0] + cute.arch.thread_idx()[0]
        step = cute.arch.grid_dim()[0] * cute.arch.block_dim()[0]
        generation = None if self.generation < 0 else self.generation
        cutedsl.wait_for_predecessor(arguments)
        call = cutedsl.begin(arguments, chunks, deferred=self.deferred, generation=generation)
        for chunk in range(first, chunks, step):
            for part in range_constexpr(call.parts):
                cutedsl.push(call, chunk, cutedsl.load(x + Int64(part * chunks + chunk) * 16), part)
        if const_expr(self.deferred):
            cutedsl.rearm_previous(call, first, step)
        cutedsl.settle(call)
        for index in range(first, call.mine, step):
            cutedsl.reduce(call, index)
        before = cutedsl.arrive(call)
        for chunk in range(first, chunks, step):
            words = cutedsl.collect(call, chunk)
            if const_expr(self.deferred):
                words = cutedsl.poll(cutedsl.gather_address(call, chunk))
            cutedsl.store(out + Int64(chunk) * 16, words)
        cutedsl.advance(call, before)


@dataclass(frozen=True)
class PartsInOrder:
    """An all-to-all of whole chunks, nothing summed: x ``[tp, chunks]``, a row for each rank; out, a row from each."""

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, chunks: Int32, arguments: cutedsl.Arguments) -> None:
        first = cute.arch.block_idx()[0] * cute.arch.block_dim()[0] + cute.arch.thread_idx()[0]
        step = cute.arch.grid_dim()[0] * cute.arch.block_dim()[0]
        cutedsl.wait_for_predecessor(arguments)
        call = cutedsl.begin(arguments, chunks * arguments.tp)
        for chunk in range(first, call.chunks, step):
            cutedsl.push(call, chunk, cutedsl.load(x + Int64(chunk) * 16))
        cutedsl.settle(call)
        for index in range(first, call.mine, step):
            for rank in range_constexpr(arguments.tp):
                words = cutedsl.collect_slot(call, rank, index)
                cutedsl.store(out + Int64(rank * chunks + index) * 16, words)
        cutedsl.advance(call, cutedsl.arrive(call))
