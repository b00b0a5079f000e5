"""The two-shot protocol as device functions: push, reduce, collect, rearm. ``protocol.py`` has the words.

A kernel calls them once for every chunk, all pushes before its first reduce, all reduces before its first
collect, with all of its CTAs resident at once (R5): a push waits for nothing, a reduce for pushes only, a
collect for reduces only. What a thread pushes may come from anywhere, and what it collects may go anywhere.

``reduce_many`` and ``collect_many`` take several chunks at once, all of them in flight together. With
`Buffers.keeps_own` a rank's own part and its own sums stay in registers: it neither pushes the chunks that it owns
nor collects them. That spares memory a ``1 / TP`` of what the protocol stores, polls and re-arms.

When a wait ends without its chunk (R9), reduce publishes nothing and what it returns, as collect does, is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32, const_expr, cute, range_constexpr
from cutlass.cutlass_dsl import select_

from jax_twoshot.kernels import memory
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.protocol import Format, Layout

OK, SLOW, FAILED = 0, 1, 2
"""States of a workspace, in the control block (as bits) and in the status record."""
REDUCE, COLLECT = 1, 2
"""Phases that wait, as the status record names them."""

CONTROL_EPOCH, CONTROL_ARRIVALS, CONTROL_STATE, CONTROL_CALLS = (4 * word for word in range(4))
"""Byte offsets in the control block."""
STATUS_STATE, STATUS_PHASE, STATUS_GENERATION, STATUS_CHUNK, STATUS_RANKS, _, STATUS_CALLS = (
    4 * word for word in range(7)
)
"""Byte offsets in the status record; the ranks take two words."""

SLOTS_AT_ONCE = 8
"""Slots that a reduce polls together; the 64 registers of 16 would not fit beside the rest."""
POLLS_PER_CHECK = 256
"""Polls between two looks at the clock and at the state, which are no part of a poll that soon succeeds."""


@dataclass(frozen=True, kw_only=True)
class Buffers(Layout):
    """The buffers of one generation, as a thread sees them. Offsets are ``Layout``'s own, on run-time values.

    Attributes:
      tp: ranks in the group, at compile time.
      slot_chunks: Int64, capacity of a slot in chunks.
      generations: Int64, P.
      format: element type, at compile time.
      generation: Int64, which copy of the buffers this call uses.
      rank: Int64, this rank.
      owned: Int64, chunks that each rank owns of this round (`protocol.owned_chunks`).
      base: Int64, address of this rank's allocation.
      peers: Int64 each, addresses of every rank's allocation, as this rank reaches it.
      multicast: Int64, multicast address of the allocations, or None at compile time: store to each peer.
      keeps_own: at compile time, a rank's own slots are not used: ``reduce_many`` is given this rank's part. Nor is its
        own part of its gather, unless multicast stores to all: ``reduce_many`` returns what a collect would.
    """

    format: Format
    generation: Int64
    rank: Int64
    owned: Int64
    base: Int64
    peers: list[Int64]
    multicast: Int64 | None
    keeps_own: bool = False

    def __post_init__(self) -> None:
        """The host checked the layout; here its numbers are not known yet."""

    def uses(self, rank: int, where: Boolean | None = None) -> Boolean | None:
        """Whether this rank and ``rank`` meet in memory, ``where`` that holds; None: always."""
        if not self.keeps_own:
            return where
        return self.rank != rank if where is None else where & (self.rank != rank)

    def peer(self, rank: Uint32) -> Int64:
        """Address of the allocation of a rank that is known at run time only: a tree of selections, no load."""
        level = self.peers
        for bit in range((self.tp - 1).bit_length()):
            odd = (rank & (1 << bit)) != 0
            pairs = [level[first : first + 2] for first in range(0, len(level), 2)]
            level = [select(odd, pair[1], pair[0]) if len(pair) == 2 else pair[0] for pair in pairs]
        return level[0]


@dataclass(frozen=True)
class Watch:
    """What ends a wait (R9).

    Attributes:
      control: Int64, address of the control block (device memory).
      status: Int64, address of the status record (pinned host memory), written when a wait is slow or fails.
      timeout_ns: Int64, nanoseconds after which a wait fails.
      calls: Uint32, calls of the workspace before this one.
    """

    control: Int64
    status: Int64
    timeout_ns: Int64
    calls: Uint32


# ---- The protocol ------------------------------------------------------------------------------------------


def aim(buffers: Buffers, chunk: Int32) -> Int64:
    """Where ``chunk`` is pushed to, in generation 0: all of the way that can be gone before the epoch is known."""
    owner, index = owner_of(buffers, chunk)
    return buffers.peer(owner) + buffers.recv_offset(0, buffers.rank, Int64(index))


def push(buffers: Buffers, target: Int64, words: Chunk, where: Boolean | None = None) -> None:
    """Stores ``words``, this rank's part of a chunk, into its slot at the chunk's owner (R1): ``aim``'s target."""
    slot = target + buffers.recv_offset(buffers.generation, 0, 0)
    memory.publish_chunk(slot, without_negative_zero(words, buffers.format), where)


@cute.jit
def reduce(
    buffers: Buffers, index: Int32, watch: Watch, deferred: bool = False, addend: Chunk | None = None
) -> None:
    """Sums the slots of this rank's chunk ``index``, and an ``addend``, into every rank's gather (R3, R10) and re-arms
    them (R2), unless the next call is to do that (``deferred``)."""
    slots = slots_of(buffers, Int64(index))
    chunk = buffers.rank * buffers.owned + index
    words, complete = sum_slots(buffers, slots, chunk, watch, addend)
    if complete:
        publish_everywhere(buffers, buffers.gather_offset(buffers.generation, chunk), words)
        if const_expr(not deferred):
            for slot in slots:
                rearm(slot, buffers.format)


@cute.jit
def collect(buffers: Buffers, chunk: Int32, watch: Watch, deferred: bool = False) -> Chunk:
    """Waits for the sum of ``chunk`` in this rank's gather, returns it and re-arms its place (R2), unless the next
    call is to do that (``deferred``)."""
    owner, _ = owner_of(buffers, chunk)
    place = buffers.base + buffers.gather_offset(buffers.generation, Int64(chunk))
    chunks, arrived = wait(buffers, watch, [place], [Uint32(1) << Uint32(owner)], COLLECT, Int64(chunk))
    words = chunks[0]  # by its own name: a branch cannot assign a name that was unpacked from a nested pattern
    if arrived:
        if const_expr(not deferred):
            rearm(place, buffers.format)
    else:
        words = not_a_number(buffers.format)
    return words


@cute.jit
def reduce_many(
    buffers: Buffers, indices: list[Int32], wanted: list[Boolean], own: list[Chunk], watch: Watch
) -> list[Chunk]:
    """``reduce`` of the ``wanted`` ones of this rank's chunks ``indices``: their sums, NaN for any other.

    Args:
      buffers: the generation.
      indices: of the chunks, counted from the first one that this rank owns.
      wanted: which of them.
      own: this rank's parts of them, looked at only with `Buffers.keeps_own`.
      watch: what ends the wait.
    """
    first = buffers.rank * buffers.owned
    sums, complete = sum_many(buffers, indices, wanted, own, watch, first)
    for index, words, there in zip(indices, sums, complete, strict=True):
        publish_everywhere(buffers, buffers.gather_offset(buffers.generation, first + index), words, there)
    rearm_slots(buffers, indices, complete)
    nan = not_a_number(buffers.format)
    return [select_chunk(there, words, nan) for there, words in zip(complete, sums, strict=True)]


@cute.jit
def collect_many(
    buffers: Buffers, chunks: list[Int32], wanted: list[Boolean], watch: Watch
) -> list[Chunk]:
    """``collect`` of the ``wanted`` ones of ``chunks``; NaN for any other."""
    places = [buffers.base + buffers.gather_offset(buffers.generation, Int64(chunk)) for chunk in chunks]
    ranks = [Uint32(1) << owner_of(buffers, chunk)[0] for chunk in chunks]
    about, nan = [Int64(chunk) for chunk in chunks], not_a_number(buffers.format)
    words, arrived = wait(buffers, watch, places, ranks, COLLECT, about, wanted, [nan] * len(chunks))
    complete = [there & arrived for there in wanted]
    for place, there in zip(places, complete, strict=True):
        rearm(place, buffers.format, there)
    return [select_chunk(there, w, nan) for there, w in zip(complete, words, strict=True)]


def rearm(address: Int64, format: Format, where: Boolean | None = None) -> None:
    """Makes a chunk that this thread has read "not yet written" again. Only its reader may (R2)."""
    memory.publish_chunk(address, (Uint32(format.sentinel),) * 4, where)


# ---- Steps of the four -------------------------------------------------------------------------------------


def owner_of(buffers: Buffers, chunk: Int32) -> tuple[Uint32, Uint32]:
    """`protocol.owner_of`, by an unsigned 32-bit division: a signed or a wider one is longer."""
    owned = Uint32(buffers.owned)
    owner = Uint32(chunk) // owned
    return owner, Uint32(chunk) - owner * owned


def slots_of(buffers: Buffers, index: Int64) -> list[Int64]:
    """Addresses of the slots, in rank order, of the chunk that this rank sums as its number ``index``."""
    return [
        buffers.base + buffers.recv_offset(buffers.generation, rank, index) for rank in range(buffers.tp)
    ]


@cute.jit
def sum_slots(
    buffers: Buffers, slots: list[Int64], chunk: Int64, watch: Watch, addend: Chunk | None = None
) -> tuple[Chunk, Boolean]:
    """Waits for ``slots`` and adds them in rank order (R3), an ``addend`` last (R10): ``(words, complete)``;
    incomplete, no words to use."""
    total: list[Float32] = []
    complete = Boolean(True)
    for first in range_constexpr(0, buffers.tp, SLOTS_AT_ONCE):
        batch = slots[first : first + SLOTS_AT_ONCE]
        masks = [Uint32(1 << (first + number)) for number in range(len(batch))]
        parts, arrived = wait(buffers, watch, batch, masks, REDUCE, chunk)
        total = add_in_order(total, parts, buffers.format)
        complete = complete & arrived
    total = add_in_order(total, [] if addend is None else [addend], buffers.format)
    return without_negative_zero(narrow(total, buffers.format), buffers.format), complete


@cute.jit
def sum_many(
    buffers: Buffers,
    indices: list[Int32],
    wanted: list[Boolean],
    own: list[Chunk],
    watch: Watch,
    first_chunk: Int64,
) -> tuple[list[Chunk], list[Boolean]]:
    """``sum_slots`` of the ``wanted`` ones of several chunks, at ``indices`` in the slots, ``first_chunk + index`` of
    the round: the sums, and which of them are complete."""
    totals: list[list[Float32]] = [[] for _ in indices]
    arrived = Boolean(True)
    own = [without_negative_zero(words, buffers.format) for words in own]
    for first in range_constexpr(0, buffers.tp, SLOTS_AT_ONCE):
        batch = range(first, min(first + SLOTS_AT_ONCE, buffers.tp))
        each = [(number, rank) for number in range(len(indices)) for rank in batch]
        parts, in_time = wait(
            buffers,
            watch,
            [slot_of(buffers, rank, indices[number]) for number, rank in each],
            [Uint32(1 << rank) for _, rank in each],
            REDUCE,
            [first_chunk + indices[number] for number, _ in each],
            [buffers.uses(rank, wanted[number]) for number, rank in each],
            [own[number] for number, _ in each],
        )
        size = len(batch)
        totals = [
            add_in_order(total, parts[number * size : (number + 1) * size], buffers.format)
            for number, total in enumerate(totals)
        ]
        arrived = arrived & in_time
    sums = [without_negative_zero(narrow(total, buffers.format), buffers.format) for total in totals]
    return sums, [there & arrived for there in wanted]


def slot_of(buffers: Buffers, rank: int, index: Int32) -> Int64:
    """Address of the slot of ``rank`` for the chunk that this rank sums as its number ``index``."""
    return buffers.base + buffers.recv_offset(buffers.generation, rank, Int64(index))


def rearm_slots(buffers: Buffers, indices: list[Int32], where: list[Boolean]) -> None:
    """Re-arms the slots of several chunks, as far as they are used."""
    for index, there in zip(indices, where, strict=True):
        for rank in range(buffers.tp):
            rearm(slot_of(buffers, rank, index), buffers.format, buffers.uses(rank, there))


def publish_everywhere(buffers: Buffers, place: Int64, words: Chunk, where: Boolean | None = None) -> None:
    """Stores ``words`` at offset ``place`` of every rank's allocation, as far as they are used."""
    if buffers.multicast is not None:
        memory.multicast_chunk(buffers.multicast + place, words, buffers.format.name, where)
        return
    for rank, peer in enumerate(buffers.peers):
        memory.publish_chunk(peer + place, words, buffers.uses(rank, where))


@cute.jit
def wait(
    buffers: Buffers,
    watch: Watch,
    places: list[Int64],
    ranks: list[Uint32],
    phase: int,
    chunk: Int64 | list[Int64],
    missing: Sequence[Boolean] = (),
    known: Sequence[Chunk] = (),
) -> tuple[list[Chunk], Boolean]:
    """Polls chunks of this rank until all have arrived, or until the watch says no: ``(chunks, arrived)``. What has
    arrived is not read again: what others still wait for has the way to itself.

    Args:
      buffers: the generation.
      watch: what ends the wait.
      places: addresses of the chunks, all loaded at once.
      ranks: for each of them the rank that stores it, as a mask.
      phase: REDUCE or COLLECT.
      chunk: which chunk of the round this is about, or which for each place.
      missing: which places to poll; by default all.
      known: what the others hold, no sentinel in it; by default nothing is known.
    """
    if const_expr(len(missing) == 0):
        words = [memory.poll_chunk(place) for place in places]
    else:
        words = [memory.poll_chunk_if(*look) for look in zip(missing, places, known, strict=True)]
    there = [has_arrived(w, buffers.format) for w in words]
    polls = Uint32(0)
    since = Int64(0)
    over = Boolean(False)
    while not (all_of(there) | over):
        words = [
            memory.poll_chunk_if(~came, place, w) for came, place, w in zip(there, places, words, strict=True)
        ]
        there = [has_arrived(w, buffers.format) for w in words]
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            first, who = first_missing(chunk, there), missing_ranks(words, ranks, buffers.format)
            since, over = check(watch, since, phase, buffers.generation, first, who)
    return words, all_of(there)


@cute.jit
def check(
    watch: Watch, since: Int64, phase: int, generation: Int64, chunk: Int64, missing: Uint32
) -> tuple[Int64, Boolean]:
    """Whether a wait is over, and since when it lasts (0: it was not yet known).

    A collect waits an eighth longer than a reduce: when a rank is missing, the owners that wait for it are
    not to be blamed for their sums. On a rank that owns a chunk its reduce fails first, naming the right one.
    """
    now = memory.now_ns()
    if since == 0:
        since = now
    waited = now - since
    limit = watch.timeout_ns
    if phase == COLLECT:
        limit += limit // 8
    state = memory.load_control_word(watch.control + CONTROL_STATE)
    over = (state >= FAILED) | (waited > limit)
    if waited > limit:
        report(watch, FAILED, phase, generation, chunk, missing)
    elif (state == OK) & (waited > memory.fresh(limit) // 10):
        report(watch, SLOW, phase, generation, chunk, missing)
    return since, over


@cute.jit
def report(watch: Watch, state: int, phase: int, generation: Int64, chunk: Int64, missing: Uint32) -> None:
    """Raises the state of the workspace. The first thread to do so writes the host's record, state last."""
    before = memory.set_bits(watch.control + CONTROL_STATE, Uint32(state))
    if before < state:
        memory.store_status(watch.status + STATUS_PHASE, Uint32(phase))
        memory.store_status(watch.status + STATUS_GENERATION, Uint32(generation))
        memory.store_status(watch.status + STATUS_CHUNK, Uint32(chunk))
        memory.store_status(watch.status + STATUS_RANKS, missing)
        memory.store_status(watch.status + STATUS_RANKS + 4, Uint32(0))
        memory.store_status(watch.status + STATUS_CALLS, watch.calls)
        memory.release_status(watch.status + STATUS_STATE, Uint32(state))


def has_arrived(words: Chunk, format: Format) -> Boolean:
    """Whether all four words of a chunk were published (R1): its store may have torn into them."""
    return all_of([word != Uint32(format.sentinel) for word in words])


def missing_ranks(chunks: list[Chunk], ranks: list[Uint32], format: Format) -> Uint32:
    """Mask of the ranks whose chunk has not arrived."""
    missing = Uint32(0)
    for words, rank in zip(chunks, ranks, strict=True):
        missing = missing | (rank * (Uint32(1) - Uint32(has_arrived(words, format))))
    return missing


def first_missing(chunk: Int64 | list[Int64], there: list[Boolean]) -> Int64:
    """Which chunk a wait is about."""
    if not isinstance(chunk, list):
        return chunk
    first = chunk[-1]
    for number, came in reversed(list(zip(chunk[:-1], there[:-1], strict=True))):
        first = select(came, first, number)
    return first


def select(condition: Boolean, then: Int64, otherwise: Int64) -> Int64:
    """One of two values, without a branch."""
    return Int64(select_(condition, then, otherwise))


def select_chunk(condition: Boolean, then: Chunk, otherwise: Chunk) -> Chunk:
    """One of two chunks, without a branch."""
    return tuple(Uint32(select_(condition, a, b)) for a, b in zip(then, otherwise, strict=True))


def any_of(conditions: list[Boolean]) -> Boolean:
    """Logical or, without a branch."""
    result = conditions[0]
    for condition in conditions[1:]:
        result = result | condition
    return result


def all_of(conditions: list[Boolean]) -> Boolean:
    """Logical and, without a branch."""
    result = conditions[0]
    for condition in conditions[1:]:
        result = result & condition
    return result


# ---- Elements of a chunk -----------------------------------------------------------------------------------


def without_negative_zero(words: Chunk, format: Format) -> Chunk:
    """Rewrites -0.0 to +0.0 (R1), on the bits, all elements of a word at once.

    ``(word & magnitude) + magnitude`` carries into an element's sign bit unless its magnitude is zero, and
    never into its neighbour.
    """
    magnitude = Uint32(~format.sentinel & 0xFFFF_FFFF)
    return tuple(word & (((word & magnitude) + magnitude) | magnitude) for word in words)


def not_a_number(format: Format) -> Chunk:
    """A chunk of the format's one NaN."""
    return pack([Uint32(format.nan)] * format.chunk, format)


def add_in_order(total: list[Float32], chunks: list[Chunk], format: Format) -> list[Float32]:
    """Adds chunks, one after the other, to ``total``, or to the first of them if there is none yet (R3)."""
    for chunk in chunks:
        part = widen(chunk, format)
        total = [a + b for a, b in zip(total, part, strict=True)] if total else part
    return total


def widen(words: Chunk, format: Format) -> list[Float32]:
    """The elements of a chunk in FP32: exact."""
    elements = unpack(words, format)
    if format.name == "float32":
        return [_ptx("mov.b32 {$w0}, {$r0};", Float32, element) for element in elements]
    if format.name == "bfloat16":
        return [_ptx("mov.b32 {$w0}, {$r0};", Float32, element << 16) for element in elements]
    return [_ptx("cvt.f32.f16 {$w0}, {$r0};", Float32, Uint16(element)) for element in elements]


def narrow(elements: list[Float32], format: Format) -> Chunk:
    """FP32 elements rounded to nearest even, any NaN to the canonical one, and packed."""
    if format.name == "float32":
        return tuple(_ptx("mov.b32 {$w0}, {$r0};", Uint32, element) for element in elements)
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[format.name]
    return tuple(
        _ptx(f"cvt.rn.{kind}.f32 {{$w0}}, {{$r1}}, {{$r0}};", Uint32, low, high)
        for low, high in zip(elements[::2], elements[1::2], strict=True)
    )


def unpack(words: Chunk, format: Format) -> list[Uint32]:
    """The bits of each element of a chunk, in the order of memory."""
    if format.itemsize == 4:
        return list(words)
    return [half for word in words for half in (word & 0xFFFF, word >> 16)]


def pack(elements: list[Uint32], format: Format) -> Chunk:
    """The chunk of these elements' bits."""
    if format.itemsize == 4:
        return tuple(elements)
    return tuple(low | (high << 16) for low, high in zip(elements[::2], elements[1::2], strict=True))


def _ptx(instruction: str, result: type, *operands: Float32 | Uint32 | Uint16) -> Float32 | Uint32:
    return cute.arch.inline_ptx(instruction, write_only_types=[result], read_only_args=list(operands))
