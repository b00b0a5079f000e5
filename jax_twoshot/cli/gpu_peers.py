"""The ways to sum over GPUs that ``bench --ranks`` compares, each with its check and its clock.

A kernel alone is captured, `calls` times, in a CUDA graph: what an engine that captures its decode step pays. The
same call through JAX is a jitted program of as many calls, one after the other, with a multiply between them. The
input of torch's symmetric-memory kernels lies in symmetric memory already, which spares them a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import lax

import jax_twoshot
from jax_twoshot import protocol, symmetric
from jax_twoshot.cli import bench, decode

if TYPE_CHECKING:
    import torch

REPLAYS = 10
"""Graphs, or programs, that run one after the other in a timed run: starting them is not what is measured."""
GRAPH, JAX, DECODE = "graph", "jax", "decode"
"""How the calls are made: alone in a CUDA graph, in a jitted program, in the decode step of `decode`."""


@dataclass(frozen=True)
class Cell(bench.Program):
    """A message on this process's GPU.

    Attributes:
      rank: of this process.
      ordinal: of its GPU.
      shared: all ranks are on one GPU.
      most_rows: of any cell of this width, for workspaces that all of them use.
    """

    rank: int
    ordinal: int
    shared: bool
    most_rows: int

    def one_chunk_each(self) -> Cell:
        """The smallest message that every rank owns a part of."""
        width = self.tp * protocol.CHUNK_BYTES // np.dtype(self.dtype).itemsize
        return dataclasses.replace(self, rows=1, width=width)


class Contender(Protocol):
    """A peer that is ready to sum one cell's message. Collective: all ranks call the same method."""

    def wrong(self) -> int:
        """Elements of this rank's sums that are not what they must be."""

    def seconds(self) -> float:
        """Of one call, in one timed run."""


class Peer(NamedTuple):
    """One way to sum.

    Attributes:
      name: in the table.
      program: ``GRAPH`` or ``JAX``.
      make: prepares a cell; any exception is the reason why it cannot run there.
      make_seconds: the longest that may take.
      xla_flags: which the processes need that it runs in, beside what ``XLA_FLAGS`` says.
    """

    name: str
    program: str
    make: Callable[[Cell], Contender]
    make_seconds: float = 60
    xla_flags: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.program})"


# ---- A kernel in a CUDA graph ------------------------------------------------------------------------------


class GraphRun:
    """A kernel in a CUDA graph; checked before it is captured, and afterwards as it is replayed.

    Args:
      cell: the message.
      call: launches one all-reduce from ``x`` to ``out`` on torch's current stream.
      x, out: CUDA tensors of the message; the same one for a kernel that works in place.
      bitwise: whether the sums are the oracle's bit for bit.
      check: raises what went wrong in the calls so far.
    """

    def __init__(
        self,
        cell: Cell,
        call: Callable[[], Any],
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        bitwise: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._cell, self._call, self._x, self._out = cell, call, x, out
        self._bitwise, self._check = bitwise, check
        self._graph: Any = None

    def wrong(self) -> int:
        one_call = dataclasses.replace(self._cell, calls=1, scale=1.0)
        want, part = one_call.expected(), _to_torch(one_call.parts()[self._cell.rank])
        in_place, wrong = self._x is self._out, 0
        # In place, the calls of a graph sum each other's sums.
        run = self._call if in_place or self._graph is None else self._graph.replay
        for _ in range(bench.CHECKED_CALLS):
            _barrier()  # nobody reads this rank's input any more
            self._x.copy_(part)
            _synchronize()
            _barrier()
            run()
            _synchronize()
            wrong += bench.wrong_elements(_to_numpy(self._out, self._cell.dtype), want, one_call, self._bitwise)
        self._check()
        if in_place:
            self._x.zero_()  # sums of sums would overflow
        _synchronize()
        return wrong

    def seconds(self) -> float:
        import torch

        if self._graph is None:
            self._graph = self._captured()
            _barrier()  # no rank spins while another still prepares
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graph.replay()  # takes up how much later the last rank starts
        start.record()
        for _ in range(REPLAYS):
            self._graph.replay()
        end.record()
        end.synchronize()
        self._check()
        return start.elapsed_time(end) / 1e3 / (REPLAYS * self._cell.calls)

    def _captured(self) -> Any:
        import torch

        graph = torch.cuda.CUDAGraph()
        # Other threads of this process, JAX's among them, may use CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(self._cell.calls):
                self._call()
        return graph


def _to_torch(array: np.ndarray) -> torch.Tensor:
    """On the CPU; by its bits, since NumPy's BF16 is unknown to torch."""
    import torch

    bits = np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}")
    return torch.from_numpy(bits).view(_dtype(array.dtype.name))


def _to_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    import torch

    bits = {2: torch.int16, 4: torch.int32}[np.dtype(dtype).itemsize]
    return tensor.view(bits).cpu().numpy().view(dtype)


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def _empty(cell: Cell) -> torch.Tensor:
    import torch

    return torch.empty(cell.rows, cell.width, dtype=_dtype(cell.dtype), device=f"cuda:{cell.ordinal}")


def _barrier() -> None:
    import torch.distributed

    torch.distributed.barrier()


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


# ---- A jitted program --------------------------------------------------------------------------------------


class JaxRun:
    """A jitted program of `calls` calls in a row, and a short one for the check."""

    def __init__(self, cell: Cell, all_reduce: Callable[[jax.Array], jax.Array], *, bitwise: bool = False) -> None:
        self._cell, self._bitwise = cell, bitwise
        self._checked = bench.compile_program(cell.checked(), all_reduce)
        self._run = bench.compile_program(cell, all_reduce)
        self._x = cell.place(cell.parts())

    def wrong(self) -> int:
        return bench.count_wrong(self._cell.checked(), self._checked, self._bitwise)

    def seconds(self) -> float:
        x = jax.block_until_ready(self._run(self._x))  # takes up how much later the last rank starts
        start = time.perf_counter()
        for _ in range(REPLAYS):
            x = self._run(x)
        jax.block_until_ready(x)
        return (time.perf_counter() - start) / (REPLAYS * self._cell.calls)


# ---- Ours --------------------------------------------------------------------------------------------------


@functools.cache
def _workspace(mesh: jax.sharding.Mesh, rows: int, width: int, dtype: str) -> jax_twoshot.Workspace:
    """One for all cells of a width, kept open: no peer is measured while memory is unmapped."""
    return jax_twoshot.Workspace(mesh, "tp", rows=rows, width=width, dtype=dtype)


def table_name(cell: Cell) -> str:
    """Which of the tables of `protocol.BUILT_IN` holds for these ranks."""
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    assert workspace._cuda is not None and workspace._cuda.gpu is not None
    return protocol.table_name(workspace._cuda.gpu.ranks_on_device, workspace._cuda.gpu.multicast)


def _ours(cell: Cell, algorithm: str = "auto") -> Contender:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    return _ours_graph(cell, workspace, algorithm)


def _hops(cell: Cell, algorithm: str) -> Contender:
    """Nothing but the way: one 16-byte chunk a rank, to every rank (one hop), or to its owner and back (two)."""
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    return _ours_graph(cell.one_chunk_each(), workspace, algorithm)


def _ours_graph(cell: Cell, workspace: jax_twoshot.Workspace, algorithm: str) -> Contender:
    import torch

    assert workspace._cuda is not None
    native, x, out = workspace._cuda.native, _empty(cell), _empty(cell)

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        native.launch(cell.ordinal, stream, cell.dtype, x.data_ptr(), out.data_ptr(), cell.bytes, algorithm, alone=True)

    return GraphRun(cell, call, x, out, bitwise=True, check=workspace.check)


def _ours_jax(cell: Cell) -> Contender:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    return JaxRun(cell, lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace), bitwise=True)


def _decode_ours(cell: Cell) -> Contender:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    return decode.DecodeRun(cell, lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace), _gathered)


def _decode_psum(cell: Cell) -> Contender:
    _refuse_shared_gpu(cell)
    return decode.DecodeRun(cell, lambda x: lax.psum(x, "tp"), _gathered)


def _decode_alone(cell: Cell) -> Contender:
    return decode.DecodeRun(cell, lambda x: x, None)


def _gathered(value: Any) -> list[Any]:
    import torch.distributed

    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


# ---- NCCL --------------------------------------------------------------------------------------------------


def _refuse_shared_gpu(cell: Cell) -> None:
    if cell.shared:
        raise ValueError("NCCL refuses two ranks on one GPU")


def _psum_jax(cell: Cell) -> Contender:
    _refuse_shared_gpu(cell)
    return JaxRun(cell, lambda x: lax.psum(x, "tp"))


def _pallas_jax(cell: Cell) -> Contender:
    """Pallas Mosaic GPU's reduce-scatter, which is an all-reduce if nothing is scattered."""
    _refuse_without_multicast(cell)
    from jax.experimental.pallas.ops.gpu.reduce_scatter_mgpu import reduce_scatter

    return JaxRun(cell, lambda x: reduce_scatter(x, axis_name="tp", scatter_dimension=None))


@functools.cache
def _nccl_group() -> Any:
    import torch.distributed

    return torch.distributed.new_group(backend="nccl")


def _nccl_torch(cell: Cell) -> Contender:
    _refuse_shared_gpu(cell)
    import torch.distributed

    x, group = _empty(cell), _nccl_group()
    return GraphRun(cell, lambda: torch.distributed.all_reduce(x, group=group), x, x)


# ---- torch's symmetric memory ------------------------------------------------------------------------------


def _symmetric(cell: Cell) -> tuple[torch.Tensor, Any, str]:
    """A symmetric tensor, its handle and the group's name."""
    import torch.distributed
    import torch.distributed._symmetric_memory as symm_mem

    group = torch.distributed.group.WORLD
    device = f"cuda:{cell.ordinal}"
    x = symm_mem.empty(cell.rows, cell.width, dtype=_dtype(cell.dtype), device=device)
    return x, symm_mem.rendezvous(x, group.group_name), group.group_name


def _torch_one_shot(cell: Cell) -> Contender:
    import torch

    x, _, group = _symmetric(cell)
    out = _empty(cell)
    return GraphRun(cell, lambda: torch.ops.symm_mem.one_shot_all_reduce_out(x, "sum", group, out), x, out)


def _torch_two_shot(cell: Cell) -> Contender:
    import torch

    x, _, group = _symmetric(cell)
    return GraphRun(cell, lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group), x, x)


def _refuse_without_multicast(cell: Cell) -> None:
    if cell.shared:
        raise ValueError("multicast needs a GPU for each rank")
    refusal = symmetric.multicast_refusal(symmetric._Driver(), cell.ordinal)
    if refusal:
        raise ValueError(f"no multicast: {refusal}")


def _torch_multimem(cell: Cell) -> Contender:
    _refuse_without_multicast(cell)
    import torch

    x, handle, group = _symmetric(cell)
    if not handle.multicast_ptr:
        raise ValueError("no multicast: the rendezvous gave no multicast address")
    return GraphRun(cell, lambda: torch.ops.symm_mem.multimem_all_reduce_(x, "sum", group), x, x)


# ---- FlashInfer --------------------------------------------------------------------------------------------


@functools.cache
def _flashinfer_workspace(rank: int, tp: int, rows: int, width: int, fp32: bool) -> torch.Tensor:
    from flashinfer import comm

    _, pointers = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, tp, rows, width, use_fp32_lamport=fp32)
    return pointers


def _flashinfer(cell: Cell, one_shot: bool) -> Contender:
    from flashinfer import comm

    if not one_shot and cell.rows <= cell.tp:
        raise ValueError("it needs more rows than ranks")
    fp32 = cell.dtype == "float32"
    x, out = _empty(cell), _empty(cell)
    call = functools.partial(
        comm.trtllm_allreduce_fusion,
        allreduce_in=x,
        world_size=cell.tp,
        world_rank=cell.rank,
        token_num=cell.rows,
        hidden_dim=cell.width,
        workspace_ptrs=_flashinfer_workspace(cell.rank, cell.tp, cell.most_rows, cell.width, fp32),
        launch_with_pdl=True,
        trigger_completion_at_end=True,  # as its own wrapper has it with PDL
        fp32_acc=True,
        pattern_code=comm.AllReduceFusionPattern.kAllReduce,
        use_oneshot=one_shot,
        allreduce_out=out,
        residual_in=None,
        residual_out=None,
        norm_out=None,
        quant_out=None,
        scale_out=None,
        rms_gamma=None,
        rms_eps=None,
        scale_factor=None,
        layout_code=None,
    )
    return GraphRun(cell, call, x, out)


def _flashinfer_mnnvl(cell: Cell) -> Contender:
    _refuse_without_multicast(cell)
    raise ValueError("its workspace is a multicast object over fabric handles, which this benchmark does not make")


COMPILE_SECONDS = 240
"""FlashInfer compiles its kernels at the first use."""

XLA_ONE_SHOT = "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=true"
"""XLA's own kernel where XLA thinks it fit, else NCCL. With JAX 0.11.2 and one process for two H200 it made no
difference."""

OURS = "jax_twoshot"
VARIANTS = ("ours, one-shot", "ours, two-shot")
FLOORS = ("one hop", "two hops")
NO_SUM = "without sums"

PEERS = (
    Peer(OURS, GRAPH, _ours),
    *(
        Peer(name, GRAPH, functools.partial(make, algorithm=algorithm))
        for make, names in ((_ours, VARIANTS), (_hops, FLOORS))
        for name, algorithm in zip(names, ("one_shot", "two_shot"), strict=True)
    ),
    Peer("torch one-shot", GRAPH, _torch_one_shot),
    Peer("torch two-shot", GRAPH, _torch_two_shot),
    Peer("torch multimem", GRAPH, _torch_multimem),
    Peer("flashinfer one-shot", GRAPH, functools.partial(_flashinfer, one_shot=True), COMPILE_SECONDS),
    Peer("flashinfer two-shot", GRAPH, functools.partial(_flashinfer, one_shot=False), COMPILE_SECONDS),
    Peer("flashinfer mnnvl", GRAPH, _flashinfer_mnnvl),
    Peer("nccl", GRAPH, _nccl_torch),
    Peer(OURS, JAX, _ours_jax),
    Peer("psum", JAX, _psum_jax),
    Peer("psum, XLA one-shot", JAX, _psum_jax, xla_flags=XLA_ONE_SHOT),
    Peer("pallas multimem", JAX, _pallas_jax),
    Peer(OURS, DECODE, _decode_ours),
    Peer("psum", DECODE, _decode_psum),
    Peer(NO_SUM, DECODE, _decode_alone),
)
"""``FLOORS`` are ours on one 16-byte chunk a rank; the others' times are given as multiples of ``OURS``."""
