"""What the commands print: tables on standard output, progress on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

PLAIN_SECONDS = 2.0
"""Least time between two lines of progress where there is no bar."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Columns flushed right, but for the first ``left``; the header starts with ``#``, as comments do."""
    cells = [(f"# {header[0]}", *header[1:]), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        (
            cell.ljust(w) if i < left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


class Progress:
    """A bar on a terminal where tqdm is installed; elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._last = time.monotonic()
        self._bar = _bar(total) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, text: str) -> None:
        """One more of the total is done, the one that ``text`` names."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif self._done == self._total or time.monotonic() - self._last >= PLAIN_SECONDS:
            self._last = time.monotonic()
            print(f"[{self._done}/{self._total}] {text}", file=sys.stderr, flush=True)


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, leave=False, dynamic_ncols=True)
