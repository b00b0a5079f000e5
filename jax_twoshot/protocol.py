"""The Lamport all-reduce, two-shot and one-shot, as data: sentinel, chunks, layout, offsets, rounds, launch plan.

Read this file first. It holds every number on which two ranks have to agree, uses the standard library only,
and has one mirror, ``ffi/protocol.h``; importing the extension checks that the two say the same.

The words (``docs/design.md`` section 2)::

    rank        one of the TP members of a group
    chunk       16 neighbouring bytes: 8 BF16 or FP16 values, 4 FP32 values
    message     what one call sums: any array, read as one row of chunks (a sum is elementwise, so where
                the array's own rows break cannot matter; the last chunk may be partial)
    owner       the rank that sums a chunk: with `owned = ceil(chunks / TP)`, rank o owns chunks
                [o * owned, (o + 1) * owned)
    slot        the place in an owner's recv for what one rank pushed
    generation  one of P copies of the buffers, used in turn
    round       one turn of the protocol; a message larger than the buffers takes several

The buffers of a rank lie in one allocation, `recv` before `gather`, every word armed with the sentinel::

    recv    [P, TP, slot_chunks]   slot s: what rank s pushed of the chunks that this rank sums
    gather  [P, TP * slot_chunks]  the finished sums, in the order of the message

One two-shot round (R1-R9 are the rules of ``docs/design.md``)::

    push     store each chunk into slot `rank` of its owner's recv                            R1
    reduce   the owner polls the TP slots of a chunk, adds them in FP32 in rank order,
             rounds once, writes the sum into every rank's gather, re-arms the slots          R1 R2 R3
    collect  every rank polls its own gather, hands the value on, re-arms it                  R2 R4

One one-shot round: every rank sums every chunk, so nothing is gathered, and chunk i lies at i in each slot::

    push     store each chunk into slot `rank` of every rank's recv                           R1
    reduce   every rank polls the TP slots of every chunk, adds and rounds as above, hands
             the value on, re-arms the slots                                                  R1 R2 R3 R4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

CHUNK_BYTES = 16
WORD_BYTES = 4
"""A 16-byte store may tear into words of this size, never further (R1)."""

MIN_RANKS = 2
MAX_RANKS = 64
"""Most ranks of one group: the wait reports which ranks are missing as bits of one 64-bit word."""

GENERATIONS = 2
"""Copies of the buffers when a call re-arms what it read (`tests/test_model.py` shows why not 1)."""
GENERATIONS_DEFERRED = 3
"""Copies of the buffers when the next call re-arms it."""

CPU_CAPACITY_BYTES = 1 << 17
"""Most bytes of a message that a round carries on CPU: larger buffers do not stay in a cache, and are no faster."""
MAX_ROUND_ELEMENTS = (1 << 31) - 8
"""Most elements that a round carries on CUDA: the kernel counts them in 32 bits."""


def ceil_div(a: int, b: int) -> int:
    """The least integer not below ``a / b``, for positive ``b``."""
    return (a + b - 1) // b


@dataclass(frozen=True)
class Format:
    """How the protocol treats one element type.

    Attributes:
      name: the NumPy/ml_dtypes name of the type.
      itemsize: bytes of one element.
      sentinel: the 32-bit word that means "not yet written" (R1): -0.0 in every element of the word.
      negative_zero: the bits of -0.0, which are rewritten to +0.0 before anything is published (R1).
      nan: the bits of the one NaN that a sum may hold (R3): NVIDIA hardware's canonical NaN, so that CPU and
        GPU publish the same bits whatever NaN went in.
    """

    name: str
    itemsize: int
    sentinel: int
    negative_zero: int
    nan: int

    @property
    def chunk(self) -> int:
        """Elements of one chunk."""
        return CHUNK_BYTES // self.itemsize

    def chunks(self, elements: int) -> int:
        """Chunks that hold ``elements`` elements, the last one perhaps partial."""
        return ceil_div(elements, self.chunk)


FORMATS = {
    f.name: f
    for f in (
        Format("bfloat16", 2, 0x8000_8000, 0x8000, 0x7FFF),
        Format("float16", 2, 0x8000_8000, 0x8000, 0x7FFF),
        Format("float32", 4, 0x8000_0000, 0x8000_0000, 0x7FFF_FFFF),
    )
}


class Round(NamedTuple):
    """Chunks ``[start, start + chunks)`` of a message, summed in one turn of the protocol by one of `ALGORITHMS`."""

    start: int
    chunks: int
    algorithm: str


@dataclass(frozen=True)
class Layout:
    """Where everything is in a rank's buffers. All sizes and offsets are in bytes unless they say chunks.

    Attributes:
      tp: ranks in the group.
      slot_chunks: capacity of one slot, in chunks.
      generations: P.
    """

    tp: int
    slot_chunks: int
    generations: int = GENERATIONS

    def __post_init__(self) -> None:
        if not MIN_RANKS <= self.tp <= MAX_RANKS:
            raise ValueError(f"tp: a group has {MIN_RANKS} to {MAX_RANKS} ranks, got {self.tp}")
        if self.slot_chunks < 1:
            raise ValueError(f"slot_chunks: a slot holds at least one chunk, got {self.slot_chunks}")
        if self.generations < GENERATIONS:
            raise ValueError(
                f"generations: re-arming is safe with {GENERATIONS} (immediate) or {GENERATIONS_DEFERRED} "
                f"(deferred), got {self.generations}"
            )

    @classmethod
    def for_capacity(
        cls, tp: int, capacity_bytes: int, generations: int = GENERATIONS, *, one_shot_bytes: int = 0
    ) -> Layout:
        """The least layout that sums ``capacity_bytes`` of message in one round.

        Args:
          tp: ranks in the group.
          capacity_bytes: of the largest two-shot round.
          generations: P.
          one_shot_bytes: what a slot can hold at least, but no more than the capacity. Beyond the two-shot share
            ``capacity_bytes / tp`` each byte of it costs ``2 P TP`` bytes a rank. With `most_one_shot_bytes` and a
            capacity of 64 x 7168 BF16 a rank has 7.3 MB instead of 3.7 at TP 2 and 4, 5.5 at TP 3, 3.7 from TP 5 on.
        """
        slot_bytes = max(ceil_div(capacity_bytes, tp), min(one_shot_bytes, capacity_bytes))
        return cls(tp, ceil_div(slot_bytes, CHUNK_BYTES), generations)

    @property
    def slot_bytes(self) -> int:
        return self.slot_chunks * CHUNK_BYTES

    @property
    def capacity_chunks(self) -> int:
        """Chunks of the largest two-shot round; a one-shot round has at most ``slot_chunks``."""
        return self.tp * self.slot_chunks

    @property
    def recv_bytes(self) -> int:
        return self.generations * self.tp * self.slot_bytes

    @property
    def gather_bytes(self) -> int:
        return self.generations * self.tp * self.slot_bytes

    @property
    def bytes(self) -> int:
        """Size of a rank's allocation."""
        return self.recv_bytes + self.gather_bytes

    def recv_offset(self, generation: int, slot: int, chunk: int) -> int:
        """Of ``chunk`` (counted from the first one that the receiver sums) in ``slot``."""
        return ((generation * self.tp + slot) * self.slot_chunks + chunk) * CHUNK_BYTES

    def gather_offset(self, generation: int, chunk: int) -> int:
        """Of the sum of ``chunk`` of the round, whoever owns it."""
        return self.recv_bytes + (generation * self.capacity_chunks + chunk) * CHUNK_BYTES


def owned_chunks(chunks: int, tp: int) -> int:
    """Chunks that each rank owns of a round of ``chunks``; the last owners may have fewer, or none."""
    return ceil_div(chunks, tp)


def owner_of(chunk: int, chunks: int, tp: int) -> tuple[int, int]:
    """``(owner, index)``: who sums ``chunk`` of a round of ``chunks``, and which of its own it is."""
    return divmod(chunk, owned_chunks(chunks, tp))


# ---- One shot or two ---------------------------------------------------------------------------------------

ALGORITHMS = ("two_shot", "one_shot")

Table = tuple[tuple[int, int], ...]
"""Pairs (ranks, bytes), fewer ranks first."""

ONE_SHOT_SHARED_GPU: Table = ((2, 64 * 14336), (4, 32 * 14336), (8, 2 * 14336))
"""(ranks, bytes): up to so many ranks, of which several share a GPU, one-shot sums messages of up to so many bytes.

Measured on one H200, rows of 7168 BF16, the most 64, slots that hold whole messages: one-shot was ahead up to 32 rows
at TP 2, and at 64 the two were equal (3.5 us); up to 32 at TP 4 (5.80 us against 6.61; at 64 rows 9.18 against 8.44),
up to 2 at TP 8 (3.09 us against 3.51; at 4 rows 4.11 against 3.96)."""
ONE_SHOT_NVLINK: Table = ((2, 1 << 20), (4, 1 << 17), (8, 1 << 15))
"""The same for ranks on GPUs of their own. TP 2 is measured (two H200 over NVLink, up to 64 rows of 7168 BF16: two
shots took 1.13 to 1.51 times as long). The others are reasoned, not tuned: one-shot moves ``(TP - 1) (1 - 2 / TP)``
times the message more through each GPU's link and saves one hop. With 1 us a hop and 400 GB/s the break-even is at
270 KB for TP 4 and 76 KB for TP 8, of which half is taken; at TP 2 one-shot moves no more."""
ONE_SHOT_MULTICAST: Table = ((2, 1 << 20), (4, 1 << 18), (8, 1 << 16))
"""The same where a push is one multicast store: the link's receiving side is as busy, the sending side is not."""


BUILT_IN: dict[str, Table] = {
    "ONE_SHOT_SHARED_GPU": ONE_SHOT_SHARED_GPU,
    "ONE_SHOT_NVLINK": ONE_SHOT_NVLINK,
    "ONE_SHOT_MULTICAST": ONE_SHOT_MULTICAST,
}
"""The tables by their names, as ``bench --tune`` writes them and ``JAX_TWOSHOT_TUNING`` replaces them."""


def table_name(ranks_on_device: int, multicast: bool) -> str:
    """Which of the tables holds for such ranks."""
    if ranks_on_device > 1:
        return "ONE_SHOT_SHARED_GPU"
    return "ONE_SHOT_MULTICAST" if multicast else "ONE_SHOT_NVLINK"


def one_shot_bytes(tp: int, ranks_on_device: int, multicast: bool, tables: Mapping[str, Table] = BUILT_IN) -> int:
    """Bytes of the largest message that one-shot is expected to sum sooner than two-shot, 0 for none."""
    return next((most for ranks, most in tables[table_name(ranks_on_device, multicast)] if tp <= ranks), 0)


def most_one_shot_bytes(tp: int, tables: Mapping[str, Table] = BUILT_IN) -> int:
    """`one_shot_bytes` wherever the ranks are: what the slots of a workspace are made for."""
    return max(one_shot_bytes(tp, *where, tables) for where in ((2, False), (1, False), (1, True)))


def algorithm(chunks: int, one_shot_bytes: int) -> str:
    """Which of `ALGORITHMS` sums ``chunks`` chunks sooner: a pure function of arguments that all ranks share."""
    return "one_shot" if chunks * CHUNK_BYTES <= one_shot_bytes else "two_shot"


def rounds(layout: Layout, chunks: int, asked: str = "auto", one_shot_bytes: int = 0) -> Iterator[Round]:
    """The rounds of a message of ``chunks`` chunks, in order; none for an empty message (R4).

    Args:
      layout: of each rank's buffers.
      chunks: of the message.
      asked: one of `ALGORITHMS` for all rounds, or "auto": what `algorithm` says, where it fits a slot.
      one_shot_bytes: of the largest message that one-shot sums sooner, such as `one_shot_bytes` says.
    """
    start = 0
    while start < chunks:
        left, chosen = chunks - start, asked
        if asked == "auto":
            chosen = algorithm(left, one_shot_bytes) if left <= layout.slot_chunks else "two_shot"
        size = min(left, layout.slot_chunks if chosen == "one_shot" else layout.capacity_chunks)
        yield Round(start, size, chosen)
        start += size


# ---- RMSNorm of a row --------------------------------------------------------------------------------------

NORM_THREADS = 512
"""Most chunks of a row that are squared side by side: threads of a CTA that norms rows, one chunk each."""
NORM_MAX_BLOCKS = 4
"""Most chunks of a row that one thread keeps, so a row has at most 2048 chunks: 16384 BF16 values."""


def norm_blocks(row_chunks: int) -> tuple[int, int]:
    """``(blocks, chunks of a block)`` into which a row is cut for its sum of squares.

    The order of that sum, a function of the row's width alone: the blocks are added to each other in order, element
    by element, the last one as if filled up with zeros; then what stands in one block is added in pairs of neighbours
    until one number is left, again as if filled up with zeros to a power of two.
    """
    blocks = ceil_div(row_chunks, NORM_THREADS)
    return blocks, ceil_div(row_chunks, blocks)


# ---- Matrix product -----------------------------------------------------------------------------------------

MATMUL_THREADS = 256
"""Threads of a CTA that multiplies: its eight warps share K."""
MATMUL_COLUMNS = 64
"""Columns of a tile: a chunk for each four lanes of a warp, in two of its registers' fours."""
MATMUL_DEPTH = 32
"""Rows of ``w`` that a warp multiplies at a time."""
MATMUL_ROW_TILES = (1, 2, 4)
"""Rows of ``a``, in sixteens, for which there are kernels: the sums of all rows of a tile stay in registers."""
MATMUL_MAX_ROWS = 16 * MATMUL_ROW_TILES[-1]
MATMUL_FORMATS = ("bfloat16", "float16")
"""What tensor cores multiply with exact products and FP32 sums."""


# ---- Launch plan (CUDA) ------------------------------------------------------------------------------------

THREADS = 128
"""Threads of a CTA: 256 measured the same, and small CTAs spread a small message over more SMs."""
CTAS_PER_SM = 6
"""CTAs that may be resident on one SM: the kernels are compiled to at most 65536 / (128 * 6) = 85 registers."""
GRIDS_IN_FLIGHT = 2
"""Where a launch overlaps the next one of its rank: that one is resident before the last one has left. It begins only
when all CTAs of the last one have, so it is in the way of other ranks on the GPU alone."""
OWN_GPU_SHARE = (2, 3)
"""Part of its GPU that a rank which has it to itself may fill with CTAs that wait: what else runs there, and may itself
wait for a peer, needs a place too. A thread for each chunk of 64 rows of 7168 BF16 takes 448 of an H200's 792 CTAs."""
CHUNKS_AT_ONCE = 2
"""Chunks that a thread which has several takes in one go."""


def most_ctas(ranks_on_device: int, sm_count: int, ctas_per_sm: int, alone: bool = False) -> int:
    """Most CTAs of one launch (R5): a pure function of its arguments, equal on every rank, and so few that all grids in
    flight of all ranks that share the GPU are resident at once.

    Ranks that share a GPU leave one SM free (a CTA goes to the emptiest SM): a rank that comes late may have a kernel
    of any size to run before its call, and finds no place beside CTAs that wait for it. Seen as hangs of 4 and of 8
    ranks, one for want of registers, one for want of shared memory. Nor may their launches overlap the next one: XLA
    launches its own kernels programmatically too (since JAX 0.11), and their CTAs, resident while they wait for ours,
    are more than anything here could count. Seen as hangs of 4 ranks from 16 rows on and of 8 from 8 rows on, which
    ``XLA_FLAGS=--xla_gpu_enable_pdl=false`` ended, and so did this.

    Args:
      ranks_on_device: ranks that share one GPU (1 unless several processes use one GPU).
      sm_count: multiprocessors of the GPU; on unequal GPUs, the least of the mesh.
      ctas_per_sm: CTAs of the kernel that fit one SM.
      alone: the ranks run nothing but such launches, as a benchmark may: they overlap, and no SM is left free.

    Raises:
      ValueError: not even one CTA a rank is sure to be resident.
    """
    resident = sm_count * ctas_per_sm
    if ranks_on_device == 1:
        most = resident * OWN_GPU_SHARE[0] // OWN_GPU_SHARE[1]
    else:
        most = resident // (GRIDS_IN_FLIGHT * ranks_on_device) if alone else (sm_count - 1) // ranks_on_device
    if most < 1:
        raise ValueError(
            f"ranks_on_device: {ranks_on_device} ranks cannot wait for each other on one GPU of {sm_count} SMs; "
            f"at most {sm_count - 1} can"
        )
    return most


def grid(chunks: int, ranks_on_device: int, sm_count: int, alone: bool = False) -> int:
    """CTAs of one launch of the all-reduce: a thread for each of the round's ``chunks``, as far as `most_ctas` allows,
    whose other arguments and errors these are; beyond that, as many batches for every thread: one that has none left
    polls, and takes L2 from the others."""
    most = most_ctas(ranks_on_device, sm_count, CTAS_PER_SM, alone)
    each = max(1, ceil_div(chunks, most * THREADS))
    if each > 1:
        each = ceil_div(each, CHUNKS_AT_ONCE) * CHUNKS_AT_ONCE
    return max(1, ceil_div(chunks, each * THREADS))
