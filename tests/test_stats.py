"""What a workspace tells of its calls: `stats`, and log lines."""

from __future__ import annotations

import functools
import logging
import re

import jax
import numpy as np
import pytest
from helpers import DTYPES, all_reduce_on_ranks, cpu_mesh, integers, on_ranks, run_ok
from jax import lax

import jax_twoshot
from jax_twoshot import protocol
from jax_twoshot.workspace import Stats

BF16 = DTYPES["bfloat16"]
NOTHING = Stats(calls=0, bytes=0, algorithms={"two_shot": 0, "one_shot": 0}, rounds=0, slow_waits=0, failure=None)


def two_shot(calls: int, bytes: int, rounds: int) -> Stats:
    return Stats(calls, bytes, {"two_shot": rounds, "one_shot": 0}, rounds, slow_waits=0, failure=None)


def test_counts_calls_bytes_and_rounds_of_one_rank() -> None:
    """8 ranks, and two groups of 4; a round carries 2 x 64 elements."""
    for mesh in (cpu_mesh(8), cpu_mesh(2, 4, names=("dp", "tp"))):
        with jax_twoshot.Workspace(mesh, "tp", rows=2, width=64) as workspace:
            assert workspace.stats() == NOTHING
            f = on_ranks(functools.partial(jax_twoshot.all_reduce, axis_name="tp"), mesh, axes=mesh.axis_names)
            jax.block_until_ready(f(integers((8, 2, 64), BF16)))
            assert workspace.stats() == two_shot(1, 256, 1)
            jax.block_until_ready(f(integers((8, 5, 64), BF16)))
            assert workspace.stats() == two_shot(2, 256 + 640, 1 + 3)
            jax.block_until_ready(f(integers((8, 0, 64), BF16)))
            assert workspace.stats() == two_shot(2, 256 + 640, 4), "an empty message makes no call"


def test_counts_each_turn_of_a_loop_and_each_execution() -> None:
    mesh, parts = cpu_mesh(8), integers((8, 3, 24), BF16)
    with jax_twoshot.Workspace(mesh, "tp", rows=3, width=24) as workspace:
        f = on_ranks(lambda x: lax.fori_loop(0, 5, lambda _, y: jax_twoshot.all_reduce(x + 0 * y, "tp"), x), mesh)
        for turn in (1, 2, 3):
            jax.block_until_ready(f(parts))
            assert workspace.stats() == two_shot(5 * turn, 5 * turn * 144, 5 * turn)


@pytest.mark.parametrize("tp", range(1, 9))
def test_says_which_way_a_message_went(tp: int, caplog: pytest.LogCaptureFixture) -> None:
    """FP32, within and over the capacity, on every number of ranks: what ran is what is planned, without a warning.

    CPU has the one algorithm, so what this can find out is a wrong count; that the two are told apart, `algorithms` of
    ``gpu/checks.py`` sees.
    """
    mesh = cpu_mesh(tp)
    with jax_twoshot.Workspace(mesh, "tp", rows=2, width=64, dtype=np.float32) as workspace:
        chunks = [rows * 64 // 4 for rows in (1, 2, 7)]
        for count in chunks:
            jax.block_until_ready(all_reduce_on_ranks(integers((tp, count * 4)), mesh, workspace=workspace))
        plan = [algorithm for n in chunks for *_, algorithm in protocol.rounds(workspace.handle.layout, n)]
        ran = workspace.stats().algorithms
    assert ran == {name: plan.count(name) if tp > 1 else 0 for name in protocol.ALGORITHMS}
    assert caplog.records == []


def test_is_of_one_workspace_and_outlives_it() -> None:
    mesh, parts = cpu_mesh(8), integers((8, 16), BF16)
    first, second = (jax_twoshot.Workspace(mesh, "tp", rows=1, width=16) for _ in range(2))
    all_reduce_on_ranks(parts, workspace=first)
    all_reduce_on_ranks(parts, workspace=second)
    all_reduce_on_ranks(parts, workspace=second)
    first.close(), second.close()
    assert (first.stats().calls, second.stats().calls) == (1, 2)


def test_calls_of_no_workspace_count_nowhere() -> None:
    mesh, parts = cpu_mesh(8), integers((8, 16))
    with jax_twoshot.Workspace(mesh, "tp", rows=1, width=16, dtype=BF16) as workspace:
        all_reduce_on_ranks(parts, mesh)
        assert workspace.stats() == NOTHING


def test_slow_waits_and_the_last_failure() -> None:
    """A rank that is late by more than a tenth of the deadline; then one that does not come."""
    said = run_ok(
        """
        from jax.experimental import io_callback

        def late(seconds, workspace):
            def body(x):
                def sleep(rank):
                    time.sleep(seconds if np.asarray(rank) == 3 else 0)
                    return np.float32(0)
                zero = io_callback(sleep, jax.ShapeDtypeStruct((), np.float32), lax.axis_index("tp"))
                return jax_twoshot.all_reduce(x + zero, "tp", workspace=workspace)
            return sharded(body)

        patient, hasty = (
            jax_twoshot.Workspace(mesh, "tp", rows=1, width=2880, dtype=np.float32, timeout=seconds)
            for seconds in (5, 0.5)
        )
        jax.block_until_ready(late(1.5, patient)(x))
        print(patient.stats().calls, patient.stats().slow_waits > 0, patient.stats().failure)
        try:
            jax.block_until_ready(late(1, hasty)(x))
        except jax.errors.JaxRuntimeError:
            print(hasty.stats().calls, hasty.stats().failure)
        """
    )
    slow, failed = said.splitlines()
    assert slow == "1 True None"
    assert re.match(r"1 jax_twoshot.* over axis 'tp': rank \d of 8 waits for rank", failed), failed


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    mesh = cpu_mesh(8)
    with caplog.at_level(logging.DEBUG, "jax_twoshot"):
        workspace = jax_twoshot.Workspace(mesh, "tp", rows=2, width=64)
        number = workspace.handle.id
        jax.block_until_ready(
            on_ranks(functools.partial(jax_twoshot.all_reduce, axis_name="tp"), mesh)(integers((8, 2, 64), BF16))
        )
        workspace.close()
        workspace.close()
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", f"workspace {number}: made for axis 'tp' of {{'tp': 8}}, bfloat16, rounds of up to 256 bytes"),
        ("DEBUG", f"all_reduce of bfloat16[2,64] over axis 'tp' compiled for cpu, workspace {number}"),
        ("INFO", f"workspace {number}: closed"),
    ]
