"""Workspaces: which devices form a group, how much one round can carry, how long the buffers live."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_twoshot import protocol


@dataclass(frozen=True)
class Handle:
    """What a traced call keeps of a workspace: no address, so that compiled programs can be cached on disk."""

    id: int
    layout: protocol.Layout


class Workspace:
    """Buffers for the all-reduces over ``axis_names`` of ``mesh``.

    Collective: every process of the mesh makes it, in the same order. On CPU it is optional; there it only sets how
    much one round carries, and the buffers belong to the call (XLA:CPU may run several at once).

    ``with workspace:`` and :meth:`close` end it: no new call may use it, compiled programs keep what they need.

    Args:
      mesh: the mesh of the ``shard_map`` that will call :func:`jax_twoshot.all_reduce`.
      axis_names: the axis, or the tuple of axes in any order, to sum over.
      rows: most rows of a message that is summed in one round.
      width: columns of such a row. Other shapes are welcome: what counts is ``rows * width`` elements.
      dtype: BF16 (default), FP16 or FP32. The two 16-bit types may share a workspace.

    Raises:
      TypeError: ``mesh`` is no mesh, or ``dtype`` is none of the three.
      ValueError: an axis that the mesh does not have, rows or width below 1.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_names: str | tuple[str, ...],
        *,
        rows: int,
        width: int,
        dtype: Any = jnp.bfloat16,
    ):
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(
                f"Workspace: mesh must be a jax.sharding.Mesh (it says which devices), got {type(mesh).__name__}; "
                "make one with jax.make_mesh"
            )
        names = tuple(axis_names) if isinstance(axis_names, (tuple, list)) else (axis_names,)
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
        self.mesh = mesh
        self.axis_names = tuple(n for n in mesh.axis_names if n in names)
        self.format = protocol.FORMATS[name]
        self.rows, self.width = int(rows), int(width)
        tp = int(np.prod([mesh.shape[n] for n in self.axis_names], dtype=np.int64))
        # One rank has nobody to sum with and needs no buffers; the layout is then never used.
        self.handle = Handle(
            next(_ids),
            protocol.Layout.for_capacity(max(tp, protocol.MIN_RANKS), self.rows * self.width * self.format.itemsize),
        )
        self._closed = False
        _open[self.handle.id] = self

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Lets go of the buffers; calling it again does nothing."""
        self._closed = True
        _open.pop(self.handle.id, None)

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

    def _mismatch(self, axes: tuple[str, ...], sizes: Mapping[str, int], fmt: protocol.Format) -> str | None:
        """Why this workspace cannot serve such a call, or None."""
        if dict(self.mesh.shape) != dict(sizes):
            return f"it was made for the mesh {dict(self.mesh.shape)}, the shard_map's is {dict(sizes)}"
        if self.axis_names != axes:
            return f"it was made for the axes {self.axis_names}, the call sums over {axes}"
        if self.format.sentinel != fmt.sentinel:
            return f"it is armed for {self.format.name}, x is {fmt.name}"
        return None


_ids = itertools.count()
_open: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()


def resolve(
    given: Workspace | None, axes: tuple[str, ...], sizes: Mapping[str, int], fmt: protocol.Format
) -> Handle | None:
    """The workspace of a call over ``axes`` of a mesh of ``sizes``: the given one, else the newest open one that
    fits, else None.

    Raises:
      TypeError: ``given`` is no workspace.
      ValueError: the given one is closed or does not fit.
    """
    if given is None:
        fitting = [w for _, w in sorted(_open.items()) if w._mismatch(axes, sizes, fmt) is None]
        return fitting[-1].handle if fitting else None
    if not isinstance(given, Workspace):
        raise TypeError(f"all_reduce: workspace must be a jax_twoshot.Workspace, got {type(given).__name__}")
    if given.closed:
        raise ValueError(f"all_reduce: workspace is closed ({given}); make a new one, and close it after its last use")
    reason = given._mismatch(axes, sizes, fmt)
    if reason is not None:
        raise ValueError(f"all_reduce: workspace does not fit this call: {reason}; make one that does")
    return given.handle
