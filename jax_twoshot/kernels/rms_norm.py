"""``all_reduce_rms_norm`` as one launch: the sum over the ranks, the residual, and the norm of whole rows (R10).

Whoever sums a chunk adds the residual. A row is collected by one CTA, a thread a chunk of each of the row's blocks,
which then has the row in registers and norms it. How pushes and sums are shared out has nothing to do with rows.

The order of the sum of squares (`protocol.norm_blocks`) is the one that costs least here: a thread adds up its chunks
element by element, then its elements in pairs, then the lanes of a warp, then the warps.

In a graph of nothing else, with the grid that ranks on a shared H200 get (R5), against FlashInfer's one-shot, which
starts while the launch before it runs; us a call at width 7168: 3.14 against 3.62 at one row of TP 2 and 4.66 against
7.15 at 64, 8.10 against 27.1 at 16 rows of TP 8, but 7.05 against 6.58 at one row of TP 8: 16 SMs a rank, and no
overlap of launches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from jax_twoshot.kernels import launch, memory, oneshot, twoshot
from jax_twoshot.kernels.launch import Arguments, Call
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.protocol import CHUNK_BYTES, NORM_THREADS, Format, ceil_div

WARP = 32
WARPS = NORM_THREADS // WARP


class AllReduceRmsNorm:
    """The kernel; a launch has blocks of `protocol.NORM_THREADS`. In the stand-in for one GPU ``x`` has an axis of
    ranks in front.

    Attributes:
      one_shot: every rank sums every chunk, else its owner.
      blocks: of a row, `protocol.norm_blocks`.
    """

    def __init__(self, *, algorithm: str, blocks: int) -> None:
        self.one_shot = algorithm == "one_shot"
        self.blocks = blocks

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        residual: Int64,
        weight: Int64,
        normalised: Int64,
        new_residual: Int64,
        rows: Int32,
        row_chunks: Int32,
        eps: Int32,
        arguments: Arguments,
    ) -> None:
        """The whole of a launch: ``rows`` rows of ``row_chunks`` chunks; ``eps`` are the bits of an FP32 number."""
        lane = cute.arch.thread_idx()[0]
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        thread, threads = cta * NORM_THREADS + lane, ctas * NORM_THREADS
        chunks = rows * row_chunks
        part_bytes = Int64(chunks) * CHUNK_BYTES

        launch.wait_for_predecessor(arguments)
        words = load(x, thread, thread < chunks)
        call = launch.begin(arguments, chunks)
        for chunk in range(thread, chunks, threads):
            self.push(call, chunk, words, 0)
            for part in range_constexpr(1, arguments.parts):
                words = memory.load_chunk(x + part * part_bytes + Int64(chunk) * CHUNK_BYTES)
                self.push(call, chunk, words, part)
            words = load(x, chunk + threads, chunk + threads < chunks)
        launch.settle(call)
        if const_expr(not self.one_shot):
            for index in range(thread, call.mine, threads):
                self.reduce(call, index, residual)
        before = launch.arrive(call)

        self.norm_rows(call, rows, row_chunks, residual, weight, normalised, new_residual, eps)
        launch.advance(call, before)

    @cute.jit
    def norm_rows(
        self,
        call: Call,
        rows: Int32,
        row_chunks: Int32,
        residual: Int64,
        weight: Int64,
        normalised: Int64,
        new_residual: Int64,
        eps: Int32,
    ) -> None:
        """Collects and norms the rows, one after the other in each CTA."""
        format, lane = call.buffers.format, cute.arch.thread_idx()[0]
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        partials = cute.make_tensor(cute.arch.alloc_smem(Float32, 2 * WARPS), cute.make_layout(2 * WARPS))
        part = Part.of(self.blocks, row_chunks, lane)
        weights = part.load(weight, Int32(0))
        for row in range(cta, rows, ctas):
            start = row * row_chunks
            words = self.take(call, part, start, residual)
            part.store(new_residual, start, words)
            # Two sets of partial sums, in turn: one barrier a row is then enough.
            own = cute.make_tensor(partials.iterator + row // ctas % 2 * WARPS, cute.make_layout(WARPS))
            total = sum_over_cta(square_sum(words, format), own, lane)
            scale = inverse_root_of_mean(total, row_chunks * format.chunk, eps)
            part.store(normalised, start, scaled(words, scale, weights, format))

    @cute.jit
    def push(self, call: Call, chunk: Int32, words: Chunk, part: int) -> None:
        if const_expr(self.one_shot):
            if call.alive:
                buffers = dataclasses.replace(call.buffers, rank=call.buffers.rank + part)
                oneshot.push(buffers, oneshot.aim(buffers, chunk), words)
        else:
            launch.push(call, chunk, words, part)

    @cute.jit
    def reduce(self, call: Call, index: Int32, residual: Int64) -> None:
        chunk = call.buffers.rank * call.buffers.owned + index
        addend = memory.load_chunk(residual + chunk * CHUNK_BYTES)
        if call.alive:
            twoshot.reduce(call.buffers, index, call.watch, call.deferred, addend)

    def take(self, call: Call, part: Part, start: Int32, residual: Int64) -> list[Chunk]:
        """This thread's part of the row whose first chunk is ``start``; zeros outside of the row."""
        at_once = max(1, twoshot.SLOTS_AT_ONCE // call.buffers.tp) if self.one_shot else self.blocks
        words: list[Chunk] = []
        for first in range(0, self.blocks, at_once):
            batch = slice(first, first + at_once)
            chunks = [start + place for place in part.places[batch]]
            words += self.take_together(call, chunks, part.inside[batch], residual)
        return words

    @cute.jit
    def take_together(
        self, call: Call, chunks: list[Int32], inside: list[Boolean], residual: Int64
    ) -> list[Chunk]:
        """Waits for several chunks at once: one trip to L2 for all."""
        words = [twoshot.not_a_number(call.buffers.format) for _ in chunks]
        if call.alive:
            words = self.wait_for(call, chunks, inside, residual)
        return words

    @cute.jit
    def wait_for(
        self, call: Call, chunks: list[Int32], inside: list[Boolean], residual: Int64
    ) -> list[Chunk]:
        buffers, zero = call.buffers, (Uint32(0),) * 4
        sources = range(buffers.tp if self.one_shot else 1)
        addends = []
        if const_expr(self.one_shot):
            addends = [load(residual, chunk, valid) for chunk, valid in zip(chunks, inside, strict=True)]
            places = [twoshot.slot_of(buffers, rank, chunk) for chunk in chunks for rank in sources]
            ranks = [Uint32(1 << rank) for _ in chunks for rank in sources]
        else:
            places = [buffers.base + buffers.gather_offset(buffers.generation, Int64(chunk)) for chunk in chunks]
            ranks = [Uint32(1) << twoshot.owner_of(buffers, chunk)[0] for chunk in chunks]
        about = [Int64(chunk) for chunk in chunks for _ in sources]
        wanted = [valid for valid in inside for _ in sources]
        phase = twoshot.REDUCE if self.one_shot else twoshot.COLLECT
        parts, arrived = twoshot.wait(
            buffers, call.watch, places, ranks, phase, about, wanted, [zero] * len(places)
        )
        if const_expr(not call.deferred):
            for place, valid in zip(places, wanted, strict=True):
                twoshot.rearm(place, buffers.format, valid & arrived)
        words = parts
        if const_expr(self.one_shot):
            groups = [parts[first : first + buffers.tp] for first in range(0, len(parts), buffers.tp)]
            words = [
                rounded_sum([*group, addend], buffers.format)
                for group, addend in zip(groups, addends, strict=True)
            ]
        nan = twoshot.not_a_number(buffers.format)
        return [twoshot.select_chunk(arrived, w, nan) for w in words]


@dataclass(frozen=True)
class Part:
    """Which chunks of a row a thread has: one of each block.

    Attributes:
      places: Int32 each, counted from the row's first chunk.
      inside: Boolean each, whether the row has that chunk.
    """

    places: list[Int32]
    inside: list[Boolean]

    @classmethod
    def of(cls, blocks: int, row_chunks: Int32, lane: Int32) -> Part:
        block = ceil_div(row_chunks, blocks)
        places = [number * block + lane for number in range(blocks)]
        return cls(places, [(lane < block) & (place < row_chunks) for place in places])

    def load(self, address: Int64, start: Int32) -> list[Chunk]:
        return [load(address, start + p, inside) for p, inside in zip(self.places, self.inside, strict=True)]

    def store(self, address: Int64, start: Int32, words: list[Chunk]) -> None:
        for place, inside, chunk in zip(self.places, self.inside, words, strict=True):
            store(address, start + place, inside, chunk)


def rounded_sum(chunks: list[Chunk], format: Format) -> Chunk:
    """In order, in FP32, rounded once (R3)."""
    total = twoshot.narrow(twoshot.add_in_order([], chunks, format), format)
    return twoshot.without_negative_zero(total, format)


def load(address: Int64, chunk: Int32, inside: Boolean) -> Chunk:
    """A chunk of an operand, zeros if it is not ``inside``."""
    return memory.load_chunk_if(inside, address + Int64(chunk) * CHUNK_BYTES)


def store(address: Int64, chunk: Int32, inside: Boolean, words: Chunk) -> None:
    memory.store_chunk(address + Int64(chunk) * CHUNK_BYTES, words, inside)


# ---- RMSNorm, every operation rounded to nearest even: never contracted, never approximate ---------------------


def square_sum(chunks: list[Chunk], format: Format) -> Float32:
    """The sum of the squares of a thread's elements: chunks element by element, then elements in pairs."""
    squares = [[multiply(a, a) for a in twoshot.widen(words, format)] for words in chunks]
    totals = squares[0]
    for others in squares[1:]:
        totals = [add(a, b) for a, b in zip(totals, others, strict=True)]
    return in_pairs(totals)


def in_pairs(numbers: list[Float32]) -> Float32:
    """The sum of a power of two of numbers, neighbours first."""
    while len(numbers) > 1:
        numbers = [add(a, b) for a, b in zip(numbers[0::2], numbers[1::2], strict=True)]
    return numbers[0]


@cute.jit
def sum_over_cta(number: Float32, partials: cute.Tensor, lane: Int32) -> Float32:
    """The sum of every thread's number, neighbours first; the same bits in each. Waits for the CTA."""
    for distance in (1, 2, 4, 8, 16):
        number = add(number, cute.arch.shuffle_sync_bfly(number, offset=distance))
    if lane % WARP == 0:
        partials[lane // WARP] = number
    cute.arch.sync_threads()
    return in_pairs([partials[warp] for warp in range(WARPS)])


def inverse_root_of_mean(total: Float32, width: Int32, eps: Int32) -> Float32:
    mean = _ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", total, Float32(width))
    root = _ptx("sqrt.rn.f32 {$w0}, {$r0};", add(mean, _ptx("mov.b32 {$w0}, {$r0};", eps)))
    return _ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", Float32(1.0), root)


def scaled(chunks: list[Chunk], scale: Float32, weights: list[Chunk], format: Format) -> list[Chunk]:
    """Elements times ``scale`` times their weights, rounded as a sum is (R3)."""
    results = []
    for words, weight in zip(chunks, weights, strict=True):
        pairs = zip(twoshot.widen(words, format), twoshot.widen(weight, format), strict=True)
        narrow = twoshot.narrow([multiply(multiply(a, scale), w) for a, w in pairs], format)
        results.append(twoshot.without_negative_zero(narrow, format))
    return results


def multiply(a: Float32, b: Float32) -> Float32:
    return _ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def add(a: Float32, b: Float32) -> Float32:
    return _ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def _ptx(instruction: str, *operands: Float32 | Int32) -> Float32:
    return cute.arch.inline_ptx(instruction, write_only_types=[Float32], read_only_args=list(operands))
