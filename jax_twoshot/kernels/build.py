"""Compiles a kernel that is a class with a method ``kernel``: one of the library's, or a user's own."""

from __future__ import annotations

import inspect
import shlex
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from cutlass import Constexpr, Int32, Int64, cute

from jax_twoshot.kernels.launch import Arguments


class Compiled(NamedTuple):
    """A kernel for one architecture: the cubin, the PTX it was assembled from, its symbol in both."""

    cubin: bytes
    ptx: str
    symbol: str


class Bounds(NamedTuple):
    """What is known of a launch when its kernel is compiled: threads of a CTA, CTAs that must fit one SM, bytes of
    dynamic shared memory."""

    threads: int
    ctas_per_sm: int
    shared_memory: int


def compile_method(
    kernel: Any, addresses: int, scalars: int, arguments: Arguments, bounds: Bounds, arch: str
) -> Compiled:
    """Compiles ``kernel.kernel`` for ``arch``, such as ``"sm_90a"``. Needs no GPU and no driver.

    Args:
      kernel: the object; ``kernel.kernel`` is a ``@cute.kernel`` method.
      addresses: its first parameters, ``Int64``.
      scalars: the parameters after these, ``Int32``.
      arguments: its last parameter.
      bounds: of the launch.
      arch: target.

    Raises:
      TypeError: the method has other parameters.
      ValueError: it uses dynamic shared memory, and ``bounds`` gives none.
    """
    _check_parameters(kernel, addresses, scalars)
    method = kernel.kernel
    name = getattr(kernel, "symbol", type(kernel).__name__)
    method.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            _host,
            method,
            [Int64(0)] * addresses,
            [Int32(0)] * scalars,
            arguments,
            bounds,
            options=f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {shlex.quote(folder)}",
        )
        (cubin,) = Path(folder).glob("*.cubin")
        (ptx,) = Path(folder).glob("*.ptx")
        (symbol,) = compiled.kernel_info
        result = Compiled(cubin.read_bytes(), ptx.read_text(), symbol)
    if ".extern .shared" in result.ptx and not bounds.shared_memory:
        raise ValueError(
            f"shared_memory: {type(kernel).__name__} uses dynamic shared memory, got 0 bytes; give as many as it "
            "allocates"
        )
    return result


@cute.jit
def _host(
    kernel: Constexpr, addresses: list[Int64], scalars: list[Int32], arguments: Arguments, bounds: Constexpr
) -> None:
    """Gives the compiler the kernel and its launch bounds; the grid is the launcher's own."""
    kernel(*addresses, *scalars, arguments).launch(
        grid=[1, 1, 1],
        block=[bounds.threads, 1, 1],
        smem=bounds.shared_memory,
        min_blocks_per_mp=bounds.ctas_per_sm,
        preferred_smem_carveout=0,  # Left out, the compiler would ask a driver for it.
    )


def _check_parameters(kernel: Any, addresses: int, scalars: int) -> None:
    parameters = list(inspect.signature(type(kernel).kernel).parameters.values())[1:]
    want = ["Int64"] * addresses + ["Int32"] * scalars + ["Arguments"]
    got = [str(p.annotation).rsplit(".")[-1].rstrip("'>") for p in parameters]
    if got != want:
        raise TypeError(
            f"{type(kernel).__name__}.kernel: parameters must be {addresses} addresses (Int64: the operands, then the "
            f"results), {scalars} scalars (Int32) and the workspace's Arguments, annotated so; got {', '.join(got)}"
        )
