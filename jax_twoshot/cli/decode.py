"""``bench --ranks --decode``: what the all-reduce costs in a decode step, with it and without it.

A step is one jitted program: `LAYERS` layers with the matrices of a dense decoder layer sharded over the ranks, two
sums a layer. Attention over the cache is left out, and so is all that a rank does alone; their time would make the
share of the sums smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_twoshot.cli.bench import Program, seconds_of

LAYERS = 4
STEPS = 20
"""Of a timed run, one after the other: starting them is not what is measured."""

AllReduce = Callable[[jax.Array], jax.Array]


def shapes(width: int, tp: int) -> tuple[tuple[int, int], ...]:
    """Of a layer's matrices on one rank: queries, keys and values; their projection; gate and up; down. The inner
    width is 18432 where the outer one is 7168."""
    heads, inner = width // tp, width * 18 // 7 // tp
    return (width, 3 * heads), (heads, width), (width, 2 * inner), (inner, width)


def layer(x: jax.Array, matrices: Sequence[jax.Array], all_reduce: AllReduce) -> jax.Array:
    """A layer on one rank, from ``[rows, width]`` to the same."""
    into, out, up, down = matrices
    query, key, value = jnp.split(x @ into, 3, axis=-1)
    x = normalised(x + all_reduce((jax.nn.sigmoid(query * key) * value) @ out))
    gate, inner = jnp.split(x @ up, 2, axis=-1)
    return normalised(x + all_reduce((jax.nn.silu(gate) * inner) @ down))


def normalised(x: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * lax.rsqrt(square + 1e-6)).astype(x.dtype)


class DecodeRun:
    """A step, compiled, with its matrices. ``seconds`` is the time of a step.

    Args:
      program: rows, width, dtype and mesh; the rest is not looked at.
      all_reduce: sums over ``tp``.
      gather: every process's value of what this one has; None: the ranks' results differ, as without a sum.
    """

    def __init__(
        self, program: Program, all_reduce: AllReduce, gather: Callable[[Any], list[Any]] | None
    ) -> None:
        self._gather = gather
        spec = P("tp")

        def make() -> list[list[jax.Array]]:
            key = jax.random.fold_in(jax.random.key(0), lax.axis_index("tp"))
            sizes = shapes(program.width, program.tp)

            def matrix(key: jax.Array, size: tuple[int, int]) -> jax.Array:
                return jax.random.normal(key, size, program.dtype)[None] * size[0] ** -0.5

            keys = jax.random.split(key, (LAYERS, len(sizes)))
            return [[matrix(k, size) for k, size in zip(of_layer, sizes, strict=True)] for of_layer in keys]

        def step(x: jax.Array, layers: list[list[jax.Array]]) -> jax.Array:
            x = x[0]
            for matrices in layers:
                x = layer(x, [m[0] for m in matrices], all_reduce)
            return x[None]

        def sharded(function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
            return jax.shard_map(function, mesh=program.mesh, in_specs=in_specs, out_specs=spec, check_vma=False)

        self._layers = jax.jit(sharded(make, ()))()
        one = program.parts()[:1].repeat(program.tp, axis=0)
        self._x = program.place(one)
        self._step = jax.jit(sharded(step, (spec, spec))).lower(self._x, self._layers).compile()

    def wrong(self) -> int:
        """Elements that are not finite, and all if the ranks do not have the same."""
        result = jax.block_until_ready(self._step(self._x, self._layers))
        shards = [np.asarray(shard.data)[0] for shard in result.addressable_shards]
        wrong = sum(int(np.count_nonzero(~np.isfinite(shard.astype(np.float32)))) for shard in shards)
        if self._gather is not None:
            everyone = {bits for found in self._gather([s.tobytes() for s in shards]) for bits in found}
            wrong += shards[0].size * (len(everyone) > 1)
        return wrong

    def seconds(self) -> float:
        x = self._x

        def step() -> jax.Array:
            nonlocal x
            x = self._step(x, self._layers)
            return x

        return seconds_of(step, STEPS)
