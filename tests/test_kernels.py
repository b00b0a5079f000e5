"""The CUDA kernels without a GPU: what every variant compiles to, for every target."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest

from jax_twoshot import cubin, protocol
from jax_twoshot.cubin import Variant

PARAMETERS = {
    "x": 8,
    "out": 8,
    "elements": 4,
    "slot_chunks": 4,
    "rank": 4,
    "base": 8,
    "multicast": 8,
    "control": 8,
    "status": 8,
    "timeout_ns": 8,
    "generations": 4,
    "overlap": 4,
}
"""Names and bytes: what ``ffi/all_reduce_cuda.cc`` packs, in front of every rank's address."""

FRAME_SIZE = 0x11
"""The cubin attribute that says how many bytes a thread spills."""

EVERYWHERE = [
    Variant(tp, name, multicast, arch, algorithm)
    for arch in cubin.ARCHS
    if arch != "sm_90a"
    for algorithm in protocol.ALGORITHMS
    for tp, name in ((2, "bfloat16"), (16, "float32"))
    for multicast in (False, True)
    if not multicast or cubin.capability(arch) >= (9, 0)
]
# FP16 differs from BF16 in two conversions.
HOPPER = [v for v in cubin.variants(["sm_90a"]) if v.format != "float16" or v.tp in (2, 16)]
VARIANTS = [*HOPPER, *EVERYWHERE]

each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


def one_shot(variant: Variant) -> bool:
    return variant.algorithm == "one_shot"


@dataclass(frozen=True)
class Code:
    """How many chunks the code names, where a thread has one chunk and where it has several.

    Attributes:
      pushed, summed, collected: chunks; the two-shot sums are collected.
      places: chunks that are polled: TP slots for each sum, and each collected sum.
      loads: times that the operand is read: before the first push, before the next, and of what a rank keeps.
      loaded: chunks of these.
      stores: times that results are written: sums that are not collected, and collected ones.
    """

    pushed: int
    summed: int
    collected: int
    places: int
    loads: int
    loaded: int
    stores: int

    @classmethod
    def of(cls, variant: Variant) -> Code:
        pushed = protocol.CHUNKS_AT_ONCE
        summed = max(1, min(protocol.CHUNKS_AT_ONCE, 8 // variant.tp))
        collected = 0 if one_shot(variant) else 1 + protocol.CHUNKS_AT_ONCE
        keeps_own = not (one_shot(variant) and variant.multicast)
        handed_on = one_shot(variant) or not variant.multicast
        return cls(
            1 + pushed,
            1 + summed,
            collected,
            variant.tp * (1 + summed) + collected,
            3 + keeps_own,
            1 + 2 * pushed + summed * keeps_own,
            2 * (handed_on + (not one_shot(variant))),
        )


@functools.cache
def compiled(variant: Variant):
    """The compiler's output. Without a compiler these tests fail: the extra "test" installs it."""
    return variant.compile()


def count(variant: Variant, instruction: str) -> int:
    return len(re.findall(rf"(?:^\s*|@%p\d+ |@wanted ){instruction}", compiled(variant).ptx, re.MULTILINE))


@each_variant
def test_is_a_cubin_for_its_target(variant):
    image, ptx, symbol = compiled(variant)
    assert image[:4] == b"\x7fELF"
    assert symbol.encode() in image
    assert f".target {variant.arch}" in ptx
    assert f".entry {symbol}(" in ptx


@each_variant
def test_registers_let_the_planned_blocks_be_resident(variant):
    image = compiled(variant).cubin
    assert 0 < cubin._attribute(image, cubin._REGCOUNT) <= 65536 // (protocol.THREADS * protocol.CTAS_PER_SM)
    assert cubin._attribute(image, FRAME_SIZE) <= (8 if variant.tp <= 8 else 96)
    assert f".reqntid {protocol.THREADS}, 1, 1" in compiled(variant).ptx


@each_variant
def test_parameters(variant):
    bits = re.findall(r"\.param \.[ub](\d+) ", compiled(variant).ptx)
    assert [int(b) // 8 for b in bits] == [*PARAMETERS.values(), *[8] * variant.tp]


@each_variant
def test_what_all_ranks_get_is_stored_once_through_multicast_or_once_to_each_peer(variant):
    """The sums of two shots, what one shot pushes."""
    code = Code.of(variant)
    kind = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}[variant.format]
    for_all, to_the_owner = (code.pushed, 0) if one_shot(variant) else (code.summed, code.pushed)
    multicast = count(variant, rf"multimem\.st\.relaxed\.sys\.global\.v4\.{kind} ")
    assert multicast == compiled(variant).ptx.count("multimem") == (for_all if variant.multicast else 0)
    to_peers = 0 if variant.multicast else for_all * variant.tp
    assert count(variant, r"st\.relaxed\.sys\.global\.v4\.u32 ") == to_peers + to_the_owner + code.places


@each_variant
def test_polls_are_whole_chunks(variant):
    first_look, loop, code = 1, 1, Code.of(variant)
    assert count(variant, r"ld\.relaxed\.sys\.global\.v4\.u32 ") == (first_look + loop) * code.places
    assert count(variant, r"ld\.relaxed\.sys") == (first_look + loop) * code.places
    assert count(variant, r"ld\.global\.L1::no_allocate\.v4\.u32 ") == code.loaded
    handed_on = code.summed if one_shot(variant) or not variant.multicast else 0
    assert count(variant, r"st\.global\.L1::no_allocate\.v4\.u32 ") == handed_on + code.collected


@each_variant
def test_a_sum_that_never_came_is_nan(variant):
    """Not the sentinel that was polled last: a wrong number (R9)."""
    fmt, code = protocol.FORMATS[variant.format], Code.of(variant)
    word = fmt.nan | fmt.nan << 16 if fmt.itemsize == 2 else fmt.nan
    handed_on = code.summed if one_shot(variant) or not variant.multicast else 0
    nan = count(variant, rf"selp\.b32\s+%r\d+, %r\d+, {word}, %p\d+;")
    assert nan == protocol.CHUNK_BYTES // 4 * (handed_on + code.collected)


@each_variant
def test_elements_of_the_last_chunk_are_masked_one_by_one(variant):
    chunk, code = protocol.FORMATS[variant.format], Code.of(variant)
    assert count(variant, rf"ld\.global\.u{8 * chunk.itemsize} ") == code.loads * (chunk.chunk - 1)
    assert count(variant, rf"st\.global\.u{8 * chunk.itemsize} ") == code.stores * (chunk.chunk - 1)


@each_variant
def test_arithmetic_is_fp32_in_rank_order_and_never_flushes_to_zero(variant):
    per_chunk = protocol.FORMATS[variant.format].chunk
    assert ".ftz" not in compiled(variant).ptx
    summed = Code.of(variant).summed
    assert count(variant, r"add(\.rn)?\.f32 ") == summed * (variant.tp - 1) * per_chunk
    assert count(variant, r"(fma|mul|mad|sub)[.a-z]*\.f") == 0
    packed = {"bfloat16": "bf16x2", "float16": "f16x2"}.get(variant.format)
    assert count(variant, r"cvt\.rn\.") == (4 * summed if packed else 0)
    if packed:
        assert count(variant, rf"cvt\.rn\.{packed}\.f32 ") == 4 * summed


@each_variant
def test_sentinel(variant):
    signed = protocol.FORMATS[variant.format].sentinel - (1 << 32)
    places = Code.of(variant).places
    compared = count(variant, rf"setp\.(ne|eq)\.b32\s+%p\d+, %r\d+, {signed};")
    assert compared >= 2 * 4 * places  # All four words, at the first look and in the loop.
    rearmed = rf"st\.relaxed\.sys\.global\.v4\.u32 \[%rd\d+\], {{{signed}, {signed}, {signed}, {signed}}};"
    assert count(variant, rearmed) == places


@each_variant
def test_next_launch_may_start_only_after_the_wait_for_the_last(variant):
    ptx = compiled(variant).ptx
    wait, trigger = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    if variant.pdl:
        first_access = re.search(r"^\s*(ld|st|atom|red|multimem)\.(?!param)", ptx, re.MULTILINE)
        assert 0 < wait < trigger < first_access.start()
    else:
        assert "griddepcontrol" not in ptx


@each_variant
def test_only_these_loads(variant):
    """The operand, the control block, what is polled and, in the slow path, the state: no table, no spilled word."""
    code = Code.of(variant)
    elements = code.loads * (protocol.FORMATS[variant.format].chunk - 1)
    control, sums = 2, 2 * -(-variant.tp // 8)
    states = sums + (0 if one_shot(variant) else 2)
    assert count(variant, r"ld\.(?!param)") == code.loaded + elements + control + 2 * code.places + states


def test_programmatic_launch_is_for_hopper_and_later():
    assert [arch for arch in cubin.ARCHS if not Variant(2, "bfloat16", False, arch).pdl] == ["sm_80", "sm_89"]


def test_docstrings_state_the_parameters():
    from jax_twoshot.kernels import all_reduce, launch

    own = re.findall(r"^    (\w+) +int(32|64) ", all_reduce.__doc__, re.MULTILINE)
    trailing = re.findall(r"^  (\w+): Int(32|64)\b", inspect.getdoc(launch.Arguments), re.MULTILINE)
    stated = {name: int(bits) // 8 for name, bits in [*own, *trailing]}
    assert list(stated.items()) == list((PARAMETERS | {"peers": 8}).items())


def test_compiling_twice_gives_the_same_bytes():
    variant = VARIANTS[0]
    first = compiled(variant)
    compiled.cache_clear()
    assert compiled(variant) == first


def test_other_programmatic_choices_are_kernels_too():
    """Hopper without programmatic launch: for a profile, or to look for a race."""
    variant = dataclasses.replace(VARIANTS[0], arch="sm_90a")
    with mock.patch.object(type(variant), "pdl", False):
        assert "griddepcontrol" not in variant.compile().ptx


def test_only_the_kernels_import_the_compiler():
    script = "import sys, jax_twoshot.cubin; sys.exit('cutlass' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
