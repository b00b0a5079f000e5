"""The PTX instructions of the protocol, named by effect, each with the ordering that its caller relies on.

An address is an ``Int64``; a ``Chunk`` is the four 32-bit words of 16 aligned bytes. A store happens ``where`` that
holds, at one instruction and no branch.

Data and flag are the same words (R1), so no store here is followed by a fence: a reader that sees a word
sees all there is to know. What orders one launch after another is the end of a launch, ``wait_for_stream``.
"""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64, Uint16, Uint32, cute

Chunk = tuple[Uint32, Uint32, Uint32, Uint32]

_WORDS = "{{$w0}, {$w1}, {$w2}, {$w3}}"
_FROM_WORDS = "{{$r1}, {$r2}, {$r3}, {$r4}}"
_MULTICAST_TYPES = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}
_ELEMENT_TYPES = {2: Uint16, 4: Uint32}


# ---- What the stream orders: operand and result ------------------------------------------------------------


def wait_for_stream() -> None:
    """Waits for the launches before this one. Before it, nothing that a launch writes may be read or written.

    Needs sm_90. In a launch without the programmatic attribute it returns at once.
    """
    cute.arch.griddepcontrol_wait()


def let_next_launch_start() -> None:
    """Lets the next launch become resident. Only after ``wait_for_stream``: before it, waiting grids of one
    rank fill the SMs of a shared GPU, and the peer that they wait for cannot start."""
    cute.arch.griddepcontrol_launch_dependents()


def load_chunk(address: Int64) -> Chunk:
    """Reads a chunk of an operand, all 16 bytes: after the wait for the launches before. Not by ``.nc``, which may be
    moved before it."""
    return _load(f"ld.global.v4.u32 {_WORDS}, [{{$r0}}];", address)


def load_chunk_if(inside: Boolean, address: Int64) -> Chunk:
    """``load_chunk`` where it is ``inside``, else +0.0."""
    return _load_if(f"ld.global.L1::no_allocate.v4.u32 {_WORDS}, [{{$r1}}];", inside, address, (Uint32(0),) * 4)


def store_chunk(address: Int64, words: Chunk, where: Boolean | None = None) -> None:
    """Writes a chunk of the result; visible to others at the end of the launch."""
    _store(f"st.global.L1::no_allocate.v4.u32 [{{$r0}}], {_FROM_WORDS};", address, words, where)


def load_element(address: Int64, itemsize: int) -> Uint32:
    """Reads one element of the operand, its bits in the low end of the word: after ``wait_for_stream``."""
    bits = cute.arch.inline_ptx(
        f"ld.global.u{8 * itemsize} {{$w0}}, [{{$r0}}];",
        write_only_types=[_ELEMENT_TYPES[itemsize]],
        read_only_args=[address],
    )
    return Uint32(bits)


def store_element(address: Int64, bits: Uint32, itemsize: int) -> None:
    """Writes one element of the result from the low end of ``bits``."""
    cute.arch.inline_ptx(
        f"st.global.u{8 * itemsize} [{{$r0}}], {{$r1}};",
        read_only_args=[address, _ELEMENT_TYPES[itemsize](bits)],
    )


# ---- What the sentinel orders: recv and gather -------------------------------------------------------------


def poll_chunk(address: Int64) -> Chunk:
    """Reads a chunk that a peer may be writing: each word is the sentinel or what was published."""
    return _load(f"ld.relaxed.sys.global.v4.u32 {_WORDS}, [{{$r0}}];", address)


def poll_chunk_if(missing: Boolean, address: Int64, words: Chunk) -> Chunk:
    """``poll_chunk`` where it is ``missing``, else ``words``."""
    return _load_if(f"ld.relaxed.sys.global.v4.u32 {_WORDS}, [{{$r1}}];", missing, address, words)


def publish_chunk(address: Int64, words: Chunk, where: Boolean | None = None) -> None:
    """Writes a chunk, here or at a peer, for a reader that polls it. The store may tear into words."""
    _store(f"st.relaxed.sys.global.v4.u32 [{{$r0}}], {_FROM_WORDS};", address, words, where)


def multicast_chunk(address: Int64, words: Chunk, format_name: str, where: Boolean | None = None) -> None:
    """``publish_chunk`` to every rank of a multicast address at once. Needs sm_90."""
    kind = _MULTICAST_TYPES[format_name]
    _store(f"multimem.st.relaxed.sys.global.v4.{kind} [{{$r0}}], {_FROM_WORDS};", address, words, where)


# ---- Words of the control block and the status record ------------------------------------------------------


def load_control(address: Int64) -> Chunk:
    """Reads the four control words from L2, past an L1 that may hold those of the launch before."""
    return _load(f"ld.relaxed.gpu.global.v4.u32 {_WORDS}, [{{$r0}}];", address)


def store_control(address: Int64, word: Uint32) -> None:
    """Writes a control word for the launches after this one."""
    _store_word("st.relaxed.gpu.global.u32", address, word)


def load_control_word(address: Int64) -> Uint32:
    """Reads a control word that other CTAs of this launch may change."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def count_to(address: Int64, last: Uint32) -> Uint32:
    """Counts one up, from ``last`` back to 0, and returns the count before. It orders nothing but itself."""
    return _atomic("atom.relaxed.gpu.global.inc.u32", address, last)


def set_bits(address: Int64, bits: Uint32) -> Uint32:
    """Sets bits of a control word and returns the word before: one caller alone sees them clear."""
    return _atomic("atom.relaxed.gpu.global.or.b32", address, bits)


def keep_bits(address: Int64, bits: Uint32) -> None:
    """Clears all other bits of a control word, without waiting for it."""
    _store_word("red.relaxed.gpu.global.and.b32", address, bits)


def store_status(address: Int64, word: Uint32) -> None:
    """Writes a word of the host's record, which says nothing before ``release_status``."""
    _store_word("st.relaxed.sys.global.u32", address, word)


def release_status(address: Int64, word: Uint32) -> None:
    """Writes a word after which the host sees all that this thread wrote before."""
    _store_word("st.release.sys.global.u32", address, word)


def now_ns() -> Int64:
    """Nanoseconds of the GPU's clock; it may advance in steps of a microsecond. Slow: not on a fast path."""
    return Int64(cute.arch.globaltimer())


def fresh(number: Int32 | Int64) -> Int32 | Int64:
    """The same number, of which the compiler knows nothing: what a rare branch makes of it is made there, not in front
    of the loop around it."""
    kind = type(number)
    return cute.arch.inline_ptx(
        f"mov.b{kind.width} {{$w0}}, {{$r0}};", write_only_types=[kind], read_only_args=[number]
    )


# ---- Operand plumbing --------------------------------------------------------------------------------------


def _load(ptx: str, address: Int64) -> Chunk:
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 4, read_only_args=[address])


def _load_if(ptx: str, wanted: Boolean, address: Int64, words: Chunk) -> Chunk:
    keep = " ".join(f"mov.b32 {{$w{i}}}, {{$r{i + 2}}};" for i in range(4))
    return cute.arch.inline_ptx(
        f"{{ .reg .pred wanted; setp.ne.u32 wanted, {{$r0}}, 0; {keep} @wanted {ptx} }}",
        write_only_types=[Uint32] * 4,
        read_only_args=[Uint32(wanted), address, *words],
    )


def _store(ptx: str, address: Int64, words: Chunk, where: Boolean | None = None) -> None:
    cute.arch.inline_ptx(ptx, read_only_args=[address, *words], predicate=where)


def _store_word(instruction: str, address: Int64, word: Uint32) -> None:
    cute.arch.inline_ptx(f"{instruction} [{{$r0}}], {{$r1}};", read_only_args=[address, word])


def _atomic(instruction: str, address: Int64, word: Uint32) -> Uint32:
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, [{{$r0}}], {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[address, word],
    )
