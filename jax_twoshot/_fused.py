"""Layers that end in an all-reduce, in one call: ``all_reduce_rms_norm``."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_twoshot import _api, _compat, _cute_call, _ffi, cubin, protocol, workspace
from jax_twoshot.workspace import Workspace, axes_text


def all_reduce_rms_norm(
    x: Any,
    residual: Any,
    weight: Any,
    axis_name: str | tuple[str, ...],
    *,
    eps: float,
    workspace: Workspace | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums ``x`` over the ranks, adds the residual, and norms the rows, in one kernel.

    To be called inside :func:`jax.shard_map`, where a decoder layer has ``residual += psum(x)`` and then
    ``rms_norm(residual)``. All ranks get the same bits, which depend neither on the number of rows nor on the platform:

    - ``new_residual`` is the FP32 sum of ``x`` in rank order, as of :func:`jax_twoshot.all_reduce`, plus the residual,
      in FP32, rounded once to the dtype;
    - ``normalised`` is ``new_residual * (1 / sqrt(mean(new_residual ** 2) + eps)) * weight`` of the rounded values, as
      the next layer sees them, in FP32 from left to right, rounded once; `docs/design.md` (R10) has the order of the
      mean. In neither is a -0.0, and NaN comes in one form.

    Over axes of size 1 there is nothing to sum, and XLA norms in an order of its own.

    The derivatives are those of the formula; under :func:`jax.vmap` it is one call on the batched rows, or one for each
    ``weight``.

    Args:
      x: ``[..., width]`` array of BF16, FP16 or FP32, this rank's part of the sum. A row has a multiple of 16 bytes, at
        most 32 KB.
      residual: the same shape and dtype, the same on all ranks. (One rank's copy is used for each column, so ranks get
        the same result even if it is not.)
      weight: ``[width]`` of the same dtype, the same on all ranks.
      axis_name: a manual axis of the mesh of the enclosing ``shard_map``, or a tuple of such, in any order.
      eps: added to the mean square: a Python number, from 0 up.
      workspace: as of :func:`jax_twoshot.all_reduce`. On CUDA one round carries whole rows, so it has to hold one.

    Returns:
      ``(normalised, new_residual)``, both of the shape and dtype of ``x``, typed as varying over the operands' axes
      less ``axis_name``.

    Raises:
      TypeError: the dtypes differ or are none of the three.
      NameError: ``axis_name`` is not an axis here: no such axis, or outside ``shard_map``.
      ValueError: shapes that do not fit, a row of another size than said, a bad ``eps``, a residual or a weight that is
        typed as varying over ``axis_name``; an axis or a workspace as of :func:`jax_twoshot.all_reduce`.
      NotImplementedError: as of :func:`jax_twoshot.all_reduce`.
    """
    axes = _api.all_manual_axes(_NAME, axis_name)
    x, residual, weight = map(jnp.asarray, (x, residual, weight))
    fmt = _check_arrays(x, residual, weight)
    check_eps(_NAME, eps)
    for name, array in (("residual", residual), ("weight", weight)):
        check_same_on_all_ranks(_NAME, name, array, axes)
    handle = _api.resolve(workspace, axes, fmt)
    with jax.named_scope(f"jax_twoshot.{_NAME}"):
        if axes.tp == 1 or x.size == 0:
            new_residual = _api.all_reduce(x, axis_name) + residual
            return rms_norm(new_residual, weight, eps), new_residual
        rank, group, typed = _api.place(axes)
        shared = set().union(*(_compat.varying(jax.typeof(a)) for a in (x, residual, weight))) - set(axes.names)
        return tuple(
            all_reduce_rms_norm_p.bind(
                _api.varying_over(x, (*axes.names, *shared), typed),
                _api.varying_over(residual, shared, typed),
                _api.varying_over(weight, shared, typed),
                rank,
                group,
                eps=float(np.float32(eps)),
                **_Params(axes.names, axes.tp, handle, typed)._asdict(),
            )
        )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The norm of the formula, in XLA's own order: what the derivatives are taken of."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


_NAME = "all_reduce_rms_norm"


class _Params(NamedTuple):
    """Of the primitive, as of `all_reduce`'s; ``eps`` comes beside them."""

    axes: tuple[str, ...]
    tp: int
    workspace: workspace.Handle | None
    typed: bool


# ---- Checks ------------------------------------------------------------------------------------------------


def _check_arrays(x: jax.Array, residual: jax.Array, weight: jax.Array) -> protocol.Format:
    fmt = protocol.FORMATS.get(x.dtype.name)
    if fmt is None or not x.dtype == residual.dtype == weight.dtype:
        raise TypeError(
            f"jax_twoshot.{_NAME}: x, residual and weight must have one dtype, one of {', '.join(protocol.FORMATS)}; "
            f"got {x.dtype.name}, {residual.dtype.name} and {weight.dtype.name}; cast them with astype"
        )
    if x.ndim == 0 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"jax_twoshot.{_NAME}: x and residual must have one shape [..., width], and weight the shape [width]; got "
            f"{x.shape}, {residual.shape} and {weight.shape}"
        )
    check_width(_NAME, "x", x.shape[-1], fmt)
    return fmt


def check_width(function: str, name: str, width: int, fmt: protocol.Format) -> None:
    """Refuses rows that no kernel can norm; ``name`` is the argument that has them."""
    most = protocol.NORM_MAX_BLOCKS * protocol.NORM_THREADS * fmt.chunk
    if width % fmt.chunk or width > most:
        raise ValueError(
            f"jax_twoshot.{function}: the width of {name} must be a multiple of {fmt.chunk} and at most {most} for "
            f"{fmt.name}, got {width}; use jax_twoshot.all_reduce and a norm of your own for other widths"
        )


def check_eps(function: str, eps: float) -> None:
    number = isinstance(eps, (int, float, np.integer, np.floating)) and not isinstance(eps, bool)
    if not number or not 0 <= eps < math.inf:
        raise ValueError(f"jax_twoshot.{function}: eps must be a Python number from 0 up, such as 1e-6; got {eps!r}")


def check_same_on_all_ranks(function: str, name: str, array: jax.Array, axes: _api.Axes) -> None:
    varying = sorted(_compat.varying(jax.typeof(array)) & set(axes.names))
    if varying:
        raise ValueError(
            f"jax_twoshot.{function}: {name} must be the same on all ranks, its type says that it varies over "
            f"{varying}; give it to jax.shard_map with an in_spec that does not name them, or take it from an "
            "all_reduce"
        )


# ---- The primitive -----------------------------------------------------------------------------------------

all_reduce_rms_norm_p = Primitive("jax_twoshot_all_reduce_rms_norm")
"""Operands: x, residual, weight, the rank in the group, the group's number."""
all_reduce_rms_norm_p.multiple_results = True


@all_reduce_rms_norm_p.def_abstract_eval
def _abstract_eval(x, residual, weight, rank, group, *, axes, tp, workspace, typed, eps):
    out = _compat.with_varying(x, _compat.varying(x) - set(axes))
    return [out, out]


def _jvp(primals, dots, *, eps, **params):
    results, dots = all_reduce_rms_norm_p.bind(*primals, eps=eps, **params), map(ad.instantiate_zeros, dots[:3])
    return results, tangents(results[1], primals[2], dots, primals[3:], eps=eps, **params)


def tangents(new_residual, weight, dots, place, *, eps, **params):
    """Of the results, by the formula; ``dots`` are those of this rank's part of the sum, the residual, the weight."""
    x_dot, residual_dot, weight_dot = dots
    new_residual_dot = _api.all_reduce_p.bind(x_dot, *place, algorithm="auto", **params) + residual_dot
    _, normalised_dot = jax.jvp(
        lambda h, w: rms_norm(h, w, eps), (new_residual, weight), (new_residual_dot, weight_dot)
    )
    return [normalised_dot, new_residual_dot]


def _batch(args, dims, **params):
    (x, residual, weight, *place), (x_dim, residual_dim, weight_dim, *_) = args, dims
    size = next(array.shape[dim] for array, dim in zip(args, dims, strict=True) if dim is not None)
    x = batching.bdim_at_front(x, x_dim, size)
    residual = batching.bdim_at_front(residual, residual_dim, size)
    if weight_dim is None:
        return all_reduce_rms_norm_p.bind(x, residual, weight, *place, **params), (0, 0)
    weight = batching.bdim_at_front(weight, weight_dim, size)
    calls = [all_reduce_rms_norm_p.bind(*one, *place, **params) for one in zip(x, residual, weight, strict=True)]
    return [jnp.stack(results) for results in zip(*calls, strict=True)], (0, 0)


ad.primitive_jvps[all_reduce_rms_norm_p] = _jvp
batching.primitive_batchers[all_reduce_rms_norm_p] = _batch


def lower_cpu(ctx, x, residual, weight, rank, group, *, axes, tp, workspace, typed, eps):
    attributes = _api.cpu_attributes(axes, tp, workspace)
    lower = jax.ffi.ffi_lowering(_ffi.RMS_NORM_TARGET)
    return lower(ctx, x, residual, weight, rank, group, eps=np.float32(eps), **attributes)


def _lower_cuda(ctx, x, residual, weight, rank, group, **params):
    what = f"jax_twoshot.{_NAME} over {axes_text(params['axes'])}"
    aval, workspace = ctx.avals_in[0], params["workspace"]
    if workspace is None or workspace.gpu is None:
        raise _api.no_workspace(what, aval.dtype)
    fmt, width = protocol.FORMATS[aval.dtype.name], aval.shape[-1]
    rows = math.prod(aval.shape[:-1])
    most_rows = _api.rows_in_a_round(what, workspace, width, fmt)
    if rows > most_rows:
        rounds = mlir.lower_fun(functools.partial(_in_rounds, most_rows, params), multiple_results=True)
        return rounds(ctx, x, residual, weight, rank, group)
    kernel, grid, scalars = launch(workspace, fmt, rows, width, params["eps"])
    return _cute_call.lower(
        ctx.replace(avals_in=ctx.avals_in[:3]),  # the rank and the group are the workspace's to know
        [x, residual, weight],
        kernel=kernel,
        workspace=workspace,
        grid=grid,
        scalars=scalars,
        what=what,
    )


def grid_of_rows(gpu: workspace.Gpus, kernel: cubin.Kernel, rows: int, row_chunks: int) -> int:
    """CTAs of a kernel that norms rows: one for each, or as many as have a chunk a thread, as far as R5 allows."""
    most = protocol.most_ctas(gpu.ranks_on_device, gpu.sm_count, kernel.ctas_per_sm)
    return min(max(rows, protocol.ceil_div(rows * row_chunks, kernel.threads)), most)


def bits_of(eps: float) -> int:
    """How a kernel is given ``eps``: as the bits of an FP32 number."""
    return int(np.float32(eps).view(np.int32))


def launch(
    workspace: workspace.Handle, fmt: protocol.Format, rows: int, width: int, eps: float
) -> tuple[cubin.Kernel, int, list[int]]:
    """The kernel for rows that one round carries, its grid and its scalars."""
    gpu, row_chunks = workspace.gpu, fmt.chunks(width)
    assert gpu is not None
    chunks = rows * row_chunks
    (one,) = protocol.rounds(workspace.layout, chunks, one_shot_bytes=gpu.one_shot_bytes)
    blocks, _ = protocol.norm_blocks(row_chunks)
    kernel = cubin.rms_norm_kernel(
        workspace.layout.tp, fmt.name, gpu.multicast, gpu.arch, one.algorithm, blocks, owners=workspace.owners
    )
    return kernel, grid_of_rows(gpu, kernel, rows, row_chunks), [rows, row_chunks, bits_of(eps)]


def _in_rounds(most_rows, params, x, residual, weight, *place):
    return _api.in_rounds(
        most_rows, lambda x, h: all_reduce_rms_norm_p.bind(x, h, weight, *place, **params), x, residual
    )


AND_A_NORM = "jax.lax.psum and a norm of your own"
_api.register_lowerings(all_reduce_rms_norm_p, _NAME, cpu=lower_cpu, cuda=_lower_cuda, instead=AND_A_NORM)
