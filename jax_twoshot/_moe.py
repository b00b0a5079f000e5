"""``moe_tail``: checks, typing, derivatives, batching, and the lowering of each platform."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jax_twoshot
from jax_twoshot import _api, _compat, _cute_call, _ffi, _fused, cubin, protocol, workspace
from jax_twoshot.workspace import Workspace, axes_text

_NAME = "moe_tail"


def moe_tail(
    experts: Any,
    index: Any,
    scale: Any,
    shared: Any,
    residual: Any,
    weight: Any,
    axis_name: str | tuple[str, ...],
    *,
    eps: float,
    workspace: Workspace | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Ends a mixture-of-experts layer in one kernel: weights and adds a rank's experts and its part of the shared one,
    sums over the ranks, adds the residual, and norms the rows.

    To be called inside :func:`jax.shard_map`, with what the last grouped matrix product of the experts has left: rows
    in its own order, and where each token finds its experts among them. All ranks get the same bits, which depend
    neither on the number of rows nor on the platform:

    - a rank's part of a row is ``scale[0] * experts[index[0]] + scale[1] * experts[index[1]] + ... + shared``, from
      left to right in FP32, each operation rounded, and then rounded once to the dtype (`docs/design.md`, R11). An
      expert whose ``index`` is no row of ``experts``, such as -1, is not on this rank: it adds nothing, whatever its
      scale;
    - the sum of the parts, ``new_residual`` and ``normalised`` are those of
      :func:`jax_twoshot.all_reduce_rms_norm`.

    On CUDA a call re-arms what the call before it has read, so it needs a workspace of three generations, which it
    shares with nothing but its like and kernels with deferred re-arm. Over axes of size 1 there is nothing to sum, and
    XLA adds and norms in an order of its own.

    The derivatives are those of the formula, and use :func:`jax_twoshot.all_reduce` on a workspace of its own kind;
    under :func:`jax.vmap` it is one call on the batched rows, or one for each ``weight``.

    Args:
      experts: ``[slots, width]`` array of BF16, FP16 or FP32, this rank's part of what its experts make of their
        tokens, in any order, at least one row. A row has a multiple of 16 bytes, at most 32 KB. Outputs
        ``[..., k, width]``, an expert beside the other, are ``experts.reshape(-1, width)`` with an ``index`` of
        ``arange(rows * k)``.
      index: ``[..., k]`` array of int32, the rows of ``experts`` that a token is to get.
      scale: ``[..., k]`` array of FP32, the routing weights.
      shared: ``[..., width]`` array of the dtype of ``experts``, this rank's part of the shared expert, or zeros.
      residual: ``[..., width]`` array of the same dtype, the same on all ranks.
      weight: ``[width]`` array of the same dtype, the same on all ranks.
      axis_name: a manual axis of the mesh of the enclosing ``shard_map``, or a tuple of such, in any order.
      eps: added to the mean square: a Python number, from 0 up.
      workspace: as of :func:`jax_twoshot.all_reduce`, made with ``generations=3``. On CUDA one round carries whole
        rows, so it has to hold one.

    Returns:
      ``(normalised, new_residual)``, both of the shape and dtype of ``residual``, typed as varying over the operands'
      axes less ``axis_name``.

    Raises:
      TypeError: the dtypes are not those above.
      NameError: ``axis_name`` is not an axis here: no such axis, or outside ``shard_map``.
      ValueError: shapes that do not fit, a row of another size than said, a bad ``eps``, a residual or a weight that is
        typed as varying over ``axis_name``, a workspace of two generations; an axis or a workspace as of
        :func:`jax_twoshot.all_reduce`.
      NotImplementedError: as of :func:`jax_twoshot.all_reduce`.
    """
    axes = _api.all_manual_axes(_NAME, axis_name)
    operands = tuple(map(jnp.asarray, (experts, index, scale, shared, residual, weight)))
    fmt = _check_arrays(*operands)
    _fused.check_eps(_NAME, eps)
    for name, array in (("residual", operands[4]), ("weight", operands[5])):
        _fused.check_same_on_all_ranks(_NAME, name, array, axes)
    handle = _api.resolve(workspace, axes, fmt, deferred=True)
    with jax.named_scope(f"jax_twoshot.{_NAME}"):
        if axes.tp == 1 or operands[3].size == 0:
            part, (residual, weight) = combine(*operands[:4]), operands[4:]
            return _fused.all_reduce_rms_norm(part, residual, weight, axis_name, eps=eps)
        rank, group, typed = _api.place(axes)
        around = set().union(*(_compat.varying(jax.typeof(a)) for a in operands)) - set(axes.names)
        params = _Params(axes.names, axes.tp, handle, _api.resolve(None, axes, fmt), typed)
        own = (_api.varying_over(array, (*axes.names, *around), typed) for array in operands[:4])
        same = (_api.varying_over(array, around, typed) for array in operands[4:])
        eps = float(np.float32(eps))
        return tuple(moe_tail_p.bind(*own, *same, rank, group, eps=eps, **params._asdict()))


def combine(experts: jax.Array, index: jax.Array, scale: jax.Array, shared: jax.Array) -> jax.Array:
    """A rank's part by the formula, in XLA's own order: what the derivatives are taken of."""
    here = (index >= 0) & (index < len(experts))
    chosen = jnp.where(here[..., None], experts[jnp.where(here, index, 0)], 0).astype(jnp.float32)
    total = jnp.sum(jnp.where(here, scale, 0)[..., None] * chosen, axis=-2)
    return (total + shared.astype(jnp.float32)).astype(shared.dtype)


class _Params(NamedTuple):
    """Of the primitive, as of `all_reduce`'s; ``sums`` is its derivatives' workspace, and ``eps`` comes beside them."""

    axes: tuple[str, ...]
    tp: int
    workspace: workspace.Handle | None
    sums: workspace.Handle | None
    typed: bool


def _check_arrays(
    experts: jax.Array,
    index: jax.Array,
    scale: jax.Array,
    shared: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
) -> protocol.Format:
    fmt = protocol.FORMATS.get(experts.dtype.name)
    alike = all(array.dtype == experts.dtype for array in (shared, residual, weight))
    if fmt is None or not alike or index.dtype != jnp.int32 or scale.dtype != jnp.float32:
        dtypes = ", ".join(a.dtype.name for a in (experts, shared, residual, weight, index, scale))
        raise TypeError(
            f"jax_twoshot.{_NAME}: experts, shared, residual and weight must have one dtype, one of "
            f"{', '.join(protocol.FORMATS)}, index int32 and scale float32; got {dtypes}; cast them with astype"
        )
    width, rows = weight.shape[-1:], index.shape[:-1]
    fits = (
        index.ndim > 0
        and weight.ndim == 1
        and experts.ndim == 2
        and experts.shape[0] > 0
        and experts.shape[1:] == width
        and scale.shape == index.shape
        and shared.shape == residual.shape == (*rows, *width)
    )
    if not fits:
        shapes = ", ".join(str(a.shape) for a in (experts, index, scale, shared, residual, weight))
        raise ValueError(
            f"jax_twoshot.{_NAME}: experts must have the shape [slots, width] with at least one slot, index and scale "
            f"[..., k], shared and residual [..., width], and weight [width]; got {shapes}"
        )
    _fused.check_width(_NAME, "weight", width[0], fmt)
    return fmt


# ---- The primitive -----------------------------------------------------------------------------------------

moe_tail_p = Primitive("jax_twoshot_moe_tail")
"""Operands: experts, index, scale, shared, residual, weight, the rank in the group, the group's number."""
moe_tail_p.multiple_results = True


@moe_tail_p.def_abstract_eval
def _abstract_eval(experts, index, scale, shared, residual, weight, rank, group, *, axes, **_):
    out = _compat.with_varying(shared, _compat.varying(shared) - set(axes))
    return [out, out]


def _jvp(primals, tangents, *, eps, sums, **params):
    results = moe_tail_p.bind(*primals, eps=eps, sums=sums, **params)
    experts, index, scale, shared, _, weight, *place = primals
    experts_dot, _, scale_dot, shared_dot, residual_dot, weight_dot = map(ad.instantiate_zeros, tangents[:6])
    _, part_dot = jax.jvp(
        lambda e, s, h: combine(e, index, s, h), (experts, scale, shared), (experts_dot, scale_dot, shared_dot)
    )
    dots = part_dot, residual_dot, weight_dot
    return results, _fused.tangents(results[1], weight, dots, place, eps=eps, **params | {"workspace": sums})


def _batch(args, dims, **params):
    size = next(array.shape[dim] for array, dim in zip(args, dims, strict=True) if dim is not None)
    experts, weight, place = args[0], args[5], args[6:]
    index, *rows = (batching.bdim_at_front(array, dim, size) for array, dim in zip(args[1:5], dims[1:5], strict=True))
    if dims[0] is not None:
        experts = jnp.moveaxis(experts, dims[0], 0)
        slots = experts.shape[1]
        first = slots * jnp.arange(size, dtype=jnp.int32).reshape(-1, *[1] * (index.ndim - 1))
        index = jnp.where((index >= 0) & (index < slots), index + first, -1)
        experts = experts.reshape(-1, experts.shape[2])
    if dims[5] is None:
        return moe_tail_p.bind(experts, index, *rows, weight, *place, **params), (0, 0)
    weights = batching.bdim_at_front(weight, dims[5], size)
    each = zip(index, *rows, weights, strict=True)
    calls = [moe_tail_p.bind(experts, *one, *place, **params) for one in each]
    return [jnp.stack(results) for results in zip(*calls, strict=True)], (0, 0)


ad.primitive_jvps[moe_tail_p] = _jvp
batching.primitive_batchers[moe_tail_p] = _batch


def _lower_cpu(ctx, experts, index, scale, shared, *others, sums, **params):
    """A call that combines, and the sum's."""
    part = ctx.avals_in[3]
    combined = jax.ffi.ffi_lowering(_ffi.COMBINE_TARGET)(
        ctx.replace(avals_in=ctx.avals_in[:4], avals_out=[part]),
        *(experts, index, scale, shared),
        version=jax_twoshot.__version__,
    )
    return _fused.lower_cpu(ctx.replace(avals_in=[part, *ctx.avals_in[4:]]), *combined, *others, **params)


def _lower_cuda(ctx, *operands, **params):
    what = f"jax_twoshot.{_NAME} over {axes_text(params['axes'])}"
    (slots, width), (*rows_of, top_k) = ctx.avals_in[0].shape, ctx.avals_in[1].shape
    dtype, workspace = ctx.avals_in[0].dtype, params["workspace"]
    if workspace is None or workspace.gpu is None:
        raise _api.no_workspace(what, dtype, ", generations=3")
    fmt, rows = protocol.FORMATS[dtype.name], math.prod(rows_of)
    most_rows = _api.rows_in_a_round(what, workspace, width, fmt)
    if rows > most_rows:
        rounds = mlir.lower_fun(functools.partial(_in_rounds, most_rows, params), multiple_results=True)
        return rounds(ctx, *operands)
    kernel, grid, scalars = launch(workspace, fmt, rows, width, slots, top_k, params["eps"])
    return _cute_call.lower(
        ctx.replace(avals_in=ctx.avals_in[:6]),  # the rank and the group are the workspace's to know
        operands[:6],
        kernel=kernel,
        workspace=workspace,
        grid=grid,
        scalars=scalars,
        what=what,
    )


def launch(
    workspace: workspace.Handle, fmt: protocol.Format, rows: int, width: int, slots: int, top_k: int, eps: float
) -> tuple[cubin.Kernel, int, list[int]]:
    """The kernel for rows that one round carries, its grid and its scalars."""
    gpu, row_chunks = workspace.gpu, fmt.chunks(width)
    assert gpu is not None
    blocks, _ = protocol.norm_blocks(row_chunks)
    kernel = cubin.moe_tail_kernel(
        workspace.layout.tp, fmt.name, gpu.multicast, gpu.arch, blocks, owners=workspace.owners
    )
    grid = _fused.grid_of_rows(gpu, kernel, rows, row_chunks)
    return kernel, grid, [rows, row_chunks, slots, top_k, _fused.bits_of(eps)]


def _in_rounds(most_rows, params, experts, index, scale, shared, residual, weight, *place):
    return _api.in_rounds(
        most_rows,
        lambda *rows: moe_tail_p.bind(experts, *rows, weight, *place, **params),
        *(index, scale, shared, residual),
    )


_api.register_lowerings(moe_tail_p, _NAME, cpu=_lower_cpu, cuda=_lower_cuda, instead=_fused.AND_A_NORM)
