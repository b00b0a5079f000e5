"""The GPU tests' own code, on CPU devices: it runs, it counts right, and it sees what is wrong."""

from __future__ import annotations

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worker
from jax import lax

import jax_twoshot
from jax_twoshot import protocol, reference


@pytest.fixture
def job(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices()[:4])
    return worker.Job(scale=0.01, calls=64)


def test_every_check_of_numbers_is_right_on_cpu():
    names = ["setup", "grid", "digest", "replays", "chains", "walk", "loops", "kept", "moe_tail", "soak", "closed"]
    (results,) = worker.launch(3, names, place="cpu", scale=0.01, calls=64, timeout=280)
    assert list(results) == names
    assert len({*results.pop("digest")["sha256"]}) == 1
    for name, result in results.items():
        assert result["wrong"] == 0, f"{name}: {result['first']}"
        assert result["compared"] >= result["calls"] > 0
    assert results["grid"]["calls"] == 3 * (48 + 18)
    assert results["chains"]["calls"] == 5 * (1 + 2 + 3 + 5 + 7)
    assert results["soak"]["calls"] == 64


@pytest.mark.parametrize("check", ["setup", "replays", "chains", "walk", "loops", "kept", "capture", "soak"])
def test_a_wrong_sum_on_one_rank_is_seen(job, monkeypatch, check):
    right = jax_twoshot.all_reduce

    def wrong(x, *args, **kwargs):
        total = right(x, *args, **kwargs)
        one = total.at[(0,) * total.ndim].add(jnp.asarray(1000, total.dtype))
        return jnp.where(lax.axis_index("tp") == 3, one, total)

    monkeypatch.setattr(jax_twoshot, "all_reduce", wrong)
    result = getattr(checks, check)(job)
    assert result["wrong"] > 0
    if check in ("setup", "replays", "walk"):  # in the others every rank sums what has become wrong
        assert "rank 3, 1 of" in result["first"]


@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8])
def test_the_soak_s_sums_are_exact_and_change_with_every_call(tp):
    parts = [np.stack([checks._integers((8, 96), jnp.int32(n), r, tp) for r in range(tp)]) for n in range(4)]
    for part in parts:
        want = part.sum(0)
        once = reference.all_reduce(part.astype(checks.BF16))
        twice = reference.all_reduce(np.stack([once] * tp))
        np.testing.assert_array_equal(once.astype(np.int64), want)
        np.testing.assert_array_equal(twice, (tp * want).astype(np.float32).astype(checks.BF16))
    for before in range(3):
        assert (parts[before] != parts[before + 1]).mean() > 0.9


def test_a_chain_is_what_the_program_computes(job):
    given = checks.values(np.random.default_rng(0), 4, 2, 40)
    with checks.small_workspace(job) as workspace:
        sums = checks.chain_program(job, workspace, 4)(job.place(given))
    for got, want in zip(sums, checks.chain(given, 4), strict=True):
        np.testing.assert_array_equal(checks.bits(np.asarray(got)), np.broadcast_to(checks.bits(want), got.shape))


def test_the_grid_is_the_issue_s():
    cases = list(checks._grid_cases(4))
    for dtype in protocol.FORMATS:
        shapes = {s for c in cases if c.dtype == dtype and not c.special for s in c.shapes}
        assert shapes == {(r, w) for r in (1, 2, 3, 16, 31, 32, 64, 200) for w in checks.WIDTHS}
    assert max(r * w for c in cases for r, w in c.shapes) > 3 * checks.CAPACITY
