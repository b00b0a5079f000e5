"""Two-shot Lamport all-reduce for tensor-parallel decode in JAX: ``jax_twoshot.all_reduce(x, "tp")``."""

from typing import NoReturn

__all__ = [
    "CuteKernel",
    "Workspace",
    "all_reduce",
    "all_reduce_rms_norm",
    "cute_call",
    "matmul_all_reduce",
    "moe_tail",
    "replacing_psum",
]
__version__ = "0.1.0"

try:
    # At once, and not when first used: programs exported or compiled earlier need the handlers that this registers.
    from jax_twoshot import _compat as _compat  # first: it says so where the rest would fail for jaxlib's age
    from jax_twoshot._api import all_reduce
    from jax_twoshot._cute_call import CuteKernel, cute_call
    from jax_twoshot._fused import all_reduce_rms_norm
    from jax_twoshot._matmul import matmul_all_reduce
    from jax_twoshot._moe import moe_tail
    from jax_twoshot._psum import replacing_psum
    from jax_twoshot.workspace import Workspace
except (ImportError, ValueError) as error:
    # Raised when first used, so that `python -m jax_twoshot doctor` can run where this fails, and say why.
    _cause = error

    def __getattr__(name: str) -> NoReturn:
        if name in __all__:
            raise _cause
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
