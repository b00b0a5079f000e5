"""``moe_tail`` as one launch: a rank's experts are weighted and added on their way to the push (R11).

What follows the push is ``rms_norm.py``'s, always in two shots. Re-arming is left to the next call: it is done while
the parts are under way, and neither a reduce nor a collect stores more than its result.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64, Uint32, cute, range_constexpr

from jax_twoshot.kernels import launch, memory, twoshot
from jax_twoshot.kernels.launch import Arguments
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.kernels.rms_norm import AllReduceRmsNorm, add, load, multiply
from jax_twoshot.protocol import NORM_THREADS, Format

AT_ONCE = 8
"""Experts of a row that a thread reads together: one trip to memory for their places, one for them."""


class MoeTail(AllReduceRmsNorm):
    """The kernel; a launch has blocks of `protocol.NORM_THREADS`. In the stand-in for one GPU ``experts``, ``index``,
    ``scale`` and ``shared`` have an axis of ranks in front.

    Attributes:
      blocks: of a row, `protocol.norm_blocks`.
    """

    def __init__(self, *, blocks: int) -> None:
        super().__init__(algorithm="two_shot", blocks=blocks)

    @cute.kernel
    def kernel(
        self,
        experts: Int64,
        index: Int64,
        scale: Int64,
        shared: Int64,
        residual: Int64,
        weight: Int64,
        normalised: Int64,
        new_residual: Int64,
        rows: Int32,
        row_chunks: Int32,
        slots: Int32,
        top_k: Int32,
        eps: Int32,
        arguments: Arguments,
    ) -> None:
        """The whole of a launch: ``rows`` rows of ``row_chunks`` chunks, ``slots`` rows of ``experts``, of which
        ``index`` names ``top_k`` a row; ``eps`` are the bits of an FP32 number."""
        thread = cute.arch.block_idx()[0] * NORM_THREADS + cute.arch.thread_idx()[0]
        threads = cute.arch.grid_dim()[0] * NORM_THREADS
        chunks = rows * row_chunks
        inputs = Inputs(experts, index, scale, shared, rows, row_chunks, slots, top_k)

        launch.wait_for_predecessor(arguments)
        words = inputs.combined(0, thread, arguments.format)  # in front of the control block: see all_reduce.py
        call = launch.begin(arguments, chunks, deferred=True)
        for chunk in range(thread, chunks, threads):
            launch.push(call, chunk, words, 0)
            for part in range_constexpr(1, arguments.parts):
                launch.push(call, chunk, inputs.combined(part, chunk, arguments.format), part)
            words = inputs.combined(0, chunk + threads, arguments.format)
        launch.rearm_previous(call, thread, threads)
        launch.settle(call)
        for number in range(thread, call.mine, threads):
            self.reduce(call, number, residual)
        before = launch.arrive(call)
        self.norm_rows(call, rows, row_chunks, residual, weight, normalised, new_residual, eps)
        launch.advance(call, before)


@dataclass(frozen=True)
class Inputs:
    """What the ranks' parts are made of: the kernel's parameters of the same names."""

    experts: Int64
    index: Int64
    scale: Int64
    shared: Int64
    rows: Int32
    row_chunks: Int32
    slots: Int32
    top_k: Int32

    @cute.jit
    def combined(self, part: int, chunk: Int32, format: Format) -> Chunk:
        """A chunk of a rank's part (R11), zeros past the last."""
        words = (Uint32(0),) * 4
        if chunk < self.rows * self.row_chunks:
            words = self.combined_inside(part, chunk, format)
        return words

    @cute.jit
    def combined_inside(self, part: int, chunk: Int32, format: Format) -> Chunk:
        row = Int32(Uint32(chunk) // Uint32(self.row_chunks))
        column = chunk - row * self.row_chunks
        first_place = (part * self.rows + row) * self.top_k
        total = [Float32(0.0) for _ in range(format.chunk)]
        for first in range(0, self.top_k, AT_ONCE):
            weights, experts = self.experts_of(part, first_place, first, column)
            for weight, words in zip(weights, experts, strict=True):
                products = [multiply(weight, number) for number in twoshot.widen(words, format)]
                total = [add(a, b) for a, b in zip(total, products, strict=True)]
        shared = load(self.shared, part * self.rows * self.row_chunks + chunk, True)
        total = [add(a, b) for a, b in zip(total, twoshot.widen(shared, format), strict=True)]
        return twoshot.narrow(total, format)

    def experts_of(
        self, part: int, first_place: Int32, first: Int32, column: Int32
    ) -> tuple[list[Float32], list[Chunk]]:
        """The next weights of a row and their experts' chunks, zeros where there is none: they add +0.0."""
        numbers = [first + number for number in range(AT_ONCE)]
        places = [first_place + cute.min(number, self.top_k - 1) for number in numbers]
        slots = [memory.load_element(self.index + Int64(place) * 4, 4) for place in places]
        scales = [memory.load_element(self.scale + Int64(place) * 4, 4) for place in places]
        here = [
            (number < self.top_k) & (slot < Uint32(self.slots)) for number, slot in zip(numbers, slots, strict=True)
        ]
        chunks = [(Int64(part) * self.slots + Int64(slot)) * self.row_chunks + column for slot in slots]
        experts = [load(self.experts, chunk, inside) for chunk, inside in zip(chunks, here, strict=True)]
        return [as_float(bits * Uint32(inside)) for bits, inside in zip(scales, here, strict=True)], experts


def as_float(bits: Uint32) -> Float32:
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
