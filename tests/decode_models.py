"""Two small decode models, written against ``lax.psum`` the way public ones are: what `replacing_psum` is tried on.

`LLAMA` is dense: batch over "dp", heads, FFN and vocabulary over "tp", layers in a scan, arrays whose types say how
they are sharded. `MOE` routes 31 rows to experts: three axes, sums over several of them in another order than the
mesh's, types unchecked. Both count with integers beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import pmax, pmin, psum
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Reduce = Callable[[jax.Array, Any], jax.Array]
WIDTH, HEADS, HEAD, FFN, VOCABULARY, CONTEXT, LAYERS, EXPERTS, END = 64, 8, 16, 128, 256, 8, 2, 4, 7


class Model(NamedTuple):
    """A model on its mesh.

    Attributes:
      mesh: sizes of its axes, by name.
      batch: rows of a step, and how they are sharded.
      heads: the axes that share the heads.
      check_vma: whether its shard_map checks types.
      weights: shape and sharding of each, by name; those of a layer have the layers first.
      step: (reduce, weights, cache, tokens, position) to (tokens, logits, cache, counters), all of one rank.
    """

    mesh: dict[str, int]
    batch: tuple[int, P]
    heads: tuple[str, ...]
    check_vma: bool
    weights: dict[str, tuple[tuple[int, ...], P]]
    step: Callable[..., Any]


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def embed(reduce: Reduce, table: jax.Array, tokens: jax.Array, axis: str) -> jax.Array:
    """The rows of a table whose vocabulary is sharded over ``axis``."""
    local = tokens - lax.axis_index(axis) * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    return reduce(jnp.where(here[:, None], table[jnp.where(here, local, 0)], 0), axis)


def attention(x: jax.Array, w: dict[str, jax.Array], cache: Any, position: jax.Array) -> Any:
    """This rank's heads of one row a sequence: (to be summed, new cache)."""
    q, k, v = (dot(x, w[name]).reshape(x.shape[0], -1, HEAD) for name in ("q", "k", "v"))
    keys, values = (
        lax.dynamic_update_slice(old, new[:, None], (0, position, 0, 0))
        for old, new in zip(cache, (k, v), strict=True)
    )
    scores = jnp.einsum("bhd,bchd->bhc", q, keys, preferred_element_type=jnp.float32)
    seen = jnp.arange(keys.shape[1]) <= position
    shares = jax.nn.softmax(jnp.where(seen, scores / HEAD**0.5, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhc,bchd->bhd", shares.astype(values.dtype), values)
    return dot(mixed.reshape(x.shape[0], -1), w["o"]), (keys, values)


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def greedy(x: jax.Array, table: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """(tokens, this rank's logits)."""
    logits = jnp.dot(norm(x), table.T, preferred_element_type=jnp.float32)
    best = logits.max(axis=-1)
    token = logits.argmax(axis=-1) + lax.axis_index(axis) * table.shape[0]
    return pmin(jnp.where(best == pmax(best, axis), token, VOCABULARY), axis).astype(jnp.int32), logits


def llama_step(reduce: Reduce, weights: Any, cache: Any, tokens: jax.Array, position: jax.Array) -> Any:
    def layer(x: jax.Array, stacked: Any) -> Any:
        w, layer_cache = stacked
        y, layer_cache = attention(norm(x), w, layer_cache, position)
        x = x + reduce(y, "tp")
        h = norm(x)
        x = x + reduce(dot(jax.nn.silu(dot(h, w["gate"])) * dot(h, w["up"]), w["down"]), "tp")
        return x, layer_cache

    x = embed(reduce, weights["table"], tokens, "tp")
    x, cache = lax.scan(layer, x, (weights["layers"], cache))
    tokens, logits = greedy(x, weights["table"], "tp")
    ended = psum(jnp.sum(tokens == END), "dp")
    return tokens, logits, cache, ended


def moe_step(reduce: Reduce, weights: Any, cache: Any, tokens: jax.Array, position: jax.Array) -> Any:
    def experts(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Experts over "z", the columns of each over "y"; every row goes to two of them."""
        chances, chosen = lax.top_k(jax.nn.softmax(jnp.dot(x, w["router"], preferred_element_type=jnp.float32)), 2)
        mine = lax.axis_index("z") * w["up"].shape[0] + jnp.arange(w["up"].shape[0])
        routed = chosen[:, :, None] == mine
        share = jnp.sum(jnp.where(routed, chances[:, :, None], 0), axis=1).astype(x.dtype)
        hidden = jax.nn.silu(jnp.einsum("bw,ewf->ebf", x, w["gate"])) * jnp.einsum("bw,ewf->ebf", x, w["up"])
        return jnp.einsum("ebf,efw,be->bw", hidden, w["down"], share), jnp.sum(routed)

    x = embed(reduce, weights["table"], tokens, "x")
    new_cache, routed = [], 0
    for i in range(LAYERS):
        w, layer_cache = jax.tree.map(lambda stacked, i=i: stacked[i], (weights["layers"], cache))
        y, layer_cache = attention(norm(x), w, layer_cache, position)
        x = x + reduce(y, ("z", "y"))
        y, count = experts(norm(x), w)
        x = x + reduce(y, ("z", "y"))
        routed += psum(count, "z")
        new_cache.append(layer_cache)
    tokens, logits = greedy(x, weights["table"], "x")
    return tokens, logits, jax.tree.map(lambda *layers: jnp.stack(layers), *new_cache), routed


def attention_weights(axes: Any) -> dict[str, tuple[tuple[int, ...], P]]:
    into = ((LAYERS, WIDTH, HEADS * HEAD), P(None, None, axes))
    return {"q": into, "k": into, "v": into, "o": ((LAYERS, HEADS * HEAD, WIDTH), P(None, axes))}


LLAMA = Model(
    mesh={"dp": 2, "tp": 4},
    batch=(6, P("dp")),
    heads=("tp",),
    check_vma=True,
    weights={
        **attention_weights("tp"),
        "gate": ((LAYERS, WIDTH, FFN), P(None, None, "tp")),
        "up": ((LAYERS, WIDTH, FFN), P(None, None, "tp")),
        "down": ((LAYERS, FFN, WIDTH), P(None, "tp")),
        "table": ((VOCABULARY, WIDTH), P("tp")),
    },
    step=llama_step,
)
MOE = Model(
    mesh={"x": 2, "y": 2, "z": 2},
    batch=(31, P()),
    heads=("z", "y"),
    check_vma=False,
    weights={
        **attention_weights(("z", "y")),
        "router": ((LAYERS, WIDTH, EXPERTS), P()),
        "gate": ((LAYERS, EXPERTS, WIDTH, FFN), P(None, "z", None, "y")),
        "up": ((LAYERS, EXPERTS, WIDTH, FFN), P(None, "z", None, "y")),
        "down": ((LAYERS, EXPERTS, FFN, WIDTH), P(None, "z", "y")),
        "table": ((VOCABULARY, WIDTH), P("x")),
    },
    step=moe_step,
)


class Decoded(NamedTuple):
    """Of each step: tokens [steps, batch], logits [steps, batch, VOCABULARY], and the counter."""

    tokens: np.ndarray
    logits: np.ndarray
    counters: list[int]


def decode(model: Model, reduce: Reduce = psum, steps: int = 4) -> Decoded:
    """Decodes greedily from one token a sequence; everything is compiled anew."""
    mesh = jax.make_mesh(tuple(model.mesh.values()), tuple(model.mesh))
    rng = np.random.default_rng(0)

    def put(array: Any, spec: P) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, spec))

    def weight(shape: tuple[int, ...], spec: P) -> jax.Array:
        return put((rng.standard_normal(shape) / shape[-2] ** 0.5).astype(jnp.bfloat16), spec)

    rows, batch = model.batch
    layers = {name: weight(*model.weights[name]) for name in model.weights if name != "table"}
    weights = {"table": weight(*model.weights["table"]), "layers": layers}
    cache_spec = P(None, *(batch or (None,)), None, model.heads)
    cache = [put(jnp.zeros((LAYERS, rows, CONTEXT, HEADS, HEAD), jnp.bfloat16), cache_spec) for _ in range(2)]
    tokens = put(rng.integers(VOCABULARY, size=rows, dtype=np.int32), batch)
    (vocabulary,) = model.weights["table"][1]
    step = jax.shard_map(
        functools.partial(model.step, reduce),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda w: w.sharding.spec, weights), (cache_spec,) * 2, batch, P()),
        out_specs=(batch, P(*(batch or (None,)), vocabulary), (cache_spec,) * 2, P()),
        check_vma=model.check_vma,
    )
    step = jax.jit(step, donate_argnums=1)
    found = []
    for position in range(steps):
        tokens, logits, cache, counter = step(weights, tuple(cache), tokens, put(jnp.int32(position), P()))
        found.append((np.asarray(tokens), np.asarray(logits), int(counter)))
    tokens, logits, counters = zip(*found, strict=True)
    return Decoded(np.stack(tokens), np.stack(logits), list(counters))
