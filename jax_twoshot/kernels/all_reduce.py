"""The all-reduce kernels, two-shot and one-shot: one launch for one round, all phases in it.

The parameters of a launch, in this order, and nothing else (``ffi/all_reduce_cuda.cc`` packs the same)::

    x            int64   address of the round's first operand element, 16-byte aligned
    out          int64   the same for the result; may be x
    elements     int32   elements of the round, at most 2^31 - 8; the last chunk may be partial
    arguments            `launch.Arguments`

    control  uint32[4]   epoch     generation of the next call, 0 to P - 1: a count that wrapped at 2^32 would
                                   use one generation twice in a row where P = 3
                         arrivals  CTAs of this launch that have read this block
                         state     bits: 1, a wait of the last call was slow; 2, one has failed, for good
                         calls     calls so far, modulo 2^32
    status   uint32[8]   state     1: a wait has passed a tenth of the timeout (said once a call); 2: one has
                                   failed. Written last. The host may write 0 over a 1 that it has logged
                         phase     1 reduce, 2 collect
                         generation
                         chunk     of the round
                         ranks     mask of the ranks whose chunk had not come, two words
                         calls     calls before this one
                         the host's own

A launch has blocks of `protocol.THREADS`, a grid of `protocol.grid`, no shared memory and, if `pdl`,
programmatic stream serialization. A failed workspace stays failed: its calls wait for nothing and write NaN.

Each thread has at most one chunk where the grid is large enough (``one_each``): the thread pushes it and collects
its sum, or owns it, adds the others' parts to its own and hands the sum on itself. Beyond that a thread takes its
chunks two by two (``several_each``).

The floor. Two shots of a message of B bytes move, on each rank, 2 B of operand and result and, through memory that
ranks share, six times B (1 - 1 / TP): push, poll and re-arm of slots and of sums. One shot: 2 B and 3 B (TP - 1). A
GPU's link carries 2 B (1 - 1 / TP) a direction in two shots, B (TP - 1) in one: with 450 GB/s and 1.59 us a hop
(one chunk alone, two H200), 64 rows of 7168 at TP 2 take no less than 3.6 us. A thread of ``one_each`` runs through
some 250 instructions at TP 2, one shot (sm_90a); with a warp or two on a scheduler that is what small messages pay
for.

What was tried, in us a call: one process, a stream a rank, H200, BF16, width 7168 (`docs/benchmarks.md` has the
tables; what is within a few percent of each other is the same).

- A rank's own part in registers, in none of its slots and no sum of its own in its gather, against all TP slots,
  one chunk a thread, two shots, 64 rows: 14.24 against 16.26 at TP 8, 6.67 against 7.84 at TP 4, 4.01 against 4.70
  at TP 2; over NVLink (two GPUs) 5.66 against 6.31. Read once more for the sum, it cost 0.2 us at one row of TP 2:
  the polls waited for it. ``one_each`` therefore never reads it twice.
- Batches of 2 chunks a thread, all in flight at once: 13.3 instead of 14.2 at TP 8 and 64 rows, 6.1 instead of 6.7
  at TP 4; over NVLink 4.93 instead of 5.75 for one shot at TP 2. With one chunk a thread they only cost, 0.1 to 0.3
  us, in instructions: hence the two ways. Batches of 4 were slower than 2 nearly everywhere, by up to 1.6 us; one
  shot of 64 rows at TP 2 on one GPU, 3.32 instead of 3.69, is the exception.
- Polling again only what has not come: in batches of 2, 6.13 instead of 6.55 at TP 4 and 64 rows, and 5.89 instead
  of 6.41 for one shot of 8 rows at TP 8. With one chunk a thread within 2 %, but for one row at TP 8: 2.44 instead
  of 2.33.
- The two ways together, against all slots and one chunk after the other: at 1 / 16 / 64 rows, two shots, 1.84 /
  2.25 / 3.62 instead of 2.12 / 2.59 / 4.71 at TP 2, 2.16 / 3.86 / 6.22 instead of 2.38 / 3.73 / 7.94 at TP 4, 2.96
  / 4.85 / 14.13 instead of 3.19 / 5.49 / 16.51 at TP 8; one shot over NVLink 1.87 / 2.52 / 4.71 instead of 1.96 /
  2.64 / 5.34.
- L1::no_allocate on operand and result: 13.11 instead of 14.13 at TP 8 and 64 rows, no difference elsewhere. L2
  evict_first on them gained no more (with batches of 4); evict_last on the mailboxes was from 4 % faster to 5 %
  slower.
- A GPU of one's own: 448 CTAs, one chunk a thread, instead of 396 (`protocol.OWN_GPU_SHARE`): 4.47 instead of 4.71,
  one shot of 64 rows over NVLink.
- As many batches for every thread (`protocol.grid`), ranks under MPS, two shots: at TP 8 and 8 / 16 / 32 rows 6.3 /
  7.5 / 10.9 instead of 8.5 / 9.1 / 11.4, at TP 4 and 16 / 32 rows 4.9 / 6.25 instead of 5.6 / 6.5; one shot of 16
  rows at TP 4 4.07 instead of 4.95. With an odd number of chunks a thread, half of whose last batch is empty, 16 rows
  at TP 8 took 8.8. Half as many threads: 5.7 at TP 4 and 32 rows, but 18.7 instead of 16.5 at TP 8 and 64. Threads
  that have nothing left poll, and what they poll is the L2 that the others need.
- The next launch let start at the end, behind a barrier, or not at all, which let a grid be twice as large: equal, and
  0.45 to 0.5 us a call slower than as soon as the launch has begun (1.78 and 2.25 at one row of TP 4). Ranks that share
  a GPU with other kernels have to (`protocol.most_ctas`).
- The next launch let start after the push (with batches of 4): up to 15 % faster at TP 2, up to 13 % slower at TP 4
  and 8.
- 4 instead of 6 CTAs an SM, which frees registers for batches of 4: one shot of 64 rows at TP 2 3.06 instead of
  3.32, two shots at TP 4 6.96 instead of 6.21.
- Counters, two shots, TP 8 and 64 rows: a rank polls 0.19 of its message again in reduce and 0.37 in collect (counted
  in a kernel made for it), so 7.8 B a rank pass through L2, 57 MB in 14.3 us: 4.0 TB/s, where a copy that stays in L2
  reaches 4.7 (torch, 20 MiB). L2 itself counts 1.5 sectors for each one stored (``ncu --replay-mode app-range``; other
  replays do not get kernels through that wait for each other): half of them lie in its other partition.
- Sleeping 20, 60 or 150 ns before the next poll of a batch: equal at 64 rows, up to 0.5 us slower below. Polling of a
  batch only the first chunk that is missing until it comes: equal from 16 rows on, 0.15 us slower at one row of TP 8.
- Flags instead of sentinels (a CTA's release store to each rank after its pushes, another after its sums; nothing is
  re-armed, 4.75 B; CUDA C++): 17.0 instead of 14.3 at TP 8 and 64 rows, 11.7 instead of 5.1 at 16, 11.2 instead of 6.9
  at TP 4 and 64. What a fence at system scope waits for costs more than what is saved.
- Sums left with their owner, where all ranks poll them (a third generation of gather, re-armed by the owner; 5.75 B):
  11.8 instead of 14.2 at TP 8 and 64 rows, 2.67 instead of 2.88 at one, 6.19 instead of 6.73 at TP 4 and 64. Not
  kept: it helps where ranks share an L2 and nowhere else, since over a link each poll is a trip there and back.
- A node of its own in XLA's graph, by the FFI's stage *record* (XLA's headers have it since jaxlib 0.11): registered,
  and never called by JAX 0.11.2. As a graph in XLA's graph a call costs 0.05 to 1.07 us more than in a plain one.
- A loop with ``range`` keeps registers for a negative step, one with ``while`` does not.
- Slots are polled 8 at once (`twoshot.SLOTS_AT_ONCE`): 16 would not fit 80 registers beside the rest.
- The first loads of the operand stand in front of that of the control block. After it, or in the loop, the compiler
  moved what depends on the epoch alone ahead of them, so that they waited for it.
- The peers' addresses were a table in memory, one more trip to L2 before a push and another before a sum is stored.
- Counting the CTA before the reduce of several chunks spilled the count: a store that waits for the atomic, in the
  way of the first warp. Counted after it, the count has the whole collect to come back. (One shot at TP 4 still
  spills it.)
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from jax_twoshot.kernels import launch, memory, oneshot, twoshot
from jax_twoshot.kernels.launch import Arguments, Call
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.protocol import ALGORITHMS, CHUNK_BYTES, CHUNKS_AT_ONCE, THREADS, Format, owned_chunks


@dataclass(frozen=True)
class Launch:
    """The parameters of a launch, those of the module's docstring, and which thread of it this is.

    Attributes:
      thread: Int32, number of this thread in the grid.
      threads: Int32, of the grid.
      chunks: Int32, of the round.
      one_shot: at compile time, every rank sums every chunk.
    """

    x: Int64
    out: Int64
    elements: Int32
    arguments: Arguments
    thread: Int32
    threads: Int32
    chunks: Int32
    one_shot: bool

    @property
    def format(self) -> Format:
        return self.arguments.format

    @property
    def keeps_own(self) -> bool:
        """A rank's own part stays in registers (`Buffers.keeps_own`)."""
        return not (self.one_shot and self.arguments.multicasts)

    @property
    def keeps_sums(self) -> bool:
        """Who sums a chunk hands its sum on itself: it is not collected from this rank's gather."""
        return not self.one_shot and not self.arguments.multicasts

    @property
    def sums_at_once(self) -> int:
        """Chunks that a thread sums in one go."""
        return max(1, min(CHUNKS_AT_ONCE, twoshot.SLOTS_AT_ONCE // self.arguments.tp))

    def every(self, first: Int32, size: int) -> list[Int32]:
        """Numbers that one thread takes at once: ``first`` and those that follow it in this thread."""
        return [first + number * self.threads for number in range(size)]


class AllReduce:
    """The kernel of one of `protocol.ALGORITHMS`; a launch has blocks of `protocol.THREADS`."""

    symbol = "jax_twoshot_all_reduce"

    def __init__(self, *, algorithm: str) -> None:
        assert algorithm in ALGORITHMS
        self.one_shot = algorithm == "one_shot"
        self.aim = oneshot.aim if self.one_shot else twoshot.aim
        self.push = oneshot.push if self.one_shot else twoshot.push

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, elements: Int32, arguments: Arguments) -> None:
        """The whole of a launch, in one thread of it; the parameters are those of the module's docstring."""
        run = Launch(
            x,
            out,
            elements,
            arguments,
            one_shot=self.one_shot,
            thread=cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0],
            threads=cute.arch.grid_dim()[0] * THREADS,
            chunks=Int32(arguments.format.chunks(Uint32(elements))),
        )
        launch.wait_for_predecessor(arguments)
        if run.chunks <= run.threads:
            self.one_each(run)
        else:
            self.several_each(run)

    @cute.jit
    def one_each(self, run: Launch) -> None:
        """At most one chunk a thread: its rank's part of it is in registers all the time."""
        chunk, inside = run.thread, run.thread < run.chunks
        words = self.load(run, [chunk])
        call = launch.begin_round(run.arguments, run.chunks, keeps_own=run.keeps_own)
        buffers = call.buffers
        owner, index = twoshot.owner_of(buffers, chunk)
        own = Boolean(True) if self.one_shot else owner == Uint32(run.arguments.rank)
        pushed = inside & call.alive if self.one_shot else inside & call.alive & ~own
        self.push(buffers, self.aim(buffers, chunk), words[0], pushed)
        launch.settle(call)
        before = launch.arrive(call)
        if inside & own:
            if const_expr(self.one_shot):
                sums = oneshot.reduce_many(buffers, [chunk], [call.alive], words, call.watch)
            else:
                sums = twoshot.reduce_many(buffers, [Int32(index)], [call.alive], words, call.watch)
            if const_expr(self.one_shot or run.keeps_sums):
                self.store(run, [chunk], [inside], sums)
        if const_expr(not self.one_shot):
            left = inside & ~own if run.keeps_sums else inside
            if left:
                self.store(run, [chunk], [inside], twoshot.collect_many(buffers, [chunk], [call.alive], call.watch))
        launch.advance(call, before)

    @cute.jit
    def several_each(self, run: Launch) -> None:
        """Several chunks a thread, ``CHUNKS_AT_ONCE`` of them in flight together."""
        owned = owned_chunks(Uint32(run.chunks), run.arguments.tp)
        start = Int32(cute.min(Uint32(run.arguments.rank) * owned, Uint32(run.chunks)))
        mine = cute.min(Int32(owned), run.chunks - start)
        others = run.chunks if self.one_shot else run.chunks - mine
        behind = Int32(0) if self.one_shot else start + mine

        # In the loop the compiler would let the first load wait for the epoch.
        first = run.thread
        chunks = self.around(run, behind, first, CHUNKS_AT_ONCE)
        words = self.load(run, chunks)
        call = launch.begin_round(run.arguments, run.chunks, keeps_own=run.keeps_own)
        while first < others:
            wanted = [(number < others) & call.alive for number in run.every(first, CHUNKS_AT_ONCE)]
            for i in range_constexpr(CHUNKS_AT_ONCE):
                self.push(call.buffers, self.aim(call.buffers, chunks[i]), words[i], wanted[i])
            first += CHUNKS_AT_ONCE * run.threads
            chunks = self.around(run, behind, first, CHUNKS_AT_ONCE)
            words = self.load(run, chunks)
        launch.settle(call)
        first = run.thread
        if const_expr(self.one_shot):
            before = launch.arrive(call)
            while first < others:
                self.reduce_every(run, call, first)
                first += run.sums_at_once * run.threads
        else:
            while first < mine:
                self.reduce_own(run, call, start, mine, first)
                first += run.sums_at_once * run.threads
            before = launch.arrive(call)
            first = run.thread
            left = others if run.keeps_sums else run.chunks
            while first < left:
                self.collect(run, call, behind, left, first)
                first += CHUNKS_AT_ONCE * run.threads
        launch.advance(call, before)

    def around(self, run: Launch, behind: Int32, first: Int32, size: int) -> list[Int32]:
        """Chunks by their numbers, which start behind what this rank owns: no owner gets all ranks' pushes at once."""
        chunks = [behind + number for number in run.every(first, size)]
        return [chunk - Int32(chunk >= run.chunks) * run.chunks for chunk in chunks]

    @cute.jit
    def reduce_own(self, run: Launch, call: Call, start: Int32, mine: Int32, first: Int32) -> None:
        """Sums this thread's next chunks of those that the rank owns."""
        indices = run.every(first, run.sums_at_once)
        inside = [index < mine for index in indices]
        chunks = [start + index for index in indices]
        wanted = [there & call.alive for there in inside]
        sums = twoshot.reduce_many(call.buffers, indices, wanted, self.load(run, chunks), call.watch)
        if const_expr(run.keeps_sums):
            self.store(run, chunks, inside, sums)

    @cute.jit
    def reduce_every(self, run: Launch, call: Call, first: Int32) -> None:
        """Sums this thread's next chunks of the round."""
        chunks = run.every(first, run.sums_at_once)
        inside = [chunk < run.chunks for chunk in chunks]
        wanted = [there & call.alive for there in inside]
        own = self.load(run, chunks) if run.keeps_own else [(Uint32(0),) * 4 for _ in chunks]
        self.store(run, chunks, inside, oneshot.reduce_many(call.buffers, chunks, wanted, own, call.watch))

    @cute.jit
    def collect(self, run: Launch, call: Call, behind: Int32, end: Int32, first: Int32) -> None:
        """Hands on this thread's next sums."""
        chunks = self.around(run, behind, first, CHUNKS_AT_ONCE)
        inside = [number < end for number in run.every(first, CHUNKS_AT_ONCE)]
        wanted = [there & call.alive for there in inside]
        self.store(run, chunks, inside, twoshot.collect_many(call.buffers, chunks, wanted, call.watch))

    # ---- Operand and result --------------------------------------------------------------------------------

    @cute.jit
    def load(self, run: Launch, chunks: list[Int32]) -> list[Chunk]:
        """Reads chunks of the operand; what lies past its end is +0.0 and not read."""
        whole = self.whole_chunks(run)
        words = [memory.load_chunk_if(chunk < whole, run.x + Int64(chunk) * CHUNK_BYTES) for chunk in chunks]
        partial = [chunk == whole for chunk in chunks]
        if twoshot.any_of(partial):
            first = memory.fresh(whole) * run.format.chunk
            each = [self.load_element(run, first + i) for i in range(run.format.chunk - 1)]
            rest = twoshot.pack([*each, Uint32(0)], run.format)
            words = [twoshot.select_chunk(is_rest, rest, w) for is_rest, w in zip(partial, words, strict=True)]
        return words

    @cute.jit
    def load_element(self, run: Launch, element: Int32) -> Uint32:
        bits = Uint32(0)
        if element < run.elements:
            address = run.x + Int64(element) * run.format.itemsize
            bits = memory.load_element(address, run.format.itemsize)
        return bits

    @cute.jit
    def store(self, run: Launch, chunks: list[Int32], inside: list[Boolean], words: list[Chunk]) -> None:
        """Writes chunks of the result, those ``inside``; what lies past its end is not written."""
        whole = self.whole_chunks(run)
        for chunk, there, w in zip(chunks, inside, words, strict=True):
            memory.store_chunk(run.out + Int64(chunk) * CHUNK_BYTES, w, there & (chunk < whole))
        partial = [there & (chunk == whole) for there, chunk in zip(inside, chunks, strict=True)]
        if twoshot.any_of(partial):
            rest = words[0]
            for is_rest, w in zip(partial[1:], words[1:], strict=True):
                rest = twoshot.select_chunk(is_rest, w, rest)
            bits, first = twoshot.unpack(rest, run.format), memory.fresh(whole) * run.format.chunk
            for i in range_constexpr(run.format.chunk - 1):
                element = first + i
                if element < run.elements:
                    address = run.out + Int64(element) * run.format.itemsize
                    memory.store_element(address, bits[i], run.format.itemsize)

    def whole_chunks(self, run: Launch) -> Int32:
        """Chunks of the round that are not partial: all, or all but the last."""
        return Int32(Uint32(run.elements) // run.format.chunk)
