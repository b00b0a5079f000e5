"""The CUDA backend on one GPU that several processes share, and on several GPUs where they are; ``pytest -m gpu``.

Each launch costs seconds, so it runs many checks, and a test judges one of them; those that no selected test judges
are left out where a test is marked with its own. A rank that fails, hangs or says nothing fails every test of its
launch, with its last lines.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest
import worker

from jax_twoshot import _launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

TP = (2, 3, 4, 6, 8)
GPUS = [n for n in (2, 4, 8) if n <= _launch.gpu_count()]
PLACES = [("one-gpu", tp) for tp in TP] + [(place, n) for place in ("gpu-each", "one-process") for n in GPUS]
"""Where the ranks are, and how many."""
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
SET_UP_DEADLINE = {"JAX_TWOSHOT_TIMEOUT": "15"}
"""Of the checks whose calls have one of their own: what a set-up may take, compilers included."""
judges = pytest.mark.judges
OTHERS = (0, 1, 3)
"""All of four ranks but ``checks.LATE``."""


def judged(request, checks):
    """Those of ``checks`` that the tests selected for this run judge."""
    marked = {mark.args[0] for item in request.session.items for mark in item.iter_markers("judges")}
    return [check for check in checks if check in marked]


# ---- Numbers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PLACES, ids=lambda param: "{}-tp{}".format(*param))
def numbers(request, gpu):
    """Each process's results. XLA captures programs of one call too."""
    place, tp = request.param
    env = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1"}
    return worker.launch(tp, [*CALLS, "digest"], place=place, env=env, timeout=280)


@pytest.mark.parametrize("check", CALLS)
def test_no_bit_is_wrong(numbers, check, figure):
    results = [rank[check] for rank in numbers]
    figure(f"{results[0]['seconds']} s, {results[0]}")
    for rank, result in enumerate(results):
        assert (result["calls"], result["wrong"]) == (CALLS[check], 0), f"rank {rank}: {result['first']}"
        assert result["compared"] >= result["calls"]


def test_the_cpu_backend_has_the_same_bits(numbers):
    on_gpu = [sha256 for process in numbers for sha256 in process["digest"]["sha256"]]
    assert on_gpu == cpu_digest(len(on_gpu))


@functools.cache
def cpu_digest(tp):
    (results,) = worker.launch(tp, ["digest"], place="cpu", env={"JAX_PLATFORMS": "cpu"})
    return results["digest"]["sha256"]


# ---- Kernels of one's own ----------------------------------------------------------------------------------

STAND_IN_CALLS = {"stand_in": 4 * 100 * 3, "stand_in_layers": 3 * (4 * 3 * (6 + 6 + 1))}
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
    return worker.launch(1, [*STAND_IN_CALLS, "oversize"])[0]


@pytest.mark.parametrize("check", STAND_IN_CALLS)
def test_one_gpu_plays_all_ranks(one_gpu, check, figure):
    result = one_gpu[check]
    figure(f"{result['seconds']} s, {result}")
    assert (result["calls"], result["wrong"]) == (STAND_IN_CALLS[check], 0), result["first"]


def test_a_message_that_does_not_fit_fails_the_workspace(one_gpu):
    assert one_gpu["oversize"]["numbers in the result"] == 0
    for text in (one_gpu["oversize"]["check"], one_gpu["oversize"]["next call"]):
        assert "a kernel gave rank 0 a message of 720 chunks of 16 bytes" in str(text)


# ---- Fused layers ------------------------------------------------------------------------------------------

FUSED_CALLS = {"rms_norm": 30 * 9 * 2 + 30 * 2 * 2, "moe_tail": 12 * 10 * 2 + 30 * 2 * 2, "matmul": 120}


@pytest.fixture(scope="module", params=(2, 4, 8), ids="tp{}".format)
def fused(request, gpu):
    """Each rank's results."""
    return worker.launch(request.param, [*FUSED_CALLS], timeout=200)


@pytest.mark.parametrize("check", FUSED_CALLS)
def test_no_bit_of_a_fused_layer_is_wrong(fused, check, figure):
    figure(f"{fused[0][check]['seconds']} s, {fused[0][check]}")
    for rank, result in enumerate(rank[check] for rank in fused):
        assert (result["calls"], result["wrong"]) == (FUSED_CALLS[check], 0), f"rank {rank}: {result['first']}"


# ---- Programs and workspaces -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lifetime(request, gpu):
    """Each rank's results, with XLA's own flags."""
    return worker.launch(4, judged(request, ["errors", "capture", "algorithms", "closed", "workspaces"]), timeout=240)


@judges("capture")
def test_a_replayed_launch_does_not_call_the_handler(lifetime, figure):
    figure([f"{r['capture']['handler_calls']} of {r['capture']['launches']} launches" for r in lifetime])
    for result in (rank["capture"] for rank in lifetime):
        assert (result["calls"], result["wrong"]) == (50, 0), result["first"]
        assert result["launches"] == 5000
        # XLA records again when an address has changed; most runs are replays all the same.
        assert 0 < result["handler_calls"] < result["launches"] / 2


@judges("capture")
def test_stats_count_replays_on_the_device(lifetime, figure):
    figure([(r["capture"]["rounds"], r["capture"]["counted"]) for r in lifetime])
    for result in (rank["capture"] for rank in lifetime):
        assert result["rounds"] == result["launches"]
        handled = result["handler_calls"]
        assert result["counted"] == [handled, handled, handled * 3 * 2880 * 2]


@judges("algorithms")
def test_stats_tell_the_algorithms_apart(lifetime, figure):
    figure(lifetime[0]["algorithms"])
    for result in (rank["algorithms"] for rank in lifetime):
        assert (result["calls"], result["wrong"]) == (9, 0), result["first"]
        assert result["counted"] == result["want"] and all(result["want"].values())


@judges("errors")
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


@judges("closed")
def test_a_program_outlives_the_close_of_its_workspace(lifetime):
    for result in (rank["closed"] for rank in lifetime):
        assert (result["calls"], result["wrong"]) == (2 * 20 * 5, 0), result["first"]
        assert (result["held"], result["held after"]) == (True, False)


@judges("workspaces")
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
def late(request, gpu):
    """Each rank's results: one is late, then it calls no more."""
    return worker.launch(4, judged(request, ["slow", "absent", "absent_from_kernel"]), env=DEADLINE)


@judges("slow")
def test_a_slow_rank_is_logged_and_nothing_else_happens(late, figure):
    figure(late[0]["slow"]["warnings"])
    for rank in late:
        assert (rank["slow"]["calls"], rank["slow"]["wrong"]) == (4, 0), rank["slow"]["first"]
    for rank in OTHERS:
        warnings = late[rank]["slow"]["warnings"]
        assert sum(f"rank {rank} of 4 waits for rank 2 (" in text for text in warnings) >= 2, warnings


@judges("slow")
@judges("absent")
def test_stats_wait_for_nothing_and_count_slow_waits(late, figure):
    """Asked in a call that waits for the late rank: the round is not over, nor is the result there."""
    figure([rank["slow"]["asked"] for rank in late])
    for rank in OTHERS:
        seen = late[rank]["slow"]
        assert [seen["asked"][1], seen["asked"][3]] == [[1, False], [3, False]]
        assert seen["rounds"] == 4 and seen["slow waits"] >= 2
        assert "waits for rank 2" in late[rank]["absent"]["stats"]


@judges("absent")
def test_a_rank_that_never_calls_is_named(late, figure):
    for rank in OTHERS:
        judge_what_the_others_saw(rank, late[rank]["absent"], figure)


@judges("absent_from_kernel")
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


FAULTS = ("reset", "dropped_pushes", "wrap", "starved", "disagree", "interrupted", "failed_setups")


@pytest.fixture(scope="module")
def faults(request, gpu):
    """Each rank's results: things are done wrong on purpose."""
    return worker.launch(4, judged(request, FAULTS), env=SET_UP_DEADLINE)


@judges("reset")
def test_a_reset_makes_a_failed_workspace_as_new(faults, figure):
    figure(f"{[rank['reset']['seconds of a reset'] for rank in faults]} s")
    for rank, result in enumerate(r["reset"] for r in faults):
        assert (result["calls"], result["wrong"]) == (4 * 5 * 21, 0), result["first"]
        for case in ("stays away", "comes too late", "stays away, and one reset fails"):
            if rank in OTHERS:
                assert result[case]["numbers"] == 0
                assert f"rank {rank} of 4 waits for rank 2 (" in str(result[case]["next call"])
                assert "the deadline Workspace(timeout=...) of 3 s has passed" in str(result[case]["next call"])
        assert "step 'reset 3, settle' failed on process 0: RuntimeError: planned" in result["reset"]
        assert "was not reset on every process" in str(result["call after it"])


@judges("dropped_pushes")
def test_a_push_that_is_lost_is_named(faults, figure):
    for rank, result in enumerate(r["dropped_pushes"] for r in faults):
        figure(f"rank {rank}: {result}")
        assert result["wrong"] == 0
        for algorithm in ("two_shot", "one_shot"):
            # In one shot only rank 0 needs what is lost; in two the others need its sums.
            fails = rank == 0 or algorithm == "two_shot"
            assert (result[algorithm]["check"] is not None) == fails, result[algorithm]
            assert (result[algorithm]["numbers"] < 16 * 2880) == fails
    for algorithm in ("two_shot", "one_shot"):
        assert "phase reduce" in (text := faults[0]["dropped_pushes"][algorithm]["check"])
        assert "rank 0 of 4 waits for rank 2 (for 3 s;" in text


@judges("wrap")
def test_the_count_of_calls_may_wrap(faults):
    for result in (r["wrap"] for r in faults):
        assert (result["calls"], result["wrong"]) == (43, 0), result["first"]
        # 43 calls of 2 generations; 20 of the 40 were after the wrap.
        assert (result["epoch"], result["state"] & 2, result["calls after"]) == (1, 0, 20)


@judges("starved")
def test_work_that_fills_the_gpu_is_waited_for(faults):
    for result in (r["starved"] for r in faults):
        assert (result["calls"], result["wrong"]) == (16, 0), result["first"]


@judges("disagree")
def test_calls_in_another_order_on_one_rank_are_found_out(faults, figure):
    """Where sizes differ; nothing tells calls of equal sizes apart."""
    figure([rank["disagree"] for rank in faults])
    assert any(rank["disagree"]["check"] is not None for rank in faults)
    for text in (rank["disagree"]["check"] for rank in faults):
        assert text is None or "the deadline Workspace(timeout=...) of 3 s has passed" in text


@judges("interrupted")
def test_ctrl_c_ends_a_wait_after_its_warning(faults, figure):
    """The deadline is 20 s."""
    for rank, result in enumerate(r["interrupted"] for r in faults):
        assert (result["calls"], result["wrong"]) == (6, 0), result["first"]
        if rank in OTHERS:
            figure(f"rank {rank}: {result['seconds after Ctrl-C']} s after Ctrl-C: {result['check']}")
            assert result["raised"] and result["seconds after Ctrl-C"] < 10
            for text in (result["check"], str(result["next call"])):
                assert f"rank {rank} of 4 waits for rank 2 (" in text and "interrupted by Ctrl-C (SIGINT)" in text


@judges("failed_setups")
def test_a_failed_set_up_leaves_nothing_behind(faults, figure):
    figure([rank["failed_setups"]["left"] for rank in faults])
    figure([rank["failed_setups"]["free after each"] for rank in faults])
    texts = [
        f"{step}: workspace N over axis 'tp': step '{step}' failed on process 2: RuntimeError: planned"
        for step in ("describe", "map", "prepare", "arm")
    ]
    for result in (r["failed_setups"] for r in faults):
        assert (result["calls"], result["wrong"]) == (5, 0), result["first"]
        assert [re.sub(r"workspace \d+", "workspace N", text) for text in result["texts"]] == texts * 3
        assert [result["left"][name] for name in ("files", "threads", "shared memory")] == [0, 0, 0]
        assert result["left"]["device memory"] >= -(2 << 20)


def test_random_programs(gpu, figure):
    """``--calls`` is their number; more by hand: ``python tests/gpu/worker.py fuzz --calls 500 --timeout 300``."""
    for result in (rank["fuzz"] for rank in worker.launch(4, ["fuzz"], calls=30)):
        figure(result)
        assert (result["programs"], result["wrong"]) == (30, 0), result["first"]


def test_a_long_soak_leaves_no_memory_behind(gpu, figure):
    """More by hand: ``python tests/gpu/worker.py long_soak --calls 10000000``."""
    for result in (rank["long_soak"] for rank in worker.launch(4, ["long_soak"], calls=200_000)):
        figure(result)
        assert result["wrong"] == 0
        assert result["grown"]["resident"] < 64 << 20 and result["grown"]["device"] < 64 << 20


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
