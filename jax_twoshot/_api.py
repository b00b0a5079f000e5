"""``all_reduce``: checks, typing, derivatives, batching, and the lowering of each platform."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jax_twoshot
from jax_twoshot import _compat, _ffi, protocol, workspace
from jax_twoshot.workspace import Workspace, axes_text, axes_tuple


def all_reduce(
    x: Any,
    axis_name: str | tuple[str, ...],
    *,
    workspace: Workspace | None = None,
    algorithm: str = "auto",
) -> Any:
    """Sums ``x`` over the ranks of one or several mesh axes: a drop-in for :func:`jax.lax.psum`.

    To be called inside :func:`jax.shard_map`. All ranks get the same bits: the values are added in FP32 in rank
    order (ranks are numbered along the mesh's axes, in the mesh's order) and rounded once, whatever the shape,
    the batch size, the workspace and the algorithm. -0.0 counts as +0.0, and NaN comes out in one form.

    The result has ``psum``'s type under ``check_vma=True`` (varying over the axes of ``x`` less ``axis_name``),
    ``psum``'s derivatives, and under :func:`jax.vmap` it is one call on the batched array.

    Args:
      x: array or pytree of arrays of BF16, FP16 or FP32, any shape; also empty, and scalars.
      axis_name: a manual axis of the mesh of the enclosing ``shard_map``, or a tuple of such, in any order.
      workspace: the buffers to use. By default the open one made for this mesh, these axes and this dtype; on CPU
        there need not be one. A message larger than the workspace takes several rounds, with the same bits.
      algorithm: on CUDA, how to sum, with the same bits. "one_shot": every rank sums all, one hop; a message that
        exceeds the workspace's slots takes several rounds. "two_shot": every rank sums a share, two hops, less
        traffic. "auto" (default): for each round what is expected to be faster. CPU always takes two shots.

    Returns:
      The sum, with the structure, shapes and dtypes of ``x``.

    Raises:
      TypeError: a dtype other than the three.
      NameError: ``axis_name`` is not an axis here: no such axis, or outside ``shard_map``.
      ValueError: the axis is not manual, the workspace is closed or does not fit, or there is no such algorithm.
      NotImplementedError: another axis of the mesh is not manual, or the platform is neither CPU nor CUDA.
    """
    axes = manual_axes("all_reduce", axis_name)
    choices = ("auto", *protocol.ALGORITHMS)
    if algorithm not in choices:
        raise ValueError(f"jax_twoshot.all_reduce: algorithm must be one of {choices}, got {algorithm!r}")
    with jax.named_scope("jax_twoshot.all_reduce"):
        return jax.tree.map(lambda leaf: _all_reduce_leaf(leaf, axes, workspace, algorithm), x)


class Axes(NamedTuple):
    """The reduced axes and the others, each in the mesh's order, with ``sizes`` of the whole mesh."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    sizes: dict[str, int]

    @property
    def tp(self) -> int:
        return math.prod(self.sizes[name] for name in self.names)


def manual_axes(function: str, axis_name: str | tuple[str, ...]) -> Axes:
    """The axes that a call of ``jax_twoshot``'s ``function`` names, checked as `all_reduce` documents."""
    names = axes_tuple(axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    prefix = f"jax_twoshot.{function}: axis_name={axis_name!r}"
    if not names or len(set(names)) != len(names):
        raise ValueError(f"{prefix}: give one axis or a tuple of different axes")
    if not mesh.manual_axes:
        raise NameError(
            f"{prefix} names an axis of a mesh, but this call is outside jax.shard_map: call it in a function "
            "wrapped by jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...)"
        )
    for name in names:
        if name not in mesh.axis_names:
            raise NameError(
                f"{prefix}: the mesh of the enclosing jax.shard_map has no axis {name!r}, its axes are "
                f"{tuple(mesh.axis_names)}"
            )
        if name not in mesh.manual_axes:
            raise ValueError(
                f"{prefix}: axis {name!r} is not manual here, the manual axes are {tuple(mesh.manual_axes)}; name it "
                "in jax.shard_map's axis_names, or leave axis_names out to make all axes manual"
            )
    automatic = [n for n in mesh.axis_names if n not in mesh.manual_axes and mesh.shape[n] > 1]
    if automatic:
        raise NotImplementedError(
            f"{prefix}: every axis of the mesh has to be manual, {automatic} are not; leave axis_names out of "
            "jax.shard_map, or use jax.lax.psum"
        )
    in_mesh_order = tuple(n for n in mesh.axis_names if n in names)
    others = tuple(n for n in mesh.axis_names if n not in names)
    return Axes(in_mesh_order, others, dict(mesh.shape))


class Place(NamedTuple):
    """Which rank of which group runs the program, and whether the trace is typed (check_vma=True)."""

    rank: jax.Array
    group: jax.Array
    typed: bool


def place(axes: Axes) -> Place:
    rank = jax.lax.axis_index(axes.names)
    group = jax.lax.axis_index(axes.others) if axes.others else jnp.int32(0)
    # Under check_vma=True, and only there, an axis index is typed as varying: what psum's rules go by.
    return Place(rank, group, bool(_compat.varying(jax.typeof(rank))))


def varying_over(x: jax.Array, axes: Iterable[str], typed: bool) -> jax.Array:
    """``x``, in a typed trace typed as varying over ``axes`` too."""
    missing = tuple(n for n in axes if n not in _compat.varying(jax.typeof(x))) if typed else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _all_reduce_leaf(x: Any, axes: Axes, given: Workspace | None, algorithm: str) -> jax.Array:
    x = jnp.asarray(x)
    fmt = protocol.FORMATS.get(x.dtype.name)
    if fmt is None:
        raise TypeError(
            f"jax_twoshot.all_reduce: x has dtype {x.dtype.name}, it takes {', '.join(protocol.FORMATS)}; use "
            "jax.lax.psum for other dtypes"
        )
    rank, group, typed = place(axes)
    x = varying_over(x, axes.names, typed)
    handle = workspace.resolve(given, axes.names, axes.sizes, fmt)
    params = _Params(axes.names, axes.tp, handle, algorithm, typed)
    return all_reduce_p.bind(x, rank, group, **params._asdict())


class _Params(NamedTuple):
    """Of the primitive: reduced axes in mesh order, ranks, the workspace (None: the platform's default), the
    algorithm asked for, and whether the trace is typed (check_vma=True)."""

    axes: tuple[str, ...]
    tp: int
    workspace: workspace.Handle | None
    algorithm: str
    typed: bool


all_reduce_p = Primitive("jax_twoshot_all_reduce")
"""Operands: x, the rank in the group, the group's number (both int32 scalars); linear in x."""


@all_reduce_p.def_abstract_eval
def _abstract_eval(x, rank, group, *, axes, tp, workspace, algorithm, typed):
    return _compat.with_varying(x, _compat.varying(x) - set(axes))


def _jvp(primals, tangents, **params):
    out = all_reduce_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return out, ad.Zero.from_primal_value(out)
    return out, all_reduce_p.bind(tangents[0], *primals[1:], **params)


def _transpose(cotangent, x, rank, group, **params):
    if isinstance(cotangent, ad.Zero):
        return ad.Zero(x.aval), None, None
    # psum's rules: a typed sum is invariant, and its transpose copies it to every rank; an untyped one counts as a
    # sum followed by a copy, whose transpose is a sum again.
    if params["typed"]:
        return jax.lax.pcast(cotangent, params["axes"], to="varying"), None, None
    return all_reduce_p.bind(cotangent, rank, group, **params), None, None


def _batch(args, dims, **params):
    return all_reduce_p.bind(*args, **params), dims[0]


ad.primitive_jvps[all_reduce_p] = _jvp
ad.primitive_transposes[all_reduce_p] = _transpose
batching.primitive_batchers[all_reduce_p] = _batch


def _lower_cpu(ctx, x, rank, group, *, axes, tp, workspace, algorithm, typed):
    if _is_identity(ctx, tp):
        return [x]
    return jax.ffi.ffi_lowering(_ffi.TARGET)(ctx, x, rank, group, **cpu_attributes(axes, tp, workspace))


def cpu_attributes(axes: tuple[str, ...], tp: int, workspace: workspace.Handle | None) -> dict[str, Any]:
    """What the handlers on CPU read.

    Raises:
      NotImplementedError: the ranks are not all in this process.
    """
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"jax_twoshot.all_reduce over {axes_text(axes)}: on CPU the ranks are devices of one process, this job "
            f"has {jax.process_count()} processes; run it in one process with as many devices "
            "(jax.config.update('jax_num_cpu_devices', n)), or use jax.lax.psum"
        )
    layout = protocol.Layout.for_capacity(tp, protocol.CPU_CAPACITY_BYTES)
    if workspace and workspace.layout.slot_chunks < layout.slot_chunks:
        layout = workspace.layout
    return _attributes(axes, layout)


def _lower_cuda(ctx, x, rank, group, *, axes, tp, workspace, algorithm, typed):
    if _is_identity(ctx, tp):
        return [x]
    if workspace is None:
        raise no_workspace(f"jax_twoshot.all_reduce over {axes_text(axes)}", ctx.avals_in[0].dtype)
    devices = _compat.lowering_devices(ctx)
    if devices is not None and devices != workspace.devices:
        raise ValueError(
            f"jax_twoshot.all_reduce over {axes_text(axes)}: the shard_map runs on devices {devices}, the workspace "
            f"was made for {workspace.devices}; make a Workspace with this mesh"
        )
    # The rank and the group are the workspace's to know: only x goes to the kernel.
    ctx = ctx.replace(avals_in=ctx.avals_in[:1])
    return jax.ffi.ffi_lowering(_ffi.TARGET)(
        ctx,
        x,
        workspace=np.int64(workspace.id),
        algorithm=algorithm,
        **_attributes(axes, workspace.layout),
    )


def no_workspace(what: str, dtype: Any) -> ValueError:
    """What a call on CUDA raises that has no buffers; ``what`` names it and its axes."""
    return ValueError(
        f"{what}: on CUDA it needs a workspace made before the first call; none is open for these axes of this mesh "
        f"and dtype {dtype.name}. Make one on every process and keep it: "
        "ws = jax_twoshot.Workspace(mesh, axis_name, rows=..., width=..., dtype=...)"
    )


def _attributes(axes: tuple[str, ...], layout: protocol.Layout) -> dict[str, Any]:
    """What the handlers of both platforms read; the version keeps a program cached on disk to the library it is for."""
    return {
        "tp": np.int64(layout.tp),
        "slot_chunks": np.int64(layout.slot_chunks),
        "axes": axes_text(axes),
        "version": jax_twoshot.__version__,
    }


def _is_identity(ctx, tp: int) -> bool:
    """Whether the sum is the operand; an empty one touches nothing (R4)."""
    return tp == 1 or 0 in ctx.avals_in[0].shape


def _lower_other(ctx, x, rank, group, *, axes, tp, workspace, algorithm, typed):
    raise NotImplementedError(
        f"jax_twoshot.all_reduce runs on CPU and CUDA devices, not on {ctx.module_context.platforms}; use jax.lax.psum"
    )


mlir.register_lowering(all_reduce_p, _lower_other)
mlir.register_lowering(all_reduce_p, _lower_cpu, platform="cpu")
mlir.register_lowering(all_reduce_p, _lower_cuda, platform="cuda")
