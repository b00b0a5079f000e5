"""Two-shot Lamport all-reduce for tensor-parallel decode in JAX: ``jax_twoshot.all_reduce(x, "tp")``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_twoshot._api import all_reduce
    from jax_twoshot.workspace import Workspace

__all__ = ["Workspace", "all_reduce"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Late, so that `python -m jax_twoshot doctor` can say why JAX or the extension does not load.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax_twoshot import _api, workspace

    globals().update(all_reduce=_api.all_reduce, Workspace=workspace.Workspace)
    return globals()[name]
