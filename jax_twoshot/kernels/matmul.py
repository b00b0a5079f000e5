"""``matmul_all_reduce`` as one launch: a skinny matrix product whose tiles are pushed as they are done.

A CTA takes tiles of 64 columns, one after the other. Its warps share the tile's K among them, each lane reads 16 bytes
of eight rows of ``w`` at a time straight into registers, and the next eight while these are multiplied: every byte of
``w`` is read once, and nothing but the warps' sums goes through shared memory. A finished tile is rounded and pushed,
and the CTA goes on to the next: what it pushed travels meanwhile. The sum over ranks, always in two shots, and the
result come after.

The product is `mma.m16n8k16`, whose lane ``4 g + t`` holds of B the rows ``2t, 2t+1, 2t+8, 2t+9`` of column ``g``.
Which row of ``w`` is called which does not matter as long as ``a`` agrees, nor which column: lane ``4 g + t`` reads
columns ``8g`` to ``8g + 7`` of rows ``8t`` to ``8t + 7``, the j-th product takes column ``8g + j`` for each ``g``, and
two steps of K take four rows each. So the loads are whole chunks, 128 neighbouring bytes of each row in a warp.

Measured through JAX, us a call, against XLA's matmul and ``all_reduce`` (H200 shared by the ranks, BF16, K = width /
TP, four matrices in turn): at 1 / 16 / 64 rows 38.7 / 49.5 / 69.3 against 33.6 / 35.9 / 48.7 at TP 2 and width 7168,
32.8 / 43.0 / 56.5 against 108.2 / 41.6 / 52.9 at width 4096, 41.8 / 64.4 / 76.8 against 33.1 / 42.4 / 63.1 at TP 4
and 7168; at 1 / 16 rows 52.4 / 70.1 against 36.2 / 46.7 at TP 8. ``w`` is 51 MB at TP 2: 10.7 us at 4.8 TB/s. The
grid is what R5 leaves on a shared GPU, 65 CTAs at TP 2, 32 at TP 4 and 16 at TP 8, one an SM: too few loads in flight.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, Uint32, cute, range_constexpr

from jax_twoshot.kernels import launch, memory, twoshot
from jax_twoshot.kernels.launch import Arguments, Call
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.protocol import CHUNK_BYTES, MATMUL_COLUMNS, MATMUL_DEPTH, MATMUL_THREADS, Format

WARP = 32
WARPS = MATMUL_THREADS // WARP
TILE_ROWS = 16
TILE_CHUNKS = MATMUL_COLUMNS // 8
_TYPES = {"bfloat16": "bf16", "float16": "f16"}

Rows = list[Chunk]
"""Eight rows of ``w``, eight columns of each."""


class MatmulAllReduce:
    """The kernel; a launch has blocks of `protocol.MATMUL_THREADS`. In the stand-in for one GPU ``a`` and ``w`` have an
    axis of ranks in front.

    Attributes:
      row_tiles: rows of ``a``, in sixteens.
    """

    def __init__(self, *, row_tiles: int) -> None:
        self.row_tiles = row_tiles

    @cute.kernel
    def kernel(
        self,
        a: Int64,
        w: Int64,
        out: Int64,
        rows: Int32,
        depth: Int32,
        width: Int32,
        arguments: Arguments,
    ) -> None:
        """The whole of a launch: ``a`` is ``[rows, depth]``, ``w`` is ``[depth, width]``."""
        lane = cute.arch.thread_idx()[0]
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        thread, threads = cta * MATMUL_THREADS + lane, ctas * MATMUL_THREADS
        partials = cute.arch.alloc_smem(Float32, WARPS * TILE_ROWS * MATMUL_COLUMNS, 16).toint()
        chunks = rows * (width // 8)

        launch.wait_for_predecessor(arguments)
        call = launch.begin(arguments, chunks)
        for tile in range(cta, width // MATMUL_COLUMNS, ctas):
            for part in range_constexpr(arguments.parts):
                part_a = a + part * (Int64(rows) * depth * 2)
                part_w = w + part * (Int64(depth) * width * 2)
                totals = self.multiply(part_a, part_w, rows, depth, width, tile, lane, arguments.format)
                for row_tile in range_constexpr(self.row_tiles):
                    first_row = row_tile * TILE_ROWS
                    self.push_tile(call, totals[row_tile], partials, lane, first_row, rows, width, tile, part)
        launch.settle(call)
        for index in range(thread, call.mine, threads):
            launch.reduce(call, index)
        before = launch.arrive(call)
        for chunk in range(thread, chunks, threads):
            memory.store_chunk(out + Int64(chunk) * CHUNK_BYTES, launch.collect(call, chunk))
        launch.advance(call, before)

    @cute.jit
    def multiply(
        self, a: Int64, w: Int64, rows: Int32, depth: Int32, width: Int32, tile: Int32, lane: Int32, format: Format
    ) -> list[list[Float32]]:
        """This warp's share of a tile: for each sixteen rows the lane's 32 sums, product by product."""
        group, within = lane % WARP // 4, lane % 4
        column = tile * MATMUL_COLUMNS + group * 8
        own = w + (Int64(within * 8) * width + column) * 2
        stages = depth // MATMUL_DEPTH
        totals = [[Float32(0.0)] * 32 for _ in range(self.row_tiles)]
        following = load_rows(own, lane // WARP, stages, width)
        for stage in range(lane // WARP, stages, WARPS):
            current = following
            following = load_rows(own, stage + WARPS, stages, width)
            totals = self.add_products(totals, a, current, stage, group, within, rows, depth, format)
        return totals

    @cute.jit
    def add_products(
        self,
        totals: list[list[Float32]],
        a: Int64,
        weights: Rows,
        stage: Int32,
        group: Int32,
        within: Int32,
        rows: Int32,
        depth: Int32,
        format: Format,
    ) -> list[list[Float32]]:
        place = stage * MATMUL_DEPTH + within * 8
        results = []
        for row_tile in range_constexpr(self.row_tiles):
            upper = load_a(a, row_tile * TILE_ROWS + group, rows, depth, place)
            lower = load_a(a, row_tile * TILE_ROWS + group + 8, rows, depth, place)
            sums = totals[row_tile]
            for step in range_constexpr(2):
                pieces = [upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]]
                r = weights[4 * step : 4 * step + 4]
                columns = [(pair(r[0], r[1], j), pair(r[2], r[3], j)) for j in range(8)]
                each = [mma(pieces, columns[j], sums[4 * j : 4 * j + 4], format) for j in range(8)]
                sums = [number for four in each for number in four]
            results.append(sums)
        return results

    @cute.jit
    def push_tile(
        self,
        call: Call,
        sums: list[Float32],
        partials: Int32,
        thread: Int32,
        first_row: int,
        rows: Int32,
        width: Int32,
        tile: Int32,
        part: int,
    ) -> None:
        """Adds up what the warps have of sixteen rows of a tile, in their order, rounds and pushes it."""
        group, within = thread % WARP // 4, thread % 4
        cute.arch.sync_threads()  # the partial sums before these have been read
        for half in range_constexpr(2):
            own = (thread // WARP * TILE_ROWS + group + 8 * half) * MATMUL_COLUMNS + within * 16
            # The j-th product's sums: of columns 16 t + j and 16 t + 8 + j, of this row and of the eighth after it.
            numbers = [sums[4 * j + 2 * half + c] for c in range(2) for j in range(8)]
            for quarter in range_constexpr(4):
                store_shared(partials + (own + quarter * 4) * 4, numbers[quarter * 4 : quarter * 4 + 4])
        cute.arch.sync_threads()
        row, place = thread // TILE_CHUNKS, thread % TILE_CHUNKS
        if (row < TILE_ROWS) & (first_row + row < rows):
            total = load_shared(partials + (row * MATMUL_COLUMNS + place * 8) * 4)
            for warp in range_constexpr(1, WARPS):
                share = load_shared(partials + ((warp * TILE_ROWS + row) * MATMUL_COLUMNS + place * 8) * 4)
                total = [x + y for x, y in zip(total, share, strict=True)]
            chunk = (first_row + row) * (width // 8) + tile * TILE_CHUNKS + place
            launch.push(call, chunk, twoshot.narrow(total, call.buffers.format), part)


@cute.jit
def load_rows(address: Int64, stage: Int32, stages: Int32, width: Int32) -> Rows:
    """The lane's chunk of each of its eight rows of a stage; zeros past the last."""
    rows = [(Uint32(0),) * 4 for _ in range(8)]
    if stage < stages:
        first = address + Int64(stage * MATMUL_DEPTH) * width * 2
        rows = [stream_chunk(first + Int64(row) * width * 2) for row in range(8)]
    return rows


@cute.jit
def load_a(a: Int64, row: Int32, rows: Int32, depth: Int32, place: Int32) -> Chunk:
    words = (Uint32(0),) * 4
    if row < rows:
        words = memory.load_chunk(a + (Int64(row) * depth + place) * 2)
    return words


def stream_chunk(address: Int64) -> Chunk:
    """Reads a chunk that nobody here reads again: after ``wait_for_stream``."""
    ptx = "ld.global.L1::no_allocate.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 4, read_only_args=[address])


def pair(even: Chunk, odd: Chunk, column: int) -> Uint32:
    """The elements in ``column`` of two neighbouring rows, as one word of B."""
    halves = 0x7632 if column % 2 else 0x5410
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {halves:#x};",
        write_only_types=[Uint32],
        read_only_args=[even[column // 2], odd[column // 2]],
    )


def mma(a: list[Uint32], b: tuple[Uint32, Uint32], sums: list[Float32], format: Format) -> list[Float32]:
    kind = _TYPES[format.name]
    ptx = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    return list(cute.arch.inline_ptx(ptx, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *sums]))


def store_shared(address: Int32, numbers: list[Float32]) -> None:
    ptx = "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(ptx, read_only_args=[address, *numbers])


def load_shared(address: Int32) -> list[Float32]:
    """Eight neighbouring numbers."""
    ptx = "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    halves = [
        cute.arch.inline_ptx(ptx, write_only_types=[Float32] * 4, read_only_args=[address + half]) for half in (0, 16)
    ]
    return [number for half in halves for number in half]
