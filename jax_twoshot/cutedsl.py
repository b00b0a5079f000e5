"""The all-reduce inside a CuTe DSL kernel of one's own: device functions for kernels that ``cute_call`` runs.

``docs/kernel_authors.md`` explains them in order, ``examples/cute_kernel.py`` is a kernel to start from. Importing this
imports the compiler; a program that only calls kernels need not (:class:`jax_twoshot.CuteKernel`).

==============================  ======================================================================================
``Arguments``                   the kernel's last parameter: what the workspace gives to each launch, and what is known
                                of it at compile time (``tp``, ``parts``, ``format``, ``deferred``)
``Call``                        one call as a thread sees it (``chunks``, ``mine``, ``alive``)
``wait_for_predecessor``        nothing may touch memory before it
``begin``                       which generation (run-time, or a given one), whose chunks, immediate or deferred re-arm
``push``                        this rank's part of a chunk to its owner
``rearm_previous``              deferred re-arm: what the call before has read, whatever its size
``settle``                      after the last push
``reduce``                      the sum of an own chunk to every rank
``arrive``                      after ``settle``; counts this CTA
``collect``                     the sum of a chunk
``advance``                     last; the last CTA advances the epoch
``collect_slot``, ``rearm``     one rank's part instead of the sum; a chunk that was read by its address
``slot_address``,               addresses of the call's generation: to read again what was reduced or collected, where
``gather_address``              re-arming is deferred
``published``                   whether a polled chunk has arrived
``Chunk``                       16 bytes, as a tuple of four ``Uint32`` words
``pack``, ``unpack``            FP32 values to a chunk that may be published, and back
``load``, ``store``, ``poll``   a chunk of an operand, of a result, of the workspace's buffers, by its address
``compile_kernel``              what ``cute_call`` compiles, without a GPU
==============================  ======================================================================================
"""

from jax_twoshot._cute_call import compile_kernel
from jax_twoshot.kernels.launch import (
    Arguments,
    Call,
    advance,
    arrive,
    begin,
    collect,
    collect_slot,
    gather_address,
    pack,
    published,
    push,
    rearm,
    rearm_previous,
    reduce,
    settle,
    slot_address,
    unpack,
    wait_for_predecessor,
)
from jax_twoshot.kernels.memory import Chunk
from jax_twoshot.kernels.memory import load_chunk as load
from jax_twoshot.kernels.memory import poll_chunk as poll
from jax_twoshot.kernels.memory import store_chunk as store

__all__ = [
    "Arguments",
    "Call",
    "Chunk",
    "advance",
    "arrive",
    "begin",
    "collect",
    "collect_slot",
    "compile_kernel",
    "gather_address",
    "load",
    "pack",
    "poll",
    "published",
    "push",
    "rearm",
    "rearm_previous",
    "reduce",
    "settle",
    "slot_address",
    "store",
    "unpack",
    "wait_for_predecessor",
]
