"""``replacing_psum``: programs written with ``lax.psum`` run on ``all_reduce``, unchanged.

The place to step in is where ``psum`` binds its primitive, while a function is traced. A new ``jax.lax.psum`` would not
reach who wrote ``from jax.lax import psum``; rewriting finished jaxprs would lose custom derivatives; and neither would
see the sums that differentiation makes. The setting is a JAX user context, hence thread-local and part of the key of
every trace and compile cache: a function traced outside is traced anew inside, and the other way round.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Primitive

from jax_twoshot import _api, _compat

EVENTS = {True: "/jax_twoshot/psum/served", False: "/jax_twoshot/psum/passed_on"}


@dataclass(frozen=True)
class PsumCall:
    """One ``psum`` of one array, as it was traced.

    Attributes:
      where: file, line and function in the user's code; "unknown" where JAX does not keep it, as in some transposes.
      shape: of a rank's operand.
      dtype: its name.
      axes: summed over.
      reason: why it was left to ``psum``; empty if ``all_reduce`` serves it.
    """

    where: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Any, ...]
    reason: str

    @property
    def served(self) -> bool:
        """Whether ``all_reduce`` does it."""
        return not self.reason


@dataclass
class PsumReport:
    """What `replacing_psum` did. ``str(report)`` is a table.

    Attributes:
      calls: in the order in which they were traced. A function that JAX has traced before under the same setting is not
        traced again, and adds nothing.
    """

    calls: list[PsumCall] = field(default_factory=list)

    @property
    def served(self) -> list[PsumCall]:
        """The calls that `all_reduce` does."""
        return [call for call in self.calls if call.served]

    @property
    def passed_on(self) -> list[PsumCall]:
        """The calls that were left to ``psum``."""
        return [call for call in self.calls if not call.served]

    def __str__(self) -> str:
        rows = [("decision", "times", "operand", "axes", "where", "reason")]
        for call, times in Counter(self.calls).items():
            decision = "served" if call.served else "passed on"
            operand = f"{call.dtype}[{','.join(map(str, call.shape))}]"
            rows.append((decision, str(times), operand, ",".join(map(str, call.axes)), call.where, call.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"psum: {len(self.served)} served by all_reduce, {len(self.passed_on)} passed on", *lines])


@dataclass(frozen=True)
class _Setting:
    """What caches have to tell apart, and the report, which they have not."""

    max_bytes: int | None
    report: PsumReport = field(compare=False)


# Asked for now, since a context may be entered where a function is being traced.
_PRIMITIVES = _compat.psum_primitives()
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)  # the user's line is what `_where` is after
_setting = jax.make_user_context(None)


@contextlib.contextmanager
def replacing_psum(*, max_bytes: int | None = None) -> Iterator[PsumReport]:
    """While a function is traced inside, ``all_reduce`` does the ``lax.psum`` calls that it can::

        with jax_twoshot.replacing_psum() as report:
            token = step(weights, cache, token)
        print(report)

    That holds for every way to call it (``from jax.lax import psum``, ``pmean``, inside a library, the sums that
    differentiation makes), in this thread. Left to ``psum`` are other dtypes than `all_reduce` takes (integer
    counters), ``axis_index_groups``, axes that are not manual axes of a mesh (those of `jax.vmap`), axes of size 1, and
    all where there is nothing to run it: no open workspace on a GPU, several processes on CPU. ``psum`` of a constant,
    such as ``psum(1, axis)``, is no sum over ranks, and not told of. The numbers are `all_reduce`'s: added in FP32 in
    rank order, -0.0 as +0.0, one form of NaN.

    Each call is told to the report and, with the same fields, to `jax.monitoring`'s event listeners as
    ``/jax_twoshot/psum/served`` or ``/jax_twoshot/psum/passed_on``. Contexts nest, the innermost decides and reports.

    Args:
      max_bytes: operands of more bytes a rank are left to ``psum``; None for no limit.

    Yields:
      The report, which fills while functions are traced.

    Raises:
      ValueError: ``max_bytes`` is negative.
    """
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"jax_twoshot.replacing_psum: max_bytes must be at least 0, or None; got {max_bytes}")
    report = PsumReport()
    with _hooks.installed(), _setting(_Setting(max_bytes, report)):
        yield report


class _Hooks:
    """Stands in for the ``bind`` of psum's primitives as long as a context is open in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._restore = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                for primitive in _PRIMITIVES:
                    self._restore.enter_context(_hooked(primitive))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._restore.close()


_hooks = _Hooks()


@contextlib.contextmanager
def _hooked(primitive: Primitive) -> Iterator[None]:
    original = primitive.bind

    def bind(x: Any, *, axes: tuple[Any, ...], **params: Any) -> Any:
        return _bind(original, x, axes, params)

    vars(primitive)["bind"] = bind
    try:
        yield
    finally:
        del vars(primitive)["bind"]


def _bind(original: Callable[..., Any], x: Any, axes: tuple[Any, ...], params: dict[str, Any]) -> Any:
    setting = _setting.value
    if setting is None:
        return original(x, axes=axes, **params)
    reason = _why_not(x, axes, params.get("axis_index_groups"), setting.max_bytes)
    _tell(setting.report, PsumCall(_where(), tuple(x.shape), x.dtype.name, axes, reason))
    if not reason:
        return _api.all_reduce(x, axes)
    with _setting(None):  # psum's own rules may bind it once more: the same call
        return original(x, axes=axes, **params)


def _why_not(x: Any, axes: tuple[Any, ...], groups: Any, max_bytes: int | None) -> str:
    """Why `all_reduce` cannot do a call, empty if it can; an error's advice is not for who has not called it."""
    if groups is not None:
        return "axis_index_groups"
    size = x.size * x.dtype.itemsize
    if max_bytes is not None and size > max_bytes:
        return f"{size} bytes are more than max_bytes={max_bytes}"
    try:
        _api.check(x, axes, jax.default_backend())
    except (NameError, NotImplementedError, TypeError, ValueError) as error:
        return str(error).removeprefix("jax_twoshot.all_reduce").lstrip(": ").split(";")[0]
    return ""


def _where() -> str:
    return source_info_util.summarize(source_info_util.current()) or "unknown"


def _tell(report: PsumReport, call: PsumCall) -> None:
    report.calls.append(call)
    jax.monitoring.record_event(
        EVENTS[call.served],
        where=call.where,
        shape=str(call.shape),
        dtype=call.dtype,
        axes=str(call.axes),
        reason=call.reason,
    )
