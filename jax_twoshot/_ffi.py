"""Loads the C++ extension, checks that it speaks the protocol of ``protocol.py``, registers its FFI handlers."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib

from jax_twoshot import _compat, _settings, protocol

try:
    from jax_twoshot import _extension
except ImportError as error:
    raise ImportError(
        f"jax_twoshot/_extension: the compiled part of jax_twoshot cannot be loaded ({error}). It is built when the "
        "package is installed: `pip install .` in a checkout, or a wheel made for this Python"
    ) from error

TARGET = "jax_twoshot_all_reduce"
"""The all-reduce's custom call, one handler a platform."""
RMS_NORM_TARGET = "jax_twoshot_all_reduce_rms_norm"
"""The same with a residual and a norm, on CPU."""
COMBINE_TARGET = "jax_twoshot_moe_combine"
"""What a rank puts into the sum of ``moe_tail``, on CPU."""
CUTE_TARGET = "jax_twoshot_cute_call"
"""The custom call of a kernel that comes with it, on CUDA."""


def protocol_constants() -> dict[str, Any]:
    """The constants of ``ffi/protocol.h``, by the names of ``protocol.py``."""
    return _extension.protocol_constants()


def layout_offset(
    tp: int, slot_chunks: int, generations: int, generation: int, slot: int, chunk: int
) -> tuple[int, int]:
    """``ffi/protocol.h``'s ``(recv_offset, gather_offset)``; the latter of message chunk
    ``slot * slot_chunks + chunk``. Both in bytes."""
    return _extension.layout_offsets(tp, slot_chunks, generations, generation, slot, chunk)


def next_round(layout: protocol.Layout, left: int, asked: str, one_shot_bytes: int) -> tuple[int, str]:
    """``ffi/protocol.h``'s ``(chunks, algorithm)`` of the first of `protocol.rounds` of ``left`` chunks."""
    return _extension.next_round(layout.tp, layout.slot_chunks, left, asked, one_shot_bytes)


def launch_grid(chunks: int, ranks_on_device: int, sm_count: int, alone: bool) -> int:
    """``ffi/protocol.h``'s `protocol.grid`."""
    return _extension.launch_grid(chunks, ranks_on_device, sm_count, alone)


def open_cuda_workspace(
    id: int,
    axes: str,
    layout: protocol.Layout,
    timeout: float | None,
    one_shot_bytes: int,
    ranks_on_device: int,
    sm_count: int,
    cubins: Sequence[tuple[str, str, bytes, str, bool]],
    ranks: Sequence[tuple[int, int, int, int, list[int]]],
) -> Any:
    """Loads kernels and makes the small buffers of a workspace on this process's GPUs.

    Args:
      id: of the workspace.
      axes: for messages.
      layout: of each rank's buffers.
      timeout: seconds of its deadline; None: the process's.
      one_shot_bytes: of the largest message that is summed in one shot where the caller does not say.
      ranks_on_device: ranks that share one GPU.
      sm_count: least number of multiprocessors.
      cubins: (algorithm, format, image, symbol, programmatic launch) of each kernel.
      ranks: (device ordinal, rank, address, multicast address or 0, peers' addresses) of each local rank.

    Raises:
      RuntimeError: the driver refused; its text.
    """
    return _extension.open_cuda_workspace(
        id,
        axes,
        layout.tp,
        layout.slot_chunks,
        layout.generations,
        timeout_attribute(timeout),
        one_shot_bytes,
        ranks_on_device,
        sm_count,
        cubins,
        ranks,
    )


def enter_process() -> None:
    """Remembers the process that first uses the library.

    Raises:
      RuntimeError: this is a fork of it. (A program compiled before the fork never gets here, and hangs in JAX.)
    """
    global _process
    _process = _process or os.getpid()
    if os.getpid() != _process:
        raise RuntimeError(
            "jax_twoshot: this process was forked from one that has used it, and the threads of JAX and the memory of "
            "a GPU do not come along: start processes with multiprocessing's 'spawn' or 'forkserver', or fork first"
        )


_process: int | None = None


def let_ctrl_c_end_waits() -> None:
    """Calls that wait long end on Ctrl-C from now on, unless the program has a SIGINT handler of its own: it may mean
    to end the step first."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _extension.count_interrupts()


def interrupts() -> int:
    """How often Ctrl-C was pressed since `let_ctrl_c_end_waits` was first called."""
    return _extension.interrupts()


def timeout_attribute(timeout: float | None) -> float:
    """How the handlers are told a workspace's own deadline, in seconds: below 0 it has none."""
    return -1.0 if timeout is None else timeout


def call_counts(id: int) -> Any:
    """What the calls of workspace ``id`` have done in this process, counted as long as anybody holds this: ``calls``,
    ``bytes``, ``rounds(algorithm)``, ``slow_waits``, and ``failure``, the text of the last one or empty."""
    return _extension.call_counts(id)


def close_cuda_workspace(id: int) -> None:
    """No program compiled from now on can use the workspace."""
    _extension.close_cuda_workspace(id)


def cuda_workspace_in_use(id: int) -> bool:
    """Whether the workspace is open, or a compiled program holds it."""
    return _extension.cuda_workspace_in_use(id)


def cuda_handler_calls() -> int:
    """How often XLA has called the CUDA handler in this process; launches replayed from a command buffer do not
    count."""
    return _extension.cuda_handler_calls()


def _check_mirror() -> None:
    mirror = protocol_constants()
    formats = mirror.pop("FORMATS")
    here = {name: getattr(protocol, name) for name in mirror}
    formats_here = {
        name: {k: v for k, v in dataclasses.asdict(f).items() if k != "name"} for name, f in protocol.FORMATS.items()
    }
    if mirror != here or formats != formats_here:
        raise ImportError(
            "jax_twoshot/_extension was built from another version of the protocol than jax_twoshot/protocol.py "
            f"({mirror}, {formats} against {here}, {formats_here}): reinstall the package"
        )


def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, _extension.cpu_handlers(), platform="cpu")
    jax.ffi.register_ffi_target(RMS_NORM_TARGET, _extension.cpu_rms_norm_handlers(), platform="cpu")
    jax.ffi.register_ffi_target(COMBINE_TARGET, _extension.cpu_moe_combine_handler(), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, _extension.cuda_handlers(), platform="CUDA")
    jax.ffi.register_ffi_target(CUTE_TARGET, _extension.cute_handlers(), platform="CUDA")


_compat.check_jaxlib(jaxlib.__version__, _extension.built_with_jaxlib)
_check_mirror()
_register()
_extension.set_timeout(_settings.timeout_seconds())
