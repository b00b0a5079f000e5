"""``matmul_all_reduce``: checks, typing, derivatives, batching, and the lowering of each platform."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_twoshot import _api, _compat, _cute_call, cubin, protocol, workspace
from jax_twoshot.workspace import Workspace, axes_text

_NAME = "matmul_all_reduce"


def matmul_all_reduce(
    a: Any, w: Any, axis_name: str | tuple[str, ...], *, workspace: Workspace | None = None
) -> jax.Array:
    """Multiplies this rank's columns of ``a`` with its rows of ``w``, and sums the products over the ranks.

    To be called inside :func:`jax.shard_map`, where a decode step has ``psum(a @ w)`` of a few rows: on CUDA one kernel
    that reads each byte of ``w`` once and sends each tile of the product while it computes the next.

    Where ranks share one GPU it is **slower** than XLA's matmul and ``all_reduce``: 1.03 to 1.5 times, 2, 4 and 8 ranks
    on an H200, widths 4096 and 7168, but for one row of 4096 (``docs/benchmarks.md``). A kernel that waits gets a part
    of the SMs there, XLA's gets all. With a GPU a rank it has not been timed.

    Each rank's product is summed in FP32, in an order of the platform's own, and rounded once to the dtype; the sum
    over ranks is :func:`jax_twoshot.all_reduce`'s, so all ranks get the same bits. With ``p[r]`` the exact products and
    ``u`` the unit roundoff of the dtype (2^-8 in BF16, 2^-11 in FP16), an element is within
    ``u * (sum(|p[r]|) + |sum(p[r])|) + K * 2^-22 * sum(|a| @ |w|)`` of the exact one.

    The derivatives are those of ``psum(a @ w)``; under :func:`jax.vmap` it is one call on the batched rows, in rounds
    of 64, or one for each ``w``.

    Args:
      a: ``[..., K]`` array of BF16 or FP16, at most 64 rows; K is a multiple of 32.
      w: ``[K, width]`` of the same dtype; the width is a multiple of 64.
      axis_name: a manual axis of the mesh of the enclosing ``shard_map``, or a tuple of such, in any order.
      workspace: as of :func:`jax_twoshot.all_reduce`. On CUDA one round carries whole rows, so it has to hold one.

    Returns:
      ``[..., width]`` of the same dtype, typed as varying over the operands' axes less ``axis_name``.

    Raises:
      TypeError: the dtypes differ or are none of the two.
      NameError: ``axis_name`` is not an axis here: no such axis, or outside ``shard_map``.
      ValueError: shapes that do not fit, more rows, another K or width than said; an axis or a workspace as of
        :func:`jax_twoshot.all_reduce`.
      NotImplementedError: as of :func:`jax_twoshot.all_reduce`.
    """
    axes = _api.all_manual_axes(_NAME, axis_name)
    a, w = map(jnp.asarray, (a, w))
    _check_arrays(a, w)
    handle = _api.resolve(workspace, axes, protocol.FORMATS[a.dtype.name])
    with jax.named_scope(f"jax_twoshot.{_NAME}"):
        if axes.tp == 1 or a.size == 0 or w.size == 0:
            return _api.all_reduce(_product(a, w), axis_name)
        rank, group, typed = _api.place(axes)
        everywhere = {*axes.names, *_compat.varying(jax.typeof(a)), *_compat.varying(jax.typeof(w))}
        return matmul_all_reduce_p.bind(
            _api.varying_over(a, everywhere, typed),
            _api.varying_over(w, everywhere, typed),
            rank,
            group,
            axes=axes.names,
            tp=axes.tp,
            workspace=handle,
            typed=typed,
        )


def _product(a: jax.Array, w: jax.Array) -> jax.Array:
    """XLA's own, in FP32, rounded once."""
    return jnp.matmul(a, w, preferred_element_type=jnp.float32).astype(a.dtype)


def _check_arrays(a: jax.Array, w: jax.Array) -> None:
    if a.dtype.name not in protocol.MATMUL_FORMATS or w.dtype != a.dtype:
        raise TypeError(
            f"jax_twoshot.{_NAME}: a and w must have one dtype, {' or '.join(protocol.MATMUL_FORMATS)}; got "
            f"{a.dtype.name} and {w.dtype.name}; cast them with astype, or use jax_twoshot.all_reduce(a @ w, ...)"
        )
    if a.ndim == 0 or w.ndim != 2 or a.shape[-1] != w.shape[0]:
        raise ValueError(
            f"jax_twoshot.{_NAME}: a must have the shape [..., K] and w [K, width], got {a.shape} and {w.shape}"
        )
    for name, size, unit in (
        ("K, the last axis of a,", w.shape[0], protocol.MATMUL_DEPTH),
        ("the width of w", w.shape[1], protocol.MATMUL_COLUMNS),
    ):
        if size % unit:
            raise ValueError(
                f"jax_twoshot.{_NAME}: {name} must be a multiple of {unit}, got {size}; fill up with zeros, or use "
                "jax_twoshot.all_reduce(a @ w, ...)"
            )
    if (rows := math.prod(a.shape[:-1])) > protocol.MATMUL_MAX_ROWS:
        raise ValueError(
            f"jax_twoshot.{_NAME}: a must have at most {protocol.MATMUL_MAX_ROWS} rows, got {rows} of shape {a.shape}; "
            "use jax_twoshot.all_reduce(a @ w, ...), which reads w once for more of them"
        )


# ---- The primitive -----------------------------------------------------------------------------------------

matmul_all_reduce_p = Primitive("jax_twoshot_matmul_all_reduce")
"""Operands: a, w, the rank in the group, the group's number. Parameters as of `all_reduce`'s, but the algorithm."""


@matmul_all_reduce_p.def_abstract_eval
def _abstract_eval(a, w, rank, group, *, axes, tp, workspace, typed):
    out = a.update(shape=(*a.shape[:-1], w.shape[1]))
    return _compat.with_varying(out, _compat.varying(a) - set(axes))


def _composed(a, w, rank, group, **params):
    return _api.all_reduce_p.bind(_product(a, w), rank, group, algorithm="auto", **params)


def _jvp(primals, tangents, **params):
    out = matmul_all_reduce_p.bind(*primals, **params)
    a, w, *place = primals
    terms = []
    if not isinstance(tangents[0], ad.Zero):
        terms.append(_product(tangents[0], w))
    if not isinstance(tangents[1], ad.Zero):
        terms.append(_product(a, tangents[1]))
    return out, _api.all_reduce_p.bind(sum(terms[1:], terms[0]), *place, algorithm="auto", **params)


def _batch(args, dims, **params):
    (a, w, *place), (a_dim, w_dim, *_) = args, dims
    size = next(array.shape[dim] for array, dim in zip(args, dims, strict=True) if dim is not None)
    a = batching.bdim_at_front(a, a_dim, size)
    if w_dim is None:
        return matmul_all_reduce_p.bind(a, w, *place, **params), 0
    w = batching.bdim_at_front(w, w_dim, size)
    return jnp.stack([matmul_all_reduce_p.bind(*one, *place, **params) for one in zip(a, w, strict=True)]), 0


ad.primitive_jvps[matmul_all_reduce_p] = _jvp
batching.primitive_batchers[matmul_all_reduce_p] = _batch


def _lower_cuda(ctx, a, w, rank, group, **params):
    what = f"jax_twoshot.{_NAME} over {axes_text(params['axes'])}"
    (shape, dtype), (depth, width) = (ctx.avals_in[0].shape, ctx.avals_in[0].dtype), ctx.avals_in[1].shape
    workspace, fmt = params["workspace"], protocol.FORMATS[dtype.name]
    if workspace is None or workspace.gpu is None:
        raise _api.no_workspace(what, dtype)
    rows = math.prod(shape[:-1])
    most_rows = min(_api.rows_in_a_round(what, workspace, width, fmt), protocol.MATMUL_MAX_ROWS)
    if rows > most_rows:
        rounds = mlir.lower_fun(functools.partial(_in_rounds, most_rows, params), multiple_results=False)
        return rounds(ctx, a, w, rank, group)
    kernel, grid, scalars = launch(workspace, fmt, rows, depth, width)
    return _cute_call.lower(
        ctx.replace(avals_in=ctx.avals_in[:2]),  # the rank and the group are the workspace's to know
        [a, w],
        kernel=kernel,
        workspace=workspace,
        grid=grid,
        scalars=scalars,
        what=what,
    )


def launch(
    workspace: workspace.Handle, fmt: protocol.Format, rows: int, depth: int, width: int
) -> tuple[cubin.Kernel, int, list[int]]:
    """The kernel for rows that one round carries, its grid and its scalars."""
    gpu = workspace.gpu
    assert gpu is not None
    row_tiles = next(tiles for tiles in protocol.MATMUL_ROW_TILES if rows <= 16 * tiles)
    kernel = cubin.matmul_kernel(
        workspace.layout.tp, fmt.name, gpu.multicast, gpu.arch, row_tiles, owners=workspace.owners
    )
    most = protocol.most_ctas(gpu.ranks_on_device, gpu.sm_count, kernel.ctas_per_sm)
    chunks = rows * fmt.chunks(width)
    grid = min(max(width // protocol.MATMUL_COLUMNS, protocol.ceil_div(chunks, kernel.threads)), most)
    return kernel, grid, [rows, depth, width]


def _in_rounds(most_rows, params, a, w, *place):
    return _api.in_rounds(most_rows, lambda a: matmul_all_reduce_p.bind(a, w, *place, **params), a)


_api.register_lowerings(
    matmul_all_reduce_p, _NAME, cpu=mlir.lower_fun(_composed, multiple_results=False), cuda=_lower_cuda
)
