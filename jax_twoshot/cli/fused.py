"""``bench --fused``: the layers that the fused calls compute, and what else computes them.

Each call takes what the one before it gave, as in a model, with no operation of the benchmark's own between them but
one: of a product's columns the next call takes the first K. Results of one call at a time are checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_twoshot import reference
from jax_twoshot._fused import rms_norm
from jax_twoshot.cli.bench import Constants, Layer, Program

EPS = 1e-6
MATRICES = 4
"""On GPUs: more than the L2 cache holds, as in a model."""
EXPERTS = 8
"""Of a token, all of which have a part on every rank."""
SLOTS = 512
"""Rows that a rank's experts have left: one for each expert of 64 tokens; more tokens share them."""


def _norm_state(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """x and residual."""
    parts = program.parts()
    return parts, np.broadcast_to(parts[:1], parts.shape)


def _norm_constants(program: Program) -> Constants:
    weight = np.random.default_rng(program.width).normal(size=program.width).astype(program.dtype)
    return ((np.broadcast_to(weight, (program.tp, program.width)),),)


def _norm_expected(program: Program) -> tuple[np.ndarray, np.ndarray]:
    (parts, residual), ((weight,),) = _norm_state(program), _norm_constants(program)
    return reference.all_reduce_rms_norm(parts, residual[0], weight[0], EPS)


def norm_sum(total: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What follows the sum where it is not fused, in XLA's own order and roundings."""
    new_residual = total + residual
    return rms_norm(new_residual, weight, EPS), new_residual


def depth(program: Program) -> int:
    """K of each rank: a square matrix, its rows sharded, as a decoder layer's projection of the heads has it."""
    return program.width // program.tp


def _matmul_state(program: Program) -> np.ndarray:
    """``[TP, rows, width]``, of which a call takes the first K columns."""
    return np.random.default_rng(program.rows).choice([-1, 1], program.parts().shape).astype(program.dtype)


def _matmul_constants(program: Program) -> Constants:
    """Numbers whose sums are exact in any order, about 256 of a column of all ranks not 0, and small enough that no
    chain of calls overflows. A matrix's rows are windows of one vector, so that there is little to draw and to hold."""
    k, n = depth(program), MATRICES if program.platform == "gpu" else 1
    random = np.random.default_rng(program.width)
    numbers = random.choice([-1, 1], n * program.tp * k + program.width - 1)
    numbers *= random.random(len(numbers)) < 256 / program.width
    return tuple((w,) for w in _windows(program, numbers / 32).reshape(n, program.tp, k, program.width))


def _windows(program: Program, numbers: np.ndarray) -> np.ndarray:
    """``[..., width]``: each row begins an element after the one before it."""
    return np.lib.stride_tricks.sliding_window_view(numbers.astype(program.dtype), program.width)


@functools.lru_cache(maxsize=1)
def _matmul_expected(program: Program) -> np.ndarray:
    x, ((w,), *_) = _matmul_state(program), _matmul_constants(program)
    parts = zip(x[..., : depth(program)], w, strict=True)
    products = (np.matmul(*(array.astype(np.float32) for array in part)) for part in parts)
    return reference.all_reduce(np.stack([product.astype(program.dtype) for product in products]))


def matmul_call(
    program: Program, sum_of_products: Callable[[jax.Array, jax.Array], jax.Array]
) -> Callable[..., jax.Array]:
    """``sum_of_products(a, w)`` as the layer's call."""
    return lambda x, w: sum_of_products(x[:, : depth(program)], w)


def _moe_constants(program: Program) -> Constants:
    """The experts' rows and the norm's weight."""
    ((weight,),) = _norm_constants(program)
    numbers = np.random.default_rng(program.width + 1).normal(size=program.tp * SLOTS + program.width - 1)
    return ((_windows(program, numbers).reshape(program.tp, SLOTS, program.width), weight),)


def _routing(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """``index`` and ``scale``, the same on all ranks."""
    random, size = np.random.default_rng(rows), rows * EXPERTS
    index = random.permutation(max(size, SLOTS))[:size] % SLOTS
    return index.reshape(rows, EXPERTS).astype(np.int32), random.random((rows, EXPERTS), np.float32)


def _moe_expected(program: Program) -> tuple[np.ndarray, np.ndarray]:
    (shared, residual), ((experts, weight),) = _norm_state(program), _moe_constants(program)
    index, scale = (np.broadcast_to(array, (program.tp, *array.shape)) for array in _routing(program.rows))
    return reference.moe_tail(experts, index, scale, shared, residual[0], weight[0], EPS)


def moe_call(
    program: Program, tail: Callable[..., tuple[jax.Array, jax.Array]]
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """``tail(experts, index, scale, shared, residual, weight)`` as the layer's call."""
    index, scale = _routing(program.rows)
    return lambda state, experts, weight: tail(experts, index, scale, *state, weight)


def _as_is(program: Program, results: Any) -> Any:
    return results


RMS_NORM = Layer(_norm_state, _norm_constants, _as_is, Program.one_call, _norm_expected)
MATMUL = Layer(_matmul_state, _matmul_constants, _as_is, Program.one_call, _matmul_expected)
MOE = Layer(_norm_state, _moe_constants, _as_is, Program.one_call, _moe_expected)
