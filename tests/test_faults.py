"""Faults on purpose, in the C++ core of the CPU backend: no hang, no wrong number, and the text names who did it.

``python tests/test_faults.py`` prints the table of ``docs/faults.md``: what each rank sees, and when.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from helpers import DTYPES, assert_bitwise, assert_every_rank_has_the_sum, bits, cpu_mesh, integers, on_ranks
from jax.errors import JaxRuntimeError

import jax_twoshot
from jax_twoshot import _ffi, reference

TP = 4
FAULTY = 2
"""The rank that misbehaves."""
DEADLINE = 2.0
"""Seconds. A collect is an eighth of it more patient than a reduce: more than a busy machine mixes up."""
SHAPE = (16, 1000)
"""Each rank's part, in BF16: two thousand chunks, so every rank owns some, in several blocks."""


@contextmanager
def planted(kind: str, phase: str = "push", **options: Any) -> Iterator[None]:
    """``FAULTY`` misbehaves in every call of the body."""
    _ffi._extension.plant_fault(kind, FAULTY, phase, **options)
    try:
        yield
    finally:
        _ffi._extension.plant_fault("none")


@pytest.fixture(scope="module")
def call() -> Iterator[Any]:
    """One ``all_reduce`` with a short deadline: the parts of ``TP`` ranks to what each of them gets."""
    with short_call() as program:
        yield program


@contextmanager
def short_call() -> Iterator[Any]:
    mesh = cpu_mesh(TP)
    with jax_twoshot.Workspace(mesh, "tp", rows=SHAPE[0], width=SHAPE[1], timeout=DEADLINE) as workspace:
        program = on_ranks(lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace), mesh)
        jax.block_until_ready(program(parts()))
        yield program


def parts(seed: int = 0) -> np.ndarray:
    return integers((TP, *SHAPE), DTYPES["bfloat16"], seed)


def outcomes(result: jax.Array) -> list[np.ndarray | str]:
    """What each rank got: its sum, or the text of its error."""

    def of(shard: Any) -> np.ndarray | str:
        try:
            return np.asarray(shard.data)[0]
        except JaxRuntimeError as error:
            return str(error)

    return [of(shard) for shard in result.addressable_shards]


def blamed(text: str) -> list[tuple[int, str, str]]:
    """(who waits, for whom, in which phase), as a text says."""
    found = re.findall(r"rank (\d+) of \d+ waits for ranks? ([\d, ]+) \(for [\d.]+ s; phase (\w+)", text)
    return [(int(rank), missing, phase) for rank, missing, phase in found]


def check_the_next_call(call: Any) -> None:
    """What failed has left nothing behind."""
    for seed in range(3):
        assert_every_rank_has_the_sum(call(parts(seed)), parts(seed))


@pytest.mark.parametrize("phase", ["push", "reduce", "collect"])
def test_a_delay_within_the_deadline_changes_nothing(call: Any, phase: str) -> None:
    with planted("delay", phase, seconds=DEADLINE / 5):
        assert_every_rank_has_the_sum(call(parts()), parts())


@pytest.mark.parametrize(
    ("kind", "phase", "waits_in"),
    [
        ("delay", "push", "reduce"),
        ("delay", "reduce", "collect"),
        ("drop", "push", "reduce"),
        ("tear", "push", "reduce"),
        ("stop", "push", "reduce"),
        ("stop", "reduce", "collect"),
    ],
)
def test_a_rank_that_is_missing_is_named_and_nobody_has_a_number(
    call: Any, kind: str, phase: str, waits_in: str
) -> None:
    meetings = _ffi._extension.cpu_meetings()
    with planted(kind, phase, seconds=1.5 * DEADLINE, owner=1):
        found = outcomes(call(parts()))
    assert _ffi._extension.cpu_meetings() == meetings  # also where a rank came after the others had given up
    texts = [text for text in found if isinstance(text, str)]
    assert len(texts) == TP or (kind, phase) == ("delay", "reduce"), found
    ((rank, missing, seen),) = {cause for text in texts for cause in blamed(text)}  # all give the first cause
    assert (missing, seen) == (str(FAULTY), waits_in), texts
    assert rank == 1 or kind not in ("drop", "tear")
    for got in found:
        if not isinstance(got, str):  # came late itself, and found all that it needs
            assert_bitwise(got, reference.all_reduce(parts()))
    check_the_next_call(call)


def test_a_rank_that_stops_when_all_have_its_sums_harms_only_itself(call: Any) -> None:
    with planted("stop", "collect"):
        found = outcomes(call(parts()))
    want = reference.all_reduce(parts())
    for rank, got in enumerate(found):
        if rank != FAULTY:
            assert_bitwise(got, want, rank)
    assert isinstance(found[FAULTY], str)
    check_the_next_call(call)


def test_a_flipped_bit_is_not_noticed_but_all_ranks_still_agree(call: Any) -> None:
    """The protocol carries data and nothing else: a link has its own CRC, and memory its ECC."""
    with planted("flip", owner=0):
        found = np.stack(outcomes(call(parts())))
    want = reference.all_reduce(parts())
    wrong = np.flatnonzero(bits(found[0]) != bits(want))
    assert len(wrong) > 0 and wrong.max() < want.size / TP  # in what rank 0 owns
    for got in found:
        assert_bitwise(got, found[0])
    check_the_next_call(call)


def table() -> None:
    with short_call() as call:
        print_outcomes(call)


def print_outcomes(call: Any) -> None:
    print(f"{TP} ranks, deadline {DEADLINE} s; rank {FAULTY} misbehaves")
    for kind, phase in (
        *(("delay", phase) for phase in ("push", "reduce", "collect")),
        *((kind, "push") for kind in ("drop", "tear", "flip")),
        *(("stop", phase) for phase in ("push", "reduce", "collect")),
    ):
        with planted(kind, phase, seconds=3 * DEADLINE, owner=1):
            start = time.monotonic()
            found = outcomes(call(parts()))
            seconds = time.monotonic() - start
        want = reference.all_reduce(parts())
        seen = [
            str(blamed(got)) if isinstance(got, str) else "right" if (got == want).all() else "wrong" for got in found
        ]
        print(f"{kind} at {phase}: {seconds:.2f} s")
        for rank, text in enumerate(seen):
            print(f"  rank {rank}: {text}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", TP)
    sys.exit(table())
