"""The one-shot protocol as device functions: push, reduce. ``protocol.py`` has the words.

One hop instead of two: every rank gets every chunk of every rank and sums it itself. A kernel calls them once
for every chunk of the message, all pushes before its first reduce, with all of its CTAs resident at once (R5).

The sum is `twoshot.sum_slots`, so that the choice of the algorithm cannot change a bit (R3). Every chunk makes
every rank wait for every rank (R4), so one-shot and two-shot calls may follow each other on one workspace.
"""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64, cute

from jax_twoshot.kernels import twoshot
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.kernels.twoshot import Buffers, Watch


def aim(buffers: Buffers, chunk: Int32) -> Int64:
    """Where in every rank's allocation ``chunk`` is pushed to, in generation 0."""
    return buffers.recv_offset(0, buffers.rank, Int64(chunk))


def push(buffers: Buffers, target: Int64, words: Chunk, where: Boolean | None = None) -> None:
    """Stores ``words``, this rank's part of a chunk, into its slot at every rank (R1): ``aim``'s target."""
    place = target + buffers.recv_offset(buffers.generation, 0, 0)
    twoshot.publish_everywhere(buffers, place, twoshot.without_negative_zero(words, buffers.format), where)


@cute.jit
def reduce(buffers: Buffers, chunk: Int32, watch: Watch) -> Chunk:
    """Sums the slots of ``chunk`` (R3), returns the sum and re-arms them (R2); NaN if they did not come (R9)."""
    slots = twoshot.slots_of(buffers, Int64(chunk))
    words, complete = twoshot.sum_slots(buffers, slots, Int64(chunk), watch)
    if complete:
        for slot in slots:
            twoshot.rearm(slot, buffers.format)
    else:
        words = twoshot.not_a_number(buffers.format)
    return words


@cute.jit
def reduce_many(
    buffers: Buffers, chunks: list[Int32], wanted: list[Boolean], own: list[Chunk], watch: Watch
) -> list[Chunk]:
    """``reduce`` of the ``wanted`` ones of ``chunks``, NaN for any other; ``own`` as `twoshot.reduce_many` has it."""
    sums, complete = twoshot.sum_many(buffers, chunks, wanted, own, watch, Int64(0))
    twoshot.rearm_slots(buffers, chunks, complete)
    nan = twoshot.not_a_number(buffers.format)
    return [twoshot.select_chunk(there, words, nan) for there, words in zip(complete, sums, strict=True)]
