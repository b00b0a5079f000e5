"""``all_reduce``: checks, typing, derivatives, batching, and the lowering of each platform."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import jax_twoshot
from jax_twoshot import _compat, _ffi, protocol, workspace
from jax_twoshot.workspace import Workspace, axes_text, axes_tuple

logger = logging.getLogger("jax_twoshot")


def all_reduce(
    x: Any,
    axis_name: str | tuple[str, ...],
    *,
    workspace: Workspace | None = None,
    algorithm: str = "auto",
) -> Any:
    """Sums ``x`` over the ranks of one or several mesh axes: a drop-in for :func:`jax.lax.psum`.

    To be called inside :func:`jax.shard_map`; the mesh's other axes are manual there too, or Explicit. All ranks get
    the same bits: the values are added in FP32 in rank order (ranks are numbered along the mesh's axes, in the mesh's
    order) and rounded once, whatever the shape, the batch size, the workspace and the algorithm. -0.0 counts as +0.0,
    and NaN comes out in one form.

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
      NotImplementedError: another axis of the mesh is Auto, or the platform is neither CPU nor CUDA.
      RuntimeError: this process was forked from one that has used the library.
    """
    _ffi.enter_process()
    axes = manual_axes("all_reduce", axis_name)
    choices = ("auto", *protocol.ALGORITHMS)
    if algorithm not in choices:
        raise ValueError(f"jax_twoshot.all_reduce: algorithm must be one of {choices}, got {algorithm!r}")
    with jax.named_scope("jax_twoshot.all_reduce"):
        return jax.tree.map(lambda leaf: _all_reduce_leaf(leaf, axes, workspace, algorithm), x)


class Axes(NamedTuple):
    """The reduced axes and the others, each in the mesh's order, with ``sizes`` of the whole mesh; which of the others
    are Explicit here, not manual."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    sizes: dict[str, int]
    explicit: frozenset[str]

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
    automatic = [n for n in mesh.auto_axes if mesh.shape[n] > 1]
    if automatic:
        raise NotImplementedError(
            f"{prefix}: the other axes of the mesh have to be manual or Explicit, {automatic} are Auto, and how x is "
            "sharded over them is not known yet; leave axis_names out of jax.shard_map, or make the mesh with "
            "jax.make_mesh, or use jax.lax.psum"
        )
    in_mesh_order = tuple(n for n in mesh.axis_names if n in names)
    others = tuple(n for n in mesh.axis_names if n not in names)
    explicit = frozenset(n for n in mesh.explicit_axes if mesh.shape[n] > 1)
    return Axes(in_mesh_order, others, dict(mesh.shape), explicit)


def check(x: jax.Array, axis_name: str | tuple[str, ...], platform: str) -> None:
    """Raises what ``all_reduce(x, axis_name)`` would, now or when it is compiled for ``platform``; and where there is
    nothing to sum, since only one rank is in the group."""
    axes = manual_axes("all_reduce", axis_name)
    fmt = _format(x.dtype)
    if axes.tp == 1:
        raise ValueError(f"one rank along {axes_text(axes.names)}: nothing to sum")
    handle = resolve(None, axes, fmt)
    if platform == "cpu":
        cpu_attributes(axes.names, axes.tp, handle)
    elif platform == "gpu":
        if handle is None:
            raise no_workspace(f"jax_twoshot.all_reduce over {axes_text(axes.names)}", x.dtype)
    else:
        _refuse_platform("all_reduce", platform)


def _format(dtype: np.dtype) -> protocol.Format:
    fmt = protocol.FORMATS.get(dtype.name)
    if fmt is None:
        raise TypeError(
            f"jax_twoshot.all_reduce: x has dtype {dtype.name}, it takes {', '.join(protocol.FORMATS)}; use "
            "jax.lax.psum for other dtypes"
        )
    return fmt


def all_manual_axes(function: str, axis_name: str | tuple[str, ...]) -> Axes:
    """`manual_axes` of a call that needs its arrays whole.

    Raises:
      NotImplementedError: another axis of the mesh is Explicit.
    """
    _ffi.enter_process()
    axes = manual_axes(function, axis_name)
    if axes.explicit:
        raise NotImplementedError(
            f"jax_twoshot.{function}: every axis of the mesh has to be manual, {sorted(axes.explicit)} are Explicit; "
            "leave axis_names out of jax.shard_map"
        )
    return axes


class Place(NamedTuple):
    """Which rank of which group runs the program, and whether the trace is typed (check_vma=True)."""

    rank: jax.Array
    group: jax.Array
    typed: bool


def place(axes: Axes) -> Place:
    group = jax.lax.axis_index(axes.others) if axes.others else jnp.int32(0)
    return Place(jax.lax.axis_index(axes.names), group, is_typed(axes))


def is_typed(axes: Axes) -> bool:
    """Whether check_vma=True: then, and only then, an axis index is typed as varying. What psum's rules go by."""
    return bool(_compat.varying(jax.typeof(jax.lax.axis_index(axes.names))))


def varying_over(x: jax.Array, axes: Iterable[str], typed: bool) -> jax.Array:
    """``x``, in a typed trace typed as varying over ``axes`` too."""
    missing = tuple(n for n in axes if n not in _compat.varying(jax.typeof(x))) if typed else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _all_reduce_leaf(x: Any, axes: Axes, given: Workspace | None, algorithm: str) -> jax.Array:
    x = jnp.asarray(x)
    fmt = _format(x.dtype)
    if axes.explicit:
        # Each device's part is a message of its own: left to XLA, the custom call would get x whole on every device.
        spec = jax.typeof(x).sharding.spec
        return jax.shard_map(
            lambda part: _all_reduce_leaf(part, axes._replace(explicit=frozenset()), given, algorithm),
            axis_names=axes.explicit,
            in_specs=spec,
            out_specs=spec,
            check_vma=is_typed(axes),
        )(x)
    rank, group, typed = place(axes)
    x = varying_over(x, axes.names, typed)
    handle = resolve(given, axes, fmt)
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
    _log_compiled(ctx, axes, "cpu", workspace)
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
    _ffi.let_ctrl_c_end_waits()
    layout = protocol.Layout.for_capacity(tp, protocol.CPU_CAPACITY_BYTES)
    if workspace and workspace.layout.slot_chunks < layout.slot_chunks:
        layout = workspace.layout
    return {
        "workspace": np.int64(workspace.id if workspace else -1),
        "timeout": np.float64(_ffi.timeout_attribute(workspace.timeout if workspace else None)),
        **_attributes(axes, layout),
    }


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
    _log_compiled(ctx, axes, "cuda", workspace)
    # The rank and the group are the workspace's to know: only x goes to the kernel.
    ctx = ctx.replace(avals_in=ctx.avals_in[:1])
    return jax.ffi.ffi_lowering(_ffi.TARGET)(
        ctx,
        x,
        workspace=np.int64(workspace.id),
        algorithm=algorithm,
        **_attributes(axes, workspace.layout),
    )


def _log_compiled(ctx, axes: tuple[str, ...], platform: str, workspace: workspace.Handle | None) -> None:
    operand = ctx.avals_in[0].str_short()
    where = f"workspace {workspace.id}" if workspace else "no workspace"
    logger.debug("all_reduce of %s over %s compiled for %s, %s", operand, axes_text(axes), platform, where)


def resolve(
    given: workspace.Workspace | None, axes: Axes, fmt: protocol.Format, *, deferred: bool = False
) -> workspace.Handle | None:
    """`workspace.resolve` for a call over ``axes``."""
    return workspace.resolve(given, axes.names, axes.sizes, fmt, deferred=deferred)


def no_workspace(what: str, dtype: Any, more: str = "") -> ValueError:
    """What a call on CUDA raises that has no buffers; ``what`` names it and its axes, ``more`` arguments it needs."""
    return ValueError(
        f"{what}: on CUDA it needs a workspace made before the first call; none is open for these axes of this mesh "
        f"and dtype {dtype.name}. Make one on every process and keep it: "
        f"ws = jax_twoshot.Workspace(mesh, axis_name, rows=..., width=..., dtype=...{more})"
    )


def rows_in_a_round(what: str, workspace: workspace.Handle, width: int, fmt: protocol.Format) -> int:
    """Most rows of whole chunks that one launch can carry.

    Raises:
      ValueError: not even one; ``what`` names the call and its axes.
    """
    rows = workspace.layout.capacity_chunks // fmt.chunks(width)
    if rows == 0:
        raise ValueError(
            f"{what}: the workspace must hold a row, {width} elements, it holds "
            f"{workspace.layout.capacity_chunks * fmt.chunk}; make a Workspace with this width"
        )
    return rows


def in_rounds(most_rows: int, call: Callable[..., Any], *arrays: jax.Array) -> Any:
    """``call``'s results for ``arrays`` ``[..., n]`` whose rows one launch cannot take: a launch for each round."""
    flat = [array.reshape(-1, array.shape[-1]) for array in arrays]
    starts = range(0, len(flat[0]), most_rows)
    rounds = [call(*(array[start : start + most_rows] for array in flat)) for start in starts]
    rows = arrays[0].shape[:-1]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts).reshape(*rows, parts[0].shape[-1]), *rounds)


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


def register_lowerings(
    primitive: Primitive, name: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], instead: str = "jax.lax.psum"
) -> None:
    """How the function ``name`` is lowered on the two platforms; any other is refused, with what to use ``instead``."""

    def other(ctx, *operands, **params):
        _refuse_platform(name, *ctx.module_context.platforms, instead=instead)

    mlir.register_lowering(primitive, other)
    mlir.register_lowering(primitive, cpu, platform="cpu")
    mlir.register_lowering(primitive, cuda, platform="cuda")


def _refuse_platform(name: str, *platforms: str, instead: str = "jax.lax.psum") -> NoReturn:
    raise NotImplementedError(
        f"jax_twoshot.{name} runs on CPU and CUDA devices, not on {', '.join(platforms)}; use {instead}"
    )


register_lowerings(all_reduce_p, "all_reduce", cpu=_lower_cpu, cuda=_lower_cuda)
