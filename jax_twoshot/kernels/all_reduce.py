"""The all-reduce kernels, two-shot and one-shot: one launch for one round, all phases in it.

The parameters of a launch, in this order, and nothing else (``ffi/all_reduce_cuda.cc`` packs the same)::

    x            int64   address of the round's first operand element, 16-byte aligned
    out          int64   the same for the result; may be x
    elements     int32   elements of the round, at most 2^31 - 8; the last chunk may be partial
    slot_chunks  int32   capacity of a slot
    rank         int32   this rank
    base         int64   address of this rank's allocation (`protocol.Layout`)
    multicast    int64   multicast address of the allocations; not read without `AllReduce.multicast`
    control      int64   address of the control block, 16-byte aligned, zero in a new workspace
    status       int64   address of the status record in pinned host memory
    timeout_ns   int64   a wait that lasts longer fails, at most 2^62; 0: none does
    generations  int32   P
    peers        int64   TP of them: address of every rank's allocation, as this rank reaches it

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
- With batches of 4: L1::no_allocate on operand and result, L2 evict_first on them and evict_last on the mailboxes
  gained 4 % at most (64 rows at TP 8) and cost as much elsewhere. The next launch let start after the push: up to
  15 % faster at TP 2, up to 13 % slower at TP 4 and 8. As many chunks for every thread: up to 27 % faster where a
  few threads had two of them, 5 % slower at TP 8 and 64 rows; with batches of 2 there is less to gain, and it is
  not done.
- 4 instead of 6 CTAs an SM, which frees registers for batches of 4: one shot of 64 rows at TP 2 3.06 instead of
  3.32, two shots at TP 4 6.96 instead of 6.21.
- Counters: ncu's range replay does not get kernels through that wait for each other, so there are none.
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

import inspect
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cutlass import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from jax_twoshot.kernels import memory, oneshot, twoshot
from jax_twoshot.kernels.build import Compiled
from jax_twoshot.kernels.launch import FOREVER_NS, advance_epoch, count_cta
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.kernels.twoshot import Buffers, Watch
from jax_twoshot.protocol import ALGORITHMS, CHUNK_BYTES, CTAS_PER_SM, THREADS, Format, owned_chunks

AT_ONCE = 2
"""Chunks that a thread which has several takes in one go."""


@dataclass(frozen=True)
class Launch:
    """The parameters of a launch, and which thread of it this is.

    Attributes:
      thread: Int32, number of this thread in the grid.
      threads: Int32, of the grid.
      chunks: Int32, of the round.
      The others are those of the module's docstring.
    """

    x: Int64
    out: Int64
    elements: Int32
    slot_chunks: Int32
    rank: Int32
    base: Int64
    multicast: Int64
    control: Int64
    status: Int64
    timeout_ns: Int64
    generations: Int32
    peers: list[Int64]
    thread: Int32
    threads: Int32
    chunks: Int32

    def every(self, first: Int32, size: int) -> list[Int32]:
        """Numbers that one thread takes at once: ``first`` and those that follow it in this thread."""
        return [first + number * self.threads for number in range(size)]


@dataclass(frozen=True)
class Call:
    """What a launch knows once the control block has been read.

    Attributes:
      buffers: of the call's generation.
      watch: what ends its waits.
      alive: Boolean, the workspace has not failed.
      state, epoch: Uint32, as the control block had them.
    """

    buffers: Buffers
    watch: Watch
    alive: Boolean
    state: Uint32
    epoch: Uint32


class AllReduce:
    """The kernel for one choice of what is known at compile time.

    Attributes:
      tp: ranks in the group.
      format: element type.
      algorithm: one of `protocol.ALGORITHMS`.
      multicast: store what all ranks get once through the multicast address, else once to each peer.
      pdl: overlap the start of a launch with the end of the launch before it (sm_90 and later).
    """

    def __init__(self, tp: int, format: Format, *, algorithm: str, multicast: bool, pdl: bool) -> None:
        assert algorithm in ALGORITHMS
        self.tp, self.format, self.multicast, self.pdl = tp, format, multicast, pdl
        self.one_shot = algorithm == "one_shot"
        self.keeps_own = not (self.one_shot and multicast)
        self.keeps_sums = not self.one_shot and not multicast
        self.sums_at_once = max(1, min(AT_ONCE, twoshot.SLOTS_AT_ONCE // tp))
        self.aim = oneshot.aim if self.one_shot else twoshot.aim
        self.push = oneshot.push if self.one_shot else twoshot.push

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        out: Int64,
        elements: Int32,
        slot_chunks: Int32,
        rank: Int32,
        base: Int64,
        multicast: Int64,
        control: Int64,
        status: Int64,
        timeout_ns: Int64,
        generations: Int32,
        peers: list[Int64],
    ) -> None:
        """The whole of a launch, in one thread of it; the parameters are those of the module's docstring."""
        launch = Launch(
            x,
            out,
            elements,
            slot_chunks,
            rank,
            base,
            multicast,
            control,
            status,
            timeout_ns,
            generations,
            peers,
            thread=cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0],
            threads=cute.arch.grid_dim()[0] * THREADS,
            chunks=Int32(self.format.chunks(Uint32(elements))),
        )
        if const_expr(self.pdl):
            memory.wait_for_stream()
            memory.let_next_launch_start()
        if launch.chunks <= launch.threads:
            self.one_each(launch)
        else:
            self.several_each(launch)

    @cute.jit
    def one_each(self, launch: Launch) -> None:
        """At most one chunk a thread: its rank's part of it is in registers all the time."""
        chunk, inside = launch.thread, launch.thread < launch.chunks
        words = self.load(launch, [chunk])
        call = self.begin(launch)
        buffers = call.buffers
        owner, index = twoshot.owner_of(buffers, chunk)
        own = Boolean(True) if self.one_shot else owner == Uint32(launch.rank)
        pushed = inside & call.alive if self.one_shot else inside & call.alive & ~own
        self.push(buffers, self.aim(buffers, chunk), words[0], pushed)
        self.settle(launch, call)
        before = count_cta(launch.control)
        if inside & own:
            if const_expr(self.one_shot):
                sums = oneshot.reduce_many(buffers, [chunk], [call.alive], words, call.watch)
            else:
                sums = twoshot.reduce_many(buffers, [Int32(index)], [call.alive], words, call.watch)
            if const_expr(self.one_shot or self.keeps_sums):
                self.store(launch, [chunk], [inside], sums)
        if const_expr(not self.one_shot):
            left = inside & ~own if self.keeps_sums else inside
            if left:
                self.store(launch, [chunk], [inside], twoshot.collect_many(buffers, [chunk], [call.alive], call.watch))
        advance_epoch(launch.control, before, call.epoch, call.watch.calls, Uint32(launch.generations))

    @cute.jit
    def several_each(self, launch: Launch) -> None:
        """Several chunks a thread, ``AT_ONCE`` of them in flight together."""
        owned = owned_chunks(Uint32(launch.chunks), self.tp)
        start = Int32(cute.min(Uint32(launch.rank) * owned, Uint32(launch.chunks)))
        mine = cute.min(Int32(owned), launch.chunks - start)
        others = launch.chunks if self.one_shot else launch.chunks - mine
        behind = Int32(0) if self.one_shot else start + mine

        # In the loop the compiler would let the first load wait for the epoch.
        first = launch.thread
        chunks = self.around(launch, behind, first, AT_ONCE)
        words = self.load(launch, chunks)
        call = self.begin(launch)
        while first < others:
            wanted = [(number < others) & call.alive for number in launch.every(first, AT_ONCE)]
            for i in range_constexpr(AT_ONCE):
                self.push(call.buffers, self.aim(call.buffers, chunks[i]), words[i], wanted[i])
            first += AT_ONCE * launch.threads
            chunks = self.around(launch, behind, first, AT_ONCE)
            words = self.load(launch, chunks)
        self.settle(launch, call)
        first = launch.thread
        if const_expr(self.one_shot):
            before = count_cta(launch.control)
            while first < others:
                self.reduce_every(launch, call, first)
                first += self.sums_at_once * launch.threads
        else:
            while first < mine:
                self.reduce_own(launch, call, start, mine, first)
                first += self.sums_at_once * launch.threads
            before = count_cta(launch.control)
            first = launch.thread
            left = others if self.keeps_sums else launch.chunks
            while first < left:
                self.collect(launch, call, behind, left, first)
                first += AT_ONCE * launch.threads
        advance_epoch(launch.control, before, call.epoch, call.watch.calls, Uint32(launch.generations))

    def around(self, launch: Launch, behind: Int32, first: Int32, size: int) -> list[Int32]:
        """Chunks by their numbers, which start behind what this rank owns: no owner gets all ranks' pushes at once."""
        chunks = [behind + number for number in launch.every(first, size)]
        return [chunk - Int32(chunk >= launch.chunks) * launch.chunks for chunk in chunks]

    @cute.jit
    def reduce_own(self, launch: Launch, call: Call, start: Int32, mine: Int32, first: Int32) -> None:
        """Sums this thread's next chunks of those that the rank owns."""
        indices = launch.every(first, self.sums_at_once)
        inside = [index < mine for index in indices]
        chunks = [start + index for index in indices]
        wanted = [there & call.alive for there in inside]
        sums = twoshot.reduce_many(call.buffers, indices, wanted, self.load(launch, chunks), call.watch)
        if const_expr(self.keeps_sums):
            self.store(launch, chunks, inside, sums)

    @cute.jit
    def reduce_every(self, launch: Launch, call: Call, first: Int32) -> None:
        """Sums this thread's next chunks of the round."""
        chunks = launch.every(first, self.sums_at_once)
        inside = [chunk < launch.chunks for chunk in chunks]
        wanted = [there & call.alive for there in inside]
        own = self.load(launch, chunks) if self.keeps_own else [(Uint32(0),) * 4 for _ in chunks]
        self.store(launch, chunks, inside, oneshot.reduce_many(call.buffers, chunks, wanted, own, call.watch))

    @cute.jit
    def collect(self, launch: Launch, call: Call, behind: Int32, end: Int32, first: Int32) -> None:
        """Hands on this thread's next sums."""
        chunks = self.around(launch, behind, first, AT_ONCE)
        inside = [number < end for number in launch.every(first, AT_ONCE)]
        wanted = [there & call.alive for there in inside]
        self.store(launch, chunks, inside, twoshot.collect_many(call.buffers, chunks, wanted, call.watch))

    # ---- The control block --------------------------------------------------------------------------------

    @cute.jit
    def begin(self, launch: Launch) -> Call:
        """Reads the control block. What is asked of memory before it is in flight meanwhile."""
        epoch, _, state, calls = memory.load_control(launch.control)
        timeout_ns = twoshot.select(launch.timeout_ns == 0, Int64(FOREVER_NS), launch.timeout_ns)
        buffers = Buffers(
            tp=self.tp,
            slot_chunks=Int64(launch.slot_chunks),
            generations=Int64(launch.generations),
            format=self.format,
            generation=Int64(epoch),
            rank=Int64(launch.rank),
            owned=Int64(owned_chunks(Uint32(launch.chunks), self.tp)),
            base=launch.base,
            peers=launch.peers,
            multicast=launch.multicast if self.multicast else None,
            keeps_own=self.keeps_own,
        )
        watch = Watch(launch.control, launch.status, timeout_ns, calls)
        return Call(buffers, watch, state < twoshot.FAILED, state, epoch)

    @cute.jit
    def settle(self, launch: Launch, call: Call) -> None:
        """Ends the reading of the control block, in every thread: each has looked at the state before the barrier."""
        if (call.state == twoshot.SLOW) & (launch.thread == 0):
            memory.keep_bits(launch.control + twoshot.CONTROL_STATE, Uint32(twoshot.FAILED))
        cute.arch.sync_threads()

    # ---- Operand and result --------------------------------------------------------------------------------

    @cute.jit
    def load(self, launch: Launch, chunks: list[Int32]) -> list[Chunk]:
        """Reads chunks of the operand; what lies past its end is +0.0 and not read."""
        whole = self.whole_chunks(launch)
        words = [memory.load_chunk_if(chunk < whole, launch.x + Int64(chunk) * CHUNK_BYTES) for chunk in chunks]
        partial = [chunk == whole for chunk in chunks]
        if twoshot.any_of(partial):
            first = memory.fresh(whole) * self.format.chunk
            each = [self.load_element(launch, first + i) for i in range(self.format.chunk - 1)]
            rest = twoshot.pack([*each, Uint32(0)], self.format)
            words = [twoshot.select_chunk(is_rest, rest, w) for is_rest, w in zip(partial, words, strict=True)]
        return words

    @cute.jit
    def load_element(self, launch: Launch, element: Int32) -> Uint32:
        bits = Uint32(0)
        if element < launch.elements:
            address = launch.x + Int64(element) * self.format.itemsize
            bits = memory.load_element(address, self.format.itemsize)
        return bits

    @cute.jit
    def store(self, launch: Launch, chunks: list[Int32], inside: list[Boolean], words: list[Chunk]) -> None:
        """Writes chunks of the result, those ``inside``; what lies past its end is not written."""
        whole = self.whole_chunks(launch)
        for chunk, there, w in zip(chunks, inside, words, strict=True):
            memory.store_chunk(launch.out + Int64(chunk) * CHUNK_BYTES, w, there & (chunk < whole))
        partial = [there & (chunk == whole) for there, chunk in zip(inside, chunks, strict=True)]
        if twoshot.any_of(partial):
            rest = words[0]
            for is_rest, w in zip(partial[1:], words[1:], strict=True):
                rest = twoshot.select_chunk(is_rest, w, rest)
            bits, first = twoshot.unpack(rest, self.format), memory.fresh(whole) * self.format.chunk
            for i in range_constexpr(self.format.chunk - 1):
                element = first + i
                if element < launch.elements:
                    address = launch.out + Int64(element) * self.format.itemsize
                    memory.store_element(address, bits[i], self.format.itemsize)

    def whole_chunks(self, launch: Launch) -> Int32:
        """Chunks of the round that are not partial: all, or all but the last."""
        return Int32(Uint32(launch.elements) // self.format.chunk)

    @cute.jit
    def __call__(
        self,
        x: Int64,
        out: Int64,
        elements: Int32,
        slot_chunks: Int32,
        rank: Int32,
        base: Int64,
        multicast: Int64,
        control: Int64,
        status: Int64,
        timeout_ns: Int64,
        generations: Int32,
        peers: list[Int64],
    ) -> None:
        """Gives the compiler the kernel and its launch bounds; the grid is the launcher's own."""
        self.kernel(
            x,
            out,
            elements,
            slot_chunks,
            rank,
            base,
            multicast,
            control,
            status,
            timeout_ns,
            generations,
            peers,
        ).launch(
            grid=[1, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=0,  # Left out, the compiler would ask a driver for it.
        )


AllReduce.kernel.set_name_prefix(
    "jax_twoshot_all_reduce", remove_cutlass_symbol=True, keep_mangled_name=False
)


def compile_kernel(kernel: AllReduce, arch: str) -> Compiled:
    """Compiles for ``arch``, such as ``"sm_90a"``. Needs no GPU and no driver."""
    parameters = inspect.get_annotations(AllReduce.__call__, eval_str=True)
    del parameters["return"], parameters["peers"]
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            kernel,
            *(kind(0) for kind in parameters.values()),
            [Int64(0)] * kernel.tp,
            options=f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {shlex.quote(folder)}",
        )
        (cubin,) = Path(folder).glob("*.cubin")
        (ptx,) = Path(folder).glob("*.ptx")
        (symbol,) = compiled.kernel_info
        return Compiled(cubin.read_bytes(), ptx.read_text(), symbol)
