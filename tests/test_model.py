"""How many generations the protocol needs: `docs/design.md`, "How many generations", by exhaustive search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest
from model import Protocol, Step, explain, search

from jax_twoshot import protocol

CTA_MESSAGES = (2, 1, 2, 1)
"""The relaxed order has too many interleavings of four deferred calls of two chunks to visit in a test."""
ALL, EVERY_OTHER = frozenset(range(4)), frozenset({1, 3})
"""Which of four calls are one-shot."""


@pytest.mark.parametrize(
    ("variant", "states"),
    [
        pytest.param(Protocol(2), 560, id="immediate-thread"),
        pytest.param(Protocol(2, in_order=False), 22143, id="immediate-ctas"),
        pytest.param(Protocol(3, deferred=True), 416, id="deferred-thread"),
        pytest.param(Protocol(3, CTA_MESSAGES, deferred=True, in_order=False), 17952, id="deferred-ctas"),
        pytest.param(Protocol(2, (2, 0, 2, 2)), 412, id="empty-call-stays-thread"),
        pytest.param(Protocol(2, (2, 0, 2, 2), in_order=False), 16490, id="empty-call-stays-ctas"),
        pytest.param(Protocol(2, one_shot=ALL), 756, id="one-shot-thread"),
        pytest.param(Protocol(2, CTA_MESSAGES, one_shot=ALL, in_order=False), 43917, id="one-shot-ctas"),
        pytest.param(Protocol(2, one_shot=EVERY_OTHER), 654, id="mixed-thread"),
        pytest.param(Protocol(2, CTA_MESSAGES, one_shot=EVERY_OTHER, in_order=False), 11673, id="mixed-ctas"),
        pytest.param(Protocol(3, one_shot=EVERY_OTHER, deferred=True), 518, id="mixed-deferred-thread"),
    ],
)
def test_holds(variant: Protocol, states: int) -> None:
    result = search(variant)
    assert not result.faults, explain(result.faults)
    assert result.states == states


@pytest.mark.parametrize(
    ("variant", "states"),
    [
        pytest.param(Protocol(1), 734, id="1-immediate-thread"),
        pytest.param(Protocol(2, one_shot=EVERY_OTHER, deferred=True), 822, id="2-mixed-deferred-thread"),
        pytest.param(Protocol(1, in_order=False), 23853, id="1-immediate-ctas"),
        pytest.param(Protocol(2, deferred=True), 496, id="2-deferred-thread"),
        pytest.param(Protocol(2, CTA_MESSAGES, deferred=True, in_order=False), 21218, id="2-deferred-ctas"),
        pytest.param(Protocol(2, (2, 0, 2, 2), empty_advances=True), 470, id="empty-advances-thread"),
        pytest.param(
            Protocol(2, (2, 0, 2, 2), empty_advances=True, in_order=False), 17060, id="empty-advances-ctas"
        ),
    ],
)
def test_fails(variant: Protocol, states: int) -> None:
    """A push lands on a slot that its owner has yet to re-arm, the re-arm wipes it out, all wait for it."""
    result = search(variant)
    assert set(result.faults) == {"live", "stuck"}, explain(result.faults)
    assert result.states == states
    assert "store" in result.faults["live"][-1] and "recv" in result.faults["live"][-1]


@pytest.mark.parametrize("one_shot", [frozenset(), ALL, EVERY_OTHER], ids=["two-shot", "one-shot", "mixed"])
def test_constants_are_the_least_that_hold(one_shot: frozenset[int]) -> None:
    for deferred, constant in ((False, protocol.GENERATIONS), (True, protocol.GENERATIONS_DEFERRED)):
        holds = [n for n in range(1, 5) if not search(Protocol(n, one_shot=one_shot, deferred=deferred)).faults]
        assert holds == list(range(constant, 5))


@pytest.mark.parametrize(("generations", "deferred"), [(2, False), (3, True)])
def test_every_sequence_of_sizes_holds(generations: int, deferred: bool) -> None:
    """R2 and R4: large, small and empty calls follow each other, and one chunk makes every rank wait."""
    for messages in product((0, 1, 2), repeat=4):
        result = search(Protocol(generations, messages, deferred=deferred))
        assert not result.faults, f"{messages}: {explain(result.faults)}"


@pytest.mark.parametrize(("generations", "deferred"), [(2, False), (3, True)])
def test_every_sequence_of_algorithms_holds(generations: int, deferred: bool) -> None:
    """R4: a one-shot call makes every rank wait for every rank too."""
    for size in range(5):
        for one_shot in combinations(range(4), size):
            for messages in ((2, 2, 2, 2), (2, 1, 2, 1), (1, 2, 0, 2)):
                result = search(Protocol(generations, messages, frozenset(one_shot), deferred))
                assert not result.faults, f"{one_shot} of {messages}: {explain(result.faults)}"


def test_shortest_fault_of_one_generation() -> None:
    """The sentence of the design, step by step: s sees o's sum, goes on, and pushes before o has re-armed."""
    assert search(Protocol(1, messages=(1, 1))).faults["live"] == [
        "rank 0, call 0: store rank 0's recv[0, 0]",
        "rank 0, call 0: poll rank 0's recv[0, 0]",
        "rank 1, call 0: store rank 0's recv[0, 1]",
        "rank 0, call 0: poll rank 0's recv[0, 1]",
        "rank 0, call 0: store rank 0's gather[0, 0]",
        "rank 0, call 0: store rank 1's gather[0, 0]",
        "rank 1, call 0: poll rank 1's gather[0, 0]",
        "rank 1, call 0: rearm rank 1's gather[0, 0]",
        "rank 1, call 1: store rank 0's recv[0, 1]",
    ]


def test_states_counted_by_hand() -> None:
    """One call of one chunk, in order: rank 0 has 9 steps (push, 2 polls, 2 publications, 2 re-arms, collect,
    re-arm), rank 1 has 3 (push, collect, re-arm). Rank 0 passes its second poll after rank 1's push, rank 1
    collects after rank 0's fifth step. By rank 1's progress 0, 1, 2, 3 that leaves 3 + 10 + 5 + 5 states."""
    result = search(Protocol(2, messages=(1,)))
    assert not result.faults
    assert result.states == 3 + 10 + 5 + 5


def test_states_of_one_shot_counted_by_hand() -> None:
    """One call of one chunk, in order: each rank has 6 steps (2 pushes, 2 polls, 2 re-arms), which would make 7 x 7
    states. Rank 0 passes its second poll after rank 1's first push: not 3 of them. Rank 1 passes its first poll
    after rank 0's second push: not 4 x 2 of them."""
    result = search(Protocol(2, messages=(1,), one_shot=frozenset({0})))
    assert not result.faults
    assert result.states == 7 * 7 - 3 - 4 * 2


def test_only_empty_calls_are_one_state() -> None:
    assert search(Protocol(2, messages=(0, 0, 0))).states == 1


@dataclass(frozen=True)
class NeverRearms(Protocol):
    def steps(self, rank: int, call: int) -> list[Step]:
        kept = [step for step in super().steps(rank, call) if step.action != "rearm"]
        return [step._replace(after=tuple(range(i))) for i, step in enumerate(kept)]


def test_search_sees_stale_data() -> None:
    """The model can tell old data from new: without re-arms a rank reads what an earlier call left."""
    assert set(search(NeverRearms(2)).faults) == {"live", "stale"}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Protocol(2), id="immediate-thread"),
        pytest.param(Protocol(2, (1, 1), in_order=False), id="immediate-ctas"),
        pytest.param(Protocol(3, deferred=True), id="deferred-thread"),
        pytest.param(Protocol(2, one_shot=EVERY_OTHER), id="mixed-thread"),
    ],
)
def test_a_rank_that_ends_anywhere_makes_peers_wait_and_nothing_else(variant: Protocol) -> None:
    """No number is wrong because of it; and where waits end (R9), nothing hangs."""
    crashed = search(replace(variant, crash=True))
    assert set(crashed.faults) == {"stuck"}, explain(crashed.faults)
    assert ": ends" in "".join(crashed.faults["stuck"])
    ended = search(replace(variant, crash=True, deadline=True))
    assert not ended.faults, explain(ended.faults)


RESET = frozenset({"settled", "armed"})


@pytest.mark.parametrize(
    ("variant", "states"),
    [
        pytest.param(Protocol(2, (2, 2, 1)), 971, id="thread"),
        pytest.param(Protocol(2, (1, 2), in_order=False), 18841, id="ctas"),
        pytest.param(Protocol(3, (2, 2), deferred=True), 557, id="deferred"),
    ],
)
def test_a_reset_after_any_rank_gave_up_anywhere_holds(variant: Protocol, states: int) -> None:
    """R7 again: all have settled, all have armed; then every call may give up or go on as if nothing had been."""
    result = search(replace(variant, deadline=True, reset=RESET))
    assert not result.faults, explain(result.faults)
    assert result.states == states


@pytest.mark.parametrize("barrier", sorted(RESET))
def test_a_reset_needs_both_of_its_barriers(barrier: str) -> None:
    """Without "settled" a late rank pushes into what is armed already; without "armed" a peer arms over a push."""
    result = search(Protocol(2, (2, 2), deadline=True, reset=RESET - {barrier}))
    assert "live" in result.faults
    assert "reset" in "".join(result.faults["live"])
