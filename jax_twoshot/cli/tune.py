"""``bench --ranks --tune``: from the times of both algorithms to the tables that choose between them.

The workers' slots hold whole messages (`EVERYTHING`), so that one shot is one round whatever the tables say now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from jax_twoshot import _settings, protocol

EVERYTHING: dict[str, protocol.Table] = {name: ((protocol.MAX_RANKS, 1 << 40),) for name in protocol.BUILT_IN}
"""Tables with which every message is summed in one shot."""


class Time(Protocol):
    """What is known of one message: `bench_ranks.Measurement`."""

    peer: str
    bytes: int
    tp: int

    @property
    def median(self) -> float:
        """Seconds of a call."""


def write_everything(folder: Path) -> Path:
    """A file for ``JAX_TWOSHOT_TUNING`` that says `EVERYTHING`."""
    path = folder / "everything.json"
    path.write_text(json.dumps({"tables": EVERYTHING}))
    return path


def limits(times: Sequence[Time], one_shot: str, two_shot: str) -> dict[int, int]:
    """Of each number of ranks the largest message below which one shot was never slower, 0 if two shots always won.

    Args:
      times: of any peers.
      one_shot: the peer that takes one shot.
      two_shot: the peer that takes two.
    """
    found = {}
    for tp in sorted({t.tp for t in times if t.peer == two_shot}):
        by_size: dict[int, dict[str, float]] = {}
        for t in times:
            if t.tp == tp and t.peer in (one_shot, two_shot):
                slowest = by_size.setdefault(t.bytes, {})
                slowest[t.peer] = max(t.median, slowest.get(t.peer, 0.0))
        found[tp] = 0
        for size, seconds in sorted(by_size.items()):
            if len(seconds) < 2 or seconds[one_shot] > seconds[two_shot]:
                break
            found[tp] = size
    return found


def merged(table: protocol.Table, measured: Mapping[int, int]) -> protocol.Table:
    """``table`` with what was measured in place of its entries for as many ranks."""
    return tuple(sorted((dict(table) | dict(measured)).items()))


def tables(name: str, measured: Mapping[int, int]) -> dict[str, protocol.Table]:
    """What ``JAX_TWOSHOT_TUNING`` needs: the tables in effect, one of them with what was measured."""
    now = _settings.tuning()
    return {name: merged(now[name], measured)}


def text(name: str, measured: Mapping[int, int], file: str | None) -> str:
    """The table as ``protocol.py`` has it, where it differs from the built-in one, and how it comes into effect."""
    (table,) = tables(name, measured).values()
    built_in = dict(protocol.BUILT_IN[name])
    differs = [
        f"{tp} ranks: {most} bytes, built in {built_in.get(tp, 'nothing')}"
        for tp, most in table
        if built_in.get(tp) != most
    ]
    use = f"JAX_TWOSHOT_TUNING={file}" if file else "with --json FILE, JAX_TWOSHOT_TUNING=FILE"
    return "\n".join(
        (
            f"{name} = {table}",
            *(f"# {line}" for line in differs or ["as it is built in"]),
            f"# {use} on every process makes it effective",
        )
    )
