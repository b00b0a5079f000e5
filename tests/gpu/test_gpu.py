"""The CUDA backend on one GPU that several processes share; ``pytest -m gpu``.

Each launch costs seconds, so it runs many checks, and a test judges one of them. A rank that fails, hangs or
says nothing fails every test of its launch, with its last lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import worker

from jax_twoshot import _launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

TP = (2, 3, 4, 6, 8)
CALLS = {
    "setup": 1,
    "grid": 3 * (48 + 18),
    "replays": 1000,
    "chains": 500 * (1 + 2 + 3 + 5 + 7),
    "walk": 2000,
    "loops": 30 * 2,
    "kept": 300 * 5,
    "soak": 20_032,
}
"""Calls that each check must have compared."""
DEADLINE = {"JAX_TWOSHOT_TIMEOUT": "6"}
OTHERS = (0, 1, 3)
"""All of four ranks but ``checks.LATE``."""


# ---- Numbers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=TP, ids="tp{}".format)
def numbers(request, gpu):
    """Each rank's results. XLA captures programs of one call too."""
    env = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1"}
    return worker.launch(request.param, [*CALLS, "digest"], env=env, timeout=280)


@pytest.mark.parametrize("check", CALLS)
def test_no_bit_is_wrong(numbers, check, figure):
    results = [rank[check] for rank in numbers]
    figure(f"{results[0]['seconds']} s, {results[0]}")
    for rank, result in enumerate(results):
        assert (result["calls"], result["wrong"]) == (CALLS[check], 0), f"rank {rank}: {result['first']}"
        assert result["compared"] >= result["calls"]


def test_the_cpu_backend_has_the_same_bits(numbers):
    (on_cpu,) = {*cpu_results(len(numbers), "digest")["digest"]["sha256"]}
    assert [rank["digest"]["sha256"] for rank in numbers] == [[on_cpu]] * len(numbers)


def cpu_results(tp, *checks):
    done = subprocess.run(
        [sys.executable, worker.__file__, *checks, "--cpu", str(tp)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# ---- Kernels of one's own ----------------------------------------------------------------------------------

KERNEL_CALLS = {"cute": 400 * 3, "all_to_all": 100, "deferred_soak": 20_032}


@pytest.fixture(scope="module", params=(2, 4, 8), ids="tp{}".format)
def kernels(request, gpu):
    """Each rank's results."""
    return worker.launch(request.param, [*KERNEL_CALLS], timeout=200)


@pytest.mark.parametrize("check", KERNEL_CALLS)
def test_no_bit_of_a_kernel_of_ones_own_is_wrong(kernels, check, figure):
    figure(f"{kernels[0][check]['seconds']} s, {kernels[0][check]}")
    for rank, result in enumerate(rank[check] for rank in kernels):
        assert (result["calls"], result["wrong"]) == (KERNEL_CALLS[check], 0), f"rank {rank}: {result['first']}"


@pytest.fixture(scope="module")
def one_gpu(gpu):
    """Results of one process that plays all ranks."""
    return worker.launch(1, ["stand_in", "oversize"])[0]


def test_one_gpu_plays_all_ranks(one_gpu, figure):
    result = one_gpu["stand_in"]
    figure(f"{result['seconds']} s, {result}")
    assert (result["calls"], result["wrong"]) == (4 * 100 * 3, 0), result["first"]


def test_a_message_that_does_not_fit_fails_the_workspace(one_gpu):
    assert one_gpu["oversize"]["numbers in the result"] == 0
    for text in (one_gpu["oversize"]["check"], one_gpu["oversize"]["next call"]):
        assert "a kernel gave rank 0 a message of 720 chunks of 16 bytes" in str(text)


# ---- Programs and workspaces -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lifetime(gpu):
    """Each rank's results, with XLA's own flags."""
    return worker.launch(4, ["errors", "capture", "closed", "workspaces"], timeout=240)


def test_a_replayed_launch_does_not_call_the_handler(lifetime, figure):
    figure([f"{r['capture']['handler_calls']} of {r['capture']['launches']} launches" for r in lifetime])
    for result in (rank["capture"] for rank in lifetime):
        assert (result["calls"], result["wrong"]) == (50, 0), result["first"]
        assert result["launches"] == 5000
        # XLA records again when an address has changed; most runs are replays all the same.
        assert 0 < result["handler_calls"] < result["launches"] / 2


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("no workspace", "needs a workspace made before the first call"),
        ("dtype", "x has dtype int32"),
        ("device order", "make a Workspace with this mesh"),
        ("other format", "armed for bfloat16, x is float32"),
        ("closed", "workspace is closed"),
    ],
)
def test_a_mistake_is_refused_with_the_fix(lifetime, mistake, words):
    texts = [rank["errors"]["texts"][mistake] for rank in lifetime]
    assert all(text is not None and words in text for text in texts), texts


def test_a_program_outlives_the_close_of_its_workspace(lifetime):
    for result in (rank["closed"] for rank in lifetime):
        assert (result["calls"], result["wrong"]) == (2 * 20 * 5, 0), result["first"]
        assert (result["held"], result["held after"]) == (True, False)


def test_workspaces_leave_no_memory_behind(lifetime, figure):
    figure([f"{rank['workspaces']['grown']} bytes" for rank in lifetime])
    for result in (rank["workspaces"] for rank in lifetime):
        assert (result["made"], result["held"]) == (200, 0)
        assert result["grown"] < 64 << 20  # one leaked buffer of each would be 3 GB


def test_a_program_outlives_a_workspace_that_nobody_keeps(gpu):
    for result in (rank["dropped"] for rank in worker.launch(4, ["dropped"])):
        assert (result["calls"], result["wrong"]) == (2 * 20 * 5, 0), result["first"]
        assert (result["held"], result["held after"]) == (True, False)


# ---- Ranks that are late or gone ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def late(gpu):
    """Each rank's results: one is late, then it calls no more."""
    return worker.launch(4, ["slow", "absent", "absent_from_kernel"], env=DEADLINE)


def test_a_slow_rank_is_logged_and_nothing_else_happens(late, figure):
    figure(late[0]["slow"]["warnings"])
    for rank in late:
        assert (rank["slow"]["calls"], rank["slow"]["wrong"]) == (4, 0), rank["slow"]["first"]
    for rank in OTHERS:
        warnings = late[rank]["slow"]["warnings"]
        assert sum(f"rank {rank} of 4 waits for rank 2 (" in text for text in warnings) >= 2, warnings


def test_a_rank_that_never_calls_is_named(late, figure):
    for rank in OTHERS:
        judge_what_the_others_saw(rank, late[rank]["absent"], figure)


def test_a_rank_that_never_calls_a_kernel_is_named(late, figure):
    for rank in OTHERS:
        result = late[rank]["absent_from_kernel"]
        figure(f"rank {rank}: {result['check']}")
        assert (result["calls"], result["wrong"], result["numbers in the result"]) == (1, 0, 0)
        for text in (result["check"], result["next call"]):
            assert f"rank {rank} of 4 waits for rank 2 (" in str(text)


def test_a_killed_rank_is_named(gpu, figure):
    with pytest.raises(_launch.LaunchError) as caught:
        worker.launch(4, ["killed"], env=DEADLINE)
    # The others ended by themselves, with a summary and status 0.
    assert str(caught.value).startswith("rank 2: exit status 17;")
    assert [rank for rank in OTHERS if f"rank {rank}:" in str(caught.value)] == []
    for rank in OTHERS:
        judge_what_the_others_saw(rank, caught.value.summaries[rank]["killed"], figure)


def judge_what_the_others_saw(rank, result, figure):
    figure(f"rank {rank} waited {result['waited']} s; a replay gave {result['replay']}; {result['check']}")
    assert (result["calls"], result["wrong"]) == (10, 0)
    assert result["numbers in the result"] == 0
    for text in (result["check"], result["next call"]):
        assert f"rank {rank} of 4 waits for rank 2 (" in str(text)
        assert "the deadline JAX_TWOSHOT_TIMEOUT of 6 s has passed" in str(text)
    # XLA does not ask the handler about a replay: NaN is all that this can say.
    assert result["replay"] == 0 or "waits for rank 2 (" in str(result["replay"])


# ---- Commands ----------------------------------------------------------------------------------------------


def test_the_selftest_finds_no_wrong_bit():
    command = [sys.executable, "-m", "jax_twoshot", "selftest", "--ranks", "2,4", "--one-gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "every bit is the oracle's" in done.stdout
