"""Workspaces: which devices form a group, how much one round can carry, how long the buffers live."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_twoshot import _ffi, _settings, cubin, protocol

if TYPE_CHECKING:
    from jax_twoshot.symmetric import SymmetricBuffer

logger = logging.getLogger("jax_twoshot")


@dataclass(frozen=True)
class Gpus:
    """What a launch depends on, the same for all GPUs of a mesh and on every process.

    Attributes:
      arch: the target that kernels are compiled for.
      multicast: what all ranks get is stored once, through a multicast address.
      ranks_on_device: most ranks that share one GPU.
      sm_count: least number of multiprocessors.
      one_shot_bytes: of the largest message that is summed in one shot where the caller does not say.
    """

    arch: str
    multicast: bool
    ranks_on_device: int
    sm_count: int
    one_shot_bytes: int


@dataclass(frozen=True)
class Handle:
    """What a traced call keeps of a workspace: no address, so that compiled programs can be cached on disk.

    Attributes:
      id: number of the workspace, in the order in which this process made them.
      layout: of each rank's buffers.
      devices: ids of the mesh's devices, in mesh order.
      owners: ranks that own chunks: all, or 1 in the stand-in for one GPU.
      timeout: seconds of its own deadline; None: the process's.
      gpu: of the mesh; None on CPU.
    """

    id: int
    layout: protocol.Layout
    devices: tuple[int, ...]
    owners: int
    timeout: float | None = None
    gpu: Gpus | None = None

    @property
    def deferred(self) -> bool:
        """Whether each call re-arms what the call before it has read."""
        return self.layout.generations >= protocol.GENERATIONS_DEFERRED


@dataclass(frozen=True)
class View:
    """One generation of a rank's buffers, as addresses on its device; a chunk lies at its number times 16 bytes.

    Attributes:
      device: ordinal of the device, as JAX knows it (``local_hardware_id``).
      rank: of the device in its group.
      recv: of this rank's ``[TP, slot_chunks]`` slots.
      gather: of this rank's ``[TP * slot_chunks]`` sums.
      peer_recv: of every rank's slots, in rank order; in the stand-in for one GPU, of the one rank's.
      peer_gather: the same for the sums.
      multicast_gather: where one multicast store reaches every rank's sums, or None.
    """

    device: int
    rank: int
    recv: int
    gather: int
    peer_recv: tuple[int, ...]
    peer_gather: tuple[int, ...]
    multicast_gather: int | None

    @classmethod
    def of(cls, layout: protocol.Layout, generation: int, buffer: SymmetricBuffer) -> View:
        """The view of a rank's allocation."""
        recv, gather = layout.recv_offset(generation, 0, 0), layout.gather_offset(generation, 0)
        return cls(
            buffer.device,
            buffer.rank,
            buffer.address + recv,
            buffer.address + gather,
            tuple(peer + recv for peer in buffer.peers),
            tuple(peer + gather for peer in buffer.peers),
            None if buffer.multicast is None else buffer.multicast + gather,
        )


@dataclass(frozen=True)
class Stats:
    """What the calls of a workspace have done. All ranks make the same calls: they are counted on one of this process.

    A replayed CUDA graph does not pass the host. So on CUDA only ``rounds`` counts all, in device memory; the other
    three tell what was launched or recorded into graphs, each launch once.

    Attributes:
      calls: that reached the handler, also of `all_reduce_rms_norm` and of kernels of one's own; an empty message or a
        single rank makes none.
      bytes: of those calls' messages, of one rank; on CUDA of `all_reduce` only.
      algorithms: rounds of the same calls as ``bytes``, by algorithm.
      rounds: all. On CUDA those that are finished, since the workspace was made or reset, modulo 2^32; once it is
        closed, those of ``algorithms``.
      slow_waits: waits, of any rank of this process, that lasted longer than a tenth of the deadline (R9).
      failure: the text of the last failed wait; None if there was none, or none since `Workspace.reset` on CUDA.
    """

    calls: int
    bytes: int
    algorithms: dict[str, int]
    rounds: int
    slow_waits: int
    failure: str | None


class Workspace:
    """Buffers for the all-reduces over ``axis_names`` of ``mesh``.

    Collective: every process of the mesh makes it, in the same order. On CPU it is optional; there it only limits how
    much one round carries, and the buffers belong to the call (XLA:CPU may run several at once).

    ``with workspace:`` and :meth:`close` end it: no new call may use it, compiled programs keep what they need.

    Args:
      mesh: the mesh of the ``shard_map`` that will call :func:`jax_twoshot.all_reduce`.
      axis_names: the axis, or the tuple of axes in any order, to sum over.
      rows: most rows of a message that is summed in one round.
      width: columns of such a row. Other shapes are welcome: what counts is ``rows * width`` elements. A rank's
        buffers on CUDA take about ``4 * rows * width`` elements, more where one-shot can carry much of such a message
        (`protocol.Layout.for_capacity`).
      dtype: BF16 (default), FP16 or FP32. The two 16-bit types may share a workspace.
      generations: copies of the buffers: 2, or 3 for :func:`jax_twoshot.moe_tail` and for kernels of one's own in which
        each call re-arms what the call before it has read (deferred re-arm). Such calls share no workspace with others,
        so ``all_reduce`` does not use one with 3.
      owners: 1 for the stand-in of a group on a mesh of one device, with ``tp``: rank 0 owns every chunk, and slots 0
        to ``tp - 1`` of its own buffers are the ranks. A kernel that is called on it pushes every rank's part itself
        (``jax_twoshot.cutedsl.Arguments.parts``), so it can be tested and timed on one GPU, in one process. Only
        :func:`jax_twoshot.cute_call` takes such a workspace.
      tp: ranks that the stand-in plays; without ``owners`` the mesh says how many there are.
      timeout: the deadline of every wait for a peer, in seconds: of calls on this workspace, of making and of
        resetting it. 0 waits for ever; None (default) is ``JAX_TWOSHOT_TIMEOUT``. The same on every process.

    Raises:
      TypeError: ``mesh`` is no mesh, or ``dtype`` is none of the three.
      ValueError: an axis that the mesh does not have, rows or width below 1, other generations than 2 and 3, a
        stand-in on several devices, or no number of seconds.
      SymmetricMemoryError: on CUDA, a process failed to set its part up, or did not come in time.
      RuntimeError: this process was forked from one that has used the library.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_names: str | tuple[str, ...],
        *,
        rows: int,
        width: int,
        dtype: Any = jnp.bfloat16,
        generations: int = protocol.GENERATIONS,
        owners: int | None = None,
        tp: int | None = None,
        timeout: float | None = None,
    ):
        _ffi.enter_process()
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(
                f"Workspace: mesh must be a jax.sharding.Mesh (it says which devices), got {type(mesh).__name__}; "
                "make one with jax.make_mesh"
            )
        names = axes_tuple(axis_names)
        unknown = [name for name in names if name not in mesh.axis_names]
        if unknown or not names or len(set(names)) != len(names):
            raise ValueError(
                f"Workspace: axis_names must be one axis of the mesh or a tuple of different ones, got {axis_names!r}; "
                f"the axes of the mesh are {tuple(mesh.axis_names)}"
            )
        for argument, value in (("rows", rows), ("width", width)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Workspace: {argument} must be a whole number from 1 up, got {value!r}")
        name = np.dtype(dtype).name
        if name not in protocol.FORMATS:
            raise TypeError(f"Workspace: dtype must be one of {', '.join(protocol.FORMATS)}, got {name}")
        if generations not in (protocol.GENERATIONS, protocol.GENERATIONS_DEFERRED):
            raise ValueError(
                f"Workspace: generations must be {protocol.GENERATIONS}, or {protocol.GENERATIONS_DEFERRED} for "
                f"deferred re-arm, got {generations!r}"
            )
        self.mesh = mesh
        self.axis_names = tuple(n for n in mesh.axis_names if n in names)
        self.format = protocol.FORMATS[name]
        self.rows, self.width = int(rows), int(width)
        self.timeout = None if timeout is None else _settings.seconds_of("Workspace: timeout", timeout)
        tp = self._tp = _ranks(math.prod(mesh.shape[n] for n in self.axis_names), owners, tp)
        cuda = tp > 1 and mesh.devices.flat[0].platform == "gpu"
        capacity = self.rows * self.width * self.format.itemsize
        # One rank has nobody to sum with and needs no buffers; the layout is then never used.
        layout = protocol.Layout.for_capacity(
            max(tp, protocol.MIN_RANKS),
            capacity,
            generations,
            one_shot_bytes=capacity if owners else protocol.most_one_shot_bytes(tp, _settings.tuning()) if cuda else 0,
        )
        devices = tuple(device.id for device in mesh.devices.flat)
        self.handle = Handle(next(_ids), layout, devices, owners or layout.tp, self.timeout)
        if cuda and self.rows * self.width > protocol.MAX_ROUND_ELEMENTS:
            raise ValueError(
                f"Workspace: rows * width must be at most {protocol.MAX_ROUND_ELEMENTS} elements, got {rows} * {width}"
                "; a larger message takes several rounds by itself"
            )
        self._closed = False
        self._counts = _ffi.call_counts(self.handle.id)
        self._cuda = _CudaBuffers(self) if cuda else None
        if self._cuda is not None:
            self.handle = dataclasses.replace(self.handle, gpu=self._cuda.gpu)
        # Also when nobody keeps the workspace: a compiled program may still use the memory.
        self._release = weakref.finalize(self, self._cuda.close) if self._cuda else None
        _open[self.handle.id] = self
        logger.info(
            "workspace %d: made for %s of %s, %s, rounds of up to %d bytes",
            *(self.handle.id, axes_text(self.axis_names), dict(mesh.shape), name),
            layout.capacity_chunks * protocol.CHUNK_BYTES,
        )

    @property
    def tp(self) -> int:
        """Ranks of a group, or those that the stand-in plays."""
        return self._tp

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Lets go of the buffers; calling it again does nothing. Dropping the last reference does the same.

        Waits for no other process, nor for a call in flight. The memory goes back soon after the last compiled program
        that uses it is gone, at the latest with the process.
        """
        if not self._closed:
            logger.info("workspace %d: closed", self.handle.id)
        self._closed = True
        _open.pop(self.handle.id, None)
        if self._release is not None:
            self._release()

    def check(self) -> None:
        """Raises what went wrong in calls so far, without waiting for the device; on CPU, the call itself raises.

        Raises:
          RuntimeError: a rank did not come in time; the text says which (R9).
        """
        failure = self._cuda.failure() if self._cuda is not None else None
        if failure is not None:
            raise RuntimeError(failure)

    def views(self, generation: int) -> tuple[View, ...]:
        """Where the buffers of one generation lie, for each rank of this process: for kernels launched without JAX.

        Args:
          generation: 0 to ``generations - 1``.

        Raises:
          ValueError: no such generation, or there are no buffers: the workspace is closed, or on CPU.
        """
        layout = self.handle.layout
        if not 0 <= generation < layout.generations:
            raise ValueError(f"Workspace.views: generation must be 0 to {layout.generations - 1}, got {generation!r}")
        if self._cuda is None or self._closed:
            raise ValueError(
                f"Workspace.views: there are no addresses, {self} is {'closed' if self._closed else 'not on GPUs'}"
            )
        return tuple(View.of(layout, generation, buffer) for buffer in self._cuda.buffers)

    def grid(self, chunks: int, *, threads: int = protocol.THREADS, ctas_per_sm: int = 1) -> int:
        """CTAs for a launch with a thread for each of ``chunks`` chunks, or as many as are sure to be resident (R5).

        On CPU, where nothing is launched, all are: a program with a path for each platform may ask on both.

        Args:
          chunks: of 16 bytes.
          threads: of a CTA.
          ctas_per_sm: CTAs of the kernel that fit one SM, as for :func:`jax_twoshot.cute_call`.

        Raises:
          ValueError: the workspace's ranks cannot share their GPU.
        """
        gpu, wanted = self.handle.gpu, max(1, protocol.ceil_div(chunks, threads))
        if gpu is None:
            return wanted
        return min(wanted, protocol.most_ctas(gpu.ranks_on_device, gpu.sm_count, ctas_per_sm))

    def stats(self) -> Stats:
        """What calls have done so far, as far as this process knows, without waiting for any of them.

        Raises:
          RuntimeError: the GPU cannot be asked; the driver's text.
        """
        counts = self._counts
        algorithms = {name: counts.rounds(name) for name in protocol.ALGORITHMS}
        on_device = self._cuda.rounds_done() if self._cuda is not None else None
        failure = self._cuda.failure() if self._cuda is not None else counts.failure
        return Stats(
            calls=counts.calls,
            bytes=counts.bytes,
            algorithms=algorithms,
            rounds=sum(algorithms.values()) if on_device is None else on_device,
            slow_waits=counts.slow_waits,
            failure=failure or None,
        )

    def reset(self) -> None:
        """Makes the workspace usable again after a call has failed; compiled programs go on working.

        Collective: every process of the mesh calls it, also one that saw no failure, after its calls have ended
        (``jax.block_until_ready``), and makes no call before it returns. It waits for its own GPUs and up to three
        deadlines for the other processes. If it raises, every call does until a later reset succeeds.

        On CPU there is nothing to do: buffers belong to a call, and what follows a failed one finds new ones.

        Raises:
          ValueError: the workspace is closed.
          SymmetricMemoryError: a process failed, or did not come in time.
        """
        if self._closed:
            raise ValueError(f"Workspace.reset: it is closed ({self}); make a new one")
        if self._cuda is not None:
            self._cuda.reset()

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"Workspace({dict(self.mesh.shape)}, {self.axis_names}, rows={self.rows}, width={self.width}, "
            f"dtype={self.format.name}, {state})"
        )

    def _mismatch(
        self, axes: tuple[str, ...], sizes: Mapping[str, int], fmt: protocol.Format, deferred: bool
    ) -> str | None:
        """Why this workspace cannot serve such a call, or None."""
        if dict(self.mesh.shape) != dict(sizes):
            return f"it was made for the mesh {dict(self.mesh.shape)}, the shard_map's is {dict(sizes)}"
        if self.axis_names != axes:
            return f"it was made for the axes {self.axis_names}, the call sums over {axes}"
        if self.handle.owners < self.handle.layout.tp:
            return (
                f"it is the stand-in for {self.tp} ranks on one GPU (owners=1), which is for kernels that are called "
                "with jax_twoshot.cute_call"
            )
        if self.format.sentinel != fmt.sentinel:
            return f"it is armed for {self.format.name}, x is {fmt.name}"
        if deferred and not self.handle.deferred:
            return (
                "it has 2 generations, and the call leaves it to the next one to re-arm what it has read, for which "
                "three are needed (generations=3)"
            )
        if self.handle.deferred and not deferred:
            return (
                "it has 3 generations, for kernels that re-arm what the call before has read, and the call is none of "
                "these"
            )
        return None


def _ranks(devices: int, owners: int | None, tp: int | None) -> int:
    """Ranks of a group of so many devices, or those that one device plays."""
    if owners is None:
        if tp is not None:
            raise ValueError(f"Workspace: tp goes with owners=1, else the mesh says it ({devices}); got tp={tp!r}")
        return devices
    if owners != 1 or devices != 1:
        raise ValueError(
            f"Workspace: owners must be 1, on axes of one device, for the stand-in of a group on a GPU; got {owners!r}"
            f" on {devices} devices"
        )
    if tp not in cubin.TP:
        raise ValueError(f"Workspace: tp must be one of {cubin.TP}, the ranks that owners=1 plays, got {tp!r}")
    return tp


def axes_tuple(axis_names: str | tuple[str, ...]) -> tuple[str, ...]:
    """The axes that an argument names: one, or a tuple or list of several."""
    return tuple(axis_names) if isinstance(axis_names, (tuple, list)) else (axis_names,)


def axes_text(axes: tuple[str, ...]) -> str:
    """How messages name the axes of a call."""
    return f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {axes!r}"


def groups(mesh: jax.sharding.Mesh, axes: Sequence[str]) -> list[list[jax.Device]]:
    """The devices of each group, in rank order: along ``axes``, which are in the mesh's order."""
    reduced = [mesh.axis_names.index(name) for name in axes]
    last = range(mesh.devices.ndim - len(reduced), mesh.devices.ndim)
    tp = math.prod(mesh.shape[name] for name in axes)
    return np.moveaxis(mesh.devices, reduced, last).reshape(-1, tp).tolist()


class _CudaBuffers:
    """A workspace's symmetric memory and kernels on this process's GPUs."""

    def __init__(self, workspace: Workspace) -> None:
        from jax_twoshot import symmetric

        self.id = workspace.handle.id
        self.gpu: Gpus | None = None
        self._stand_in = workspace.handle.owners < workspace.handle.layout.tp
        self._format = workspace.format
        self._layout = workspace.handle.layout
        self._timeout = workspace.timeout
        self.native: Any = None
        self._axes = axes_text(workspace.axis_names)
        _free_unused()
        self.buffers: list[SymmetricBuffer] = []
        try:
            self.buffers = symmetric.allocate(
                groups(workspace.mesh, workspace.axis_names),
                self._layout.bytes,
                self._format.sentinel,
                prepare=self._open,
                owner=f"workspace {self.id} over {self._axes}",
                timeout=self._timeout,
            )
            if not self.buffers:
                raise ValueError(
                    "Workspace: no device of the mesh belongs to this process; make it on the processes that have one"
                )
            self._warn_of_lazy_loading()
            _ffi.let_ctrl_c_end_waits()
            _start_watching()
        except BaseException:  # another process may have failed after this one had opened
            self.close()
            raise

    def _warn_of_lazy_loading(self) -> None:
        shared = len(self.buffers) > 1 or self.buffers[0].ranks_on_device > 1
        if shared and os.environ.get("CUDA_MODULE_LOADING") != "EAGER":
            logger.warning(
                "Workspace: several ranks share a GPU or a process, and CUDA loads kernels lazily: a rank that loads "
                "one can wait for the kernels of its peers, which wait for it. Set CUDA_MODULE_LOADING=EAGER before "
                "JAX starts"
            )

    def _open(self, buffers: Sequence[SymmetricBuffer]) -> None:
        """Loads the kernels of the formats that share the sentinel, and makes each device's small buffers."""
        by_ordinal = {device.local_hardware_id: device for device in jax.local_devices()}
        arch = _one_arch([by_ordinal[b.device] for b in buffers])
        multicast = all(b.multicast is not None for b in buffers)
        sharing = buffers[0].ranks_on_device
        one_shot_bytes = protocol.one_shot_bytes(self._layout.tp, sharing, multicast, _settings.tuning())
        self.gpu = Gpus(arch, multicast, sharing, buffers[0].sm_count, one_shot_bytes)
        protocol.grid(1, self.gpu.ranks_on_device, self.gpu.sm_count)  # R5: refuse what cannot be resident
        variants = self._all_reduce_variants()
        found = zip(variants, cubin.find_all(variants, share=jax.process_index()), strict=True)
        self.native = _ffi.open_cuda_workspace(
            self.id,
            self._axes,
            self._layout,
            self._timeout,
            self.gpu.one_shot_bytes,
            self.gpu.ranks_on_device,
            self.gpu.sm_count,
            [(v.algorithm, v.format, c.image, c.symbol, v.pdl) for v, c in found],
            [(b.device, b.rank, b.address, b.multicast or 0, self._peers(b)) for b in buffers],
        )

    def _all_reduce_variants(self) -> list[cubin.Variant]:
        """The kernels of the all-reduce, for the formats that share the sentinel; none where it is refused."""
        assert self.gpu is not None
        if self._stand_in or self._layout.generations != protocol.GENERATIONS:
            return []
        return [
            cubin.Variant(self._layout.tp, f.name, self.gpu.multicast, self.gpu.arch, algorithm)
            for algorithm in protocol.ALGORITHMS
            for f in protocol.FORMATS.values()
            if f.sentinel == self._format.sentinel
        ]

    def _peers(self, buffer: SymmetricBuffer) -> list[int]:
        """An address for each rank; in the stand-in all ranks are at this one's."""
        return list(buffer.peers) * (self._layout.tp // len(buffer.peers))

    def failure(self) -> str | None:
        """Why no further call can succeed, or None."""
        native = self.native  # another thread may close
        return native.failure() if native is not None else None

    def rounds_done(self) -> int | None:
        """Rounds finished, replayed ones included; None once the buffers are given back."""
        native = self.native
        return native.rounds_done() if native is not None else None

    def slow_waits(self) -> list[str]:
        """What ranks of this process have been waiting for long for, each wait once."""
        native = self.native
        return native.slow_waits() if native is not None else []

    def end_slow_waits(self) -> None:
        """Ends the waits that `slow_waits` has told of."""
        native = self.native
        if native is not None:
            native.end_slow_waits()

    def reset(self) -> None:
        from jax_twoshot import symmetric

        self.native.begin_reset()
        symmetric.rearm(self.buffers, self._format.sentinel, self.native.clear)
        self.native.end_reset()

    def close(self) -> None:
        """Gives the memory back, now or soon after no compiled program holds it any more."""
        self.native = None
        _ffi.close_cuda_workspace(self.id)
        with _closing_lock:
            _closing.append((self.id, self.buffers))
        _free_unused()


def _one_arch(devices: Sequence[jax.Device]) -> str:
    """The target of all kernels of a workspace in this process."""
    kinds = {cubin.arch_for(_capability(device)): device.device_kind for device in devices}
    if len(kinds) > 1:
        raise ValueError(
            "mesh: all GPUs of a process must run the same kernels, got "
            f"{', '.join(f'{kind} ({arch})' for arch, kind in sorted(kinds.items()))}; make a mesh of GPUs of one kind"
        )
    (arch,) = kinds
    return arch


def _capability(device: jax.Device) -> tuple[int, int]:
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


_closing: list[tuple[int, list[SymmetricBuffer]]] = []
_closing_lock = threading.RLock()  # a workspace that is collected while it is held closes itself


def _free_unused() -> None:
    """Unmaps the memory of closed workspaces that no compiled program holds any more."""
    with _closing_lock:
        unused = [entry for entry in _closing if not _ffi.cuda_workspace_in_use(entry[0])]
        for entry in unused:
            _closing.remove(entry)
    for number, buffers in unused:
        for buffer in buffers:
            try:
                buffer.close()
            except RuntimeError as error:
                logger.warning("workspace %d: memory is not given back: %s", number, error)


_watcher: threading.Thread | None = None
_WATCH_SECONDS = 0.5


def _start_watching() -> None:
    """Starts the thread that logs slow waits (R9) and ends them on Ctrl-C, since while a GPU waits the host mostly
    waits for the GPU, and that frees what compiled programs let go of."""
    global _watcher
    if _watcher is None:
        watcher = threading.Thread(target=_watch, name="jax_twoshot-watch", daemon=True)
        watcher.start()
        _watcher = watcher


def _watch() -> None:
    interrupts = _ffi.interrupts()
    while True:
        time.sleep(_WATCH_SECONDS)
        try:
            _log_slow_waits()
            if (now := _ffi.interrupts()) != interrupts:
                interrupts = now
                _end_slow_waits()
            _free_unused()
        except Exception:  # the other workspaces still have to be watched
            logger.exception("watching the workspaces")


def _end_slow_waits() -> None:
    for workspace in list(_open.values()):
        if workspace._cuda is not None:
            try:
                workspace._cuda.end_slow_waits()
            except RuntimeError as error:
                logger.warning("workspace %d: Ctrl-C ends no wait: %s", workspace.handle.id, error)


def _log_slow_waits() -> None:
    for workspace in list(_open.values()):
        if workspace._cuda is not None:
            try:
                texts = workspace._cuda.slow_waits()
            except RuntimeError as error:
                logger.warning("workspace %d: slow waits are not told of: %s", workspace.handle.id, error)
                continue
            for text in texts:
                logger.warning("%s", text)


_ids = itertools.count()
_open: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()


def resolve(
    given: Workspace | None,
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
    fmt: protocol.Format,
    *,
    deferred: bool = False,
) -> Handle | None:
    """The workspace of a call over ``axes`` of a mesh of ``sizes``: the given one, else the newest open one that
    fits, else None. A ``deferred`` call leaves re-arming to the next one.

    Raises:
      TypeError: ``given`` is no workspace.
      ValueError: the given one is closed or does not fit.
    """
    if given is None:
        fitting = [w for _, w in sorted(_open.items()) if w._mismatch(axes, sizes, fmt, deferred) is None]
        return fitting[-1].handle if fitting else None
    if not isinstance(given, Workspace):
        raise TypeError(f"all_reduce: workspace must be a jax_twoshot.Workspace, got {type(given).__name__}")
    if given.closed:
        raise ValueError(f"all_reduce: workspace is closed ({given}); make a new one, and close it after its last use")
    reason = given._mismatch(axes, sizes, fmt, deferred)
    if reason is not None:
        raise ValueError(f"all_reduce: workspace does not fit this call: {reason}; make one that does")
    return given.handle
