"""Random programs of ``all_reduce``, each compared with the oracle bit for bit.

    python tests/fuzz.py --minutes 10         # on eight CPU devices, from a seed of the clock, which it prints
    python tests/fuzz.py --seed 17 --count 1  # that program again

A seed stands for a program: a mesh, a dtype, inputs, and calls over some of its axes, on inputs and on earlier sums,
unrolled and in a scan, on workspaces of any size. ``test_fuzz.py`` runs a few seeds, always the same ones;
``gpu/checks.py`` runs programs of one axis on GPUs.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import _ffi, protocol, reference

MESHES = ((2,), (3,), (5,), (8,), (2, 2), (2, 4), (4, 2), (3, 2), (2, 2, 2), (1, 4), (2, 1, 3))
SHAPES = ((), (1,), (7,), (8,), (3, 5), (31, 32), (2, 3, 129), (16, 577), (4, 1024), (0, 40), (64, 300))
DELAY_SECONDS = 0.02


@dataclass(frozen=True)
class Call:
    """One call, or ``repeat`` in a scan, each on what `feed` makes of the sum before it.

    Attributes:
      value: what is summed first: an input, or, counted on from there, the result of an earlier call.
      axes: summed over, as the call names them.
      algorithm: asked for.
      repeat: how many sums; 1: no scan.
    """

    value: int
    axes: tuple[str, ...]
    algorithm: str
    repeat: int


@dataclass(frozen=True)
class Program:
    """What a seed stands for.

    Attributes:
      seed: of it and of its inputs.
      mesh: size of each axis by name.
      dtype: name of the element type.
      shapes: of each input, a rank's part.
      special: the inputs hold any bits, and no call is fed with a sum.
      calls: in order; their results are the program's.
      capacity: elements of a round, for each set of axes.
    """

    seed: int
    mesh: tuple[tuple[str, int], ...]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    special: bool
    calls: tuple[Call, ...]
    capacity: tuple[tuple[frozenset[str], int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.mesh)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh)

    def source(self, value: int) -> int:
        """The input that a value comes from, which has its shape."""
        return value if value < len(self.shapes) else self.source(self.calls[value - len(self.shapes)].value)


def draw(seed: int, devices: int, meshes: Sequence[tuple[int, ...]] = MESHES) -> Program:
    """The program of ``seed`` for a machine of so many devices."""
    random = np.random.default_rng(seed)
    fitting = [mesh for mesh in meshes if np.prod(mesh) <= devices]
    sizes = fitting[random.integers(len(fitting))]
    names = tuple("xyz"[: len(sizes)])
    special = bool(random.random() < 0.3)
    shapes = tuple(SHAPES[i] for i in random.integers(len(SHAPES), size=random.integers(1, 4)))
    calls: list[Call] = []
    for index in range(random.integers(1, 7)):
        axes = random.permutation(names)[: random.integers(1, len(names) + 1)]
        values = len(shapes) if special else len(shapes) + index
        algorithm = random.choice(["auto", *protocol.ALGORITHMS])
        repeat = 1 if special or random.random() < 0.7 else int(random.integers(2, 9))
        calls.append(Call(int(random.integers(values)), tuple(map(str, axes)), str(algorithm), repeat))
    summed = sorted({frozenset(call.axes) for call in calls}, key=sorted)
    least = max(map(math.prod, shapes)) // 16 + 1  # the delay of a fault is one of each round
    return Program(
        seed,
        tuple(zip(names, sizes, strict=True)),
        str(random.choice(list(protocol.FORMATS))),
        shapes,
        special,
        tuple(calls),
        tuple((axes, max(least, int(random.choice([1, 100, 5000, 100_000])))) for axes in summed),
    )


def inputs(program: Program) -> list[np.ndarray]:
    """``[*sizes, *shape]`` for each input, the same wherever they are drawn."""
    random, dtype = np.random.default_rng([program.seed, 1]), np.dtype(program.dtype)
    whole = [(*program.sizes, *shape) for shape in program.shapes]
    if program.special:
        word = np.dtype(f"u{dtype.itemsize}")
        most = np.iinfo(word).max
        zeros = [0, protocol.FORMATS[program.dtype].negative_zero]
        anything = (random.integers(0, most, shape, word, endpoint=True) for shape in whole)
        return [
            np.where(random.random(bits.shape) < 0.5, random.choice(zeros, bits.shape).astype(word), bits).view(dtype)
            for bits in anything
        ]
    return [(30 * random.standard_normal(shape, np.float32)).astype(dtype) for shape in whole]


def scales(program: Program) -> np.ndarray:
    """``[*sizes]``: what each rank multiplies a sum by in `feed`."""
    return np.where(np.indices(program.sizes).sum(axis=0) % 2 == 0, 0.5, -0.25)


def expected(program: Program, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The result of each call, ``[*sizes, *shape]``."""
    values = list(parts)
    scale = scales(program).astype(program.dtype)
    for call in program.calls:
        given = values[program.source(call.value)]
        value, by = values[call.value], scale.reshape(*scale.shape, *[1] * (given.ndim - scale.ndim))
        for repeat in range(call.repeat):
            fed = value if repeat == 0 and call.value < len(parts) else value * by + given
            value = all_reduced(fed, [program.names.index(name) for name in call.axes])
        values.append(value)
    return values[len(parts) :]


def all_reduced(value: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The oracle's sum over mesh axes, in each place of ``value``'s shape; one rank has nothing to sum."""
    axes = sorted(axes)
    ranks = np.moveaxis(value, axes, range(len(axes)))
    tp = math.prod(ranks.shape[: len(axes)])
    if tp == 1:
        return value
    total = reference.all_reduce(ranks.reshape(tp, *ranks.shape[len(axes) :]))
    return np.broadcast_to(np.expand_dims(total, tuple(axes)), value.shape)


def place(program: Program, mesh: Mesh, parts: Sequence[np.ndarray]) -> list[jax.Array]:
    """The operands of ``build``'s program, which makes those without elements itself: JAX 0.11's compiler crashes on
    them."""
    sharding = NamedSharding(mesh, P(*program.names))
    return [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in parts if x.size]


def build(program: Program, mesh: Mesh, workspaces: dict[frozenset[str], jax_twoshot.Workspace]) -> Any:
    """The program, jitted: what ``place`` gives to results, ``[*sizes, *shape]`` each."""
    alone = (1,) * len(program.mesh)
    per_rank = scales(program)

    def rank(placed: list[jax.Array]) -> list[jax.Array]:
        given = iter(placed)
        values = [
            next(given).reshape(shape) if math.prod(shape) else jnp.zeros(shape, program.dtype)
            for shape in program.shapes
        ]
        scale = jnp.asarray(per_rank, program.dtype)[tuple(lax.axis_index(name) for name in program.names)]
        for call in program.calls:
            values.append(run(call, values, values[program.source(call.value)], scale))
        return [value.reshape(*alone, *value.shape) for value in values[len(program.shapes) :]]

    def run(call: Call, values: list[jax.Array], given: jax.Array, scale: jax.Array) -> jax.Array:
        workspace = workspaces.get(frozenset(call.axes))

        def reduce(x: jax.Array) -> jax.Array:
            return jax_twoshot.all_reduce(x, call.axes, workspace=workspace, algorithm=call.algorithm)

        fed = values[call.value] if call.value < len(program.shapes) else values[call.value] * scale + given
        total = reduce(fed)
        if call.repeat == 1:
            return total
        return lax.scan(lambda t, _: (reduce(t * scale + given), None), total, length=call.repeat - 1)[0]

    spec = P(*program.names)
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def differences(program: Program, results: Sequence[jax.Array], want: Sequence[np.ndarray]) -> tuple[int, str | None]:
    """Elements compared in this process's shards, and the first call that is wrong."""
    compared, first, word = 0, None, f"u{np.dtype(program.dtype).itemsize}"
    for call, result, right in zip(program.calls, results, want, strict=True):
        for shard in result.addressable_shards:
            got = np.asarray(shard.data).view(word)
            bad = int(np.count_nonzero(got != np.ascontiguousarray(right[shard.index]).view(word)))
            compared += got.size
            if bad and first is None:
                first = f"{program}: {bad} elements of {call} are wrong on {shard.device}"
    return compared, first


# ---- On CPU ------------------------------------------------------------------------------------------------


def run_on_cpu(seed: int, runs: int = 3) -> int:
    """Runs the program of ``seed``, one rank late now and then; returns how many elements were compared.

    Raises:
      AssertionError: a bit is not the oracle's.
    """
    program = draw(seed, len(jax.devices("cpu")))
    random = np.random.default_rng([seed, 2])
    devices = random.permutation(np.array(jax.devices("cpu")))[: np.prod(program.sizes)]
    mesh = Mesh(devices.reshape(program.sizes), program.names)
    parts = inputs(program)
    want = expected(program, parts)
    with ExitStack() as stack:
        workspaces = {
            axes: stack.enter_context(
                jax_twoshot.Workspace(mesh, tuple(axes), rows=1, width=capacity, dtype=program.dtype)
            )
            for axes, capacity in program.capacity
        }
        compiled = build(program, mesh, workspaces)
        placed = place(program, mesh, parts)
        compared = 0
        for _ in range(runs):
            if random.random() < 0.5:
                phase = str(random.choice(["push", "reduce", "collect"]))
                seconds = DELAY_SECONDS * random.random() ** 4
                _ffi._extension.plant_fault("delay", int(random.integers(2)), phase, seconds)
            else:
                _ffi._extension.plant_fault("none")
            elements, first = differences(program, compiled(placed), want)
            assert first is None, first
            compared += elements
    return compared


def run_in_threads(seeds: Sequence[int]) -> int:
    """``run_on_cpu`` of each seed, all at once, each in a thread."""
    compared: list[int] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            compared.append(run_on_cpu(seed))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _ffi._extension.plant_fault("none")
    if errors:
        raise errors[0]
    return sum(compared)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first one (default: the clock)")
    parser.add_argument("--count", type=int, help="of programs, instead of --minutes")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    start, programs, compared, calls = time.monotonic(), 0, 0, 0
    print(f"from seed {args.seed}", flush=True)
    while programs < args.count if args.count else time.monotonic() - start < 60 * args.minutes:
        seeds = range(args.seed + programs, args.seed + programs + (2 if not args.count and programs % 6 == 0 else 1))
        compared += run_in_threads(seeds)
        calls += 3 * sum(call.repeat for seed in seeds for call in draw(seed, 8).calls)
        programs += len(seeds)
        if programs % 50 == 0:
            jax.clear_caches()
    print(f"{programs} programs, {calls} calls, {compared} elements: every bit is the oracle's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
