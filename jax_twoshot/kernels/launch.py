"""What a kernel of one's own needs around push, reduce and collect: the launch's arguments, the epoch, the way out.

``jax_twoshot.cutedsl`` shows this to kernel authors, ``docs/kernel_authors.md`` explains it. A kernel calls, in every
thread and in this order::

    wait_for_predecessor(arguments)         nothing may touch memory before it
    call = begin(arguments, chunks)         which generation, which chunks are whose, has the workspace failed
    push(call, chunk, words)                each chunk of the message once
    rearm_previous(call, thread, threads)   deferred re-arm only, anywhere from here on
    settle(call)                            once
    reduce(call, index)                     each of the ``call.mine`` chunks that this rank owns once
    before = arrive(call)                   once
    collect(call, chunk)                    each chunk of the message once
    advance(call, before)                   once, last

All CTAs of the launch are resident at once (R5), so that a thread may wait for what another pushes: which thread
takes which chunk is the kernel's choice, and need not be the same one in the three phases. The numbers of the
chunks are its choice too: a sum is elementwise, so any order of the elements will do that all ranks share.

On a workspace that has failed (R9) all of these return at once: push, reduce and the re-arming do nothing, collect
returns NaN. A kernel needs no branch for it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute

from jax_twoshot.kernels import memory, twoshot
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.kernels.twoshot import Buffers, Watch
from jax_twoshot.protocol import GENERATIONS_DEFERRED, Format, owned_chunks

FOREVER_NS = 1 << 62
OVERSIZE = 3
"""In place of a phase in the status record: no wait, but a message of ``chunk`` chunks that does not fit."""
CONTROL_DIRTY = 16
"""Byte offset in the control block, behind the four words of ``all_reduce.py``, of one word a generation: chunks of its
last message, if the next call is to re-arm them."""

_TYPES = (Int32, Int32, Int64, Int64, Int64, Int64, Int64, Int32, Int32)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The last parameter of a kernel: what the workspace gives to each launch.

    It stands for the trailing parameters ``slot_chunks`` to ``peers``, in this order, as ``ffi/all_reduce_cuda.cc``
    packs them.

    Attributes:
      slot_chunks: Int32, capacity of a slot.
      rank: Int32, this rank.
      base: Int64, address of this rank's allocation (`protocol.Layout`).
      multicast: Int64, multicast address of the allocations; used if ``multicasts``.
      control: Int64, address of the control block.
      status: Int64, address of the status record.
      timeout_ns: Int64, a wait that lasts longer fails; 0: none does.
      generations: Int32, P.
      overlap: Int32, 0: the next launch becomes resident when this one has ended; else as soon as it has begun (R5).
      peers: Int64 each, TP of them: address of every rank's allocation, as this rank reaches it.
      format: at compile time, element type of the message.
      owners: at compile time, ranks that own chunks: TP, or 1 in the stand-in for one GPU.
      multicasts: at compile time, what all ranks get is stored once through ``multicast``.
      deferred: at compile time, the workspace's calls re-arm what the call before has read: three generations.
      pdl: at compile time, a launch may start before the one in front of it has ended.
    """

    slot_chunks: Int32
    rank: Int32
    base: Int64
    multicast: Int64
    control: Int64
    status: Int64
    timeout_ns: Int64
    generations: Int32
    overlap: Int32
    peers: list[Int64]
    format: Format
    owners: int
    multicasts: bool
    deferred: bool
    pdl: bool

    @classmethod
    def example(cls, *, tp: int, format: Format, owners: int, multicasts: bool, deferred: bool, pdl: bool) -> Arguments:
        """Arguments to compile with: of the run-time ones only the types count."""
        names = [field.name for field in dataclasses.fields(cls)]
        zeros = {name: kind(0) for name, kind in zip(names, _TYPES, strict=False)}
        return cls(
            **zeros,
            peers=[Int64(0)] * tp,
            format=format,
            owners=owners,
            multicasts=multicasts,
            deferred=deferred,
            pdl=pdl,
        )

    @property
    def tp(self) -> int:
        """Ranks in the group, at compile time."""
        return len(self.peers)

    @property
    def parts(self) -> int:
        """Ranks whose part this rank pushes, at compile time: 1, its own; all TP in the stand-in for one GPU."""
        return 1 if self.owners == self.tp else self.tp

    def _values(self) -> list[Int32 | Int64]:
        names = [field.name for field in dataclasses.fields(self)][: len(_TYPES)]
        return [*(getattr(self, name) for name in names), *self.peers]

    # What the compiler asks of a parameter that stands for several.

    def __extract_mlir_values__(self) -> list:
        return [mlir for value in self._values() for mlir in value.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list) -> Arguments:
        first, peers = values[: len(_TYPES)], values[len(_TYPES) :]
        names = [field.name for field in dataclasses.fields(self)]
        new = {name: kind(value) for name, kind, value in zip(names, _TYPES, first, strict=False)}
        return dataclasses.replace(self, **new, peers=[Int64(value) for value in peers])

    def __get_mlir_types__(self) -> list:
        return [mlir for value in self._values() for mlir in value.__get_mlir_types__()]

    def __c_pointers__(self) -> list:
        return [pointer for value in self._values() for pointer in value.__c_pointers__()]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, as a thread sees it: made by ``begin``.

    Attributes:
      buffers: of the call's generation.
      watch: what ends its waits.
      alive: Boolean, the workspace has not failed: all that follows does nothing otherwise.
      chunks: Int32, of the message.
      mine: Int32, how many of them this rank owns; not positive for none.
      state: Uint32, of the workspace when the call began.
      epoch: Uint32, which generation the control block named.
      deferred: at compile time, the next call re-arms what this one reads.
      generations: Uint32, P.
      parts: `Arguments.parts`.
    """

    buffers: Buffers
    watch: Watch
    alive: Boolean
    chunks: Int32
    mine: Int32
    state: Uint32
    epoch: Uint32
    deferred: bool
    generations: Uint32
    parts: int


# ---- The way in --------------------------------------------------------------------------------------------


@cute.jit
def wait_for_predecessor(arguments: Arguments) -> None:
    """Waits for the launches before this one; then the next may become resident, if R5 allows it. Before it, touch no
    memory."""
    if const_expr(arguments.pdl):
        memory.wait_for_stream()
        if arguments.overlap != 0:
            memory.let_next_launch_start()


def begin(arguments: Arguments, chunks: Int32, *, deferred: bool = False, generation: int | None = None) -> Call:
    """Reads the control block: after ``wait_for_predecessor``, once in every thread. Takes a trip to L2.

    Args:
      arguments: the kernel's own.
      chunks: of the message, the same on every rank, at least 1. More than the workspace holds,
        ``owners * slot_chunks``, fail it.
      deferred: the next call re-arms what this one reads, so that it may be read again until the kernel ends.
        Every call of the workspace has to, and to call ``rearm_previous``.
      generation: which copy of the buffers to use, at compile time; by default the epoch says (R6).

    Raises:
      ValueError: when compiling: ``deferred`` is not what the workspace was made for.
    """
    if deferred != arguments.deferred:
        needs = f"needs a workspace of {GENERATIONS_DEFERRED} generations" if deferred else "needs one of 2"
        raise ValueError(
            f"begin: deferred={deferred} {needs}, this workspace was made for "
            f"{'deferred' if arguments.deferred else 'immediate'} re-arm; its calls cannot mix the two"
        )
    call = begin_round(arguments, chunks, generation=generation)
    return dataclasses.replace(call, alive=call.alive & fits(call.buffers, call.watch, chunks))


def begin_round(arguments: Arguments, chunks: Int32, *, generation: int | None = None, keeps_own: bool = False) -> Call:
    """`begin` where the launcher has seen to it that the chunks fit. What is asked of memory before it is in flight
    meanwhile. ``keeps_own`` is `Buffers.keeps_own`."""
    epoch, _, state, calls = memory.load_control(arguments.control)
    owned = Int32(owned_chunks(Uint32(chunks), arguments.owners))
    buffers = Buffers(
        tp=arguments.tp,
        slot_chunks=Int64(arguments.slot_chunks),
        generations=Int64(arguments.generations),
        format=arguments.format,
        generation=Int64(epoch) if generation is None else generation,
        rank=Int64(arguments.rank),
        owned=Int64(owned),
        base=arguments.base,
        # The stand-in's ranks are one: a sum stored again could land on a place that was re-armed meanwhile.
        peers=arguments.peers[: arguments.owners],
        multicast=arguments.multicast if arguments.multicasts else None,
        keeps_own=keeps_own,
    )
    timeout_ns = twoshot.select(arguments.timeout_ns == 0, Int64(FOREVER_NS), arguments.timeout_ns)
    watch = Watch(arguments.control, arguments.status, timeout_ns, calls)
    return Call(
        buffers=buffers,
        watch=watch,
        alive=state < twoshot.FAILED,
        chunks=chunks,
        mine=cute.min(owned, chunks - arguments.rank * owned),
        state=state,
        epoch=epoch,
        deferred=arguments.deferred,
        generations=Uint32(arguments.generations),
        parts=arguments.parts,
    )


# ---- The protocol ------------------------------------------------------------------------------------------


@cute.jit
def push(call: Call, chunk: Int32, words: Chunk, part: int = 0) -> None:
    """Gives the chunk's owner this rank's part of it: before ``settle``, once for each chunk, from any thread.

    Args:
      call: this call.
      chunk: which of the message, 0 to ``call.chunks - 1``.
      words: 16 bytes of the format, as from ``pack`` or ``load``; -0.0 is sent as +0.0 (R1).
      part: at compile time, in the stand-in for one GPU the rank that is played, 0 to ``call.parts - 1``.

    Raises:
      ValueError: when compiling: ``words`` are no chunk.
    """
    if const_expr(len(words) != 4):
        raise ValueError(f"push: a chunk is four Uint32 words, as from pack or load, got {len(words)} values")
    if call.alive:
        buffers = dataclasses.replace(call.buffers, rank=call.buffers.rank + part)
        twoshot.push(buffers, twoshot.aim(buffers, chunk), words)


@cute.jit
def reduce(call: Call, index: Int32) -> None:
    """Waits for all ranks' parts of a chunk that this rank owns, and gives every rank the sum (R3).

    After this thread's own pushes, once for each index from any thread: the slots are re-armed, unless deferred.

    Args:
      call: this call.
      index: 0 to ``call.mine - 1``; it is chunk ``rank * owned + index`` of the message.
    """
    if call.alive:
        twoshot.reduce(call.buffers, index, call.watch, call.deferred)


@cute.jit
def collect(call: Call, chunk: Int32) -> Chunk:
    """Waits for the sum of a chunk and returns it, or NaN if it did not come (R9).

    After this thread's own reduces, once for each chunk, from any thread: its place is re-armed, unless deferred.

    Args:
      call: this call.
      chunk: which of the message, 0 to ``call.chunks - 1``.
    """
    words = twoshot.not_a_number(call.buffers.format)
    if call.alive:
        words = twoshot.collect(call.buffers, chunk, call.watch, call.deferred)
    return words


@cute.jit
def rearm_previous(call: Call, first: Int32, step: Int32) -> None:
    """Deferred re-arm: makes what the call before this one has read "not yet written" again (R2), whatever its size.

    After ``begin``, once: thread ``first`` of ``step`` takes every ``step``-th chunk. It waits for nothing, so it is
    best done while the parts are under way. The control block remembers what is to be re-armed.
    """
    generation = Uint32(call.buffers.generation)
    previous = generation + call.generations - 1
    if previous >= call.generations:
        previous -= call.generations
    chunks = Int32(0)
    if call.alive:
        chunks = Int32(memory.load_control_word(dirty_address(call, previous)))
    owned = Int32(owned_chunks(Uint32(chunks), len(call.buffers.peers)))
    mine = cute.min(owned, chunks - Int32(call.buffers.rank) * owned)
    before = dataclasses.replace(call.buffers, generation=Int64(previous))
    for index in range(first, mine, step):
        for slot in twoshot.slots_of(before, Int64(index)):
            twoshot.rearm(slot, before.format)
    for chunk in range(first, chunks, step):
        twoshot.rearm(before.base + before.gather_offset(before.generation, Int64(chunk)), before.format)


# ---- Its pieces, for a kernel that combines otherwise -------------------------------------------------------


def slot_address(call: Call, rank: int | Int64, index: Int32) -> Int64:
    """Where ``rank``'s part of this rank's own chunk ``index`` arrives."""
    return call.buffers.base + call.buffers.recv_offset(call.buffers.generation, rank, Int64(index))


def gather_address(call: Call, chunk: Int32) -> Int64:
    """Where the sum of ``chunk`` of the message arrives."""
    return call.buffers.base + call.buffers.gather_offset(call.buffers.generation, Int64(chunk))


@cute.jit
def collect_slot(call: Call, rank: int, index: Int32) -> Chunk:
    """Waits for one rank's part of an own chunk and returns it, or NaN if it did not come (R9).

    In place of ``reduce``, for a kernel that does something else with the parts than to sum them: after this thread's
    own pushes, once for each slot of each index, from any thread. The slot is re-armed, unless deferred. A message of
    which no chunk is reduced must be one of which every rank owns a chunk (R4).

    Args:
      call: this call.
      rank: at compile time, whose part.
      index: 0 to ``call.mine - 1``.
    """
    words = twoshot.not_a_number(call.buffers.format)
    if call.alive:
        place = slot_address(call, rank, index)
        chunk = call.buffers.rank * call.buffers.owned + index
        mask = [Uint32(1 << rank)]
        chunks, arrived = twoshot.wait(call.buffers, call.watch, [place], mask, twoshot.REDUCE, chunk)
        if arrived:
            words = chunks[0]
            if const_expr(not call.deferred):
                rearm(call, place)
    return words


def rearm(call: Call, address: Int64) -> None:
    """Makes a chunk of this rank's buffers that this thread has read "not yet written" again (R2)."""
    twoshot.rearm(address, call.buffers.format)


def published(words: Chunk, format: Format) -> Boolean:
    """Whether all of a polled chunk has arrived: none of its four words is the sentinel (R1)."""
    return twoshot.has_arrived(words, format)


def pack(values: list[Float32], format: Format) -> Chunk:
    """A chunk's worth of FP32 values, rounded to nearest even, as words that may be published: no -0.0 (R1).

    Raises:
      ValueError: when compiling: they are not ``format.chunk``.
    """
    if len(values) != format.chunk:
        raise ValueError(f"pack: a chunk is {format.chunk} {format.name} values, got {len(values)}")
    return twoshot.without_negative_zero(twoshot.narrow(values, format), format)


def unpack(words: Chunk, format: Format) -> list[Float32]:
    """The values of a chunk in FP32, exactly, in the order of memory: ``format.chunk`` of them."""
    return twoshot.widen(words, format)


# ---- The way out -------------------------------------------------------------------------------------------


@cute.jit
def settle(call: Call) -> None:
    """Makes sure that all of this CTA has begun: after the last push, once in every thread. Waits for the CTA."""
    if (call.state == twoshot.SLOW) & ((cute.arch.block_idx()[0] + cute.arch.thread_idx()[0]) == 0):
        memory.keep_bits(call.watch.control + twoshot.CONTROL_STATE, Uint32(twoshot.FAILED))
    cute.arch.sync_threads()


def arrive(call: Call) -> Uint32:
    """Counts this CTA, once in every thread, after ``settle``: for ``advance``, which may be much later."""
    return count_cta(call.watch.control)


@cute.jit
def advance(call: Call, before: Uint32) -> None:
    """The last CTA to arrive readies the control block for the next call (R6): last, once in every thread.

    Args:
      call: this call.
      before: what ``arrive`` returned.
    """
    if is_last_cta(before):
        remember_dirty(call)
    advance_epoch(call.watch.control, before, call.epoch, call.watch.calls, call.generations)


# ---- Steps of these ----------------------------------------------------------------------------------------


@cute.jit
def fits(buffers: Buffers, watch: Watch, chunks: Int32) -> Boolean:
    """Whether the message fits the workspace; where it does not, the workspace has failed: nothing may be stored."""
    room = buffers.owned <= buffers.slot_chunks
    if not room:
        twoshot.report(watch, twoshot.FAILED, OVERSIZE, Int64(buffers.generation), Int64(chunks), Uint32(0))
    return room


@cute.jit
def count_cta(control: Int64) -> Uint32:
    """Counts this CTA, all of whose threads have read the control block: how many came before it. Nothing waits for the
    count before ``advance_epoch``."""
    before = Uint32(0xFFFF_FFFF)
    if cute.arch.thread_idx()[0] == 0:
        before = memory.count_to(control + twoshot.CONTROL_ARRIVALS, Uint32(ctas() - 1))
    return before


@cute.jit
def advance_epoch(control: Int64, before: Uint32, epoch: Uint32, calls: Uint32, generations: Uint32) -> None:
    """The last CTA to be counted readies the control block for the next call (R6)."""
    if is_last_cta(before):
        following = epoch + 1
        if following == generations:
            following = Uint32(0)
        memory.store_control(control + twoshot.CONTROL_EPOCH, following)
        memory.store_control(control + twoshot.CONTROL_CALLS, calls + 1)


def is_last_cta(before: Uint32) -> Boolean:
    """Whether this thread has counted its CTA, as the last."""
    return before == Uint32(ctas() - 1)


def remember_dirty(call: Call) -> None:
    """Says how much of this call's generation the next one has to re-arm."""
    if call.deferred:
        memory.store_control(dirty_address(call, Uint32(call.buffers.generation)), Uint32(call.chunks))


def dirty_address(call: Call, generation: Uint32) -> Int64:
    """Of the control word that says how much of a generation is to be re-armed."""
    return call.watch.control + CONTROL_DIRTY + Int64(generation) * 4


def ctas() -> Int32:
    """CTAs of this launch, whose grid and blocks have one dimension."""
    return cute.arch.grid_dim()[0]
