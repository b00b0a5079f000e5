"""The ways to sum over GPUs that ``bench --ranks`` compares, each with its check and its clock.

A kernel alone is captured, `calls` times, in a CUDA graph: what an engine that captures its decode step pays. The
same call through JAX is a jitted program of as many calls, one after the other, with a multiply between them, or with
nothing. The input of torch's symmetric-memory kernels lies in symmetric memory already, which spares them a copy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import lax

import jax_twoshot
from jax_twoshot import _fused, _moe, cubin, protocol, symmetric
from jax_twoshot.cli import bench, decode, fused
from jax_twoshot.cli.bench import ALL_REDUCE, Layer

if TYPE_CHECKING:
    import torch

REPLAYS = 10
"""Graphs, or programs, that run one after the other in a timed run: starting them is not what is measured."""
GRAPH, JAX, DECODE = "graph", "jax", "decode"
"""How the calls are made: alone in a CUDA graph, in a jitted program, in the decode step of `decode`."""
NORM_GRAPH, NORM_JAX, MATMUL_JAX, MOE_JAX = "rms_norm graph", "rms_norm jax", "matmul jax", "moe_tail jax"
"""The same of the layers of `fused`."""
FUSED_JAX = (NORM_JAX, MATMUL_JAX, MOE_JAX)
FUSED = (NORM_GRAPH, *FUSED_JAX)


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

    @property
    def replays(self) -> int:
        """Programs of a timed run; on CPU a call takes so long that the start of one is little beside them."""
        return REPLAYS if self.platform == "gpu" else 1

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
      program: ``GRAPH``, ``JAX``, ``DECODE`` or one of ``FUSED``: what is compared with each other.
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
      call: launches one from ``x`` to ``outs`` on torch's current stream.
      x, *outs: CUDA tensors of the message; the same one for a kernel that works in place.
      layer: what ``call`` computes; its state begins with ``x``.
      bitwise: whether the sums are the oracle's bit for bit.
      check: raises what went wrong in the calls so far.
    """

    def __init__(
        self,
        cell: Cell,
        call: Callable[[], Any],
        x: torch.Tensor,
        *outs: torch.Tensor,
        layer: Layer = ALL_REDUCE,
        bitwise: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._cell, self._call, self._x, self._outs = cell, call, x, outs
        self._layer, self._bitwise, self._check = layer, bitwise, check
        self._graph: Any = None

    def wrong(self) -> int:
        one_call = self._cell.one_call()
        want, part = jax.tree.leaves(self._layer.expected(one_call)), _to_torch(one_call.parts()[self._cell.rank])
        in_place, wrong = self._x is self._outs[0], 0
        # In place, the calls of a graph sum each other's sums.
        run = self._call if in_place or self._graph is None else self._graph.replay
        for _ in range(bench.CHECKED_CALLS):
            _barrier()  # nobody reads this rank's input any more
            self._x.copy_(part)
            _synchronize()
            _barrier()
            run()
            _synchronize()
            for out, wanted in zip(self._outs, want, strict=True):
                wrong += bench.wrong_elements(_to_numpy(out, self._cell.dtype), wanted, one_call, self._bitwise)
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
    """A jitted program of `calls` calls in a row, and a short one for the check.

    Args:
      cell: the message. A ``scale`` of 1: no multiply, and zeros are summed, since sums of sums would overflow.
      call: of the state and one turn of constants, on a rank.
      layer: what ``call`` computes.
      bitwise: whether it does so as the oracle, bit for bit.
    """

    def __init__(
        self, cell: Cell, call: Callable[..., Any], *, layer: Layer = ALL_REDUCE, bitwise: bool = False
    ) -> None:
        self._cell, self._layer, self._bitwise = cell, layer, bitwise
        self._check = layer.checked(cell)
        self._checked = bench.compile_program(self._check, call, layer)
        # Its result takes its operand's place, as a model's cache does: at new addresses XLA would update its graph.
        self._run = bench.compile_program(cell, call, layer, donate=True)
        state = layer.state(cell)
        if layer is ALL_REDUCE and cell.scale == 1:
            state = np.zeros_like(state)
        self._state = jax.tree.map(cell.place, state)
        self._constants = _placed_constants(layer, dataclasses.replace(cell, rows=1))

    def wrong(self) -> int:
        runs = range(bench.CHECKED_CALLS // self._check.calls)
        what = self._check, self._checked, self._bitwise, self._layer, self._constants
        return sum(bench.count_wrong(*what) for _ in runs)

    def seconds(self) -> float:
        return bench.seconds_of(self._again, self._cell.replays) / self._cell.calls

    def _again(self) -> Any:
        self._state = self._run(self._state, self._constants)
        return self._state


@functools.lru_cache(maxsize=len(FUSED))
def _placed_constants(layer: Layer, cell: Cell) -> bench.Constants:
    """Once for all peers and rows: they may be large."""
    return jax.tree.map(cell.place, layer.constants(cell))


# ---- Ours --------------------------------------------------------------------------------------------------


@functools.cache
def _workspace(
    mesh: jax.sharding.Mesh, rows: int, width: int, dtype: str, generations: int = protocol.GENERATIONS
) -> jax_twoshot.Workspace:
    """One for all cells of a width, kept open: no peer is measured while memory is unmapped."""
    return jax_twoshot.Workspace(mesh, "tp", rows=rows, width=width, dtype=dtype, generations=generations)


def table_name(cell: Cell) -> str:
    """Which of the tables of `protocol.BUILT_IN` holds for these ranks."""
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    assert workspace._cuda is not None and workspace._cuda.gpu is not None
    return protocol.table_name(workspace._cuda.gpu.ranks_on_device, workspace._cuda.gpu.multicast)


def _ours(cell: Cell, algorithm: str = "auto", alone: bool = True) -> Contender:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    return _ours_graph(cell, workspace, algorithm, alone)


def _hops(cell: Cell, algorithm: str) -> Contender:
    """Nothing but the way: one 16-byte chunk a rank, to every rank (one hop), or to its owner and back (two)."""
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    return _ours_graph(cell.one_chunk_each(), workspace, algorithm)


def _ours_graph(cell: Cell, workspace: jax_twoshot.Workspace, algorithm: str, alone: bool = True) -> Contender:
    import torch

    assert workspace._cuda is not None
    native, x, out = workspace._cuda.native, _empty(cell), _empty(cell)

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        native.launch(cell.ordinal, stream, cell.dtype, x.data_ptr(), out.data_ptr(), cell.bytes, algorithm, alone)

    return GraphRun(cell, call, x, out, bitwise=True, check=workspace.check)


def _ours_jax(cell: Cell) -> Contender:
    return JaxRun(cell, _all_reduce(cell), bitwise=True)


def _ours_replayed(cell: Cell) -> Contender:
    return _ours_jax(dataclasses.replace(cell, scale=1.0))


def _norm_graph(cell: Cell) -> Contender:
    if cell.platform != "gpu":
        raise ValueError("a CUDA graph needs NVIDIA GPUs")
    import torch

    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    assert workspace._cuda is not None
    kernel, grid, scalars = _fused.launch(workspace.handle, workspace.format, cell.rows, cell.width, fused.EPS)
    found, native, tensors = cubin.find(kernel), workspace._cuda.native, _norm_tensors(cell)

    def call() -> None:
        native.launch_kernel(
            cell.ordinal,
            torch.cuda.current_stream().cuda_stream,
            image=found.image,
            symbol=found.symbol,
            pdl=kernel.pdl,
            grid=grid,
            threads=kernel.threads,
            ctas_per_sm=kernel.ctas_per_sm,
            shared_memory=kernel.shared_memory,
            addresses=[tensor.data_ptr() for tensor in tensors],
            scalars=scalars,
        )

    x, _, _, *outs = tensors
    return GraphRun(cell, call, x, *outs, layer=fused.RMS_NORM, bitwise=True, check=workspace.check)


def _norm_tensors(cell: Cell) -> tuple[torch.Tensor, ...]:
    """x, residual, weight, and for the results normalised and new residual."""
    (_, residual), ((weight,),) = fused.RMS_NORM.state(cell), fused.RMS_NORM.constants(cell)
    device = f"cuda:{cell.ordinal}"
    constants = (_to_torch(array[cell.rank].copy()).to(device) for array in (residual, weight))
    return _empty(cell), *constants, _empty(cell), _empty(cell)


def _norm_jax(cell: Cell) -> Contender:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)

    def call(state: tuple[jax.Array, jax.Array], weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, residual = state
        return jax_twoshot.all_reduce_rms_norm(x, residual, weight, "tp", eps=fused.EPS, workspace=workspace)

    return JaxRun(cell, call, layer=fused.RMS_NORM, bitwise=True)


def _norm_apart(cell: Cell, all_reduce: MakeAllReduce) -> Contender:
    """XLA's residual add and norm after a sum."""
    total = all_reduce(cell)
    return JaxRun(cell, lambda s, weight: fused.norm_sum(total(s[0]), s[1], weight), layer=fused.RMS_NORM)


def _matmul_jax(cell: Cell) -> Contender:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    ours = functools.partial(jax_twoshot.matmul_all_reduce, axis_name="tp", workspace=workspace)
    return JaxRun(cell, fused.matmul_call(cell, ours), layer=fused.MATMUL, bitwise=True)


def _matmul_apart(cell: Cell, all_reduce: MakeAllReduce) -> Contender:
    """A sum after XLA's matmul."""
    total = all_reduce(cell)
    return JaxRun(cell, fused.matmul_call(cell, lambda a, w: total(a @ w)), layer=fused.MATMUL, bitwise=True)


def _moe_jax(cell: Cell) -> Contender:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype, protocol.GENERATIONS_DEFERRED)
    ours = functools.partial(jax_twoshot.moe_tail, axis_name="tp", eps=fused.EPS, workspace=workspace)
    return JaxRun(cell, fused.moe_call(cell, ours), layer=fused.MOE, bitwise=True)


def _moe_half(cell: Cell) -> Contender:
    """The other fused call after XLA's weighted sum of the experts."""
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    norm = functools.partial(jax_twoshot.all_reduce_rms_norm, axis_name="tp", eps=fused.EPS, workspace=workspace)
    return _moe_apart(cell, norm)


def _moe_apart(cell: Cell, rest: Callable[..., tuple[jax.Array, jax.Array]]) -> Contender:
    """``rest(part, residual, weight)`` after XLA's weighted sum of the experts."""

    def tail(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        *routed, residual, weight = operands
        return rest(_moe.combine(*routed), residual, weight)

    return JaxRun(cell, fused.moe_call(cell, tail), layer=fused.MOE)


def _moe_all_apart(cell: Cell, all_reduce: MakeAllReduce) -> Contender:
    """A sum after XLA's weighted sum of the experts, then XLA's residual add and norm."""
    total = all_reduce(cell)
    return _moe_apart(cell, lambda part, residual, weight: fused.norm_sum(total(part), residual, weight))


MakeAllReduce = Callable[[Cell], Callable[[jax.Array], jax.Array]]


def _all_reduce(cell: Cell) -> Callable[[jax.Array], jax.Array]:
    workspace = _workspace(cell.mesh, cell.most_rows, cell.width, cell.dtype)
    return lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace)


def _psum(cell: Cell) -> Callable[[jax.Array], jax.Array]:
    _refuse_shared_gpu(cell)
    return lambda x: lax.psum(x, "tp")


def _decode_ours(cell: Cell) -> Contender:
    return decode.DecodeRun(cell, _all_reduce(cell), _gathered)


def _decode_psum(cell: Cell) -> Contender:
    return decode.DecodeRun(cell, _psum(cell), _gathered)


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
    return JaxRun(cell, _psum(cell))


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


def _torch_two_shot(cell: Cell, copied: bool = False) -> Contender:
    """In place in symmetric memory; ``copied``, after a copy of an operand that lies elsewhere, as JAX's do."""
    import torch

    shared, _, group = _symmetric(cell)
    x = _empty(cell) if copied else shared

    def call() -> None:
        if copied:
            shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

    return GraphRun(cell, call, x, shared)


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


def _flashinfer(cell: Cell, one_shot: bool, norm: bool = False) -> Contender:
    from flashinfer import comm

    if not one_shot and cell.rows <= cell.tp:
        raise ValueError("it needs more rows than ranks")
    fp32 = cell.dtype == "float32"
    if norm:
        x, residual, weight, *outs = _norm_tensors(cell)
        pattern, fusion = (
            comm.AllReduceFusionPattern.kARResidualRMSNorm,
            {
                "allreduce_out": None,
                "residual_in": residual,
                "norm_out": outs[0],
                "residual_out": outs[1],
                "rms_gamma": weight,
                "rms_eps": fused.EPS,
            },
        )
    else:
        x, *outs = _empty(cell), _empty(cell)
        pattern, fusion = (
            comm.AllReduceFusionPattern.kAllReduce,
            dict.fromkeys(("residual_in", "norm_out", "residual_out", "rms_gamma", "rms_eps"))
            | {"allreduce_out": outs[0]},
        )
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
        pattern_code=pattern,
        use_oneshot=one_shot,
        quant_out=None,
        scale_out=None,
        scale_factor=None,
        layout_code=None,
        **fusion,
    )
    return GraphRun(cell, call, x, *outs, layer=fused.RMS_NORM if norm else ALL_REDUCE)


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
REPLAYED = ("ours, grid as in JAX", "ours, XLA's graph")
"""The same launches in a plain CUDA graph, and in the one that XLA replays for a program that does nothing else."""

PEERS = (
    Peer(OURS, GRAPH, _ours),
    *(
        Peer(name, GRAPH, functools.partial(make, algorithm=algorithm))
        for make, names in ((_ours, VARIANTS), (_hops, FLOORS))
        for name, algorithm in zip(names, ("one_shot", "two_shot"), strict=True)
    ),
    Peer(REPLAYED[0], GRAPH, functools.partial(_ours, alone=False)),
    Peer(REPLAYED[1], GRAPH, _ours_replayed),
    Peer("torch one-shot", GRAPH, _torch_one_shot),
    Peer("torch two-shot", GRAPH, _torch_two_shot),
    Peer("torch two-shot, copied in", GRAPH, functools.partial(_torch_two_shot, copied=True)),
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
    Peer(OURS, NORM_GRAPH, _norm_graph),
    Peer("flashinfer one-shot", NORM_GRAPH, functools.partial(_flashinfer, one_shot=True, norm=True), COMPILE_SECONDS),
    Peer("flashinfer two-shot", NORM_GRAPH, functools.partial(_flashinfer, one_shot=False, norm=True), COMPILE_SECONDS),
    Peer(OURS, NORM_JAX, _norm_jax),
    Peer("all_reduce + XLA", NORM_JAX, functools.partial(_norm_apart, all_reduce=_all_reduce)),
    Peer("psum + XLA", NORM_JAX, functools.partial(_norm_apart, all_reduce=_psum)),
    Peer(OURS, MATMUL_JAX, _matmul_jax),
    Peer("XLA + all_reduce", MATMUL_JAX, functools.partial(_matmul_apart, all_reduce=_all_reduce)),
    Peer("XLA + psum", MATMUL_JAX, functools.partial(_matmul_apart, all_reduce=_psum)),
    Peer(OURS, MOE_JAX, _moe_jax),
    Peer("XLA + all_reduce_rms_norm", MOE_JAX, _moe_half),
    Peer("XLA + all_reduce", MOE_JAX, functools.partial(_moe_all_apart, all_reduce=_all_reduce)),
    Peer("XLA + psum", MOE_JAX, functools.partial(_moe_all_apart, all_reduce=_psum)),
)
"""``FLOORS`` are ours on one 16-byte chunk a rank; the others' times are given as multiples of ``OURS``."""
