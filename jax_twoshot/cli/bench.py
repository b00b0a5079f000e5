"""``bench``: time of a call, ours and its peers', in one run that checks their sums first.

Every peer runs the same program, `calls` times ``x = scale * all_reduce(x)``, in a scan on CPU and one by one on GPUs:
the time of a call includes the multiply, and the loop. Peers take turns, run by run: what disturbs the machine disturbs
all.

Columns as in NCCL's tests: ``algbw`` is bytes over time, ``busbw`` that times ``2 (n - 1) / n``, what an
all-reduce has to move through every rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import reference
from jax_twoshot.cli import UsageError, machine, terminal

CHECKED_CALLS = 5
"""Enough to come back to every generation of the buffers."""

Run = Callable[..., Any]
"""A compiled program: from a layer's state and constants, ``[TP, ...]``, to the state that its calls leave."""


@dataclass(frozen=True)
class Program:
    """What every peer runs.

    Attributes:
      mesh: of one axis, ``tp``.
      rows, width, dtype: of each rank's part.
      calls: of the all-reduce, one after the other.
      scale: what each sum is multiplied by; 1 / TP keeps values bounded.
    """

    mesh: Mesh
    rows: int
    width: int
    dtype: str
    calls: int
    scale: float

    @property
    def tp(self) -> int:
        return self.mesh.size

    @property
    def bytes(self) -> int:
        """Of the message, as each rank holds it."""
        return self.rows * self.width * np.dtype(self.dtype).itemsize

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def parts(self) -> np.ndarray:
        """``[TP, rows, width]``; every process draws the same."""
        random = np.random.default_rng(self.rows)
        return random.normal(size=(self.tp, self.rows, self.width)).astype(self.dtype)

    def place(self, parts: np.ndarray) -> jax.Array:
        sharding = NamedSharding(self.mesh, P("tp"))
        return jax.make_array_from_callback(parts.shape, sharding, parts.__getitem__)

    def checked(self) -> Program:
        """A short program whose only rounding is the all-reduce's own."""
        return dataclasses.replace(self, calls=CHECKED_CALLS, scale=1.0)

    def one_call(self) -> Program:
        return dataclasses.replace(self, calls=1, scale=1.0)

    def expected(self) -> np.ndarray:
        """``[rows, width]``: what every rank ends with, by the oracle, if ``scale`` is 1."""
        total = reference.all_reduce(self.parts())
        for _ in range(self.calls - 1):
            total = reference.all_reduce(np.broadcast_to(total, (self.tp, *total.shape)))
        return total


Constants = tuple[tuple[Any, ...], ...]
"""What calls take beside the state; they take turns with them, but in a loop, where there must be but one."""


class Layer(NamedTuple):
    """What is called, whoever computes it; its arrays are ``[TP, ...]``, a part a rank.

    Attributes:
      state: array or tuple of arrays: what a program's first call takes, and every other one from the call before it.
      constants: of a program, whatever its rows.
      again: the state for the next call, of a program and a call's results.
      checked: the short program whose result is compared.
      expected: that result on every rank, as the state but without ``[TP]``.
    """

    state: Callable[[Program], Any]
    constants: Callable[[Program], Constants]
    again: Callable[[Program, Any], Any]
    checked: Callable[[Program], Program]
    expected: Callable[[Program], Any]


def _scaled(program: Program, total: jax.Array) -> jax.Array:
    return total if program.scale == 1 else total * jnp.asarray(program.scale, total.dtype)


ALL_REDUCE = Layer(Program.parts, lambda program: ((),), _scaled, Program.checked, Program.expected)


class Peer(NamedTuple):
    """One way to sum.

    Attributes:
      name: in the table.
      make: compiles a program, or says why it cannot run here.
      bitwise: whether its sums are the oracle's bit for bit; else they may be rounded in another order.
    """

    name: str
    make: Callable[[Program], Run | str]
    bitwise: bool


def _make_twoshot(program: Program) -> Run:
    workspace = jax_twoshot.Workspace(
        program.mesh, "tp", rows=program.rows, width=program.width, dtype=program.dtype
    )
    with workspace:  # the compiled program keeps the buffers that it needs
        return compile_program(program, lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace))


def _make_psum(program: Program) -> Run:
    return compile_program(program, lambda x: lax.psum(x, "tp"))


PEERS = (Peer("jax_twoshot", _make_twoshot, bitwise=True), Peer("psum", _make_psum, bitwise=False))
"""The first one is ours; the others' times are given as multiples of its."""


def compile_program(
    program: Program, call: Callable[..., Any], layer: Layer = ALL_REDUCE, *, donate: bool = False
) -> Run:
    """The program with this call: a loop, but on GPUs, where an iteration costs more than a call, its calls one by one.

    Args:
      program: the message, and how many calls.
      call: of the state and one turn of constants, on a rank.
      layer: what it computes.
      donate: the result takes the place of the state that the program is given.
    """

    def rank(state: Any, constants: Constants) -> Any:
        state, constants = jax.tree.map(lambda x: x[0], (state, constants))
        if program.platform == "gpu":
            for i in range(program.calls):
                state = layer.again(program, call(state, *constants[i % len(constants)]))
        else:
            (only,) = constants
            state, _ = lax.scan(lambda s, _: (layer.again(program, call(s, *only)), None), state, length=program.calls)
        return jax.tree.map(lambda x: x[None], state)

    spec = P("tp")
    sharded = jax.shard_map(rank, mesh=program.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(program.mesh, spec)),
        (layer.state(program), layer.constants(program)),
    )
    compiled = jax.jit(sharded, donate_argnums=0 if donate else ()).lower(*shapes).compile()
    return lambda state, constants=((),): compiled(state, constants)


# ---- Measuring ---------------------------------------------------------------------------------------------


@dataclass
class Measurement:
    """Of one peer and one message size.

    Attributes:
      peer: its name.
      rows, bytes, tp: of the message and the group.
      wrong: elements of the checked sums that are wrong, over all ranks of this process.
      seconds: of one call, a sample for each timed run.
    """

    peer: str
    rows: int
    bytes: int
    tp: int
    wrong: int
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Distance of the quartiles, as a part of the median."""
        low, high = self.quartiles
        return (high - low) / self.median

    @property
    def algbw(self) -> float:
        return algbw(self.bytes, self.median)

    @property
    def busbw(self) -> float:
        return busbw(self.bytes, self.median, self.tp)


def algbw(size: int, seconds: float) -> float:
    """GB/s (10^9 bytes) of a message of ``size`` bytes."""
    return size / seconds / 1e9


def busbw(size: int, seconds: float, tp: int) -> float:
    """GB/s that each rank's link carries in each direction, if no byte is sent in vain."""
    return algbw(size, seconds) * 2 * (tp - 1) / tp


def measure(
    program: Program, peers: Sequence[Peer], repeats: int, on_run: Callable[[str], None] = lambda _: None
) -> tuple[list[Measurement], dict[str, str]]:
    """Checks each peer, then times all in turn.

    Args:
      program: what is timed.
      peers: in the order of the result.
      repeats: timed runs of each.
      on_run: called after the check and after each run of a peer, with what was done.

    Returns:
      The measurements of those that run here, and why the others do not.
    """
    results, runs, reasons = [], [], {}
    for peer in peers:
        checked, run = _make(peer, program.checked()), _make(peer, program)
        if isinstance(checked, str) or isinstance(run, str):
            reasons[peer.name] = checked if isinstance(checked, str) else str(run)
            continue
        wrong = count_wrong(program.checked(), checked, peer.bitwise)
        results.append(Measurement(peer.name, program.rows, program.bytes, program.tp, wrong, []))
        runs.append(run)
        on_run(f"{program.rows} rows, {peer.name} checked")
    x = program.place(program.parts())
    for run in runs:
        jax.block_until_ready(run(x))
    for _ in range(repeats):
        for result, run in zip(results, runs, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(x))
            result.seconds.append((time.perf_counter() - start) / program.calls)
            on_run(f"{program.rows} rows, {result.peer}")
    return results, reasons


def seconds_of(run: Callable[[], Any], runs: int) -> float:
    """Of one run, the mean of ``runs`` in a row; one more before them takes up how much later the last rank starts."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    for _ in range(runs):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / runs


def _make(peer: Peer, program: Program) -> Run | str:
    try:
        return peer.make(program)
    except (ValueError, RuntimeError) as error:  # what JAX, the driver and this library refuse with
        return str(error)


def count_wrong(
    program: Program, run: Run, bitwise: bool, layer: Layer = ALL_REDUCE, constants: Constants = ((),)
) -> int:
    """Elements of all ranks of this process that are not what they must be.

    Args:
      program: the layer's `checked`.
      run: its compiled form.
      bitwise: of which the results are the oracle's bit for bit.
      layer: what it computes.
      constants: the layer's, on the devices.
    """
    results = jax.block_until_ready(run(jax.tree.map(program.place, layer.state(program)), constants))
    return sum(
        wrong_elements(np.asarray(shard.data)[0], want, program, bitwise)
        for result, want in zip(jax.tree.leaves(results), jax.tree.leaves(layer.expected(program)), strict=True)
        for shard in result.addressable_shards
    )


def wrong_elements(got: np.ndarray, want: np.ndarray, program: Program, bitwise: bool) -> int:
    """How many differ: in any bit, or by more than the program's roundings can make."""
    if bitwise:
        bits = f"u{got.dtype.itemsize}"
        return int(np.count_nonzero(got.view(bits) != want.view(bits)))
    return int(np.count_nonzero(~_near(got, want, program)))


def _near(got: np.ndarray, want: np.ndarray, program: Program) -> np.ndarray:
    """Whether each sum is within the rounding of TP additions a call in the element type, in any order."""
    got, want = got.astype(np.float32), want.astype(np.float32)
    bound = float(jnp.finfo(program.dtype).eps) * program.tp * program.calls
    return np.isclose(
        got, want, rtol=bound, atol=bound * float(np.abs(want[np.isfinite(want)]).max()), equal_nan=True
    )


# ---- The command -------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    for option in ("tune", "decode"):
        if getattr(args, option):
            raise UsageError(f"argument --{option}: it is about --ranks, which is missing, such as --ranks 2,4,8")
    if args.plot:
        require_matplotlib()
    if len(args.width) > 1:
        raise UsageError(f"argument --width: without --ranks one is needed, got {len(args.width)}")
    (args.width,) = args.width
    found = machine.devices(args.devices)
    mesh = Mesh(np.array(found), ("tp",))
    measurements: list[Measurement] = []
    reasons: dict[str, str] = {}
    with terminal.Progress(len(args.rows) * len(PEERS) * (1 + args.repeats)) as progress:
        for rows in args.rows:
            program = Program(mesh, rows, args.width, args.dtype, args.calls, 1 / mesh.size)
            try:
                results, missing = measure(program, PEERS, args.repeats, progress.step)
            except jax.errors.JaxRuntimeError as error:
                print(f"{rows} rows: {error}", file=sys.stderr)
                return 1
            measurements += results
            reasons |= missing
    facts = machine.facts(found)
    title = _title(args, found, facts)
    _write(args, title, facts, measurements, reasons)
    ours = [m for m in measurements if m.peer == PEERS[0].name]
    return 0 if ours and not any(m.wrong for m in measurements) else 1


def _title(args: argparse.Namespace, found: Sequence[jax.Device], facts: dict[str, Any]) -> str:
    versions = ", ".join(
        f"{name} {facts['versions'][name]}" for name in ("jax-twoshot", "jax", "jaxlib", "python")
    )
    return (
        f"all_reduce of rows x {args.width} {args.dtype} over {len(found)} ranks: {machine.describe(found)}\n"
        f"{versions}; {facts['date']}"
    )


def _write(
    args: argparse.Namespace,
    title: str,
    facts: dict[str, Any],
    measurements: Sequence[Measurement],
    reasons: dict[str, str],
) -> None:
    to_stdout = str(args.json) == "-"
    out = sys.stderr if to_stdout else sys.stdout
    print(_text(title, args, measurements, reasons), file=out)
    if args.json:
        report = json.dumps(facts | _report(args, measurements, reasons), indent=1)
        if to_stdout:
            print(report)
        else:
            args.json.write_text(report + "\n")
    if args.plot and measurements:
        plot(measurements, title, args.plot)


def _text(
    title: str, args: argparse.Namespace, measurements: Sequence[Measurement], reasons: dict[str, str]
) -> str:
    header = (
        "bytes",
        "rows",
        "peer",
        "time us",
        "spread",
        "algbw GB/s",
        "busbw GB/s",
        "#wrong",
        "time/jax_twoshot",
    )
    return "\n".join(
        (
            *(f"# {line}" for line in title.splitlines()),
            f"# time: median of {args.repeats} runs of {args.calls} calls, with a multiply a call; "
            "spread: between the quartiles",
            terminal.table(header, [_row(m, measurements) for m in measurements]),
            *(f"# {name} is not in the table: {reason}" for name, reason in reasons.items()),
        )
    )


def _row(m: Measurement, measurements: Sequence[Measurement]) -> tuple[str, ...]:
    ratio = _ratio(m, measurements)
    return (
        str(m.bytes),
        str(m.rows),
        m.peer,
        f"{m.median * 1e6:.2f}",
        f"{m.spread:.0%}",
        f"{m.algbw:.3f}",
        f"{m.busbw:.3f}",
        str(m.wrong),
        "-" if ratio is None else f"{ratio:.2f}",
    )


def _ratio(m: Measurement, measurements: Sequence[Measurement]) -> float | None:
    """Its time over ours for the same message."""
    return next(
        (m.median / o.median for o in measurements if (o.peer, o.rows) == (PEERS[0].name, m.rows)), None
    )


def _report(
    args: argparse.Namespace, measurements: Sequence[Measurement], reasons: dict[str, str]
) -> dict[str, Any]:
    return {
        "program": {name: getattr(args, name) for name in ("width", "dtype", "repeats", "calls")},
        "measurements": [
            dataclasses.asdict(m)
            | {
                "median_seconds": m.median,
                "quartiles_seconds": m.quartiles,
                "algbw_gb_per_s": m.algbw,
                "busbw_gb_per_s": m.busbw,
                "time_over_ours": _ratio(m, measurements),
            }
            for m in measurements
        ],
        "not_measured": reasons,
    }


# ---- The picture -------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    if machine.version("matplotlib") is None:
        raise UsageError("argument --plot: matplotlib is not installed; pip install 'jax_twoshot[bench]'")


def plot(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Draws time against bytes, a line a peer with its quartiles as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    for peer in dict.fromkeys(m.peer for m in measurements):
        of_peer = sorted((m for m in measurements if m.peer == peer), key=lambda m: m.bytes)
        sizes = [m.bytes for m in of_peer]
        low, high = zip(*(m.quartiles for m in of_peer), strict=True)
        (line,) = axes.plot(sizes, [1e6 * m.median for m in of_peer], marker="o", label=peer)
        axes.fill_between(
            sizes, [1e6 * s for s in low], [1e6 * s for s in high], color=line.get_color(), alpha=0.2
        )
    sizes = sorted({m.bytes for m in measurements})
    rows = {m.bytes: m.rows for m in measurements}
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(
        sizes, [f"{size / 1024:.4g} KiB\n{rows[size]} row{'s' * (rows[size] > 1)}" for size in sizes]
    )
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("message of each rank")
    axes.set_ylabel("time of a call, us (median and quartiles)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)
