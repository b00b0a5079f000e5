"""``bench --ranks`` without a GPU: what the parent makes of its workers' lines, and the peers' checks on CPU."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import jax_twoshot
from jax_twoshot import _launch, _settings, protocol, reference
from jax_twoshot.cli import bench, bench_ranks, decode, fused, gpu_peers, main, tune
from jax_twoshot.cli.bench_ranks import Ears, Found, Job, Measurement, Missing
from jax_twoshot.cli.gpu_peers import DECODE, GRAPH, JAX, MATMUL_JAX, MOE_JAX, NORM_GRAPH, NORM_JAX, Cell, Peer

FACTS = {
    "date": "2026-01-02 03:04 UTC",
    "machine": {"devices": ["NVIDIA H200"]},
    "table": "ONE_SHOT_SHARED_GPU",
    "versions": {"jax-twoshot": "0.1.0", "jax": "0.11.2", "torch": "2.11.0", "flashinfer-python": None},
}


def cell(tp: int = 4, rows: int = 3, width: int = 40, dtype: str = "bfloat16", **more: Any) -> Cell:
    mesh = Mesh(np.array(jax.devices()[:tp]), ("tp",))
    values = {"calls": 7, "scale": 1 / tp, "rank": 1, "ordinal": 0, "shared": True, "most_rows": rows}
    return Cell(mesh, rows, width, dtype, **values | more)


def measurement(peer: str, seconds: float, rows: int = 1, tp: int = 2, program: str = GRAPH) -> Measurement:
    return Measurement(peer, rows, 128 * rows, tp, 0, [seconds, seconds * 3, seconds], 64, program)


def arguments(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    values = dict(ranks=[2, 4], one_gpu=True, rows=[1, 2], width=[64], dtype="bfloat16", repeats=3, calls=5)
    values |= dict(timeout=100, json=tmp_path / "bench.json", plot=None, tune=False, decode=False, fused=False)
    return argparse.Namespace(**values | changes)


@contextlib.contextmanager
def no_step(what: str, seconds: float = 0) -> Iterator[None]:
    yield


# ---- A worker ----------------------------------------------------------------------------------------------


class Fake:
    """A contender that writes down when it is asked."""

    def __init__(self, log: list[str], name: str, wrong: int = 0) -> None:
        self.log, self.name, self._wrong = log, name, wrong

    def wrong(self) -> int:
        self.log.append(f"{self.name} wrong")
        return self._wrong

    def seconds(self) -> float:
        self.log.append(f"{self.name} seconds")
        return len(self.log) / 1e6


def test_peers_take_turns_after_their_checks() -> None:
    log: list[str] = []

    def refuse(cell: Cell) -> Any:
        raise ValueError("not today\nand no other day")

    peers = [
        Peer("a", GRAPH, lambda cell: Fake(log, "a")),
        Peer("b", JAX, lambda cell: Fake(log, "b", wrong=2)),
        Peer("c", GRAPH, refuse),
    ]
    steps = []

    def step(what: str, seconds: float = 0) -> Any:
        steps.append(what)
        return contextlib.nullcontext()

    found = bench_ranks.measure(cell(), peers, 2, step, lambda refusal: refusal)
    checks = ["a wrong", "a seconds", "b wrong", "b seconds"]
    assert log == [*checks, *["a seconds", "b seconds"] * 2, "a wrong", "b wrong"]
    assert found["refusals"] == {"c (graph)": "not today"}
    assert [(p["peer"], p["program"], p["wrong"]) for p in found["peers"]] == [("a", GRAPH, 0), ("b", JAX, 4)]
    assert found["peers"][0]["seconds"] == [5e-6, 7e-6], "the warm-up is no sample"
    assert (found["rows"], found["width"], found["bytes"]) == (3, 40, 240)
    assert steps[0] == "a (graph): set-up for 3 rows"
    assert len(steps) == 3 + 2 + 4 + 2
    assert json.loads(json.dumps(found)) == found


def test_a_peer_that_another_rank_refuses_is_left_out() -> None:
    log: list[str] = []
    peers = [Peer("a", GRAPH, lambda cell: Fake(log, "a"))]
    found = bench_ranks.measure(cell(), peers, 2, no_step, lambda refusal: "rank 3 cannot")
    assert (found["peers"], found["refusals"], log) == ([], {"a (graph)": "rank 3 cannot"}, [])


def test_jax_peers_on_cpu() -> None:
    """Ours is the oracle bit for bit, psum within rounding, and a sum of something else is neither."""

    def ours(c: Cell) -> Any:
        return gpu_peers.JaxRun(c, lambda x: jax_twoshot.all_reduce(x, "tp"), bitwise=True)

    peers = [
        Peer("ours", JAX, ours),
        Peer("psum", JAX, lambda c: gpu_peers.JaxRun(c, lambda x: lax.psum(x, "tp"))),
        Peer("broken", JAX, lambda c: gpu_peers.JaxRun(c, lambda x: lax.psum(x, "tp") * 2)),
    ]
    found = bench_ranks.measure(cell(), peers, 2, no_step, lambda refusal: refusal)
    wrong = {peer["peer"]: peer["wrong"] for peer in found["peers"]}
    assert (wrong["ours"], wrong["psum"]) == (0, 0)
    assert wrong["broken"] > 4 * 120
    assert all(len(peer["seconds"]) == 2 and min(peer["seconds"]) > 0 for peer in found["peers"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_check_of_a_kernel(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """With a kernel on the CPU that knows the other ranks' parts."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(gpu_peers, "_barrier", lambda: None)
    monkeypatch.setattr(gpu_peers, "_synchronize", lambda: None)
    c = cell(dtype=dtype)
    x = torch.empty(c.rows, c.width, dtype=getattr(torch, dtype))

    def kernel(out: Any, error: float = 0.0) -> Any:
        def call() -> None:
            parts = c.parts()
            parts[c.rank] = gpu_peers._to_numpy(x, dtype)
            out.copy_(gpu_peers._to_torch(reference.all_reduce(parts)))
            out[1, 2] += error

        return call

    out = torch.empty_like(x)
    assert gpu_peers.GraphRun(c, kernel(out), x, out, bitwise=True).wrong() == 0
    assert gpu_peers.GraphRun(c, kernel(out, 1.0), x, out, bitwise=True).wrong() == bench.CHECKED_CALLS
    assert gpu_peers.GraphRun(c, kernel(out, 1.0), x, out).wrong() == bench.CHECKED_CALLS
    assert gpu_peers.GraphRun(c, kernel(x), x, x).wrong() == 0
    assert not x.any(), "in place it would sum its own sums"

    captured = gpu_peers.GraphRun(c, kernel(out), x, out, bitwise=True)
    captured._graph = SimpleNamespace(replay=kernel(out, 1.0))
    assert captured.wrong() == bench.CHECKED_CALLS, "once there is a graph, it is what is checked"

    def failed() -> None:
        raise RuntimeError("a rank did not come")

    with pytest.raises(RuntimeError, match="a rank did not come"):
        gpu_peers.GraphRun(c, kernel(out), x, out, check=failed).wrong()


def test_clock_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replay before the clock starts, then as many as are counted."""
    torch = pytest.importorskip("torch")
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            assert isinstance(end, Event)
            return 7.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_peers, "_barrier", lambda: log.append("barrier"))
    run = gpu_peers.GraphRun(
        cell(calls=7), lambda: None, torch.zeros(1), torch.zeros(1), check=lambda: log.append("check")
    )
    monkeypatch.setattr(run, "_captured", lambda: SimpleNamespace(replay=lambda: log.append("replay")))
    assert run.seconds() == pytest.approx(7e-3 / (10 * 7))
    replays = ["replay", "record", *["replay"] * gpu_peers.REPLAYS, "record", "synchronize", "check"]
    assert log == ["barrier", *replays]
    run.seconds()
    assert log == ["barrier", *replays * 2], "captured once"


def test_floor_is_one_chunk_a_rank() -> None:
    assert (cell(tp=8).one_chunk_each().rows, cell(tp=8).one_chunk_each().width) == (1, 64)
    assert cell(tp=4, dtype="float32").one_chunk_each().bytes == 64
    assert cell(tp=2).one_chunk_each().expected().shape == (1, 16)


@pytest.mark.parametrize(
    "name, program, reason",
    [
        ("nccl", GRAPH, "NCCL refuses two ranks on one GPU"),
        ("psum", JAX, "NCCL refuses two ranks on one GPU"),
        ("psum, XLA one-shot", JAX, "NCCL refuses two ranks on one GPU"),
        ("pallas multimem", JAX, "multicast needs a GPU for each rank"),
        ("flashinfer mnnvl", GRAPH, "multicast needs a GPU for each rank"),
        ("torch multimem", GRAPH, "multicast needs a GPU for each rank"),
        ("flashinfer one-shot", GRAPH, "No module named 'flashinfer'"),
    ],
)
def test_refusals_on_a_shared_gpu(name: str, program: str, reason: str) -> None:
    if "flashinfer" in name:
        pytest.importorskip("torch")
    (peer,) = (p for p in gpu_peers.PEERS if (p.name, p.program) == (name, program))
    assert bench_ranks._make(peer, cell()) == reason


def test_no_multicast_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setenv("JAX_TWOSHOT_MULTICAST", "1")
    assert not off.keys() & bench_ranks.environment(shared=False).keys()
    assert off.items() <= bench_ranks.environment(shared=True).items()
    monkeypatch.setenv("JAX_TWOSHOT_MULTICAST", "0")
    assert off.items() <= bench_ranks.environment(shared=False).items()
    monkeypatch.setattr(gpu_peers.symmetric, "_Driver", lambda: None)
    with pytest.raises(ValueError, match="no multicast: switched off by JAX_TWOSHOT_MULTICAST=0"):
        gpu_peers._torch_multimem(cell(shared=False))


# ---- The parent --------------------------------------------------------------------------------------------


def done(rows: int, seconds: list[float], wrong: int = 0, refusals: dict[str, str] | None = None) -> dict[str, Any]:
    peers = [{"peer": "jax_twoshot", "program": GRAPH, "wrong": wrong, "seconds": seconds}]
    refusals = refusals or {}
    return {"rows": rows, "width": 64, "bytes": 128 * rows, "peers": peers, "refusals": refusals, "facts": FACTS}


def test_merge_takes_the_slowest_rank_of_each_sample() -> None:
    ranks = [done(2, [1.0, 5.0, 3.0], wrong=1, refusals={"nccl (graph)": "no"}), done(2, [2.0, 4.0, 3.5], wrong=2)]
    (m,), missing = bench_ranks.merge(2, ranks)
    assert m == Measurement("jax_twoshot", 2, 256, 2, 3, [2.0, 5.0, 3.5], 64, GRAPH)
    assert m.median == 3.5
    assert missing == [Missing(2, "nccl (graph)", "no", ((2, 64),))]


def test_the_same_reason_is_said_once() -> None:
    missing = [Missing(2, "a", "no", ((1, 64),)), Missing(4, "a", "no", ((1, 64),)), Missing(2, "a", "no", ((2, 64),))]
    assert bench_ranks.join(missing) == [
        Missing(2, "a", "no", ((1, 64), (2, 64))),
        Missing(4, "a", "no", ((1, 64),)),
    ]


def test_blame() -> None:
    ears = Ears(3)
    assert bench_ranks.blame("no MPS\nat all", ears) == (None, "no MPS")
    for rank, steps in enumerate(
        (("a: set-up", "b (graph): check"), ("a: set-up",), ("a: set-up", "b (graph): check"))
    ):
        for step in steps:
            ears.hear(rank, f"bench-step {step}")
    ears.hear(1, "Traceback")
    ears.hear(1, "ValueError: bad")
    ears.hear(0, "gloo: connection closed")
    assert bench_ranks.blame("rank 0: exit status 1", ears) == ("a", "set-up: ValueError: bad"), "rank 1 came least far"
    ears.hear(1, "bench-step b (graph): check")
    ears.hear(0, "bench-step b (graph): timing")
    ears.hear(2, "bench-step b (graph): timing")
    failure = "rank 0: no summary; its last lines:\nx\nrank 1: ended by SIGSEGV; its last lines:"
    assert bench_ranks.blame(failure, ears) == ("b (graph)", "check: ended by SIGSEGV"), "said nothing since the step"
    for line in ("Timeout (0:01:00)!", "Thread 0x1", '  File "x.py"'):
        ears.hear(1, line)
    assert bench_ranks.blame("", ears) == ("b (graph)", "check: Timeout (0:01:00)!")


def test_a_peer_that_crashes_is_dropped_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    jobs: list[Job] = []

    def launch(tp: int, argv: list[str], *, on_line: Any, **options: Any) -> list[dict[str, Any]]:
        jobs.append(Job(**json.loads(argv[-1])))
        assert argv[1:3] == ["-m", "jax_twoshot.cli.bench_ranks"]
        assert options["one_gpu"] and not options["echo"]
        for rows, _ in jobs[-1].cells:
            for rank in range(tp):
                if rows == 2 and "nccl (graph)" in jobs[-1].peers:
                    on_line(rank, "bench-step nccl (graph): timing at 2 rows")
                    on_line(rank, "Segmentation fault")
                else:
                    on_line(rank, "bench-done " + json.dumps(done(rows, [1e-6 * (rank + 1)] * 3)))
            if rows == 2 and "nccl (graph)" in jobs[-1].peers:
                raise _launch.LaunchError("rank 0: ended by SIGSEGV", [None] * tp, [[]] * tp)
        return [{}] * tp

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "gpu_count", lambda: 1)
    code = main(["bench", "--ranks", "2,4", "--one-gpu", "--rows", "1,2", "--width", "64", "--repeats", "3"])
    out, err = capsys.readouterr()
    assert code == 0
    every = [str(peer) for peer in gpu_peers.PEERS if peer.program in (GRAPH, JAX)]
    assert [(job.cells, job.peers) for job in jobs] == [
        ([[1, 64], [2, 64]], every),
        ([[2, 64]], [peer for peer in every if peer != "nccl (graph)"]),
    ] * 2
    assert {job.most_rows for job in jobs} == {2}
    table = [line.split() for line in out.splitlines() if not line.startswith("#")]
    assert [(row[1], row[2], row[4], row[6], row[9]) for row in table] == [
        ("jax_twoshot", "2", "1", "2.00", "0"),
        ("jax_twoshot", "2", "2", "2.00", "0"),
        ("jax_twoshot", "4", "1", "4.00", "0"),
        ("jax_twoshot", "4", "2", "4.00", "0"),
    ]
    missing = "nccl (graph) is not in the table for rows 2 x 64: timing at 2 rows: Segmentation fault"
    assert out.splitlines()[-2:] == [f"# 2 ranks, {missing}", f"# 4 ranks, {missing}"]
    assert "2 ranks: rank 0: ended by SIGSEGV" in err
    assert "[4/4] 4 ranks, 2 x 64" in err


def test_a_launch_that_never_starts_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(*args: Any, **options: Any) -> None:
        raise RuntimeError("nvidia-cuda-mps-control -d: no")

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "gpu_count", lambda: 1)
    assert main(["bench", "--ranks", "2", "--one-gpu", "--rows", "1,4", "--width", "64,128"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "# 2 ranks, every peer is not in the table for rows 1,4 x 64, rows 1,4 x 128: nvidia-cuda-mps-control -d: no"
    )


def test_wrong_sums_fail_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def launch(tp: int, argv: list[str], *, on_line: Any, **options: Any) -> None:
        for rank in range(tp):
            on_line(rank, "bench-done " + json.dumps(done(1, [1e-6] * 2, wrong=rank)))

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "gpu_count", lambda: 2)
    assert main(["bench", "--ranks", "2", "--rows", "1", "--width", "64"]) == 1
    assert "one a rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, text",
    [
        ("--ranks 2 --devices 2", "not allowed with argument"),
        ("--ranks 2", "argument --ranks: it starts a process for each rank on NVIDIA GPUs, and there is none here"),
        ("--one-gpu", "argument --one-gpu: it is about --ranks, which is missing"),
        ("--width 64,128", "argument --width: without --ranks one is needed, got 2"),
    ],
)
def test_bad_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, text: str
) -> None:
    monkeypatch.setattr(_launch, "gpu_count", lambda: 0)
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *options.split()])
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


# ---- Table, JSON and picture -------------------------------------------------------------------------------


def test_table_and_json(tmp_path: Path) -> None:
    found = Found(
        [
            measurement("jax_twoshot", 2e-6),
            measurement("two hops", 1e-6),
            measurement("nccl", 5e-6),
            measurement("torch one-shot", 1.6e-6),
            measurement("nccl", 5e-6, rows=2),
        ],
        [Missing(2, "jax_twoshot (graph)", "check: no", ((2, 64),))],
        FACTS,
    )
    args = arguments(tmp_path)
    text = bench_ranks.text("a title\nof two lines", args, found)
    assert text.startswith("# a title\n# of two lines\n# time: median of 3 runs of 10 x 5 calls, of the slowest rank")
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    times = ("2.00..6.00", "0.06", "0", "1.00")
    assert rows[0] == ["graph", "jax_twoshot", "2", "128", "1", "64", "2.00", *times]
    assert [row[-1] for row in rows] == ["1.00", "0.50", "2.50", "0.80", "-"]
    assert [row[-3] for row in rows] == ["0.06", "-", "0.03", "0.08", "0.05"], "the floor moves another message"
    assert "# graph, 2 ranks: ahead of the fastest peer in 0 of 1 messages" in text
    assert "geometric mean 0.80, least 0.80" in text
    assert text.splitlines()[-1] == "# 2 ranks, jax_twoshot (graph) is not in the table for rows 2 x 64: check: no"

    bench_ranks._write(args, found)
    written = json.loads(args.json.read_text())
    assert written["date"] == FACTS["date"]
    assert written["program"]["ranks"] == [2, 4]
    assert written["measurements"][0]["seconds"] == [2e-6, 6e-6, 2e-6]
    assert written["measurements"][2]["time_over_ours"] == pytest.approx(2.5)
    assert written["not_measured"] == [json.loads(json.dumps(dataclasses.asdict(found.missing[0])))]


def test_plot(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    times = [
        measurement(peer, seconds * rows * tp, rows, tp, program)
        for peer, seconds in (("jax_twoshot", 1e-6), ("two hops", 5e-7), ("nccl", 7e-6))
        for rows in (1, 4, 16)
        for tp in (2, 4)
        for program in (GRAPH, JAX)
    ]
    bench_ranks.plot(times, "a title", tmp_path / "time.png")
    height, width, _ = image.imread(tmp_path / "time.png").shape
    assert (height, width) == (9 * 150, 10 * 150)


# ---- --tune ------------------------------------------------------------------------------------------------

ONE, TWO = gpu_peers.VARIANTS


def both(one: dict[int, float], two: dict[int, float], tp: int) -> list[Measurement]:
    times = [(ONE, rows, t) for rows, t in one.items()] + [(TWO, rows, t) for rows, t in two.items()]
    return [measurement(peer, seconds, rows, tp) for peer, rows, seconds in times]


def test_limits_are_the_last_size_up_to_which_one_shot_never_lost() -> None:
    times = [
        *both({1: 1.0, 2: 2.0, 4: 3.0, 8: 1.0}, {1: 2.0, 2: 2.0, 4: 2.9, 8: 9.0}, tp=2),
        *both({1: 3.0}, {1: 2.0}, tp=4),
        *both({1: 1.0}, {1: 2.0, 2: 2.0}, tp=8),
        measurement("nccl", 0.1, 4, 2),
    ]
    assert tune.limits(times, ONE, TWO) == {2: 2 * 128, 4: 0, 8: 128}


def test_of_messages_of_one_size_the_slower_one_counts() -> None:
    times = [measurement(ONE, 2.0), measurement(TWO, 3.0), measurement(ONE, 4.0), measurement(TWO, 1.0)]
    assert tune.limits(times, ONE, TWO) == {2: 0}


def test_what_was_not_measured_stays() -> None:
    assert tune.merged(((2, 10), (4, 5), (8, 1)), {4: 7, 3: 8}) == ((2, 10), (3, 8), (4, 7), (8, 1))


def test_tune_times_both_algorithms_and_writes_what_the_setting_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seconds = {("one", 1): 1e-6, ("two", 1): 2e-6, ("one", 2): 3e-6, ("two", 2): 2e-6}

    def launch(tp: int, argv: list[str], *, on_line: Any, env: dict[str, str], **options: Any) -> list[dict[str, Any]]:
        job = Job(**json.loads(argv[-1]))
        assert job.peers == [f"{ONE} (graph)", f"{TWO} (graph)"]
        monkeypatch.setenv("JAX_TWOSHOT_TUNING", env["JAX_TWOSHOT_TUNING"])
        assert _settings.tuning() == tune.EVERYTHING, "while it is measured, slots hold whole messages"
        monkeypatch.delenv("JAX_TWOSHOT_TUNING")
        for rows, _ in job.cells:
            peers = [
                {"peer": peer, "program": GRAPH, "wrong": 0, "seconds": [seconds[key, rows] * 4 / tp] * 2}
                for peer, key in ((ONE, "one"), (TWO, "two"))
            ]
            for rank in range(tp):
                on_line(rank, "bench-done " + json.dumps(done(rows, []) | {"peers": peers}))
        return [{}] * tp

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "gpu_count", lambda: 1)
    file = tmp_path / "tuned.json"
    options = ["--ranks", "4", "--one-gpu", "--rows", "1,2", "--width", "64", "--json", str(file)]
    assert main(["bench", "--tune", *options]) == 0
    table = tune.merged(protocol.ONE_SHOT_SHARED_GPU, {4: 128})
    lines = capsys.readouterr().out.splitlines()
    assert f"ONE_SHOT_SHARED_GPU = {table}" in lines
    assert f"# 4 ranks: 128 bytes, built in {dict(protocol.ONE_SHOT_SHARED_GPU)[4]}" in lines
    assert lines[-1] == f"# JAX_TWOSHOT_TUNING={file} on every process makes it effective"

    monkeypatch.setenv("JAX_TWOSHOT_TUNING", str(file))
    assert _settings.tuning() == protocol.BUILT_IN | {"ONE_SHOT_SHARED_GPU": table}
    assert protocol.one_shot_bytes(4, 2, False, _settings.tuning()) == 128


@pytest.mark.parametrize("option", ["--tune", "--decode"])
def test_needs_ranks(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", option])
    assert f"argument {option}: it is about --ranks" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "{}", '{"tables": {"ONE_SHOT": []}}', '{"tables": {"ONE_SHOT_NVLINK": [1]}}'])
def test_a_tuning_file_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    monkeypatch.setenv("JAX_TWOSHOT_TUNING", str(file))
    with pytest.raises(ValueError, match="JAX_TWOSHOT_TUNING: a file that .*bench --tune.* wrote; got '.*tuned.json'"):
        _settings.tuning()


def test_processes_that_are_tuned_otherwise_are_refused() -> None:
    from jax_twoshot import symmetric

    symmetric._require_one_tuning(["a", "a"])
    with pytest.raises(ValueError, match="JAX_TWOSHOT_TUNING: .* got a and b; give every process the same file"):
        symmetric._require_one_tuning(["b", "a", "b"])


# ---- --decode ----------------------------------------------------------------------------------------------


def test_shapes_are_those_of_a_layer() -> None:
    assert decode.shapes(7168, 8) == ((7168, 2688), (896, 7168), (7168, 4608), (2304, 7168))


def test_decode_steps_agree_between_ranks_and_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "LAYERS", 1)
    c, here = cell(tp=2, rows=2, width=56), lambda value: [value]
    ours = decode.DecodeRun(c, lambda x: jax_twoshot.all_reduce(x, "tp"), here)
    psum = decode.DecodeRun(c, lambda x: lax.psum(x, "tp"), here)
    assert (ours.wrong(), psum.wrong()) == (0, 0)
    results = [np.asarray(run._step(run._x, run._layers)).astype(np.float32) for run in (ours, psum)]
    np.testing.assert_allclose(*results, rtol=0.1, atol=0.1)
    assert ours.seconds() > 0

    alone = decode.DecodeRun(c, lambda x: x, None)
    assert alone.wrong() == 0, "without a sum each rank has its own"
    assert decode.DecodeRun(c, lambda x: x, here).wrong() == 2 * 56
    assert decode.DecodeRun(c, lambda x: lax.psum(x, "tp") * jnp.inf, here).wrong() >= 2 * 2 * 56


def test_share_of_a_step() -> None:
    steps = [
        measurement("jax_twoshot", 100e-6, program=DECODE),
        measurement("psum", 200e-6, program=DECODE),
        measurement("without sums", 80e-6, program=DECODE),
        measurement("jax_twoshot", 1e-6),
    ]
    assert bench_ranks.shares(steps) == [
        "decode, 2 ranks, 1 rows: jax_twoshot's sums are 20.0% of a step of 4 layers, 2.50 us a sum",
        "decode, 2 ranks, 1 rows: psum's sums are 60.0% of a step of 4 layers, 15.00 us a sum",
    ]
    assert bench_ranks.lead(steps)[0].startswith("decode, 2 ranks: ahead of the fastest peer in 1 of 1 messages")


def test_decode_is_a_choice_of_peers(tmp_path: Path) -> None:
    assert [str(peer) for peer in bench_ranks.selected(arguments(tmp_path, decode=True))] == [
        "jax_twoshot (decode)",
        "psum (decode)",
        "without sums (decode)",
    ]


def test_a_peer_that_needs_flags_runs_in_processes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def launch(tp: int, argv: list[str], *, on_line: Any, env: dict[str, str], **options: Any) -> list[dict[str, Any]]:
        job = Job(**json.loads(argv[-1]))
        seen.append((job.peers, env.get("XLA_FLAGS")))
        for rank in range(tp):
            on_line(rank, "bench-done " + json.dumps(done(1, [1e-6] * 2)))
        return [{}] * tp

    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "gpu_count", lambda: 2)
    assert main(["bench", "--ranks", "2", "--rows", "1", "--width", "64"]) == 0
    (others, flags), (alone, added) = seen
    assert (flags, alone) == (None, ["psum, XLA one-shot (jax)"])
    assert added == "--xla_dump_to=here --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=true"
    assert "psum (jax)" in others and alone[0] not in others
    assert list(bench_ranks.launches(arguments(tmp_path, one_gpu=True))) == [""], "there it refuses as psum does"


# ---- --fused -----------------------------------------------------------------------------------------------


def test_fused_on_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "fused.json"
    options = ["--devices", "2", "--rows", "1,3", "--width", "64,128", "--calls", "3", "--repeats", "2"]
    jax.devices()  # the command would make two CPU devices, for all tests of this process
    assert main(["bench", "--fused", *options, "--json", str(file)]) == 0
    text, report = capsys.readouterr().out, json.loads(file.read_text())
    names = {
        NORM_JAX: ["jax_twoshot", "all_reduce + XLA", "psum + XLA"],
        MATMUL_JAX: ["jax_twoshot", "XLA + all_reduce", "XLA + psum"],
        MOE_JAX: ["jax_twoshot", "XLA + all_reduce_rms_norm", "XLA + all_reduce", "XLA + psum"],
    }
    cells = [(rows, width) for width in (64, 128) for rows in (1, 3)]
    every = [(program, peer, *c) for c in cells for program, peers in names.items() for peer in peers]
    found = report["measurements"]
    assert [(m["program"], m["peer"], m["rows"], m["width"]) for m in found] == every
    assert {(m["tp"], m["wrong"], len(m["seconds"])) for m in found} == {(2, 0, 2)}
    assert f"# 2 ranks, jax_twoshot ({NORM_GRAPH}) is not in the table for rows 1,3 x 64, rows 1,3 x 128" in text
    assert sum(line.startswith((NORM_JAX, MATMUL_JAX, MOE_JAX)) for line in text.splitlines()) == len(every)


@pytest.mark.parametrize("layer", [fused.RMS_NORM, fused.MATMUL, fused.MOE])
def test_checks_of_the_fused_calls_see_a_rank_that_is_left_out(layer: bench.Layer) -> None:
    """And the oracle itself is right by a sum in another precision."""
    c = cell(rows=2, width=256)
    *experts, weights = (array.astype(np.float64) for array in layer.constants(c)[0])
    if layer is fused.MATMUL:
        x = layer.state(c)[..., : fused.depth(c)].astype(np.float64)
        np.testing.assert_array_equal(layer.expected(c.one_call()).astype(np.float64), (x @ weights).sum(0))
        make = gpu_peers._matmul_apart
    else:
        x, residual = (part.astype(np.float64) for part in layer.state(c))
        error = 0.0
        if layer is fused.MOE:
            index, scale = fused._routing(c.rows)
            x = (experts[0][:, index] * scale[..., None].astype(np.float64)).sum(-2) + x
            error = 2**-8 * np.abs(x).sum(0).max()  # each rank's part is rounded
        total = x.sum(0) + residual[0]
        root = np.sqrt((total**2).mean(-1, keepdims=True) + fused.EPS)
        normalised, new_residual = (want.astype(np.float64) for want in layer.expected(c.one_call()))
        np.testing.assert_allclose(new_residual, total, rtol=2**-8, atol=error)
        np.testing.assert_allclose(
            normalised, total / root * weights[0], rtol=2**-6, atol=error * np.abs(weights[0] / root).max()
        )
        make = gpu_peers._norm_apart if layer is fused.RMS_NORM else gpu_peers._moe_all_apart
    assert make(c, lambda _: lambda x: lax.psum(x, "tp")).wrong() == 0
    three = make(c, lambda _: lambda x: lax.psum(jnp.where(lax.axis_index("tp") == 3, 0, x), "tp"))
    assert three.wrong() > bench.CHECKED_CALLS * c.tp * c.rows * c.width / 2


def test_numbers_of_the_matmul_are_exact_and_bounded() -> None:
    """No column of any matrix is all zeros, no sum needs more than BF16's bits, and calls shrink their operand."""
    c = cell(tp=2, rows=4, width=2048)
    (w,) = fused.MATMUL.constants(c)[0]
    assert set(np.unique(w.astype(np.float32))) == {-1 / 32, 0, 1 / 32}
    columns = np.count_nonzero(w, axis=(0, 1))
    assert columns.min() > 128 and columns.max() < 512
    sums = fused.MATMUL.expected(c.one_call()).astype(np.float64) * 32
    assert np.abs(sums).max() < 256
    assert 0.3 < (sums / 32).std() < 0.7


def test_norm_in_a_graph_checks_both_results(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(gpu_peers, "_barrier", lambda: None)
    monkeypatch.setattr(gpu_peers, "_synchronize", lambda: None)
    c = cell()
    x, *outs = (torch.empty(c.rows, c.width, dtype=torch.bfloat16) for _ in range(3))

    def run(error: float) -> int:
        def call() -> None:
            for out, want in zip(outs, fused.RMS_NORM.expected(c.one_call()), strict=True):
                out.copy_(gpu_peers._to_torch(want))
            outs[1][0, 0] += error

        return gpu_peers.GraphRun(c, call, x, *outs, layer=fused.RMS_NORM, bitwise=True).wrong()

    assert (run(0), run(8)) == (0, bench.CHECKED_CALLS)


def test_with_ranks_the_fused_peers_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ours has to be measured in a program of either kind."""
    jobs: list[Job] = []

    def launch(tp: int, argv: list[str], *, on_line: Any, **options: Any) -> None:
        jobs.append(Job(**json.loads(argv[-1])))
        peers = [{"peer": "jax_twoshot", "program": name, "wrong": 0, "seconds": [1e-6] * 2} for name in programs]
        for rank in range(tp):
            on_line(rank, "bench-done " + json.dumps(done(1, []) | {"peers": peers}))

    monkeypatch.setattr(_launch, "launch", launch)
    monkeypatch.setattr(_launch, "gpu_count", lambda: 1)
    options = ["bench", "--fused", "--ranks", "2", "--one-gpu", "--rows", "1", "--width", "64"]
    programs = [NORM_JAX, MATMUL_JAX, MOE_JAX]
    assert main(options) == 0
    programs = [NORM_JAX, MATMUL_JAX]
    assert main(options) == 1
    assert jobs[0].peers == [str(peer) for peer in gpu_peers.PEERS if peer.program in gpu_peers.FUSED]


# ---- What JAX adds -----------------------------------------------------------------------------------------


def test_what_jax_adds_to_a_call() -> None:
    plain, replayed = gpu_peers.REPLAYED
    times = [measurement("jax_twoshot", 1e-6), measurement(plain, 2e-6), measurement(replayed, 2.5e-6)]
    assert bench_ranks.overheads([*times, measurement(plain, 2e-6, rows=2)]) == [
        "2 ranks, 1 x 64: JAX adds 0.50 us to a call, 1.25 times the time in a plain CUDA graph"
    ]
    assert bench_ranks.lead(times) == [], "ours against ours is no race"


def test_a_chain_of_nothing_but_calls_stays_finite() -> None:
    """No multiply: what is timed is zeros, what is checked is not."""
    run = gpu_peers.JaxRun(cell(calls=300, scale=1.0), lambda x: jax_twoshot.all_reduce(x, "tp"), bitwise=True)
    assert run.wrong() == 0
    assert run.seconds() > 0
    assert not np.asarray(run._state).any()
    broken = gpu_peers.JaxRun(cell(scale=1.0), lambda x: lax.psum(x, "tp") * 2, bitwise=True)
    assert broken.wrong() > 4 * 100


def test_calls_take_turns_with_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where there is no loop."""
    monkeypatch.setattr(bench.Program, "platform", "gpu")
    c = cell(tp=2, rows=1, width=8, calls=5)
    weights = np.arange(6, dtype=np.float32).reshape(3, 2, 1)
    layer = fused.MATMUL._replace(
        state=lambda _: np.zeros((2, 1), np.float32), constants=lambda _: tuple((w,) for w in weights)
    )
    run = bench.compile_program(c, lambda x, w: 10 * x + w, layer)
    result = run(c.place(np.zeros((2, 1), np.float32)), jax.tree.map(c.place, layer.constants(c)))
    np.testing.assert_array_equal(np.asarray(result), [[2402], [13513]])
