"""``moe_tail``'s kernel, run as PTX in Python (`tests/ptx.py`): the oracle's bits, and deferred re-arming."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES
from ptx_ranks import Ranks

from jax_twoshot import cubin, protocol, reference
from jax_twoshot.protocol import GENERATIONS_DEFERRED

EPS = 1e-5
CALLS = ((1, 48, 3), (6, 48, 1), (3, 1600, 2), (2, 48, 9), (3, 48, 8), (1, 48, 2))
"""Rows, width, experts of a token; of the widest, a thread of one CTA has several chunks."""
MOST = 3 * 1600
SLOTS = 7
SPECIAL = [0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 3e38, -1e-8]


class Group(Ranks):
    """Ranks whose calls are ``moe_tail``'s."""

    def __init__(self, tp: int, name: str, owners: int | None = None, seed: int = 0) -> None:
        format = protocol.FORMATS[name]
        size = MOST * format.itemsize
        one_shot_bytes = size if owners else 0
        layout = protocol.Layout.for_capacity(tp, size, GENERATIONS_DEFERRED, one_shot_bytes=one_shot_bytes)
        super().__init__(layout, format, owners=owners, seed=seed)
        self.kernel = cubin.moe_tail_kernel(tp, name, False, "sm_90a", 1, owners=owners)

    def normals(self, *shape: int) -> np.ndarray:
        special = self.numbers.random(shape) < 0.05
        numbers = np.where(special, self.numbers.choice(SPECIAL, shape), self.numbers.standard_normal(shape))
        with np.errstate(over="ignore"):
            return numbers.astype(np.float32).astype(DTYPES[self.format.name])

    def moe_tail(self, rows: int, width: int, k: int, ctas: int) -> None:
        """Another call in every rank's stream."""
        index = self.numbers.integers(-2, SLOTS + 2, (self.tp, rows, k)).astype(np.int32)
        scale = self.numbers.standard_normal(index.shape).astype(np.float32)
        scale[(index < 0) | (index >= SLOTS)] = np.nan
        own = self.normals(self.tp, SLOTS, width), index, scale, self.normals(self.tp, rows, width)
        same = self.normals(rows, width), self.normals(width)
        scalars = [rows, width // self.format.chunk, SLOTS, k, int(np.float32(EPS).view(np.int32))]
        self.call(self.kernel, own, same, scalars, reference.moe_tail(*own, *same, EPS), ctas)


@pytest.mark.parametrize(
    ("tp", "owners", "name"),
    [(2, None, "bfloat16"), (3, None, "bfloat16"), (2, None, "float32"), (4, 1, "bfloat16")],
    ids=["2 ranks", "3 ranks", "FP32", "stand-in for 4"],
)
def test_calls_follow_each_other(tp: int, owners: int | None, name: str) -> None:
    """Bits of the oracle on every rank; of the generations only the last call's is not armed again, and the control
    block says how much of it the next call has to re-arm."""
    group = Group(tp, name, owners, seed=tp)
    for rows, width, k in CALLS:
        group.moe_tail(rows, width, k, ctas=1 if rows * width == MOST else group.random.choice([1, 2]))
    group.run_and_compare()
    last = (len(CALLS) - 1) % GENERATIONS_DEFERRED
    assert group.is_armed([g for g in range(GENERATIONS_DEFERRED) if g != last])
    assert not group.is_armed([last])
    for rank in range(group.owners):
        words = group.control_words(rank)
        assert words[:4] == (len(CALLS) % GENERATIONS_DEFERRED, 0, 0, len(CALLS))
        assert words[4 + last] == CALLS[-1][0] * CALLS[-1][1] // group.format.chunk


def test_a_failed_workspace_waits_for_nothing_and_writes_nan() -> None:
    group = Group(2, "bfloat16")
    group.moe_tail(*CALLS[0], ctas=1)
    group.streams[1].clear()
    group.fail(0)
    group.run()
    ((_, ranks),) = group.results()
    assert all(np.isnan(result.astype(np.float32)).all() for result in ranks[0])
    assert group.is_armed(), "nothing was pushed"
