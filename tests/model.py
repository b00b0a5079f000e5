"""The protocol of two ranks as a finite machine, and a breadth-first search over everything that can happen.

A **rank** runs its calls one after another. A **call** is a set of atomic steps (one store, or one successful
poll each) with an order between them, and the next call starts when all are done, as a kernel launch or a CPU
handler does. Two orders are searched:

    in order    every step after the one before it: a CPU thread
    relaxed     only what the data forces (a sum is stored after its slots were polled, a place is re-armed
                after it was polled): the CTAs of one launch and their unordered stores

**Memory** is one cell per place of recv and gather. A cell holds ``ARMED`` or the number of the call whose
data it is; a sum is numbered by the call that made it. So old data in a new call is seen, whatever its value.

A message is 0, 1 or 2 chunks; in a two-shot call rank o owns chunk o, in a one-shot call every rank sums every
chunk. The faults that the search looks for:

    live    a store over a cell that is not armed: somebody's data is gone
    stale   a poll that returned another call's data
    stuck   not every call is done, and no rank can take a step

Any rank may be late by any time: that is what interleavings are. With ``crash`` one may also end between any two
steps; with ``deadline`` whoever waits may give up, however soon its peer would have come. A rank that has given up,
or has done its calls, comes to ``Workspace.reset``, if there is one: it arms its own memory and makes all calls again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

RANKS = (0, 1)
ARMED = -1

Fault = Literal["live", "stale", "stuck"]


class Cell(NamedTuple):
    """One chunk of ``rank``'s buffers: ``place`` is a chunk of its gather, or a slot of its recv. A slot holds two
    chunks: place 0 is the first of slot 0, place 1 that of slot 1, then come their second ones."""

    rank: int
    buffer: Literal["recv", "gather"]
    generation: int
    place: int


class Step(NamedTuple):
    """One atomic action. ``after`` are the positions, in the call's list, of the steps that must be done."""

    action: Literal["store", "poll", "rearm"]
    cell: Cell
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Protocol:
    """A variant of the protocol, and what two ranks do with it.

    Attributes:
      generations: copies of the buffers, used in turn.
      messages: chunks of each call's message.
      one_shot: which calls are one-shot.
      deferred: a call re-arms what the call before it has read, not what it reads itself.
      empty_advances: a call without elements moves on to the next generation.
      in_order: the steps of a call happen in the order of its list.
      crash: one rank may end.
      deadline: a wait may end without its data.
      reset: a reset and as many calls again follow. It holds the points at which ranks wait for each other in it:
        "settled", when none of them is in a call any more, and "armed", when all have armed their memory.
    """

    generations: int
    messages: tuple[int, ...] = (2, 2, 2, 2)
    one_shot: frozenset[int] = frozenset()
    deferred: bool = False
    empty_advances: bool = False
    in_order: bool = True
    crash: bool = False
    deadline: bool = False
    reset: frozenset[str] | None = None

    def program(self, rank: int) -> list[list[Step]]:
        """The steps of each call of ``rank``; with a reset in the middle the calls come twice."""
        return [self.steps(rank, call) for call in range(len(self.messages))] * (1 if self.reset is None else 2)

    def generation(self, call: int) -> int:
        before = self.messages[:call]
        return sum(chunks > 0 or self.empty_advances for chunks in before) % self.generations

    def reads(self, rank: int, call: int) -> list[Cell]:
        """What ``rank`` polls in ``call``, hence what it must re-arm: its slots, then its gather."""
        chunks, generation = self.messages[call], self.generation(call)
        if call in self.one_shot:
            return [slot for chunk in range(chunks) for slot in slots_of(rank, generation, chunk)]
        slots = slots_of(rank, generation) if rank < chunks else []
        return slots + [Cell(rank, "gather", generation, chunk) for chunk in range(chunks)]

    def steps(self, rank: int, call: int) -> list[Step]:
        """All of one call of one rank, with its re-arms; an empty call has no steps (R4)."""
        if self.messages[call] == 0:
            return []
        steps = self.one_shot_steps(rank, call) if call in self.one_shot else self.two_shot_steps(rank, call)
        if self.deferred:
            earlier = [before for before in range(call) if self.messages[before] > 0]
            steps += [Step("rearm", cell) for dirty in earlier[-1:] for cell in self.reads(rank, dirty)]
        if self.in_order:
            steps = [step._replace(after=tuple(range(i))) for i, step in enumerate(steps)]
        return steps

    def one_shot_steps(self, rank: int, call: int) -> list[Step]:
        """Push to every rank, then reduce every chunk."""
        chunks, generation = self.messages[call], self.generation(call)
        steps = [
            Step("store", slots_of(peer, generation, chunk)[rank]) for chunk in range(chunks) for peer in RANKS
        ]
        for chunk in range(chunks):
            slots = slots_of(rank, generation, chunk)
            polls = tuple(len(steps) + i for i in range(len(slots)))
            steps += [Step("poll", slot) for slot in slots]
            if not self.deferred:
                steps += [Step("rearm", slot, after=polls) for slot in slots]
        return steps

    def two_shot_steps(self, rank: int, call: int) -> list[Step]:
        """Push, reduce what this rank owns, collect."""
        chunks, generation = self.messages[call], self.generation(call)
        steps = [Step("store", slots_of(owner, generation)[rank]) for owner in range(chunks)]

        slots = [cell for cell in self.reads(rank, call) if cell.buffer == "recv"]
        polls = tuple(len(steps) + i for i in range(len(slots)))
        steps += [Step("poll", slot) for slot in slots]
        if slots:
            steps += [Step("store", Cell(peer, "gather", generation, rank), after=polls) for peer in RANKS]
        if not self.deferred:
            steps += [Step("rearm", slot, after=polls) for slot in slots]

        for chunk in range(chunks):
            cell = Cell(rank, "gather", generation, chunk)
            steps.append(Step("poll", cell))
            if not self.deferred:
                steps.append(Step("rearm", cell, after=(len(steps) - 1,)))
        return steps


def slots_of(rank: int, generation: int, index: int = 0) -> list[Cell]:
    """The slots, one for each pushing rank, of the chunk that ``rank`` sums as its number ``index``."""
    return [Cell(rank, "recv", generation, index * len(RANKS) + slot) for slot in RANKS]


COMES, SETTLED, ARMED_AGAIN, STARTS = -3, -2, -1, 0
"""``RankState.done`` of a rank in a reset: it goes through them in this order."""
ENDED = 1 << 32
"""``RankState.done`` of a rank that takes no step any more, having crashed or given up for good."""


class RankState(NamedTuple):
    """Which call a rank is in, and which of its steps are done (a bit each), or what it does instead of it."""

    call: int
    done: int


class State(NamedTuple):
    ranks: tuple[RankState, ...]
    memory: frozenset[tuple[Cell, int]]
    """The cells that are not armed, and the call whose data each holds."""


@dataclass(frozen=True)
class Result:
    """What a search found: how many states, and the shortest way to each kind of fault."""

    states: int
    faults: dict[Fault, list[str]]


class Move(NamedTuple):
    text: str
    state: State
    fault: Fault | None


def moves(protocol: Protocol, programs: list[list[list[Step]]], state: State) -> Iterator[Move]:
    """Every step that some rank can take next. A poll of an armed cell is no step: it tries again, or gives up."""
    memory = dict(state.memory)
    for rank, (call, done) in enumerate(state.ranks):
        if call == len(programs[rank]) or done == ENDED:
            continue
        if done < 0:
            yield from reset_moves(protocol, rank, state)
            continue
        steps = programs[rank][call]
        if protocol.crash and all(other.done != ENDED for other in state.ranks):
            yield Move(f"rank {rank}, call {call}: ends", with_rank(state, rank, RankState(call, ENDED)), None)
        if protocol.deadline and waits(steps, done, memory):
            after = RankState(call, ENDED)
            if protocol.reset is not None and call < len(protocol.messages):
                after = RankState(len(protocol.messages), COMES)
            yield Move(f"rank {rank}, call {call}: gives up", with_rank(state, rank, after), None)
        for i, (action, cell, after) in enumerate(steps):
            held = memory.get(cell, ARMED)
            if done >> i & 1 or not all(done >> j & 1 for j in after) or (action == "poll" and held == ARMED):
                continue
            fault: Fault | None = None
            changed = memory
            if action == "store":
                fault = "live" if held != ARMED else None
                changed = memory | {cell: call}
            elif action == "poll":
                fault = "stale" if held != call else None
            else:
                changed = {c: data for c, data in memory.items() if c != cell}
            ranks = list(state.ranks)
            ranks[rank] = next_call(protocol, programs[rank], RankState(call, done | 1 << i))
            where = f"rank {cell.rank}'s {cell.buffer}[{cell.generation}, {cell.place}]"
            text = f"rank {rank}, call {call}: {action} {where}"
            yield Move(text, State(tuple(ranks), frozenset(changed.items())), fault)


def with_rank(state: State, rank: int, new: RankState) -> State:
    return State((*state.ranks[:rank], new, *state.ranks[rank + 1 :]), state.memory)


def waits(steps: list[Step], done: int, memory: dict[Cell, int]) -> bool:
    """Whether a rank polls a place that is armed."""
    return any(
        action == "poll" and not done >> i & 1 and all(done >> j & 1 for j in after) and cell not in memory
        for i, (action, cell, after) in enumerate(steps)
    )


def reset_moves(protocol: Protocol, rank: int, state: State) -> Iterator[Move]:
    """The step of a reset that ``rank`` can take next, unless it has to wait for the others."""
    assert protocol.reset is not None
    here = state.ranks[rank]
    barrier = {COMES: "settled", ARMED_AGAIN: "armed"}.get(here.done)
    if barrier in protocol.reset and any(other < here for other in state.ranks):
        return
    memory = state.memory
    if here.done == SETTLED:
        memory = frozenset(entry for entry in memory if entry[0].rank != rank)
    after = with_rank(State(state.ranks, memory), rank, RankState(here.call, here.done + 1))
    yield Move(f"rank {rank}, reset: {barrier or 'arms'}", after, None)


def next_call(protocol: Protocol, program: list[list[Step]], rank: RankState) -> RankState:
    """The same state, past every call that has no step left to do (an empty call has none at all), up to a reset."""
    call, done = rank
    while call < len(program) and done == (1 << len(program[call])) - 1:
        call, done = call + 1, 0
        if protocol.reset is not None and call == len(protocol.messages):
            return RankState(call, COMES)
    return RankState(call, done)


def search(protocol: Protocol) -> Result:
    """Visits every reachable state. A fault does not end the search: its consequences are found too."""
    programs = [protocol.program(rank) for rank in RANKS]
    first = State(tuple(next_call(protocol, program, RankState(0, 0)) for program in programs), frozenset())
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    faults: dict[Fault, list[str]] = {}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        stuck = True
        for text, after, fault in moves(protocol, programs, state):
            stuck = False
            if fault is not None and fault not in faults:
                faults[fault] = [*path(came_from, state), text]
            if after not in came_from:
                came_from[after] = (state, text)
                queue.append(after)
        waiting = any(rank.call < len(programs[0]) and rank.done != ENDED for rank in state.ranks)
        if stuck and waiting and "stuck" not in faults:
            faults["stuck"] = path(came_from, state)
    return Result(len(came_from), faults)


def path(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    """The steps that led from the first state to ``state``."""
    texts = []
    while (step := came_from[state]) is not None:
        state, text = step
        texts.append(text)
    return texts[::-1]


def explain(faults: dict[Fault, list[str]]) -> str:
    """The shortest way to each fault, for a failed assertion's message."""
    return "".join(f"\n{kind}:\n  " + "\n  ".join(steps) for kind, steps in faults.items())
