"""``cute_call``: a CuTe DSL kernel on a workspace, inside ``jit`` and ``shard_map``."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jax_twoshot
from jax_twoshot import _compat, _ffi, cubin, protocol
from jax_twoshot.workspace import Handle, Workspace, axes_text


@dataclass(frozen=True, init=False)
class CuteKernel:
    """Names a kernel's class without importing it, so that a program runs where the compiler is not installed.

    Attributes:
      source: the module, or the path of the ``.py`` file, in which the class is. A file is run to get it.
      class_name: the class, at the top level of its file.
      parameters: (name, value) of the keyword arguments that make one, each a str, int, bool or float. A cubin is found
        by them: give each field, also one that has a default, as the kernel that was compiled had it.

    Raises:
      TypeError: a parameter of another type.
    """

    source: str
    class_name: str
    parameters: tuple[tuple[str, str | int | bool | float], ...]

    def __init__(self, source: str | os.PathLike, class_name: str, **parameters: str | int | bool | float) -> None:
        for name, value in parameters.items():
            if not isinstance(value, (str, int, float)):
                raise TypeError(
                    f"CuteKernel: parameter {name} of {class_name} must be a str, int, bool or float, since it is part "
                    f"of the cubin's name; got {value!r}"
                )
        object.__setattr__(self, "source", os.fspath(source))
        object.__setattr__(self, "class_name", class_name)
        object.__setattr__(self, "parameters", tuple(sorted(parameters.items())))

    @classmethod
    def of(cls, kernel: Any) -> CuteKernel:
        """The name of a kernel that is at hand.

        Raises:
          TypeError: it is no instance of a frozen dataclass at the top level of a file.
        """
        if isinstance(kernel, CuteKernel):
            return kernel
        kind = type(kernel)
        frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if not frozen or "." in kind.__qualname__:
            raise TypeError(
                "cute_call: kernel must be an instance of a frozen dataclass at the top level of its file (its fields "
                f"are the compile-time parameters) or a CuteKernel, got {kernel!r}"
            )
        source = kind.__module__ if kind.__module__ != "__main__" else inspect.getsourcefile(kind)
        assert source is not None
        return cls(source, kind.__name__, **{f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)})


def cute_call(
    kernel: Any,
    *operands: jax.Array,
    workspace: Workspace,
    out_shape: Any,
    grid: int,
    scalars: Sequence[int] = (),
    threads: int = protocol.THREADS,
    ctas_per_sm: int = 1,
    shared_memory: int = 0,
    varying: Collection[str] | None = None,
) -> Any:
    """Calls a CuTe DSL kernel that pushes, reduces and collects on a workspace; ``docs/kernel_authors.md`` shows how.

    To be called inside :func:`jax.shard_map` over the workspace's mesh; for the stand-in of one GPU, also outside. The
    kernel's parameters are the addresses of the operands and of the results (``Int64``, 256-byte aligned, row-major),
    the scalars (``Int32``) and :class:`jax_twoshot.cutedsl.Arguments`. It is compiled to a cubin when the call is
    lowered, about half a second, and found in the cache after that; XLA captures its launch like any other. Every rank
    makes the same calls in the same order, those of ``all_reduce`` on the same workspace among them. A wait that fails
    is reported as ``all_reduce`` does. There is no derivative and no batching rule: use :class:`jax.custom_vjp`.

    Args:
      kernel: an instance of a frozen dataclass with a ``@cute.kernel`` method named ``kernel``, whose fields are the
        compile-time parameters (str, int, bool or float), or a :class:`CuteKernel` that names one. The cache knows it
        by its file, these fields and the workspace's kind, and does not look at what it imports besides
        ``jax_twoshot``.
      *operands: arrays of any dtype, each rank's own: what changes from call to call, also a single number.
      workspace: the buffers. Its dtype is the message's.
      out_shape: a pytree of what has a shape and a dtype, such as :class:`jax.ShapeDtypeStruct`.
      grid: CTAs, all of which must be resident at once (R5): ``workspace.grid(chunks)`` gives a number that is.
      scalars: whole numbers of 32 bits, part of the program. A float goes as its bits.
      threads: of a CTA.
      ctas_per_sm: CTAs that fit one SM; the compiler keeps the registers down for it.
      shared_memory: dynamic bytes of a CTA, as many as the kernel allocates.
      varying: under ``check_vma=True``, the mesh axes over which the results may differ: none for what is the same on
        every rank. By default those over which any operand may.

    Returns:
      The results, in the structure of ``out_shape``.

    Raises:
      TypeError: ``kernel`` or ``workspace`` is none, or, when lowered, the kernel has other parameters.
      ValueError: the workspace is closed or of another mesh, an axis is not manual, a number is out of range; when
        lowered, the grid cannot be resident, or the kernel defers its re-arming and the workspace has two generations.
      NotImplementedError: when lowered, for another platform than CUDA.
      CubinError: when lowered, the kernel is not in the cache and the compiler is not installed.
    """
    name = CuteKernel.of(kernel)
    what = f"jax_twoshot.cute_call of {name.class_name}"
    typed = _check_place(what, workspace)
    _check_numbers(what, {"grid": grid, "threads": threads, "ctas_per_sm": ctas_per_sm}, scalars, shared_memory)
    leaves, structure = jax.tree.flatten(out_shape)
    params = _Params(
        workspace=workspace.handle,
        kernel=name,
        format=workspace.format.name,
        results=tuple((tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves),
        scalars=tuple(int(s) for s in scalars),
        grid=int(grid),
        threads=int(threads),
        ctas_per_sm=int(ctas_per_sm),
        shared_memory=int(shared_memory),
        varying=None if varying is None else frozenset(varying) if typed else frozenset(),
        what=f"{what} over {axes_text(workspace.axis_names)}",
    )
    with jax.named_scope(what):
        results = cute_call_p.bind(*(jnp.asarray(x) for x in operands), call=params)
    return jax.tree.unflatten(structure, results)


@dataclass(frozen=True, kw_only=True)
class _Params:
    """Of the primitive: everything but the operands."""

    workspace: Handle
    kernel: CuteKernel
    format: str
    results: tuple[tuple[tuple[int, ...], np.dtype], ...]
    scalars: tuple[int, ...]
    grid: int
    threads: int
    ctas_per_sm: int
    shared_memory: int
    varying: frozenset[str] | None
    what: str


def _check_place(what: str, workspace: Workspace) -> bool:
    """Refuses a workspace that cannot serve here; whether types are checked (check_vma=True)."""
    if not isinstance(workspace, Workspace):
        raise TypeError(f"{what}: workspace must be a jax_twoshot.Workspace, got {type(workspace).__name__}")
    if workspace.closed:
        raise ValueError(f"{what}: workspace is closed ({workspace}); make a new one, and close it after its last use")
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes and workspace.mesh.size == 1:
        return False
    if dict(mesh.shape) != dict(workspace.mesh.shape) or set(mesh.manual_axes) != set(mesh.axis_names):
        raise ValueError(
            f"{what}: call it inside jax.shard_map over the workspace's mesh {dict(workspace.mesh.shape)}, all of its "
            f"axes manual; here the mesh is {dict(mesh.shape)}, its manual axes {tuple(mesh.manual_axes)}"
        )
    return bool(_compat.varying(jax.typeof(jax.lax.axis_index(mesh.manual_axes))))


def _check_numbers(what: str, positive: dict[str, int], scalars: Sequence[int], shared_memory: int) -> None:
    """Refuses what the driver would."""
    for name, value in positive.items():
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{what}: {name} must be a whole number from 1 up, got {value!r}")
    if shared_memory < 0:
        raise ValueError(f"{what}: shared_memory must be bytes from 0 up, got {shared_memory!r}")
    for value in scalars:
        if not isinstance(value, (int, np.integer)) or not -(1 << 31) <= value < 1 << 31:
            raise ValueError(
                f"{what}: scalars must be whole numbers of 32 bits, got {value!r}; the bits of a float are one, "
                "int(np.float32(x).view(np.int32)), and a traced number goes as an operand"
            )


cute_call_p = Primitive("jax_twoshot_cute_call")
"""Operands: the kernel's. One parameter, `_Params`."""
cute_call_p.multiple_results = True


@cute_call_p.def_abstract_eval
def _abstract_eval(*operands, call):
    everywhere = frozenset[str]().union(*(_compat.varying(x) for x in operands))
    axes = everywhere if call.varying is None else call.varying
    return [_compat.array_type(shape, dtype, axes) for shape, dtype in call.results]


def compile_kernel(
    kernel: Any,
    arch: str,
    *,
    addresses: int,
    scalars: int,
    tp: int,
    stand_in: bool = False,
    dtype: Any = jnp.bfloat16,
    multicast: bool = False,
    deferred: bool = False,
    threads: int = protocol.THREADS,
    ctas_per_sm: int = 1,
    shared_memory: int = 0,
    folder: Path | str | None = None,
) -> cubin.Cubin:
    """Compiles what :func:`cute_call` would, without a GPU: to look at, or for a machine without the compiler.

    Args:
      kernel: as for ``cute_call``, and so are ``threads``, ``ctas_per_sm`` and ``shared_memory``.
      arch: target, such as "sm_90a"; one of ``jax_twoshot.cubin.ARCHS``.
      addresses: operands and results of the call.
      scalars: scalars of the call.
      tp: ranks in the group.
      stand_in: for ``Workspace(owners=1)``.
      dtype: the workspace's.
      multicast: for GPUs that store to all ranks at once, as ``python -m jax_twoshot doctor`` says.
      deferred: for ``Workspace(generations=3)``.
      folder: where to put the cubin; ``JAX_TWOSHOT_CUBIN_PATH`` names it where it is used. By default nowhere. The
        library's own kernels, which workspaces need, go into the same one: ``python -m jax_twoshot compile``.

    Returns:
      The cubin: ``image``, ``symbol``, ``registers`` of a thread.

    Raises:
      CubinError: the compiler is not installed.
      TypeError, ValueError: the kernel has other parameters, or there can be no such kernel.
    """
    name = CuteKernel.of(kernel)
    which = cubin.Kernel(
        source=name.source,
        class_name=name.class_name,
        parameters=name.parameters,
        addresses=addresses,
        scalars=scalars,
        tp=tp,
        owners=1 if stand_in else tp,
        format=np.dtype(dtype).name,
        multicast=multicast,
        deferred=deferred,
        threads=threads,
        ctas_per_sm=ctas_per_sm,
        shared_memory=shared_memory,
        arch=arch,
    )
    if folder is None:
        return cubin.compile_variant(which)
    return cubin.compile_into([which], Path(folder))[0]


def _lower_cuda(ctx, *operands, call):
    gpu = call.workspace.gpu
    if gpu is None:
        raise ValueError(
            f"{call.what}: the workspace was made on {jax.default_backend()} devices, so the GPU to compile for is not "
            "known; make it with the mesh of GPUs"
        )
    kernel = cubin.Kernel(
        source=call.kernel.source,
        class_name=call.kernel.class_name,
        parameters=call.kernel.parameters,
        addresses=len(ctx.avals_in) + len(ctx.avals_out),
        scalars=len(call.scalars),
        tp=call.workspace.layout.tp,
        owners=call.workspace.owners,
        format=call.format,
        multicast=gpu.multicast,
        deferred=call.workspace.deferred,
        threads=call.threads,
        ctas_per_sm=call.ctas_per_sm,
        shared_memory=call.shared_memory,
        arch=gpu.arch,
    )
    return lower(
        ctx, operands, kernel=kernel, workspace=call.workspace, grid=call.grid, scalars=call.scalars, what=call.what
    )


def lower(
    ctx: Any,
    operands: Sequence[Any],
    *,
    kernel: cubin.Kernel,
    workspace: Handle,
    grid: int,
    scalars: Sequence[int],
    what: str,
) -> Sequence[Any]:
    """The custom call of a kernel on a workspace, in a lowering rule for CUDA.

    Args:
      ctx: of the rule; its ``avals_in`` are those of ``operands``, its ``avals_out`` those of the results.
      operands: the kernel's, as values of the program.
      kernel: which; the cubin is found, or compiled, now, and becomes part of the program.
      workspace: the buffers; ``workspace.gpu`` is not None.
      grid: CTAs.
      scalars: whole numbers of 32 bits.
      what: begins messages: the call, and the axes it is over.

    Returns:
      The results, as values of the program.

    Raises:
      ValueError: the grid cannot be resident (R5), or the program is for other devices than the workspace's.
      CubinError: as `cubin.find`.
    """
    assert workspace.gpu is not None
    devices = _compat.lowering_devices(ctx)
    if devices is not None and devices != workspace.devices:
        raise ValueError(
            f"{what}: the program runs on devices {devices}, the workspace was made for {workspace.devices}; make a "
            "Workspace with this mesh"
        )
    most = protocol.most_ctas(workspace.gpu.ranks_on_device, workspace.gpu.sm_count, kernel.ctas_per_sm)
    if grid > most:
        raise ValueError(
            f"{what}: grid must be at most {most} CTAs, since all wait for each other and no more are sure to be "
            f"resident ({workspace.gpu.sm_count} SMs, {kernel.ctas_per_sm} CTAs an SM, "
            f"{workspace.gpu.ranks_on_device} ranks a GPU), got {grid}; let each CTA take several chunks"
        )
    found = cubin.find(kernel)
    return jax.ffi.ffi_lowering(_ffi.CUTE_TARGET)(
        ctx,
        *operands,
        what=what,
        workspace=np.int64(workspace.id),
        tp=np.int64(workspace.layout.tp),
        slot_chunks=np.int64(workspace.layout.slot_chunks),
        generations=np.int64(workspace.layout.generations),
        image=found.image,
        symbol=found.symbol,
        pdl=kernel.pdl,
        grid=np.int64(grid),
        threads=np.int64(kernel.threads),
        ctas_per_sm=np.int64(kernel.ctas_per_sm),
        shared_memory=np.int64(kernel.shared_memory),
        scalars=np.asarray(scalars, np.int32),
        version=jax_twoshot.__version__,
    )


def _lower_other(ctx, *operands, call):
    raise NotImplementedError(
        f"{call.what}: a CuTe DSL kernel runs on CUDA only, this program is compiled for "
        f"{', '.join(ctx.module_context.platforms)}; write that platform's path with jax_twoshot.all_reduce, and "
        "choose by jax.lax.platform_dependent"
    )


mlir.register_lowering(cute_call_p, _lower_other)
mlir.register_lowering(cute_call_p, _lower_cuda, platform="cuda")
