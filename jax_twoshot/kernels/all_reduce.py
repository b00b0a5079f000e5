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
                         unused

A launch has blocks of `protocol.THREADS`, a grid of `protocol.grid`, no shared memory and, if `pdl`,
programmatic stream serialization. A failed workspace stays failed: its calls wait for nothing and write NaN.

What was tried (cubins for sm_90a, BF16, at most 80 registers a thread so that `protocol.CTAS_PER_SM` fit):

- TP 2 takes 60 registers, TP 8 and 16 all 80. Only TP 16 spills: 136 bytes when it polled its slots at once,
  none in batches of 8 (with multicast 88), none at all in batches of 4. Each batch is one more trip to L2,
  hence `twoshot.SLOTS_AT_ONCE`.
- The first load of the operand stands in front of the loop, and before that of the control block. In the loop the
  compiler moved what depends on the epoch alone ahead of it, so that it waited for the epoch; after the control
  block's it did the same, to put the epoch into a uniform register.
- The peers' addresses were a table in memory, one more trip to L2 before a push and another before a sum is stored.
- On one H200 (`docs/benchmarks.md` has the tables), one process, 1 / 4 / 16 / 64 rows of 7168: the two-shot
  kernel took 2.29 / 2.47 / 2.84 / 4.59 us at TP 2 and 3.13 / 3.52 / 5.35 / 15.37 at TP 8 with the peers'
  addresses in a table and the operand loaded after the control block; 2.15 / 2.30 / 2.58 / 4.67 and 3.15 / 3.37
  / 5.41 / 16.64 with the addresses as parameters and both loads in flight at once. These are two runs: what is
  within a few percent of each other is the same.
- One-shot saves a hop: 1.50 us instead of 2.15 at TP 2 and one row; it loses from 16 rows at TP 4, 4 at TP 8.
- Not tried: batches of chunks a thread (at 64 rows and TP 8 a thread takes nine, one L2 trip after the other).
- Counting the CTA before the reduce spilled the count at TP 8: a store that waits for the atomic, in the way
  of the first warp. Counted after it, the count has the whole collect to come back.
"""

from __future__ import annotations

import inspect
import shlex
import tempfile
from pathlib import Path

from cutlass import Int32, Int64, Uint32, const_expr, cute

from jax_twoshot.kernels import launch, memory, oneshot, twoshot
from jax_twoshot.kernels.build import Compiled
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.kernels.twoshot import Buffers, Watch
from jax_twoshot.protocol import ALGORITHMS, CHUNK_BYTES, CTAS_PER_SM, THREADS, Format, owned_chunks


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
        self.aim = oneshot.aim if self.one_shot else twoshot.aim
        self.push = oneshot.push if self.one_shot else twoshot.push
        self.take = oneshot.reduce if self.one_shot else twoshot.collect

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
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        threads = cute.arch.grid_dim()[0] * THREADS

        # What memory has to say is asked for first: all that is computed next has until then.
        if const_expr(self.pdl):
            memory.wait_for_stream()
            memory.let_next_launch_start()
        words = self.load(x, thread, elements)
        epoch, _, state, calls = memory.load_control(control)

        chunks = (elements + (self.format.chunk - 1)) // self.format.chunk
        owned = owned_chunks(chunks, self.tp)
        mine = cute.min(owned, chunks - rank * owned)
        buffers = Buffers(
            tp=self.tp,
            slot_chunks=Int64(slot_chunks),
            generations=Int64(generations),
            format=self.format,
            generation=Int64(epoch),
            rank=Int64(rank),
            owned=Int64(owned),
            base=base,
            peers=peers,
            multicast=multicast if self.multicast else None,
        )
        target = self.aim(buffers, thread)
        if timeout_ns == 0:
            timeout_ns = Int64(launch.FOREVER_NS)
        watch = Watch(control, status, timeout_ns, calls)

        alive = state < twoshot.FAILED
        for chunk in range(thread, chunks, threads):
            if alive:
                self.push(buffers, target, words)
            target = self.aim(buffers, chunk + threads)
            words = self.load(x, chunk + threads, elements)
        if (state == twoshot.SLOW) & (thread == 0):
            memory.keep_bits(control + twoshot.CONTROL_STATE, Uint32(twoshot.FAILED))
        # Every thread has branched on the state, so every read of the control block has come back.
        cute.arch.sync_threads()
        if alive:
            self.reduce_owned(buffers, watch, thread, mine, threads)
        before = launch.count_cta(control)
        if alive:
            for chunk in range(thread, chunks, threads):
                self.store(out, chunk, elements, self.take(buffers, chunk, watch))
        else:
            for chunk in range(thread, chunks, threads):
                self.store(out, chunk, elements, twoshot.not_a_number(self.format))
        launch.advance_epoch(control, before, epoch, calls, Uint32(generations))

    @cute.jit
    def reduce_owned(self, buffers: Buffers, watch: Watch, first: Int32, end: Int32, step: Int32) -> None:
        """Sums this thread's share of what the rank owns; in one shot ``take`` sums everything."""
        if const_expr(not self.one_shot):
            for index in range(first, end, step):
                twoshot.reduce(buffers, index, watch)

    @cute.jit
    def load(self, x: Int64, chunk: Int32, elements: Int32) -> Chunk:
        """Reads a chunk of the operand; what lies past its end is +0.0 and not read."""
        address = x + Int64(chunk) * CHUNK_BYTES
        left = elements - chunk * self.format.chunk
        words = (Uint32(0),) * 4
        if left >= self.format.chunk:
            words = memory.load_chunk(address)
        elif left > 0:
            each = [self.load_element(address, index, left) for index in range(self.format.chunk)]
            words = twoshot.pack(each, self.format)
        return words

    @cute.jit
    def load_element(self, address: Int64, index: int, left: Int32) -> Uint32:
        bits = Uint32(0)
        if index < left:
            bits = memory.load_element(address + index * self.format.itemsize, self.format.itemsize)
        return bits

    @cute.jit
    def store(self, out: Int64, chunk: Int32, elements: Int32, words: Chunk) -> None:
        """Writes a chunk of the result; what lies past its end is not written."""
        address = out + Int64(chunk) * CHUNK_BYTES
        left = elements - chunk * self.format.chunk
        if left >= self.format.chunk:
            memory.store_chunk(address, words)
        else:
            for index, bits in enumerate(twoshot.unpack(words, self.format)):
                if index < left:
                    memory.store_element(address + index * self.format.itemsize, bits, self.format.itemsize)

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
