"""What the ranks of ``worker.py`` check: each function returns what it counted, for ``test_gpu.py`` to judge.

All processes call the same checks in the same order, and draw the same random numbers.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from worker import Job

import jax_twoshot
from jax_twoshot import _ffi, protocol, reference
from jax_twoshot.cli import selftest

BF16 = np.dtype(jnp.bfloat16)
ROWS = (1, 2, 3, 16, 31, 32, 64, 200)
WIDTHS = (32, 64, 576, 2880, 7168, 7169)
CAPACITY = 64 * 7168
"""Elements of a round of the grid: the largest message takes four."""
SPECIAL_ROWS = (1, 3, 31)
DIGEST_SHAPES = ((), (1,), (7,), (3, 577), (16, 2880), (5, 7169))
SHAPE = (3, 2880)
CHAINS = (1, 2, 3, 5, 7)
WALK = (1, 6, 12, 8, 16, 3, 5, 2, 4, 1)
LOOP_CALLS = 20
CAPTURED_CALLS = 100
SOAK_SHAPES = ((1, 7168), (16, 2880), (3, 577), (8, 7168))
CUTE_SHAPES = ((1, 7168), (16, 2880), (3, 576), (8, 7168))
"""Whole chunks."""
KERNELS = Path(__file__).with_name("kernels.py")
SOAK_CALLS = 64
"""Calls of a soak's program."""
WORKSPACES = 200


# ---- Counting ----------------------------------------------------------------------------------------------


class Tally:
    """Compares results with what they must be, bit for bit, some calls late: calls follow each other."""

    PENDING = 8

    def __init__(self) -> None:
        self.calls = self.compared = self.wrong = 0
        self.first: str | None = None
        self._pending: list[tuple[str, jax.Array, np.ndarray]] = []

    def add(self, what: str, result: jax.Array, want: np.ndarray) -> None:
        """``result`` is ``[TP, ...]``, and every rank's row of it must be ``want``."""
        self._pending.append((what, result, want))
        if len(self._pending) > self.PENDING:
            self._compare(*self._pending.pop(0))

    def _compare(self, what: str, result: jax.Array, want: np.ndarray) -> None:
        self.calls += 1
        for shard in result.addressable_shards:
            got = np.asarray(shard.data)[0]
            assert (got.shape, got.dtype) == (want.shape, want.dtype), f"{what}: {got.shape} {got.dtype}"
            bad = np.argwhere(bits(got) != bits(want))
            self.compared += got.size
            self.wrong += len(bad)
            if len(bad) and self.first is None:
                at = tuple(bad[0].tolist())
                self.first = (
                    f"{what}: rank {shard.index[0].start}, {len(bad)} of {got.size} elements are wrong, "
                    f"the first at {at}: {got[at]!r} instead of {want[at]!r}"
                )

    def result(self) -> dict[str, Any]:
        while self._pending:
            self._compare(*self._pending.pop(0))
        return {"calls": self.calls, "compared": self.compared, "wrong": self.wrong, "first": self.first}


def bits(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def values(random: np.random.Generator, *shape: int, dtype: Any = BF16) -> np.ndarray:
    return (30 * random.standard_normal(shape, np.float32)).astype(dtype)


def sum_program(job: Job, workspace: jax_twoshot.Workspace) -> Callable:
    return job.program(lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace))


# ---- Bits --------------------------------------------------------------------------------------------------


def grid(job: Job) -> dict[str, Any]:
    """Every shape in every dtype, also with values that go wrong."""
    tally = {"calls": 0, "compared": 0, "wrong": 0, "first": None}
    for outcome in selftest.run_cases(job.mesh.devices.tolist(), _grid_cases(job.tp)):
        if outcome.error:
            raise RuntimeError(outcome.error)
        tally["calls"] += outcome.calls
        tally["compared"] += outcome.elements
        tally["wrong"] += outcome.wrong
        tally["first"] = tally["first"] or (outcome.first and str(outcome.first))
    return tally


def _grid_cases(tp: int) -> Iterator[selftest.Case]:
    for dtype in protocol.FORMATS:
        for rows, special in ((ROWS, False), (SPECIAL_ROWS, True)):
            shapes = tuple((r, w) for r in rows for w in WIDTHS)
            yield selftest.Case("grid", (("tp", tp),), ("tp",), dtype, shapes, CAPACITY, special)


def digest(job: Job) -> dict[str, Any]:
    """SHA-256 of each rank's sums of fixed inputs with any bits, to be compared with another backend's."""
    hashes = {rank: hashlib.sha256() for rank in job.here}
    for dtype in protocol.FORMATS:
        case = selftest.Case("digest", (("tp", job.tp),), ("tp",), dtype, DIGEST_SHAPES, 4096, special=True)
        with jax_twoshot.Workspace(job.mesh, "tp", rows=1, width=case.capacity, dtype=dtype) as workspace:
            program = sum_program(job, workspace)
            for parts in selftest.inputs(case):
                for shard in program(job.place(parts)).addressable_shards:
                    hashes[shard.index[0].start].update(np.asarray(shard.data).tobytes())
    return {"sha256": [h.hexdigest() for h in hashes.values()]}


# ---- Replays -----------------------------------------------------------------------------------------------


def feed(total: jax.Array, given: jax.Array) -> jax.Array:
    """What a rank puts into the next call of a chain. The product is exact: one rounding, fused or not."""
    scale = jnp.where(lax.axis_index("tp") % 2 == 0, 0.5, -0.25).astype(total.dtype)
    return total * scale + given


def chain(given: np.ndarray, calls: int) -> list[np.ndarray]:
    """The sums of ``calls`` calls, each on what ``feed`` makes of the one before, from ``[TP, ...]``."""
    scale = np.where(np.arange(len(given)) % 2 == 0, 0.5, -0.25).astype(given.dtype)
    scale = scale.reshape(-1, *[1] * (given.ndim - 1))
    sums = [reference.all_reduce(given)]
    while len(sums) < calls:
        sums.append(reference.all_reduce(sums[-1] * scale + given))
    return sums


def chain_program(job: Job, workspace: jax_twoshot.Workspace, calls: int) -> Callable:
    """Unrolled; returns every sum."""

    def rank(given: jax.Array) -> list[jax.Array]:
        sums = [jax_twoshot.all_reduce(given, "tp", workspace=workspace)]
        while len(sums) < calls:
            sums.append(jax_twoshot.all_reduce(feed(sums[-1], given), "tp", workspace=workspace))
        return sums

    return job.program(rank)


@contextmanager
def small_workspace(job: Job) -> Iterator[jax_twoshot.Workspace]:
    with jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880) as workspace:
        yield workspace


def replays(job: Job) -> dict[str, Any]:
    """One call a program, a new input each run."""
    random, tally = np.random.default_rng(1), Tally()
    before = _ffi.cuda_handler_calls()
    with small_workspace(job) as workspace:
        program = sum_program(job, workspace)
        for run in range(job.runs(1000)):
            parts = values(random, job.tp, *SHAPE)
            tally.add(f"run {run}", program(job.place(parts)), reference.all_reduce(parts))
        return tally.result() | {"handler_calls": _ffi.cuda_handler_calls() - before}


def chains(job: Job) -> dict[str, Any]:
    """Programs of several calls, one rank late at every other run."""
    random, tally = np.random.default_rng(2), Tally()
    with small_workspace(job) as workspace:
        for calls in CHAINS:
            program = chain_program(job, workspace, calls)
            for run in range(job.runs(500)):
                given = values(random, job.tp, *SHAPE)
                placed = job.place(given)
                if run % 2:
                    job.hold_up_one(random)
                for index, (sums, want) in enumerate(zip(program(placed), chain(given, calls), strict=True)):
                    tally.add(f"{calls} calls, run {run}, call {index}", sums, want)
        return tally.result()


def walk(job: Job) -> dict[str, Any]:
    """Row counts that change from call to call on one workspace."""
    random, tally = np.random.default_rng(3), Tally()
    with small_workspace(job) as workspace:
        program = sum_program(job, workspace)
        for call in range(job.runs(2000)):
            rows = WALK[call % len(WALK)] if call // len(WALK) % 2 == 0 else random.integers(1, 17)
            parts = values(random, job.tp, rows, 2880)
            tally.add(f"call {call} of {rows} rows", program(job.place(parts)), reference.all_reduce(parts))
        return tally.result()


def loops(job: Job) -> dict[str, Any]:
    """Chains in ``lax.scan``, and in ``lax.while_loop`` with a count that is data."""
    random, tally = np.random.default_rng(4), Tally()
    with small_workspace(job) as workspace:

        def scan(given: jax.Array) -> jax.Array:
            def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
                total = jax_twoshot.all_reduce(x, "tp", workspace=workspace)
                return feed(total, given), total

            return lax.scan(step, given, length=LOOP_CALLS)[1]

        def loop(given: jax.Array, calls: jax.Array) -> jax.Array:
            def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                call, x, _ = state
                total = jax_twoshot.all_reduce(x, "tp", workspace=workspace)
                return call + 1, feed(total, given), total

            return lax.while_loop(lambda state: state[0] < calls, step, (jnp.int32(0), given, given))[2]

        scanned, looped = job.program(scan), job.program(loop)
        for run in range(job.runs(30)):
            given, calls = values(random, job.tp, *SHAPE), int(random.integers(1, LOOP_CALLS + 1))
            want, placed = chain(given, LOOP_CALLS), job.place(given)
            tally.add(f"scan, run {run}", scanned(placed), np.stack(want))
            counts = job.place(np.full(job.tp, calls, np.int32))
            tally.add(f"while_loop of {calls}, run {run}", looped(placed, counts), want[calls - 1])
        return tally.result()


def kept(job: Job) -> dict[str, Any]:
    """One input, every result kept alive: addresses move, and each result must still be right at the end."""
    given, calls = values(np.random.default_rng(5), job.tp, *SHAPE), 5
    placed, want, tally = job.place(given), chain(given, calls), Tally()
    with small_workspace(job) as workspace:
        program = chain_program(job, workspace, calls)
        results = [program(placed) for _ in range(job.runs(300))]
        for run, sums in enumerate(results):
            for index in range(calls):
                tally.add(f"run {run}, call {index}", sums[index], want[index])
        return tally.result()


def capture(job: Job) -> dict[str, Any]:
    """How often XLA calls the handler in 50 runs of 100 calls."""
    random, tally = np.random.default_rng(6), Tally()
    before = _ffi.cuda_handler_calls()
    with small_workspace(job) as workspace:

        def rank(given: jax.Array) -> jax.Array:
            x = given
            for _ in range(CAPTURED_CALLS - 1):
                x = feed(jax_twoshot.all_reduce(x, "tp", workspace=workspace), given)
            return jax_twoshot.all_reduce(x, "tp", workspace=workspace)

        program = job.program(rank)
        given = values(random, job.tp, *SHAPE)
        placed, want = job.place(given), chain(given, CAPTURED_CALLS)[-1]
        runs = job.runs(50)
        for run in range(runs):
            result = jax.block_until_ready(program(placed))
            tally.add(f"run {run}", result, want)
            del result
        counted = tally.result()
    return counted | {"launches": runs * CAPTURED_CALLS, "handler_calls": _ffi.cuda_handler_calls() - before}


def profile(job: Job) -> dict[str, Any]:
    """Our launches in a trace of 20 runs of 100 calls, by the kernel's name on the device; nothing is captured anew."""
    given = job.place(values(np.random.default_rng(9), job.tp, *SHAPE))
    with small_workspace(job) as workspace:

        def rank(x: jax.Array) -> jax.Array:
            for _ in range(CAPTURED_CALLS):
                x = jax_twoshot.all_reduce(x, "tp", workspace=workspace) * jnp.asarray(0.125, x.dtype)
            return x

        program = job.program(rank, donate=(0,))
        for _ in range(10):  # the donated input and the result take turns: every address has been recorded
            given = jax.block_until_ready(program(given))
        before = _ffi.cuda_handler_calls()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(20):
                    given = jax.block_until_ready(program(given))
            (file,) = Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            names = Counter(event.name for plane in planes for line in plane.lines for event in line.events)
    ours = {name: count for name, count in names.items() if "AllReduce" in name or "all_reduce" in name}
    graphs = {name: count for name, count in names.items() if "GraphLaunch" in name or "LaunchKernel" in name}
    return {"handler_calls": _ffi.cuda_handler_calls() - before, "kernels": ours, "host": graphs}


# ---- Soak --------------------------------------------------------------------------------------------------


def soak(job: Job) -> dict[str, Any]:
    """Very many calls in captured programs, ranks late at random, compared on the device."""
    with jax_twoshot.Workspace(job.mesh, "tp", rows=8, width=7168) as workspace:
        return _soak(job, lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace), SOAK_SHAPES)


def deferred_soak(job: Job) -> dict[str, Any]:
    """The same with a kernel that re-arms what the call before it has read."""
    with jax_twoshot.Workspace(job.mesh, "tp", rows=8, width=7168, generations=3) as workspace:
        return _soak(job, lambda x: cute_sum(x, workspace), CUTE_SHAPES)


def _soak(job: Job, all_reduce: Callable[[jax.Array], jax.Array], shapes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    random = np.random.default_rng(7)
    before, start = _ffi.cuda_handler_calls(), time.monotonic()
    runs = -(-job.calls // SOAK_CALLS)
    program = job.program(_soak_program(job.tp, all_reduce, shapes), donate=(0, 1))
    # One counter goes round on the device: no input from the host, and the same addresses at each run.
    number, wrong = (job.place(np.zeros(job.tp, np.int32)) for _ in range(2))
    for run in range(runs):
        if random.random() < 0.2:
            job.hold_up_one(random)
        number, wrong = program(number, wrong)
        if run % 32 == 0:
            jax.block_until_ready(number)
    counted = [int(np.asarray(shard.data)[0]) for shard in wrong.addressable_shards]
    done = {int(np.asarray(shard.data)[0]) for shard in number.addressable_shards}
    assert done == {runs}, f"{done} runs instead of {runs}"
    return {
        "calls": runs * SOAK_CALLS,
        "compared": runs * (SOAK_CALLS // 2) // len(shapes) * 2 * sum(r * w for r, w in shapes),
        "wrong": sum(counted),
        "first": None,
        "handler_calls": _ffi.cuda_handler_calls() - before,
        "microseconds a call": round(1e6 * (time.monotonic() - start) / (runs * SOAK_CALLS), 2),
    }


def _soak_program(
    tp: int, all_reduce: Callable[[jax.Array], jax.Array], shapes: Sequence[tuple[int, int]]
) -> Callable:
    """``(run, wrong)`` to the next run's. Calls in pairs: one on new integers, the other on its sum."""

    def count(got: jax.Array, want: jax.Array) -> jax.Array:
        want = want.astype(jnp.float32).astype(got.dtype)
        words = (lax.bitcast_convert_type(x, jnp.uint16) for x in (got, want))
        return jnp.sum(jnp.not_equal(*words), dtype=jnp.int32)

    def rank(run: jax.Array, wrong: jax.Array) -> tuple[jax.Array, jax.Array]:
        for pair in range(SOAK_CALLS // 2):
            number = run * (SOAK_CALLS // 2) + pair
            shape = shapes[pair % len(shapes)]
            want = sum(_integers(shape, number, other, tp) for other in range(tp))
            # The count, zero if all is well, ties each pair to the one before.
            mine = _integers(shape, number, lax.axis_index("tp"), tp) + wrong
            once = all_reduce(mine.astype(BF16))
            twice = all_reduce(once)
            wrong += count(once, want) + count(twice, tp * want)
        return run + 1, wrong

    return rank


def _integers(shape: tuple[int, ...], number: jax.Array, rank: int | jax.Array, tp: int) -> jax.Array:
    """Mixed bits of place, call and rank, so small that BF16 holds the sum of all ranks exactly."""
    places = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    seed = number.astype(jnp.uint32) * jnp.uint32(64) + jnp.asarray(rank, jnp.uint32)
    x = places * jnp.uint32(0x9E3779B1) + seed * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 15)) * jnp.uint32(0xC2B2AE35)
    return ((x ^ (x >> 13)) % jnp.uint32(256 // tp)).astype(jnp.int32)


# ---- Kernels of one's own ----------------------------------------------------------------------------------


def cute_sum(x: jax.Array, workspace: jax_twoshot.Workspace) -> jax.Array:
    """What ``all_reduce`` would give for whole chunks; in the stand-in for one GPU, the ranks are the first axis."""
    kernel = jax_twoshot.CuteKernel(KERNELS, "Sum", **({"deferred": True} if workspace.handle.deferred else {}))
    shape = x.shape[1:] if workspace.handle.owners == 1 else x.shape
    chunks = int(np.prod(shape)) // 8
    return jax_twoshot.cute_call(
        kernel,
        x,
        workspace=workspace,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        scalars=[chunks],
        grid=workspace.grid(chunks),
        varying=(),
    )


def cute(job: Job) -> dict[str, Any]:
    """A kernel and ``all_reduce`` by turns on one workspace, in programs of both, one rank late at every other run."""
    random, tally = np.random.default_rng(13), Tally()
    with jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=7168) as workspace:

        def rank(given: jax.Array) -> list[jax.Array]:
            one = cute_sum(given, workspace)
            two = jax_twoshot.all_reduce(feed(one, given), "tp", workspace=workspace)
            return [one, two, cute_sum(feed(two, given), workspace)]

        program = job.program(rank)
        for run in range(job.runs(400)):
            given = values(random, job.tp, *CUTE_SHAPES[run % len(CUTE_SHAPES)])
            placed = job.place(given)
            if run % 2:
                job.hold_up_one(random)
            for index, (sums, want) in enumerate(zip(program(placed), chain(given, 3), strict=True)):
                tally.add(f"run {run}, call {index}", sums, want)
        return tally.result()


def oversize(job: Job) -> dict[str, Any]:
    """What a kernel gets that is given more than the workspace holds."""
    with jax_twoshot.Workspace(job.mesh, "tp", rows=1, width=2880, owners=1, tp=4) as workspace:
        program = job.program(lambda x: cute_sum(x, workspace))
        given = job.place(np.ones((1, 4, 2, 2880), BF16))
        return {
            "numbers in the result": _numbers(lambda: program(given)),
            "check": _refusal(workspace.check, RuntimeError),
            "next call": _numbers(lambda: program(given)),
        }


def all_to_all(job: Job) -> dict[str, Any]:
    """A kernel that collects every rank's part and sums nothing."""
    random, tally, chunks = np.random.default_rng(14), Tally(), 360
    with small_workspace(job) as workspace:

        def rank(x: jax.Array) -> jax.Array:
            return jax_twoshot.cute_call(
                jax_twoshot.CuteKernel(KERNELS, "PartsInOrder"),
                x,
                workspace=workspace,
                out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                scalars=[chunks],
                grid=workspace.grid(chunks),
            )

        program = job.program(rank)
        for run in range(job.runs(100)):
            parts = values(random, job.tp, job.tp, chunks * 8)
            for rank_here, shard in zip(job.here, program(job.place(parts)).addressable_shards, strict=True):
                tally.add(f"run {run}", _Alone(shard), parts[:, rank_here])
        return tally.result()


class _Alone:
    """One shard of a result, which only this rank can compare."""

    def __init__(self, shard: Any) -> None:
        self.addressable_shards = [shard]


def stand_in(job: Job) -> dict[str, Any]:
    """One GPU whose slots play the ranks: re-armed at once and deferred, alone and three calls in a program."""
    random, tally = np.random.default_rng(15), Tally()
    for tp, generations in ((2, 2), (4, 3), (8, 2), (8, 3)):
        options = {"owners": 1, "tp": tp, "generations": generations}
        with jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=7168, **options) as workspace:

            def rank(x: jax.Array, workspace: jax_twoshot.Workspace = workspace) -> list[jax.Array]:
                one = cute_sum(x, workspace)
                two = cute_sum(x + one, workspace)
                return [one, two, cute_sum(x + two, workspace)]

            program = job.program(rank)
            for run in range(job.runs(100)):
                parts = values(random, tp, *CUTE_SHAPES[run % len(CUTE_SHAPES)])
                want = [reference.all_reduce(parts)]
                while len(want) < 3:
                    want.append(reference.all_reduce(parts + want[-1]))
                for index, (got, expected) in enumerate(zip(program(job.place(parts[None])), want, strict=True)):
                    tally.add(f"{tp} ranks, {generations} generations, run {run}, call {index}", got, expected)
            (view,) = workspace.views(1)
            assert view.gather - view.recv == workspace.handle.layout.recv_bytes
    return tally.result()


# ---- Set-up, lifetime, errors ------------------------------------------------------------------------------


def setup(job: Job) -> dict[str, Any]:
    """Seconds from ``Workspace(...)`` to the first result; of the first call here only in a fresh process."""
    parts, tally = values(np.random.default_rng(8), job.tp, *SHAPE), Tally()
    placed = jax.block_until_ready(job.place(parts))
    job.barrier()
    start = time.monotonic()
    with small_workspace(job) as workspace:
        made = time.monotonic()
        result = jax.block_until_ready(sum_program(job, workspace)(placed))
        end = time.monotonic()
        tally.add("the first call", result, reference.all_reduce(parts))
        return tally.result() | {"workspace": round(made - start, 3), "first result": round(end - start, 3)}


def errors(job: Job) -> dict[str, Any]:
    """The text of every refusal that a user can run into, None where there was none. CUDA only."""
    x = job.shape(SHAPE, BF16)
    other_mesh = Mesh(job.mesh.devices[::-1], ("tp",))

    def lower(workspace: jax_twoshot.Workspace | None, x: Any, mesh: Mesh | None = None) -> None:
        job.program(lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace), mesh).lower(x)

    texts = {"no workspace": _refusal(lambda: lower(None, x), ValueError)}
    with small_workspace(job) as workspace:
        integers = job.shape(SHAPE, np.int32)
        reordered = job.shape(SHAPE, BF16, other_mesh)
        texts["dtype"] = _refusal(lambda: lower(workspace, integers), TypeError)
        texts["device order"] = _refusal(lambda: lower(workspace, reordered, other_mesh), ValueError)
        texts["other format"] = _refusal(lambda: lower(workspace, job.shape(SHAPE, np.float32)), ValueError)
    texts["closed"] = _refusal(lambda: lower(workspace, x), ValueError)
    return {"texts": texts}


def _refusal(action: Callable[[], Any], kind: type[Exception]) -> str | None:
    try:
        action()
    except kind as error:
        return str(error)
    return None


def closed(job: Job) -> dict[str, Any]:
    """A compiled program goes on after its workspace was closed; when it is gone, so is the workspace."""
    random, tally = np.random.default_rng(9), Tally()
    with small_workspace(job) as workspace:
        program = chain_program(job, workspace, 5)
        _run_chains(job, program, random, tally, "open")
    _run_chains(job, program, random, tally, "closed")
    held = _ffi.cuda_workspace_in_use(workspace.handle.id)
    counted = tally.result()
    del program
    _collect()
    return counted | {"held": held, "held after": _ffi.cuda_workspace_in_use(workspace.handle.id)}


def dropped(job: Job) -> dict[str, Any]:
    """The same for a workspace that nobody closed and nobody keeps."""
    random, tally = np.random.default_rng(10), Tally()
    workspace = jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880)
    number = workspace.handle.id
    program = chain_program(job, workspace, 5)
    _run_chains(job, program, random, tally, "kept")
    compiled = program.lower(job.shape(SHAPE, BF16)).compile()  # holds no function, hence no workspace
    gone = weakref.ref(workspace)
    del workspace, program
    _collect()
    assert gone() is None, "something keeps the workspace: this check shows nothing"
    job.barrier()
    _run_chains(job, compiled, random, tally, "dropped")
    held = _ffi.cuda_workspace_in_use(number)
    counted = tally.result()
    del compiled
    _collect()
    return counted | {"held": held, "held after": _ffi.cuda_workspace_in_use(number)}


def _run_chains(job: Job, program: Callable, random: np.random.Generator, tally: Tally, what: str) -> None:
    for run in range(job.runs(20)):
        given = values(random, job.tp, *SHAPE)
        for index, (sums, want) in enumerate(zip(program(job.place(given)), chain(given, 5), strict=True)):
            tally.add(f"{what}, run {run}, call {index}", sums, want)


def _collect() -> None:
    jax.clear_caches()
    gc.collect()


def workspaces(job: Job) -> dict[str, Any]:
    """Bytes of device memory that very many workspaces leave behind, half of them closed and half dropped."""
    import torch

    def make(count: int) -> list[int]:
        numbers = []
        for index in range(count):
            workspace = jax_twoshot.Workspace(job.mesh, "tp", rows=64, width=7168)
            numbers.append(workspace.handle.id)
            if index % 2:
                workspace.close()
        del workspace
        gc.collect()
        job.barrier()
        return numbers

    make(job.runs(20))  # what the driver keeps for itself
    before = torch.cuda.mem_get_info()[0]
    job.barrier()
    numbers = make(job.runs(WORKSPACES))
    grown = before - torch.cuda.mem_get_info()[0]
    job.barrier()
    return {"made": len(numbers), "held": sum(map(_ffi.cuda_workspace_in_use, numbers)), "grown": grown}


# ---- Ranks that are late or gone ---------------------------------------------------------------------------

LATE = 2
"""The rank that is."""


class _Warnings(logging.Handler):
    """The texts that the library logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def slow(job: Job) -> dict[str, Any]:
    """One rank is late by a third of the deadline: the others log it, and all is right."""
    random, tally, warnings = np.random.default_rng(11), Tally(), _Warnings()
    logging.getLogger("jax_twoshot").addHandler(warnings)
    with small_workspace(job) as workspace:
        program = sum_program(job, workspace)
        for call in range(4):
            parts = values(random, job.tp, 16, 2880)
            placed = jax.block_until_ready(job.place(parts))
            job.barrier()
            if call in (1, 3) and LATE in job.here:
                time.sleep(_deadline() / 3)
            result = jax.block_until_ready(program(placed))
            tally.add(f"call {call}", result, reference.all_reduce(parts))
            job.barrier()
        time.sleep(1)  # the log is written by a thread that looks twice a second
        workspace.check()
        counted = tally.result()
    logging.getLogger("jax_twoshot").removeHandler(warnings)
    return counted | {"warnings": warnings.texts}


def absent(job: Job) -> dict[str, Any]:
    """One rank never calls."""

    def act() -> dict[str, Any]:
        job.barrier(seconds=6 * _deadline())
        return {"absent": True}

    def after() -> None:
        job.barrier(seconds=6 * _deadline())

    return _without_one(job, act, after)


def absent_from_kernel(job: Job) -> dict[str, Any]:
    """One rank does not call the others' kernel."""
    workspace = jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880)
    program = job.program(lambda x: cute_sum(x, workspace))
    given, tally = values(np.random.default_rng(16), job.tp, 16, 2880), Tally()
    placed = job.place(given)
    tally.add("all call", program(placed), reference.all_reduce(given))
    counted = tally.result()
    job.barrier()
    if LATE in job.here:
        job.barrier(seconds=6 * _deadline())
        return {"absent": True}
    found = counted | {
        "numbers in the result": _numbers(lambda: program(placed)),
        "check": _refusal(workspace.check, RuntimeError),
        "next call": _numbers(lambda: program(placed)),
    }
    job.barrier(seconds=6 * _deadline())
    return found


def killed(job: Job) -> dict[str, Any]:
    """One rank dies between two calls."""

    def act() -> dict[str, Any]:
        os._exit(17)

    def after() -> None:
        job.lost = True
        job.barrier([rank for rank in range(job.tp) if rank != LATE], seconds=6 * _deadline())

    return _without_one(job, act, after)


def _without_one(job: Job, act: Callable[[], dict[str, Any]], after: Callable[[], None]) -> dict[str, Any]:
    """What the others see when rank ``LATE`` does ``act`` instead of the next call."""
    random = np.random.default_rng(12)
    workspace = jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880)
    one, many = sum_program(job, workspace), chain_program(job, workspace, 20)
    given = values(random, job.tp, 16, 2880)
    placed, tally = job.place(given), Tally()
    for run in range(5):  # both are compiled, and the longer one is replayed
        tally.add(f"run {run}, one call", one(placed), reference.all_reduce(given))
        tally.add(f"run {run}, the last call", many(placed)[-1], chain(given, 20)[-1])
    counted = tally.result()
    job.barrier()
    if LATE in job.here:
        return act()
    start = time.monotonic()
    found = counted | {
        "numbers in the result": _numbers(lambda: one(placed)),
        "waited": round(time.monotonic() - start, 2),
        "check": _refusal(workspace.check, RuntimeError),
        "replay": _numbers(lambda: many(placed)[-1]),
        "next call": _numbers(lambda: one(placed)),
    }
    after()
    return found


def _numbers(call: Callable[[], jax.Array]) -> str | int:
    """How many elements of a call's result are numbers, or the text that it raised."""
    try:
        (shard,) = call().addressable_shards
        return int(np.count_nonzero(~np.isnan(np.asarray(shard.data).astype(np.float32))))
    except jax.errors.JaxRuntimeError as error:
        return str(error)


def _deadline() -> float:
    return float(os.environ["JAX_TWOSHOT_TIMEOUT"])
