"""``selftest``: ``all_reduce`` against the oracle, bit for bit, on the devices present.

``cases`` says what to run and ``run_cases`` runs it on the devices given. Neither knows of processes: inputs
and expected sums follow from the case alone, and each process compares the shards that it holds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import protocol, reference
from jax_twoshot.cli import machine, terminal

SHAPES = ((), (1,), (7,), (3, 5), (0, 2880), (1, 7168), (31, 32), (2, 3, 129), (32, 2880), (64, 577))
FULL_SHAPES = tuple(
    (rows, width) for rows in (0, 1, 3, 31, 32, 64, 200) for width in (1, 7, 8, 32, 576, 2880, 7168, 7169)
)
ROUNDS_SHAPES = ((3,), (5, 129), (40, 96))
ROUNDS_CAPACITY = 640
"""Elements of a round: the last of the shapes above takes six or more, and the others follow a round that was full."""
ALGORITHM_SHAPES = ((7,), (1, 7168), (31, 32), (32, 2880))
LOOP_CALLS = 50
LOOP_SHAPE = (3, 160)


@dataclass(frozen=True)
class Case:
    """One workspace, and one program that calls ``all_reduce`` on it.

    Attributes:
      group: what it tests, a line of the table.
      mesh: size of each axis by name; the devices are taken in order.
      axes: the axes summed over.
      dtype: name of the element type.
      shapes: of the calls, each rank's part.
      capacity: elements that a round can carry.
      special: any bits at all and the values that go wrong, instead of ordinary numbers.
      loop: calls of a scan, each of which also needs the sum before it; None: no scan.
      algorithm: of the calls.
    """

    group: str
    mesh: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    capacity: int
    special: bool = False
    loop: int | None = None
    algorithm: str = "auto"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.mesh)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh)

    @property
    def reduced(self) -> tuple[int, ...]:
        """Positions of the summed axes, in the mesh's order: the order of ranks."""
        return tuple(i for i, name in enumerate(self.names) if name in self.axes)

    @property
    def tp(self) -> int:
        return math.prod(self.sizes[i] for i in self.reduced)

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh)
        return f"{self.group}, {self.dtype}, sum over {'+'.join(self.axes)} of {mesh}"


@dataclass(frozen=True)
class Difference:
    """The first wrong element: of which call and rank, its bits and those of the oracle."""

    case: str
    shape: tuple[int, ...]
    rank: int
    element: tuple[int, ...]
    got: str
    expected: str

    def __str__(self) -> str:
        return (
            f"{self.case}: call of shape {self.shape}, rank {self.rank}, element {self.element}: "
            f"bits {self.got}, expected {self.expected}"
        )


@dataclass(frozen=True)
class Outcome:
    """What one case came to on this process's devices.

    Attributes:
      case: which.
      calls: of ``all_reduce`` by each rank.
      elements: compared.
      wrong: elements whose bits differ.
      first: the first of these.
      error: what was raised instead.
    """

    case: Case
    calls: int
    elements: int = 0
    wrong: int = 0
    first: Difference | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.wrong == 0 and self.error is None


# ---- What to run -------------------------------------------------------------------------------------------


def cases(tps: Iterable[int], full: bool = False, algorithms: Sequence[str] = ()) -> list[Case]:
    """All cases: groups of each size in ``tps``, and sub-groups of meshes with the most devices of these.

    Args:
      tps: sizes.
      full: every shape of the test-suite's grid.
      algorithms: to be asked for by name too; on CPU there is only one.
    """
    tps = sorted(tps)
    return [
        case
        for dtype in protocol.FORMATS
        for case in (
            *(case for tp in tps for case in _whole_mesh_cases(tp, dtype, full, algorithms)),
            *_sub_group_cases(tps[-1], dtype),
        )
    ]


def _whole_mesh_cases(tp: int, dtype: str, full: bool, algorithms: Sequence[str]) -> list[Case]:
    mesh = (("tp", tp),)
    shapes = FULL_SHAPES if full else SHAPES
    most = max(map(math.prod, shapes))
    return [
        Case("shapes", mesh, ("tp",), dtype, shapes, most),
        Case("special values", mesh, ("tp",), dtype, shapes, most, special=True),
        # A slot may hold all of a small workspace's capacity: a round then carries `tp` times as much.
        Case("several rounds", mesh, ("tp",), dtype, ROUNDS_SHAPES, ROUNDS_CAPACITY // tp),
        *(
            Case("each algorithm", mesh, ("tp",), dtype, ALGORITHM_SHAPES, most, algorithm=algorithm)
            for algorithm in algorithms
        ),
        Case("calls in a scan", mesh, ("tp",), dtype, (LOOP_SHAPE,), math.prod(LOOP_SHAPE), loop=LOOP_CALLS),
    ]


def _sub_group_cases(devices: int, dtype: str) -> list[Case]:
    """Over each axis of every a x b mesh; over two axes of a 2 x c x 2 mesh, named in the other order."""
    shapes = ((5, 33), (8, 96))
    most = max(map(math.prod, shapes))
    planes = [(("x", a), ("y", devices // a)) for a in range(2, devices // 2 + 1) if devices % a == 0]
    found = [Case("sub-groups", mesh, (axis,), dtype, shapes, most) for mesh in planes for axis in "xy"]
    if devices % 4 == 0 and devices > 4:
        cube = (("x", 2), ("y", devices // 4), ("z", 2))
        found.append(Case("sub-groups", cube, ("z", "x"), dtype, shapes, most))
    return found


# ---- Inputs and expected sums ------------------------------------------------------------------------------


def inputs(case: Case) -> list[np.ndarray]:
    """``[*case.sizes, *shape]`` for each shape, a scan's calls before it; the same in every process."""
    random = np.random.default_rng(zlib.crc32(repr(case).encode()))
    draw = _special_values if case.special else _ordinary_values
    calls = () if case.loop is None else (case.loop,)
    return [draw(random, case.dtype, (*case.sizes, *calls, *shape)) for shape in case.shapes]


def _ordinary_values(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(random.normal(scale=30, size=shape)).astype(dtype)


def _special_values(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """A third each: +0.0 and -0.0, other special values, any bits."""
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    info = jnp.finfo(dtype)
    subnormal = np.arange(1, 5).astype(bits).view(dtype)
    special = np.array([np.inf, -np.inf, np.nan, info.max, info.min, info.tiny, -info.tiny], dtype)
    special = np.concatenate([special, subnormal, -subnormal])
    kind = random.integers(0, 3, shape)
    anything = random.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)
    zeros = random.choice(np.array([0.0, -0.0], dtype), shape)
    return np.choose(kind, [x.view(bits) for x in (zeros, random.choice(special, shape), anything)]).view(
        dtype
    )


def expected(case: Case, part: np.ndarray) -> np.ndarray:
    """What every rank must end with: ``part``'s shape, equal along the summed axes."""
    front = tuple(range(len(case.reduced)))
    ranks = np.moveaxis(part, case.reduced, front)
    ranks = ranks.reshape(case.tp, *ranks.shape[len(front) :])
    total = reference.all_reduce(ranks) if case.loop is None else _expected_scan(ranks)
    return np.broadcast_to(np.expand_dims(total, case.reduced), part.shape)


def _expected_scan(ranks: np.ndarray) -> np.ndarray:
    """``[calls, ...]`` sums of ``[TP, calls, ...]``; rank 1 puts in the sum before, not its own part."""
    total, totals = np.zeros_like(ranks[0, 0]), []
    for call in np.moveaxis(ranks, 1, 0):
        call = call.copy()
        call[1] = total
        total = reference.all_reduce(call)
        totals.append(total)
    return np.stack(totals)


# ---- Running -----------------------------------------------------------------------------------------------


def run_cases(
    devices: Sequence[jax.Device],
    todo: Sequence[Case],
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Runs ``todo``, each on the first of ``devices``, up to the first one that raises.

    Of several processes each one calls this with the same arguments, and gets the outcomes of its own shards.
    """
    outcomes = []
    for case in todo:
        outcomes.append(_run_case(devices, case))
        on_outcome(outcomes[-1])
        if outcomes[-1].error:
            break
    return outcomes


def _run_case(devices: Sequence[jax.Device], case: Case) -> Outcome:
    calls = len(case.shapes) * (case.loop or 1)
    parts = inputs(case)
    try:
        results = _sums(devices, case, parts)
    except Exception as error:  # of whatever kind, it is this case's outcome
        return Outcome(case, calls, error=f"{case}: {type(error).__name__}: {error}")
    elements = wrong = 0
    first = None
    for part, result in zip(parts, results, strict=True):
        compared, bad, difference = _compare(case, result, expected(case, part))
        elements, wrong, first = elements + compared, wrong + bad, first or difference
    return Outcome(case, calls, elements, wrong, first)


def _sums(devices: Sequence[jax.Device], case: Case, parts: list[np.ndarray]) -> list[jax.Array]:
    mesh = Mesh(np.array(devices[: math.prod(case.sizes)]).reshape(case.sizes), case.names)
    sharding = NamedSharding(mesh, P(*case.names))
    # An empty part is made in the program: the compiler of JAX 0.11 crashes on an empty operand beside others.
    placed = [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in parts if x.size]
    with jax_twoshot.Workspace(mesh, case.axes, rows=1, width=case.capacity, dtype=case.dtype) as workspace:
        call = _call(case, workspace)

        def rank(xs: list[jax.Array]) -> list[jax.Array]:
            given, alone = iter(xs), (1,) * len(case.sizes)
            mine = [x.shape[len(alone) :] for x in parts]
            operands = [next(given).reshape(s) if math.prod(s) else jnp.zeros(s, case.dtype) for s in mine]
            return [call(x).reshape(*alone, *x.shape) for x in operands]

        spec = sharding.spec
        program = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=spec))
        return jax.block_until_ready(program(placed))


def _call(case: Case, workspace: jax_twoshot.Workspace) -> Callable[[jax.Array], jax.Array]:
    """What a rank does with its part of one array."""

    def reduce(x: jax.Array) -> jax.Array:
        return jax_twoshot.all_reduce(x, case.axes, workspace=workspace)

    def step(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = reduce(jnp.where(lax.axis_index(case.axes) == 1, total, x))
        return total, total

    def scan(xs: jax.Array) -> jax.Array:
        return lax.scan(step, jnp.zeros(xs.shape[1:], xs.dtype), xs)[1]

    return reduce if case.loop is None else scan


def _compare(case: Case, result: jax.Array, want: np.ndarray) -> tuple[int, int, Difference | None]:
    """``(compared, wrong, first)`` of the shards of this process."""
    bits = f"u{want.dtype.itemsize}"
    compared = bad = 0
    first = None
    for shard in sorted(result.addressable_shards, key=lambda s: s.device.id):
        got, right = np.asarray(shard.data).view(bits), want[shard.index].copy().view(bits)
        places = np.argwhere(got != right)
        compared, bad = compared + got.size, bad + len(places)
        if len(places) and first is None:
            at = tuple(places[0].tolist())
            digits = 2 + 2 * want.dtype.itemsize
            position = [shard.index[i].start for i in case.reduced]
            first = Difference(
                str(case),
                got.shape[len(case.sizes) :],
                int(np.ravel_multi_index(position, [case.sizes[i] for i in case.reduced])),
                at[len(case.sizes) :],
                f"{got[at]:#0{digits}x}",
                f"{right[at]:#0{digits}x}",
            )
    return compared, bad, first


# ---- The command -------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    found = machine.devices(args.devices)
    todo = cases(range(protocol.MIN_RANKS, len(found) + 1), args.full)
    with terminal.Progress(len(todo)) as progress:
        outcomes = run_cases(found, todo, lambda outcome: progress.step(str(outcome.case)))
    return judge(args, outcomes, len(todo), machine.facts(found), machine.describe(found), start)


def judge(
    args: argparse.Namespace,
    outcomes: Sequence[Outcome],
    planned: int,
    facts: dict[str, Any],
    described: str,
    start: float,
) -> int:
    """Prints what the outcomes come to; returns the exit code."""
    summary = facts | summarize(outcomes, planned) | {"seconds": round(time.monotonic() - start, 1)}
    print(json.dumps(summary, indent=1) if args.json else _text(summary, described))
    if summary["failure"]:
        print(summary["failure"], file=sys.stderr)
    return 0 if summary["ok"] else 1


def summarize(outcomes: Sequence[Outcome], planned: int) -> dict[str, Any]:
    """The verdict, what failed first, and the counts of each group, as JSON can hold them."""
    first = next((o.first for o in outcomes if o.first), None)
    error = next((o.error for o in outcomes if o.error), None)
    return {
        "ok": len(outcomes) == planned and all(o.ok for o in outcomes),
        "cases": planned,
        "groups": [
            _count(group, [o for o in outcomes if o.case.group == group])
            for group in dict.fromkeys(o.case.group for o in outcomes)
        ],
        "first_difference": asdict(first) if first else None,
        "failure": error or (f"first difference: {first}" if first else None),
    }


def _count(group: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "group": group,
        "tp": sorted({o.case.tp for o in outcomes}),
        "dtypes": sorted({o.case.dtype for o in outcomes}),
        "cases": len(outcomes),
        "failed": sum(not o.ok for o in outcomes),
        "calls": sum(o.calls for o in outcomes),
        "elements": sum(o.elements for o in outcomes),
        "wrong": sum(o.wrong for o in outcomes),
    }


def _text(summary: dict[str, Any], described: str) -> str:
    rows = [
        [
            group["group"],
            ",".join(map(str, group["tp"])),
            *(str(group[name]) for name in ("cases", "failed", "calls", "elements", "wrong")),
        ]
        for group in summary["groups"]
    ]
    ran = sum(group["cases"] for group in summary["groups"])
    verdict = (
        "every bit is the oracle's" if summary["ok"] else f"FAILED, after {ran} of {summary['cases']} cases"
    )
    return "\n".join(
        (
            f"# all_reduce against the oracle: {', '.join(protocol.FORMATS)} on {described}",
            terminal.table(("test", "TP", "cases", "failed", "calls", "elements", "wrong"), rows, left=2),
            f"{verdict} ({summary['seconds']} s)",
        )
    )
