"""``bench --ranks``: ours, its floor and every peer that runs here, with a process for each rank on NVIDIA GPUs.

The parent launches the workers for one number of ranks after the other. A worker says on its standard output what it
is about to do, and hands over each message size that is done. A peer that refuses is left out; one that hangs,
crashes or fails while it runs takes the workers along: the parent drops it and launches them again for the sizes that
are left. Each of a worker's steps has a deadline, which needs no help from what hangs.

A sample is the time of a call, of the rank that took longest. Peers take turns, sample by sample, with a barrier over
TCP between them, which is none of the peers.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_twoshot import _launch, _settings
from jax_twoshot.cli import bench, decode, fused, gpu_peers, machine, ranks, terminal, tune
from jax_twoshot.cli.gpu_peers import DECODE, GRAPH, JAX, OURS, Cell, Contender, Peer

STEP_SECONDS = 60
"""Deadline of a step of a worker that has none of its own."""
START_SECONDS = 150
"""Until the workers of a launch have found each other."""
GRACE_SECONDS = 5
"""What the other workers get when one has ended."""
WAIT_SECONDS = "40"
"""A rank's deadline for the others, where ``JAX_TWOSHOT_TIMEOUT`` does not say."""
PACKAGES = ("flashinfer-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Of the peers; their versions go into the report."""
NO_PEERS = (OURS, gpu_peers.NO_SUM, *gpu_peers.VARIANTS, *gpu_peers.FLOORS, *gpu_peers.REPLAYED)
"""What stands in the table and competes with nobody."""

PROGRAMS = {
    False: (
        f"{GRAPH}: the kernel alone in a CUDA graph; {JAX}: a jitted program, with a multiply a call; "
        f"{DECODE}: time of a step of {decode.LAYERS} layers with two sums each, {decode.STEPS} in a run; "
        f"{', '.join(gpu_peers.FLOORS)}: {OURS} on 16 bytes a rank; {gpu_peers.REPLAYED[1]}: a jitted program of "
        "nothing but calls",
    ),
    True: (
        f"{gpu_peers.NORM_JAX}: a jitted program, {OURS}: all_reduce_rms_norm; others: a sum, then XLA's residual add "
        f"and RMSNorm; {gpu_peers.NORM_GRAPH}: the same in one kernel, alone in a CUDA graph, ours with JAX's grid",
        f"{gpu_peers.MATMUL_JAX}: a jitted program, {OURS}: matmul_all_reduce of [rows, width / TP] and "
        "[width / TP, width]; others: XLA's matmul, then a sum",
        f"{gpu_peers.MOE_JAX}: a jitted program, {OURS}: moe_tail of {fused.EXPERTS} experts a token; others: XLA's "
        "weighted sum of the experts, then one of the above",
    ),
}
"""What the table says of its programs, without ``--fused`` and with it."""

_STEP, _DONE = "bench-step ", "bench-done "
"""What the lines of a worker for its parent start with."""


@dataclass(frozen=True)
class Job:
    """What the workers of one launch do; travels as JSON.

    Attributes:
      cells: (rows, width) of each message, in order.
      most_rows: of all messages, those of other launches too.
      dtype, calls, repeats: of the command line.
      shared: all ranks are on one GPU.
      peers: the ones that take part, as ``str(peer)`` names them.
      store: a new file through which the workers find each other.
    """

    cells: list[list[int]]
    most_rows: int
    dtype: str
    calls: int
    repeats: int
    shared: bool
    peers: list[str]
    store: str


@dataclass
class Measurement(bench.Measurement):
    """Of one peer, message and number of ranks; ``seconds`` are of the slowest rank, ``wrong`` of all together.

    Attributes:
      width: of the message.
      program: what is called and how, as of `gpu_peers.Peer`.
    """

    width: int
    program: str

    @property
    def cell(self) -> tuple[str, int, int, int]:
        """What it can be compared with: the same program, ranks, width and rows."""
        return self.program, self.tp, self.width, self.rows


@dataclass(frozen=True)
class Missing:
    """Why a peer was not measured for some messages of a number of ranks."""

    tp: int
    peer: str
    reason: str
    cells: tuple[tuple[int, int], ...]


@dataclass
class Found:
    """What all launches came to; ``replays`` graphs or programs made a timed run."""

    measurements: list[Measurement] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    replays: int = gpu_peers.REPLAYS


# ---- A worker ----------------------------------------------------------------------------------------------


def work(job: Job) -> None:
    """Measures all cells of ``job`` as one of the ranks that the parent has launched."""
    import torch
    import torch.distributed

    faulthandler.dump_traceback_later(START_SECONDS, exit=True)  # until the first step, which has its own
    rank = _launch.initialize()
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    (device,) = jax.local_devices()
    torch.cuda.set_device(device.local_hardware_id)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=mesh.size,
        timeout=timedelta(seconds=gpu_peers.COMPILE_SECONDS),
    )
    peers = [peer for peer in gpu_peers.PEERS if str(peer) in job.peers]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for rows, width in job.cells:
            cell = Cell(
                mesh,
                rows,
                width,
                job.dtype,
                job.calls,
                1 / mesh.size,
                rank=rank,
                ordinal=device.local_hardware_id,
                shared=job.shared,
                most_rows=job.most_rows,
            )
            facts = _facts(jax.devices()) | {"table": gpu_peers.table_name(cell)}
            found = measure(cell, peers, job.repeats, _step, agree) | {"facts": facts}
            print(_DONE + json.dumps(found), flush=True)
    _launch.summary()


def _facts(devices: Sequence[jax.Device]) -> dict[str, Any]:
    facts = machine.facts(devices)
    facts["versions"] |= {name: machine.version(name) for name in PACKAGES}
    facts["machine"]["platform"] = devices[0].client.platform_version
    return facts


def agree(refusal: str | None) -> str | None:
    """The first of all ranks' refusals, the same on every rank."""
    import torch.distributed

    refusals: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(refusals, refusal)
    return next((text for text in refusals if text), None)


@contextmanager
def _step(what: str, seconds: float = STEP_SECONDS) -> Iterator[None]:
    """Says what comes next; after ``seconds`` the process ends with its stacks, also from within a driver call."""
    print(_STEP + what, flush=True)
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure(
    cell: Cell,
    peers: Sequence[Peer],
    repeats: int,
    step: Callable[..., Any],
    agree: Callable[[str | None], str | None],
) -> dict[str, Any]:
    """What this rank finds for one message: its samples and wrong elements of each peer, and the refusals.

    Args:
      cell: the message.
      peers: in the order of the result.
      repeats: samples of each.
      step: opens a step, given ``"PEER: WHAT"`` and how long it may take.
      agree: all ranks' refusal of a peer from this rank's, in which they wait for each other.
    """
    contenders: dict[Peer, Contender] = {}
    refusals = {}
    for peer in peers:
        with step(f"{peer}: set-up for {cell.rows} rows", peer.make_seconds):
            made = _make(peer, cell)
            refusal = agree(made if isinstance(made, str) else None)
        if refusal or isinstance(made, str):
            refusals[str(peer)] = refusal
        else:
            contenders[peer] = made
    wrong: dict[Peer, int] = defaultdict(int)
    samples: dict[Peer, list[float]] = defaultdict(list)
    for peer, contender in contenders.items():
        with step(f"{peer}: check at {cell.rows} rows"):
            wrong[peer] += contender.wrong()
            contender.seconds()  # captures, and warms up
    for _, (peer, contender) in itertools.product(range(repeats), contenders.items()):
        with step(f"{peer}: timing at {cell.rows} rows"):
            agree(None)
            samples[peer].append(contender.seconds())
    for peer, contender in contenders.items():
        with step(f"{peer}: check after timing at {cell.rows} rows"):
            wrong[peer] += contender.wrong()
    return {
        "rows": cell.rows,
        "width": cell.width,
        "bytes": cell.bytes,
        "peers": [{"peer": p.name, "program": p.program, "wrong": wrong[p], "seconds": samples[p]} for p in contenders],
        "refusals": refusals,
    }


def _make(peer: Peer, cell: Cell) -> Contender | str:
    try:
        return peer.make(cell)
    except Exception as error:  # of whatever kind: the peers are not ours
        return _first_line(str(error)) or type(error).__name__


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


# ---- The parent --------------------------------------------------------------------------------------------


class Ears:
    """What the workers of one launch say: steps, finished cells, and other lines since the last step.

    Args:
      tp: how many ranks.
      on_done: called when rank 0 has done another cell.
    """

    def __init__(self, tp: int, on_done: Callable[[str], None] = lambda _: None) -> None:
        self.steps: list[list[str]] = [[] for _ in range(tp)]
        self.done: list[list[dict[str, Any]]] = [[] for _ in range(tp)]
        self.others: list[list[str]] = [[] for _ in range(tp)]
        self._on_done = on_done

    def hear(self, rank: int, line: str) -> None:
        if line.startswith(_STEP):
            self.steps[rank].append(line.removeprefix(_STEP))
            self.others[rank].clear()
        elif line.startswith(_DONE):
            self.done[rank].append(json.loads(line.removeprefix(_DONE)))
            if rank == 0:
                cell = self.done[0][-1]
                self._on_done(f"{len(self.done)} ranks, {cell['rows']} x {cell['width']}")
        elif line.strip():
            self.others[rank].append(line)

    @property
    def stuck(self) -> tuple[int, str] | None:
        """The rank that came least far, and the step that it did not finish: where the trouble was."""
        rank = min(range(len(self.steps)), key=lambda r: len(self.steps[r]))
        return (rank, self.steps[rank][-1]) if self.steps[rank] else None

    def cells(self) -> list[list[dict[str, Any]]]:
        """Of each message that every rank has done, what each rank found."""
        return [list(found) for found in zip(*self.done, strict=False)]


def merge(tp: int, found: Sequence[dict[str, Any]]) -> tuple[list[Measurement], list[Missing]]:
    """One message from what each rank found: the slowest rank of each sample, wrong elements of all ranks."""
    first, measurements = found[0], []
    for parts in zip(*(rank["peers"] for rank in found), strict=True):
        seconds = [max(samples) for samples in zip(*(part["seconds"] for part in parts), strict=True)]
        wrong = sum(part["wrong"] for part in parts)
        measurements.append(
            Measurement(
                parts[0]["peer"],
                first["rows"],
                first["bytes"],
                tp,
                wrong,
                seconds,
                first["width"],
                parts[0]["program"],
            )
        )
    cell = (first["rows"], first["width"])
    return measurements, [Missing(tp, peer, reason, (cell,)) for peer, reason in first["refusals"].items()]


def join(missing: Sequence[Missing]) -> list[Missing]:
    """One entry for each number of ranks, peer and reason, with all its messages."""
    cells: dict[tuple[int, str, str], list[tuple[int, int]]] = defaultdict(list)
    for m in missing:
        cells[m.tp, m.peer, m.reason] += m.cells
    return [Missing(*key, tuple(of_key)) for key, of_key in cells.items()]


def launches(args: argparse.Namespace) -> dict[str, list[str]]:
    """Which peers run in the same processes, by the XLA flags of these. On a shared GPU all refuse that need any."""
    together: dict[str, list[str]] = defaultdict(list)
    for peer in selected(args):
        together["" if args.one_gpu else peer.xla_flags].append(str(peer))
    return together


def run(args: argparse.Namespace) -> int:
    """Measures one number of ranks after the other, and prints what came of it."""
    if args.plot:
        bench.require_matplotlib()
    if args.fused and not args.ranks and not args.one_gpu:
        return _run_here(args)
    ranks.require_gpus(args)
    cells = [(rows, width) for width in args.width for rows in args.rows]
    found = Found()
    try:
        together = launches(args)
        with terminal.Progress(len(args.ranks) * len(cells) * len(together)) as progress:
            for tp, (flags, peers) in itertools.product(args.ranks, together.items()):
                _measure_ranks(tp, cells, args, flags, peers, found, progress.step)
    finally:  # what was measured is shown, whatever ended the rest
        found.missing = join(found.missing)
        _write(args, found)
    return _verdict(args, found, len(args.ranks) * len(cells))


def _run_here(args: argparse.Namespace) -> int:
    """Measures with the devices of this process for ranks."""
    devices = machine.devices(args.devices)
    mesh, found = Mesh(np.array(devices), ("tp",)), Found(facts=_facts(devices))
    args.ranks = [mesh.size]
    cells = [(rows, width) for width in args.width for rows in args.rows]
    with terminal.Progress(len(cells)) as progress:
        for rows, width in cells:
            cell = Cell(
                mesh,
                rows,
                width,
                args.dtype,
                args.calls,
                1 / mesh.size,
                rank=0,
                ordinal=0,
                shared=False,
                most_rows=max(args.rows),
            )
            of_cell = measure(cell, selected(args), args.repeats, lambda *_: nullcontext(), lambda refusal: refusal)
            measurements, missing = merge(mesh.size, [of_cell])
            found.measurements += measurements
            found.missing += missing
            found.replays = cell.replays
            progress.step(f"{mesh.size} ranks, {rows} x {width}")
    found.missing = join(found.missing)
    _write(args, found)
    return _verdict(args, found, len(cells))


def _verdict(args: argparse.Namespace, found: Found, cells: int) -> int:
    """The exit code: whether ours was measured for all ``cells``, and nobody's results are wrong."""
    always: tuple[str, ...] = gpu_peers.VARIANTS if args.tune else (OURS,)
    programs: tuple[str, ...] = (DECODE,) if args.decode else gpu_peers.FUSED_JAX if args.fused else (GRAPH,)
    done = {(m.peer, m.cell) for m in found.measurements if m.peer in always and m.program in programs}
    complete = len(done) == cells * len(always) * len(programs)
    return 0 if complete and not any(m.wrong for m in found.measurements) else 1


def _measure_ranks(
    tp: int,
    cells: Sequence[tuple[int, int]],
    args: argparse.Namespace,
    flags: str,
    peers: Sequence[str],
    found: Found,
    on_done: Callable[[str], None],
) -> None:
    """Launches the workers until all cells are done, each time without the peer that ended them."""
    todo, without, everyone = list(cells), list[str](), "every peer" if not flags else ", ".join(peers)
    end = time.monotonic() + args.timeout
    while todo:
        ears = Ears(tp, on_done)
        names = [name for name in peers if name not in without]
        failure = _launch_workers(tp, todo, names, args, flags, end - time.monotonic(), ears)
        done = ears.cells()
        for of_ranks in done:
            measurements, missing = merge(tp, of_ranks)
            found.measurements += measurements
            found.missing += missing
            found.facts = of_ranks[0]["facts"]
        todo = todo[len(done) :]
        if not todo:
            return
        culprit, reason = blame(failure or "the workers ended early", ears)
        if culprit is None or culprit in without or time.monotonic() > end:
            found.missing.append(Missing(tp, everyone, reason, tuple(todo)))
            return
        without.append(culprit)
        found.missing.append(Missing(tp, culprit, reason, tuple(todo)))


def _launch_workers(
    tp: int,
    todo: Sequence[tuple[int, int]],
    peers: Sequence[str],
    args: argparse.Namespace,
    flags: str,
    seconds: float,
    ears: Ears,
) -> str | None:
    """Why the launch failed, or None."""
    with tempfile.TemporaryDirectory(prefix="jax_twoshot-bench-") as folder:
        store = str(Path(folder, "store"))
        job = Job(
            [list(cell) for cell in todo],
            max(args.rows),
            args.dtype,
            args.calls,
            args.repeats,
            args.one_gpu,
            list(peers),
            store,
        )
        variables = environment(args.one_gpu)
        if flags:
            variables["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), flags)).strip()
        if args.tune:
            variables["JAX_TWOSHOT_TUNING"] = str(tune.write_everything(Path(folder)))
        try:
            _launch.launch(
                tp,
                [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(job))],
                one_gpu=args.one_gpu,
                timeout=max(1.0, seconds),
                grace=GRACE_SECONDS,
                env=variables,
                echo=False,
                on_line=ears.hear,
            )
        except (RuntimeError, subprocess.SubprocessError) as error:  # of the workers, or of the MPS daemon
            print(f"{tp} ranks: {error}", file=sys.stderr)
            return str(error)
    return None


def selected(args: argparse.Namespace) -> list[Peer]:
    """The peers that take part: the two algorithms to tune by, the decode steps, the fused calls, or all that sum."""
    if args.tune:
        return [peer for peer in gpu_peers.PEERS if peer.name in gpu_peers.VARIANTS]
    programs = (DECODE,) if args.decode else gpu_peers.FUSED if args.fused else (GRAPH, JAX)
    return [peer for peer in gpu_peers.PEERS if peer.program in programs]


def environment(shared: bool) -> dict[str, str]:
    """Of the workers: no library of theirs makes a multicast object where ours may make none."""
    variables = {
        "JAX_TWOSHOT_TIMEOUT": os.environ.get("JAX_TWOSHOT_TIMEOUT", WAIT_SECONDS),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch, NCCL and the workspaces need memory too
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    if shared:
        variables["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if shared or not _settings.multicast_allowed():
        variables |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    return variables


def blame(failure: str, ears: Ears) -> tuple[str | None, str]:
    """The peer at which a launch ended, None before the first, and a line that says how: a worker's last words."""
    if ears.stuck is None:
        return None, _first_line(failure)
    rank, step = ears.stuck
    peer, _, doing = step.partition(": ")
    lines = ears.others[rank]
    late = next((line for line in lines if line.startswith("Timeout (")), None)
    return peer, f"{doing}: {late or (lines[-1].strip() if lines else _cause(failure, rank))}"


def _cause(failure: str, rank: int) -> str:
    """How the launcher says that a rank has ended."""
    start = f"rank {rank}: "
    lines = (line.removeprefix(start) for line in failure.splitlines() if line.startswith(start))
    return next(lines, _first_line(failure)).partition(";")[0]


# ---- Table, JSON and picture -------------------------------------------------------------------------------


def ratio(m: Measurement, measurements: Sequence[Measurement]) -> float | None:
    """Its time over ours for the same message and program."""
    return next((m.median / o.median for o in measurements if o.peer == OURS and o.cell == m.cell), None)


def lead(measurements: Sequence[Measurement]) -> list[str]:
    """How far ours is ahead of the fastest peer: a line for each program and number of ranks."""
    lines = []
    for program, tp in dict.fromkeys((m.program, m.tp) for m in measurements):
        fastest: dict[tuple[str, int, int, int], float] = {}
        for m in measurements:
            if (m.program, m.tp) != (program, tp) or m.peer in NO_PEERS:
                continue
            if (times := ratio(m, measurements)) is not None:
                fastest[m.cell] = min(times, fastest.get(m.cell, math.inf))
        if fastest:
            ahead = sum(times >= 1 for times in fastest.values())
            mean = statistics.geometric_mean(fastest.values())
            lines.append(
                f"{program}, {tp} ranks: ahead of the fastest peer in {ahead} of {len(fastest)} messages; its time "
                f"over ours: geometric mean {mean:.2f}, least {min(fastest.values()):.2f}"
            )
    return lines


def shares(measurements: Sequence[Measurement]) -> list[str]:
    """How much of each decode step is the sums."""
    alone = {m.cell: m.median for m in measurements if m.peer == gpu_peers.NO_SUM}
    return [
        f"decode, {m.tp} ranks, {m.rows} rows: {m.peer}'s sums are {1 - alone[m.cell] / m.median:.1%} of a step of "
        f"{decode.LAYERS} layers, {1e6 * (m.median - alone[m.cell]) / (2 * decode.LAYERS):.2f} us a sum"
        for m in measurements
        if m.program == DECODE and m.peer != gpu_peers.NO_SUM and m.cell in alone
    ]


def overheads(measurements: Sequence[Measurement]) -> list[str]:
    """What JAX adds to a call: XLA's replay of nothing but calls against a plain CUDA graph of the same launches."""
    plain, replayed = ({m.cell: m.median for m in measurements if m.peer == name} for name in gpu_peers.REPLAYED)
    return [
        f"{tp} ranks, {rows} x {width}: JAX adds {1e6 * (replayed[cell] - plain[cell]):.2f} us to a call, "
        f"{replayed[cell] / plain[cell]:.2f} times the time in a plain CUDA graph"
        for cell in plain
        if cell in replayed
        for _, tp, width, rows in [cell]
    ]


def text(title: str, args: argparse.Namespace, found: Found) -> str:
    header = (
        *("program", "peer", "TP", "bytes", "rows", "width"),
        *("time us", "min..max", "busbw GB/s", "#wrong", f"time/{OURS}"),
    )
    rows = [_row(m, found.measurements) for m in sorted(found.measurements, key=lambda m: (m.program, *m.cell[1:]))]
    return "\n".join(
        (
            *(f"# {line}" for line in title.splitlines()),
            f"# time: median of {args.repeats} runs of {found.replays} x {args.calls} calls, of the slowest rank; "
            "min..max: of these runs",
            *(f"# {line}" for line in PROGRAMS[args.fused]),
            terminal.table(header, rows, left=2),
            *(f"# {line}" for notes in (lead, shares, overheads) for line in notes(found.measurements)),
            *(
                f"# {m.tp} ranks, {m.peer} is not in the table for {_messages(m.cells)}: {m.reason}"
                for m in found.missing
            ),
        )
    )


def _row(m: Measurement, measurements: Sequence[Measurement]) -> tuple[str, ...]:
    times = ratio(m, measurements)
    return (
        m.program,
        m.peer,
        str(m.tp),
        str(m.bytes),
        str(m.rows),
        str(m.width),
        f"{m.median * 1e6:.2f}",
        f"{min(m.seconds) * 1e6:.2f}..{max(m.seconds) * 1e6:.2f}",
        "-" if m.peer in gpu_peers.FLOORS or m.program == DECODE else f"{m.busbw:.2f}",
        str(m.wrong),
        "-" if times is None else f"{times:.2f}",
    )


def _messages(cells: Sequence[tuple[int, int]]) -> str:
    """Such as ``rows 1,2 x 7168``."""
    widths = dict.fromkeys(width for _, width in cells)
    return ", ".join(f"rows {','.join(str(r) for r, w in cells if w == width)} x {width}" for width in widths)


def report(args: argparse.Namespace, found: Found) -> dict[str, Any]:
    """As JSON can hold it, with all samples."""
    program = {name: getattr(args, name) for name in ("ranks", "one_gpu", "rows", "width", "dtype", "repeats", "calls")}
    tables = tune.tables(found.facts["table"], _limits(found)) if args.tune and found.facts else {}
    return found.facts | ({"tables": tables} if tables else {}) | {
        "program": program | {"replays": found.replays, "multicast_allowed": _settings.multicast_allowed()},
        "measurements": [
            dataclasses.asdict(m)
            | {
                "median_seconds": m.median,
                "busbw_gb_per_s": m.busbw,
                "time_over_ours": ratio(m, found.measurements),
            }
            for m in found.measurements
        ],
        "not_measured": [dataclasses.asdict(m) for m in found.missing],
    }


def _title(args: argparse.Namespace, found: Found) -> str:
    if not found.facts:
        return f"all_reduce over {','.join(map(str, args.ranks))} ranks: no launch has ended well"
    facts = found.facts
    device = facts["machine"]["devices"][0]
    where = f"one {device}, shared by all ranks" if args.one_gpu else f"{device}, one a rank"
    what = "all_reduce, fused with what is around it," if args.fused else "all_reduce"
    names = ("jax-twoshot", "jax", "torch", *PACKAGES)
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in names if facts["versions"].get(name))
    return f"{what} of {args.dtype} over {','.join(map(str, args.ranks))} ranks: {where}\n{versions}; {facts['date']}"


def _write(args: argparse.Namespace, found: Found) -> None:
    """The table comes last."""
    title, to_stdout = _title(args, found), str(args.json) == "-"
    if args.json:
        written = json.dumps(report(args, found), indent=1)
        if to_stdout:
            print(written)
        else:
            args.json.write_text(written + "\n")
    if args.plot and found.measurements:
        plot(found.measurements, title, args.plot)
    out = sys.stderr if to_stdout else sys.stdout
    print(text(title, args, found), file=out)
    if args.tune and found.facts:
        file = None if to_stdout or not args.json else str(args.json)
        print(tune.text(found.facts["table"], _limits(found), file), file=out)


def _limits(found: Found) -> dict[int, int]:
    return tune.limits(found.measurements, *gpu_peers.VARIANTS)


def plot(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Draws time against bytes: a column of panels for each number of ranks, a row for each program."""
    import matplotlib
    from matplotlib.figure import Figure

    programs = list(dict.fromkeys(m.program for m in measurements))
    tps = list(dict.fromkeys(m.tp for m in measurements))
    palette = [tuple(color) for color in matplotlib.colormaps["tab20"](range(20))]
    names = dict.fromkeys(m.peer for m in measurements)
    # Strong ones first, then their pale companions.
    colors = dict(zip(names, itertools.cycle(palette[::2] + palette[1::2]), strict=False))
    figure = Figure(figsize=(1 + 4.5 * len(tps), 1 + 4 * len(programs)), layout="constrained")
    panels = figure.subplots(len(programs), len(tps), squeeze=False, sharex=True, sharey="row")
    for (i, program), (j, tp) in itertools.product(enumerate(programs), enumerate(tps)):
        _panel(panels[i][j], [m for m in measurements if (m.program, m.tp) == (program, tp)], colors)
        panels[i][j].set_title(f"{program}, {tp} ranks", fontsize=10)
    for panel in panels[:, 0]:
        panel.set_ylabel("time of a call, us (median, min and max)")
    for panel in panels[-1]:
        panel.set_xlabel("message of each rank, KiB")
    lines = [line for part in title.splitlines() for line in textwrap.wrap(part, 70 * len(tps))]
    figure.suptitle("\n".join(lines), fontsize=9)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, measurements: Sequence[Measurement], colors: dict[str, Any]) -> None:
    for peer in dict.fromkeys(m.peer for m in measurements):
        of_peer = sorted((m for m in measurements if m.peer == peer), key=lambda m: m.bytes)
        sizes = [m.bytes / 1024 for m in of_peer]
        style = "--" if peer in gpu_peers.FLOORS else "-"
        marker = None if peer in gpu_peers.FLOORS else "o"
        axes.plot(
            sizes,
            [1e6 * m.median for m in of_peer],
            style,
            marker=marker,
            markersize=4,
            color=colors[peer],
            linewidth=2.5 if peer == OURS else 1.2,
            label=peer,
        )
        low, high = ([1e6 * pick(m.seconds) for m in of_peer] for pick in (min, max))
        axes.fill_between(sizes, low, high, color=colors[peer], alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", labelsize=6)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    work(Job(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # JAX, torch, NCCL and CUDA graphs: no order is known in which they take themselves down safely
