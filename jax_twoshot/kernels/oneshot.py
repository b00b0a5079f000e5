"""The one-shot protocol as device functions: push, reduce. ``protocol.py`` has the words.

One hop instead of two: every rank gets every chunk of every rank and sums it itself. A kernel calls them once
for every chunk of the message, all pushes before its first reduce, with all of its CTAs resident at once (R5).

The sum is `twoshot.sum_slots`, so that the choice of the algorithm cannot change a bit (R3). Every chunk makes
every rank wait for every rank (R4), so one-shot and two-shot calls may follow each other on one workspace.
"""

from __future__ import annotations

from cutlass import Int32, Int64, cute

from jax_twoshot.kernels import twoshot
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.kernels.twoshot import Buffers, Watch


def aim(buffers: Buffers, chunk: Int32) -> Int64:
    """Where in every rank's allocation ``chunk`` is pushed to, in generation 0."""
    return buffers.recv_offset(0, buffers.rank, Int64(chunk))


def push(buffers: Buffers, target: Int64, words: Chunk) -> None:
    """Stores ``words``, this rank's part of a chunk, into its slot at every rank (R1): ``aim``'s target."""
    place = target + buffers.recv_offset(buffers.generation, 0, 0)
    twoshot.publish_everywhere(buffers, place, twoshot.without_negative_zero(words, buffers.format))


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
