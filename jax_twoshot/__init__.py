"""Two-shot Lamport all-reduce for tensor-parallel decode in JAX: ``jax_twoshot.all_reduce(x, "tp")``."""

from jax_twoshot._api import all_reduce
from jax_twoshot.workspace import Workspace

__all__ = ["Workspace", "all_reduce"]
__version__ = "0.1.0"
