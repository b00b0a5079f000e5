"""What the ranks of ``worker.py`` check: each function returns what it counted, for ``test_gpu.py`` to judge.

All processes call the same checks in the same order, and draw the same random numbers.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from worker import Job

import jax_twoshot
from jax_twoshot import _ffi, _fused, _matmul, _moe, cubin, protocol, reference, symmetric
from jax_twoshot.cli import selftest
from jax_twoshot.workspace import _closing

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
SOAK_CHAINS = 6
SOAK_CHAIN_SHAPES = ((1, 2880), (2, 7168), (1, 577))
WORKSPACES = 200
FUSED_SHAPES = ((1, 7168), (6, 7168), (3, 576), (64, 7168), (2, 4096), (12, 2880), (31, 4096), (1, 16384), (70, 7168))
"""The last is larger than the workspace."""
MOE_SHAPES = (
    *((1, 7168, 8), (6, 7168, 8), (3, 576, 2), (64, 7168, 8), (2, 4096, 4), (12, 2880, 4), (31, 4096, 6)),
    *((1, 16384, 9), (70, 2880, 1), (70, 7168, 8)),
)
"""Rows, width, experts of a token; the last is larger than the workspace."""
MATMUL_SHAPES = ((1, 896, 7168), (3, 64, 576), (16, 128, 4096), (17, 96, 2880), (33, 256, 1024), (64, 320, 7168))
"""Rows, K, width."""
LAYERS = 24
EPS = 1e-5


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

    def compare_all(self) -> None:
        while self._pending:
            self._compare(*self._pending.pop(0))

    def result(self) -> dict[str, Any]:
        self.compare_all()
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
        counted, stats = tally.result(), workspace.stats()
    return counted | {
        "launches": runs * CAPTURED_CALLS,
        "handler_calls": _ffi.cuda_handler_calls() - before,
        "rounds": stats.rounds,
        "counted": [stats.calls, sum(stats.algorithms.values()), stats.bytes],
    }


def algorithms(job: Job) -> dict[str, Any]:
    """Which algorithm each round of messages of one round and of several takes, asked for or chosen by itself."""
    random, tally = np.random.default_rng(12), Tally()
    want = dict.fromkeys(protocol.ALGORITHMS, 0)
    with small_workspace(job) as workspace:
        handle = workspace.handle
        for asked in ("auto", *protocol.ALGORITHMS):
            for rows in (1, 16, 200):
                program = job.program(
                    lambda x, asked=asked: jax_twoshot.all_reduce(x, "tp", workspace=workspace, algorithm=asked)
                )
                given = values(random, job.tp, rows, 2880)
                tally.add(f"{asked}, {rows} rows", program(job.place(given)), reference.all_reduce(given))
                chunks = protocol.ceil_div(given[0].nbytes, protocol.CHUNK_BYTES)
                for taken in protocol.rounds(handle.layout, chunks, asked, handle.gpu.one_shot_bytes):
                    want[taken.algorithm] += 1
        return tally.result() | {"counted": workspace.stats().algorithms, "want": want}


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


# ---- Fused layers ------------------------------------------------------------------------------------------


def rms_norm(job: Job) -> dict[str, Any]:
    """``all_reduce_rms_norm``: see `_check_layers`."""
    random, tp = np.random.default_rng(12), job.tp

    def draw(rows: int, width: int) -> tuple[np.ndarray, ...]:
        x, *same = _draw_rms_norm(random, tp, rows, width)
        return x, *_on_each(tp, *same)

    def oracle(x: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, ...]:
        return reference.all_reduce_rms_norm(x, residual[0], weight[0], EPS)

    with jax_twoshot.Workspace(job.mesh, "tp", rows=64, width=7168) as workspace:

        def call(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax_twoshot.all_reduce_rms_norm(x, residual, weight, "tp", eps=EPS, workspace=workspace)

        return _check_layers(job, random, call, oracle, draw, FUSED_SHAPES, SHAPE, runs=30)


def moe_tail(job: Job) -> dict[str, Any]:
    """``moe_tail``, a fifth of the experts on no rank: see `_check_layers`."""
    random, tp = np.random.default_rng(14), job.tp

    def draw(rows: int, width: int, k: int) -> tuple[np.ndarray, ...]:
        *routed, shared, residual, weight = _draw_moe_tail(random, tp, rows, width, k)
        return shared, *_on_each(tp, residual, weight), *routed

    def oracle(shared: np.ndarray, residual: np.ndarray, weight: np.ndarray, *routed: np.ndarray) -> Any:
        return reference.moe_tail(*routed, shared, residual[0], weight[0], EPS)

    with jax_twoshot.Workspace(job.mesh, "tp", rows=64, width=7168, generations=3) as workspace:

        def call(shared: jax.Array, residual: jax.Array, weight: jax.Array, *routed: jax.Array) -> Any:
            return jax_twoshot.moe_tail(*routed, shared, residual, weight, "tp", eps=EPS, workspace=workspace)

        return _check_layers(job, random, call, oracle, draw, MOE_SHAPES, (*SHAPE, 4), runs=12)


def _draw_rms_norm(random: np.random.Generator, tp: int, rows: int, width: int) -> tuple[np.ndarray, ...]:
    """x ``[TP, ...]``, the residual, the weight."""
    return values(random, tp, rows, width), values(random, rows, width), values(random, width)


def _draw_moe_tail(random: np.random.Generator, tp: int, rows: int, width: int, k: int) -> tuple[np.ndarray, ...]:
    """Experts, index, scale and shared part, ``[TP, ...]`` each, the residual, the weight."""
    slots = 1 + rows * k // 2
    index = random.integers(-(slots // 4) - 1, slots, (tp, rows, k)).astype(np.int32)
    routed = values(random, tp, slots, width), index, random.random(index.shape, np.float32)
    return *routed, *_draw_rms_norm(random, tp, rows, width)


def _draw_matmul(random: np.random.Generator, tp: int, rows: int, depth: int, width: int) -> tuple[np.ndarray, ...]:
    """Integers, for which every order of K has the same bits: a and w, ``[TP, ...]`` each."""
    a, w = (random.integers(-4, 5, shape).astype(BF16) for shape in ((tp, rows, depth), (tp, depth, width)))
    return a, w


def _matmul_oracle(a: np.ndarray, w: np.ndarray) -> np.ndarray:
    return reference.all_reduce(np.matmul(a.astype(np.float32), w.astype(np.float32)).astype(BF16))


def _on_each(tp: int, *arrays: np.ndarray) -> list[np.ndarray]:
    """The same on each rank."""
    return [np.broadcast_to(array, (tp, *array.shape)) for array in arrays]


def _check_layers(
    job: Job,
    random: np.random.Generator,
    call: Callable,
    oracle: Callable,
    draw: Callable,
    shapes: Sequence[tuple[int, ...]],
    layer_shape: tuple[int, ...],
    runs: int,
) -> dict[str, Any]:
    """Sizes that walk, then layers that follow each other, unrolled and in ``lax.scan``, a rank late now and then.

    Args:
      job: the ranks.
      random: the same on all processes.
      call: of a layer: what it sums, the residual, and more; gives the normalised rows and the new residual.
      oracle: the same of every rank's operands, ``[TP, ...]`` each.
      draw: such operands of a shape.
      shapes: of the sizes.
      layer_shape: of the layers.
      runs: of the sizes.
    """
    tally = Tally()
    programs = [_compiled(job, call, draw(*shape)) for shape in shapes]
    for run in range(job.runs(runs)):
        given = [draw(*shape) for shape in shapes]
        labels = [f"run {run} of {shape}" for shape in shapes]
        _run_undisturbed(job, random, tally, labels, programs, given, [oracle(*each) for each in given])

    def layer(carry: tuple[jax.Array, ...], more: tuple[jax.Array, ...]) -> Any:
        y, residual = call(*carry, *more)
        return (feed(y, carry[0]), residual), (y, residual)

    def unrolled(x: jax.Array, residual: jax.Array, *more: jax.Array) -> Any:
        carry, results = (x, residual), []
        for _ in range(LAYERS):
            carry, result = layer(carry, more)
            results.append(result)
        return tuple(jnp.stack(each) for each in zip(*results, strict=True))

    def scanned(x: jax.Array, residual: jax.Array, *more: jax.Array) -> Any:
        return lax.scan(lambda carry, _: layer(carry, more), (x, residual), length=LAYERS)[1]

    programs = [_compiled(job, layers, draw(*layer_shape)) for layers in (unrolled, scanned)]
    for run in range(job.runs(30)):
        given = draw(*layer_shape)
        labels = [f"{name}, run {run}" for name in ("unrolled", "scan")]
        _run_undisturbed(job, random, tally, labels, programs, [given] * 2, [_layers(oracle, *given)] * 2)
    return tally.result()


def _layers(oracle: Callable, x: np.ndarray, residual: np.ndarray, *more: np.ndarray) -> list[np.ndarray]:
    scale = np.where(np.arange(len(x)) % 2 == 0, 0.5, -0.25).astype(x.dtype).reshape(-1, 1, 1)
    results = []
    for _ in range(LAYERS):
        results.append(oracle(x, residual, *more))
        y, new_residual = results[-1]
        x, (residual,) = y * scale + x, _on_each(len(x), new_residual)
    return [np.stack(each) for each in zip(*results, strict=True)]


def _compiled(job: Job, call: Callable, given: Sequence[np.ndarray]) -> Callable:
    return job.program(call).lower(*(job.shape(a.shape[1:], a.dtype) for a in given)).compile()


def _run_undisturbed(
    job: Job,
    random: np.random.Generator,
    tally: Tally,
    labels: list[str],
    programs: list[Callable],
    given: list[tuple[np.ndarray, ...]],
    wants: list[Any],
) -> None:
    """Calls that follow each other, a rank late at one of them. No rank compiles or copies meanwhile: where ranks share
    a GPU, that may wait for their kernels, which wait for it."""
    placed = [tuple(map(job.place, operands)) for operands in given]
    jax.block_until_ready(placed)
    job.barrier()
    late, results = random.integers(len(programs)), []
    for number, (program, operands) in enumerate(zip(programs, placed, strict=True)):
        if number == late:
            job.hold_up_one(random)
        results.append(program(*operands))
    jax.block_until_ready(results)
    job.barrier()
    for label, result, want in zip(labels, results, wants, strict=True):
        for what, got, expected in zip(("normalised", "residual"), result, want, strict=True):
            tally.add(f"{label}, {what}", got, expected)
    tally.compare_all()
    job.barrier()


def matmul(job: Job) -> dict[str, Any]:
    """``matmul_all_reduce`` of integers: sizes that walk, a rank late."""
    random, tally = np.random.default_rng(13), Tally()
    with jax_twoshot.Workspace(job.mesh, "tp", rows=64, width=7168) as workspace:
        program = job.program(lambda a, w: jax_twoshot.matmul_all_reduce(a, w, "tp", workspace=workspace))
        for run in range(job.runs(120)):
            shape = MATMUL_SHAPES[run % len(MATMUL_SHAPES)]
            a, w = _draw_matmul(random, job.tp, *shape)
            if run % 3 == 0:
                job.hold_up_one(random)
            tally.add(f"run {run} of {shape}", program(job.place(a), job.place(w)), _matmul_oracle(a, w))
    return tally.result()


def stand_in_layers(job: Job) -> dict[str, Any]:
    """The fused layers' kernels on one GPU whose slots play the ranks: sizes that walk, some layers a program."""
    random, tally = np.random.default_rng(22), Tally()
    for tp in (2, 4, 8):
        for layer in STAND_IN_LAYERS:
            options = {"owners": 1, "tp": tp, "generations": layer.generations}
            with jax_twoshot.Workspace(job.mesh, "tp", rows=64, width=7168, **options) as workspace:
                program = job.program(functools.partial(_layers_on_stand_in, layer, workspace))
                for run in range(job.runs(3 * len(layer.shapes))):
                    shape = layer.shapes[run % len(layer.shapes)]
                    given = layer.draw(random, tp, *shape)
                    want = _follow_each_other(layer, layer.oracle, given)
                    results = program(*(job.place(array[None]) for array in given))
                    for index, (got, expected) in enumerate(zip(results, want, strict=True)):
                        what = f"{layer.call.__name__}, {tp} ranks, run {run} of {shape}, result {index}"
                        tally.add(what, got, expected)
    return tally.result()


def _layers_on_stand_in(layer: StandInLayer, workspace: jax_twoshot.Workspace, *operands: jax.Array) -> list[jax.Array]:
    return _follow_each_other(layer, functools.partial(layer.call, workspace), operands)


def _follow_each_other(layer: StandInLayer, call: Callable, operands: Sequence[Any]) -> list[Any]:
    """All results; each call gets the new residual of the one before it, the last operand but one."""
    results: list[Any] = []
    for _ in range(layer.calls):
        results += call(*operands)
        operands = *operands[:-2], results[-1], operands[-1]
    return results


def _rms_norm_on_stand_in(workspace: jax_twoshot.Workspace, *operands: jax.Array) -> list[jax.Array]:
    residual = operands[-2]
    launch = _fused.launch(workspace.handle, workspace.format, *residual.shape, EPS)
    return _on_stand_in(workspace, launch, operands, [residual.shape] * 2)


def _moe_tail_on_stand_in(workspace: jax_twoshot.Workspace, *operands: jax.Array) -> list[jax.Array]:
    experts, index, *_, residual, _ = operands
    sizes = *residual.shape, experts.shape[1], index.shape[2]
    launch = _moe.launch(workspace.handle, workspace.format, *sizes, EPS)
    return _on_stand_in(workspace, launch, operands, [residual.shape] * 2)


def _matmul_on_stand_in(workspace: jax_twoshot.Workspace, a: jax.Array, w: jax.Array) -> list[jax.Array]:
    (_, rows, depth), (_, _, width) = a.shape, w.shape
    launch = _matmul.launch(workspace.handle, workspace.format, rows, depth, width)
    return _on_stand_in(workspace, launch, (a, w), [(rows, width)])


def _on_stand_in(
    workspace: jax_twoshot.Workspace,
    launch: tuple[cubin.Kernel, int, list[int]],
    operands: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
) -> list[jax.Array]:
    """A kernel of the library's, launched as its call would on a group; operands that differ have an axis of ranks."""
    kernel, grid, scalars = launch
    return jax_twoshot.cute_call(
        jax_twoshot.CuteKernel(kernel.source, kernel.class_name, **dict(kernel.parameters)),
        *operands,
        workspace=workspace,
        out_shape=[jax.ShapeDtypeStruct(shape, BF16) for shape in shapes],
        grid=grid,
        scalars=scalars,
        threads=kernel.threads,
        ctas_per_sm=kernel.ctas_per_sm,
        varying=(),
    )


class StandInLayer(NamedTuple):
    """A fused layer, as `stand_in_layers` checks it.

    Attributes:
      call: of a workspace and the operands: the results.
      oracle: of the operands: what they must be.
      draw: random operands for a number of ranks and a shape.
      shapes: to be walked through.
      generations: of the workspace.
      calls: that follow each other in one program.
    """

    call: Callable
    oracle: Callable
    draw: Callable
    shapes: Sequence[tuple[int, ...]]
    generations: int
    calls: int


STAND_IN_LAYERS = (
    StandInLayer(
        _rms_norm_on_stand_in,
        functools.partial(reference.all_reduce_rms_norm, eps=EPS),
        _draw_rms_norm,
        ((1, 7168), (64, 7168), (3, 576), (12, 2880)),
        generations=2,
        calls=3,
    ),
    StandInLayer(
        _moe_tail_on_stand_in,
        functools.partial(reference.moe_tail, eps=EPS),
        _draw_moe_tail,
        ((1, 7168, 8), (16, 7168, 8), (3, 576, 2), (12, 2880, 4)),
        generations=3,
        calls=3,
    ),
    StandInLayer(
        _matmul_on_stand_in,
        lambda a, w: [_matmul_oracle(a, w)],
        _draw_matmul,
        ((1, 896, 7168), (64, 320, 7168), (3, 64, 576), (17, 96, 2880)),
        generations=2,
        calls=1,
    ),
)


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


def long_soak(job: Job) -> dict[str, Any]:
    """Very many calls with nothing between them, and what memory they leave: chains of sums of sums, which multiply by
    the number of ranks, a power of two, and so stay exact in BF16. A wrong element of any call is one of the last."""
    tp, chain_calls = job.tp, 112 // (job.tp.bit_length() - 1)
    assert tp in (2, 4, 8)
    random, runs = np.random.default_rng(20), -(-job.calls // (chain_calls * SOAK_CHAINS))
    before_calls = _ffi.cuda_handler_calls()

    def rank(run: jax.Array, wrong: jax.Array) -> tuple[jax.Array, jax.Array]:
        for index in range(SOAK_CHAINS):
            shape = SOAK_CHAIN_SHAPES[index % len(SOAK_CHAIN_SHAPES)]
            number = run * SOAK_CHAINS + index
            want = sum(_integers(shape, number, other, tp) for other in range(tp)) + tp * wrong
            mine = _integers(shape, number, lax.axis_index("tp"), tp) + wrong
            total = mine.astype(jnp.bfloat16) * jnp.asarray(2.0**-100, jnp.bfloat16)
            for _ in range(chain_calls):
                total = jax_twoshot.all_reduce(total, "tp", workspace=workspace)
            factor = float(tp) ** (chain_calls - 1) * 2.0**-100
            right = (want.astype(jnp.float32) * jnp.float32(factor)).astype(jnp.bfloat16)
            words = (lax.bitcast_convert_type(x, jnp.uint16) for x in (total, right))
            wrong += jnp.sum(jnp.not_equal(*words), dtype=jnp.int32)
        return run + 1, wrong

    def memory() -> dict[str, int]:
        return {
            "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
            "files": len(os.listdir("/proc/self/fd")),
            "device": _device_memory(),
        }

    with jax_twoshot.Workspace(job.mesh, "tp", rows=2, width=7168) as workspace:
        program = job.program(rank, donate=(0, 1))
        number, wrong = (job.place(np.zeros(tp, np.int32)) for _ in range(2))
        for run in range(runs):
            if run == min(200, runs // 2):
                jax.block_until_ready(number)
                job.barrier()
                warm, start = memory(), time.monotonic()
            if random.random() < 0.05:
                job.hold_up_one(random)
            number, wrong = program(number, wrong)
            if run % 16 == 0:
                jax.block_until_ready(number)
        jax.block_until_ready(number)
        seconds = time.monotonic() - start
        job.barrier()
        end = memory()
        counted = [int(np.asarray(shard.data)[0]) for shard in wrong.addressable_shards]
        done = {int(np.asarray(shard.data)[0]) for shard in number.addressable_shards}
    assert done == {runs}, f"{done} runs instead of {runs}"
    timed = (runs - min(200, runs // 2)) * chain_calls * SOAK_CHAINS
    return {
        "calls": runs * chain_calls * SOAK_CHAINS,
        "compared": sum(r * w for r, w in SOAK_CHAIN_SHAPES) * SOAK_CHAINS // len(SOAK_CHAIN_SHAPES) * runs,
        "wrong": sum(counted),
        "first": None,
        "handler_calls": _ffi.cuda_handler_calls() - before_calls,
        "microseconds a call": round(1e6 * seconds / timed, 2),
        "grown": {name: end[name] - warm[name] for name in warm},
    }


def _device_memory() -> int:
    """Bytes of the GPU that are taken, by whatever process; 0 on CPU."""
    if jax.default_backend() == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


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
    random, tally, warnings, asked = np.random.default_rng(11), Tally(), _Warnings(), []
    logging.getLogger("jax_twoshot").addHandler(warnings)
    with small_workspace(job) as workspace:
        program = sum_program(job, workspace)
        for call in range(4):
            parts = values(random, job.tp, 16, 2880)
            placed = jax.block_until_ready(job.place(parts))
            job.barrier()
            if call in (1, 3) and LATE in job.here:
                time.sleep(_deadline() / 3)
            result = program(placed)
            # While it waits for the late rank: asking waits for nothing.
            asked.append([workspace.stats().rounds, bool(result.is_ready())])
            tally.add(f"call {call}", jax.block_until_ready(result), reference.all_reduce(parts))
            job.barrier()
        time.sleep(1)  # the log is written by a thread that looks twice a second
        workspace.check()
        counted, stats = tally.result(), workspace.stats()
    logging.getLogger("jax_twoshot").removeHandler(warnings)
    return counted | {
        "warnings": warnings.texts,
        "asked": asked,
        "rounds": stats.rounds,
        "slow waits": stats.slow_waits,
    }


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


def reset(job: Job) -> dict[str, Any]:
    """A rank stays away, or comes too late; all reset, and programs compiled before go on, replays too."""
    random, tally, found = np.random.default_rng(13), Tally(), {}
    with jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880, timeout=3) as workspace:
        one, many = sum_program(job, workspace), chain_program(job, workspace, 20)
        given = values(random, job.tp, 16, 2880)
        placed = job.place(given)

        def run(what: str) -> None:
            for number in range(5):
                tally.add(f"{what} {number}, one call", one(placed), reference.all_reduce(given))
                for index, (sums, want) in enumerate(zip(many(placed), chain(given, 20), strict=True)):
                    tally.add(f"{what} {number}, call {index} of 20", sums, want)
            tally.result()
            job.barrier()

        for case in ("stays away", "comes too late", "stays away, and one reset fails"):
            run(f"before one {case}")
            here = LATE in job.here
            if here and case == "comes too late":
                time.sleep(4.5)
            if not here or case == "comes too late":
                found[case] = {"numbers": _numbers(lambda: one(placed)), "next call": _numbers(lambda: one(placed))}
            job.barrier()
            if case == "stays away, and one reset fails":
                found["reset"] = _refusal(lambda: _failing_reset(workspace, fails=0 in job.here), RuntimeError)
                found["call after it"] = _numbers(lambda: one(placed))
            start = time.monotonic()
            workspace.reset()
            found["seconds of a reset"] = round(time.monotonic() - start, 3)
            workspace.check()
        run("at the end")
    return tally.result() | found


def dropped_pushes(job: Job) -> dict[str, Any]:
    """What rank ``LATE`` pushes to rank 0 goes elsewhere; two-shot and one-shot."""
    open_workspace, found = _ffi.open_cuda_workspace, {}
    job.barrier()
    if LATE in job.here:
        _ffi.open_cuda_workspace = functools.partial(_open_with_a_lost_peer, open_workspace)
    try:
        workspace = jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880, timeout=3)
    finally:
        _ffi.open_cuda_workspace = open_workspace
    with workspace:
        given = values(np.random.default_rng(14), job.tp, 16, 2880)
        placed, want = job.place(given), reference.all_reduce(given)
        for algorithm in protocol.ALGORITHMS:
            program = job.program(
                lambda x, a=algorithm: jax_twoshot.all_reduce(x, "tp", workspace=workspace, algorithm=a)
            )
            start = time.monotonic()
            (shard,) = program(placed).addressable_shards
            got = np.asarray(shard.data)[0]
            numbers = ~np.isnan(got.astype(np.float32))
            found[algorithm] = {
                "seconds": round(time.monotonic() - start, 2),
                "numbers": int(np.count_nonzero(numbers)),
                "wrong": int(np.count_nonzero(bits(got)[numbers] != bits(want)[numbers])),
                "check": _refusal(workspace.check, RuntimeError),
            }
            job.barrier()
            workspace.reset()
    return found | {"wrong": sum(found[a]["wrong"] for a in protocol.ALGORITHMS)}


def _open_with_a_lost_peer(open_workspace: Callable, *args: Any) -> Any:
    """Opens a workspace for which rank 0's buffers are memory of nobody."""
    import torch

    *rest, ((device, rank, address, multicast, peers),) = args
    _lost.append(torch.zeros(rest[2].bytes, dtype=torch.uint8, device=f"cuda:{device}"))
    return open_workspace(*rest, [(device, rank, address, multicast, [_lost[-1].data_ptr(), *peers[1:]])])


_lost: list[Any] = []


def wrap(job: Job) -> dict[str, Any]:
    """The count of calls goes through 2^32."""
    random, tally = np.random.default_rng(15), Tally()
    with small_workspace(job) as workspace:
        program = sum_program(job, workspace)
        given = values(random, job.tp, *SHAPE)
        for run in range(3):  # an odd number of calls: generation 1 is next
            tally.add(f"before, run {run}", program(job.place(given)), reference.all_reduce(given))
        tally.result()
        job.barrier()
        control = workspace._cuda.native.control(0)  # type: ignore[union-attr]
        driver = symmetric._Driver()
        driver.fill(0, control + 12, 2**32 - 20, 1)
        job.barrier()
        for run in range(40):
            parts = values(random, job.tp, *SHAPE)
            tally.add(f"run {run}", program(job.place(parts)), reference.all_reduce(parts))
        counted = tally.result()
        words = driver.load(0, control, 4)
    return counted | {"epoch": words[0], "state": words[2], "calls after": words[3]}


def starved(job: Job) -> dict[str, Any]:
    """Each rank in turn has work that fills the GPU several times over before its call; the others wait for it."""
    random, tally = np.random.default_rng(16), Tally()
    with small_workspace(job) as workspace:

        def rank(x: jax.Array, busy: jax.Array) -> jax.Array:
            steps = jnp.where(busy, 400, 0)
            work = lax.fori_loop(0, steps, lambda _, y: jnp.cos(y), jnp.ones((16, 1 << 20), jnp.float32) + busy)
            # A dependence that the compiler cannot see through: 0 for every rank.
            late = jnp.minimum(jnp.abs(work[0, 0]), 0.0).astype(x.dtype)
            return jax_twoshot.all_reduce(x + late, "tp", workspace=workspace)

        program = job.program(rank)
        for run in range(4 * job.tp):
            parts = values(random, job.tp, *SHAPE)
            busy = job.place(np.arange(job.tp) == run % job.tp)
            tally.add(f"run {run}", program(job.place(parts), busy), reference.all_reduce(parts))
        workspace.check()
        return tally.result()


def disagree(job: Job) -> dict[str, Any]:
    """Rank ``LATE`` makes two calls of different sizes in the other order."""
    with jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880, timeout=3) as workspace:
        program = job.program(lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace, algorithm="two_shot"))
        operands = [job.place(values(np.random.default_rng(17), job.tp, rows, 2880)) for rows in (16, 1)]
        for operand in operands:
            jax.block_until_ready(program(operand))
        job.barrier()
        for operand in operands[:: -1 if LATE in job.here else 1]:
            _numbers(lambda x=operand: program(x))
        found = {"check": _refusal(workspace.check, RuntimeError)}
        job.barrier()
    return found


def interrupted(job: Job) -> dict[str, Any]:
    """Ctrl-C while one rank stays away, after the warning and long before the deadline."""
    tally, found = Tally(), {}
    with jax_twoshot.Workspace(job.mesh, "tp", rows=16, width=2880, timeout=20) as workspace:
        program = sum_program(job, workspace)
        given = values(np.random.default_rng(21), job.tp, *SHAPE)
        placed, want = job.place(given), reference.all_reduce(given)
        tally.add("before", program(placed), want)
        tally.result()
        job.barrier()
        if LATE not in job.here:
            result, start = program(placed), time.monotonic()
            threading.Timer(4, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                jax.block_until_ready(result)
                found["raised"] = False
            except KeyboardInterrupt:
                found["raised"] = True
            jax.block_until_ready(result)  # JAX may let go of the result before the wait has ended
            found["seconds after Ctrl-C"] = round(time.monotonic() - start - 4, 2)
            found["check"] = _refusal(workspace.check, RuntimeError)
            found["next call"] = _numbers(lambda: program(placed))
        job.barrier()
        workspace.reset()
        for run in range(5):
            tally.add(f"after a reset, run {run}", program(placed), want)
        return tally.result() | found


def failed_setups(job: Job) -> dict[str, Any]:
    """Every step of a set-up fails on rank ``LATE``; what is left behind, and whether the next one works."""
    import torch

    attempt, texts, tally = symmetric._Peers.attempt, [], Tally()

    def counts() -> dict[str, int]:
        gc.collect()
        until = time.monotonic() + 5
        while _closing and time.monotonic() < until:  # a program's memory is given back soon after the program
            time.sleep(0.05)
        job.barrier()
        return {
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "shared memory": Path("/proc/self/maps").read_text().count("/dev/shm"),
            "device memory": torch.cuda.mem_get_info()[0],
        }

    def try_once(failing: str | None) -> None:
        def attempt_or_fail(peers: Any, step: str, action: Callable) -> Any:
            fails = step == failing and LATE in job.here
            return attempt(peers, step, (lambda: _raise("planned")) if fails else action)

        symmetric._Peers.attempt = attempt_or_fail  # type: ignore[method-assign]
        try:
            setup_once(tally)
        except RuntimeError as error:
            if failing is None or "planned" not in str(error):
                raise  # every later one might wait for its deadline
            texts.append(f"{failing}: {error}")
        finally:
            symmetric._Peers.attempt = attempt  # type: ignore[method-assign]

    def setup_once(tally: Tally) -> None:
        parts = values(np.random.default_rng(18), job.tp, *SHAPE)
        with small_workspace(job) as workspace:
            tally.add("after set-up", sum_program(job, workspace)(job.place(parts)), reference.all_reduce(parts))
            tally.result()
        jax.clear_caches()

    steps = ("describe", "map", "prepare", "arm")
    for failing in (None, *steps, None):  # what the first ones leave is the driver's and JAX's own
        try_once(failing)
    before = counts()
    texts.clear()
    free = []
    for _ in range(3):
        for failing in (*steps, None):
            try_once(failing)
            after = counts()
            free.append(after["device memory"] - before["device memory"])
    left = {name: after[name] - before[name] for name in before}
    return tally.result() | {"texts": texts, "left": left, "free after each": free}


def fuzz(job: Job) -> dict[str, Any]:
    """``--calls`` random programs of ``fuzz.py``, each run several times, one rank late now and then."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import fuzz as programs

    random = np.random.default_rng(19)
    compared, calls, first, made, start = 0, 0, None, 0, time.monotonic()
    for seed in range(job.calls):
        program = programs.draw(seed, job.tp, meshes=[(job.tp,)])
        parts = programs.inputs(program)
        want = programs.expected(program, parts)
        ((axes, capacity),) = program.capacity
        mesh = Mesh(job.mesh.devices, program.names)
        with jax_twoshot.Workspace(mesh, tuple(axes), rows=1, width=capacity, dtype=program.dtype) as workspace:
            compiled = programs.build(program, mesh, {axes: workspace})
            placed = programs.place(program, mesh, parts)
            for _ in range(4):
                if random.random() < 0.5:
                    job.hold_up_one(random)
                elements, wrong = programs.differences(program, compiled(placed), want)
                compared, first = compared + elements, first or wrong
                calls += sum(call.repeat for call in program.calls)
        made += 1
        if seed % 20 == 19:
            jax.clear_caches()
            if job.here[0] == 0:
                seconds = round(time.monotonic() - start, 1)
                print(f"fuzz: {made} programs, {seconds} s, {first or 'none wrong'}", file=sys.stderr, flush=True)
    seconds = round(time.monotonic() - start, 1)
    return {"calls": calls, "compared": compared, "wrong": int(first is not None), "first": first, "programs": made} | {
        "fuzzed for": seconds
    }


def _failing_reset(workspace: jax_twoshot.Workspace, fails: bool) -> None:
    settle = symmetric._Driver.settle
    if fails:
        symmetric._Driver.settle = lambda *_: _raise("planned")  # type: ignore[method-assign]
    try:
        workspace.reset()
    finally:
        symmetric._Driver.settle = settle  # type: ignore[method-assign]


def _raise(text: str) -> None:
    raise RuntimeError(text)


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
        "stats": workspace.stats().failure,
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
