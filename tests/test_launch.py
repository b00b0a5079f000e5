"""The launcher: results, failures, deadlines, ports, MPS; with tiny workers, some of them JAX on CPU."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jax_twoshot import _launch

ROOT = Path(__file__).parent.parent


def python(code: str) -> list[str]:
    """A worker that runs ``code`` with its ``rank`` known and ``summary`` at hand."""
    head = """
        import json, os, signal, subprocess, sys, time
        from jax_twoshot._launch import initialize, summary
        rank = json.loads(os.environ["JAX_TWOSHOT_WORKER"])["rank"]
    """
    return [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)]


def parent_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs ``code`` with the names of this file."""
    head = "from test_launch import _launch, python, sys\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), *arguments],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends within some seconds: the last steps of a killed process take a moment."""
    end = time.monotonic() + 10
    while running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not running(pid)


def test_summaries_come_in_rank_order_and_lines_carry_their_rank(capsys):
    code = "time.sleep(0.3 * (2 - rank)); print('hello'); print('two'); summary(rank=rank, square=rank**2)"
    assert _launch.launch(3, python(code), timeout=60) == [{"rank": r, "square": r * r} for r in range(3)]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == sorted(f"[{r}] {word}" for r in range(3) for word in ("hello", "two"))


def test_jax_processes_on_cpu_form_one_job():
    code = """
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        assert initialize() == rank == jax.process_index()
        from jax._src import distributed
        client = distributed.global_state.client
        client.key_value_set(f"square/{rank}", str(rank**2))
        seen = [int(client.blocking_key_value_get(f"square/{r}", 30_000)) for r in range(jax.process_count())]
        summary(devices=jax.device_count(), seen=seen)
    """
    assert _launch.launch(2, python(code), timeout=120) == [{"devices": 2, "seen": [0, 1]}] * 2


def test_two_jobs_at_once_do_not_clash():
    code = """
        import jax
        jax.config.update("jax_platforms", "cpu")
        initialize()
        from jax._src import distributed
        client = distributed.global_state.client
        client.key_value_set(f"job/{rank}", sys.argv[1])
        summary(jobs=[client.blocking_key_value_get(f"job/{r}", 30_000) for r in range(2)])
    """
    parent = f"print(_launch.launch(2, python({code!r}) + sys.argv[1:], echo=False))"
    jobs = [parent_process(parent, name) for name in ("one", "two")]
    for name, job in zip(("one", "two"), jobs, strict=True):
        out, _ = job.communicate(timeout=120)
        assert out.strip() == str([{"jobs": [name, name]}] * 2)


def test_the_port_cannot_be_given_to_anyone_else():
    with _launch._reserved_address() as address:
        host, port = address.split(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        with socket.socket() as coordinator:
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            coordinator.bind((host, int(port)))


def test_a_missing_summary_is_a_failure_with_the_last_lines():
    code = "print('the last word'); rank == 1 or summary(ok=True)"
    with pytest.raises(_launch.LaunchError) as caught:
        _launch.launch(2, python(code), timeout=60)
    assert str(caught.value).splitlines() == ["rank 1: no summary; its last lines:", "the last word"]
    assert caught.value.summaries == [{"ok": True}, None]
    assert caught.value.outputs == [["the last word"], ["the last word"]]


@pytest.mark.parametrize(
    ("act", "cause"),
    [("sys.exit(3)", "exit status 3"), ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL")],
)
def test_a_failed_rank_ends_the_others_after_the_grace(act, cause):
    start = time.monotonic()
    with pytest.raises(_launch.LaunchError) as caught:
        _launch.launch(2, python(f"summary(ok=1)\nif rank: {act}\ntime.sleep(100)"), timeout=90, grace=0.5)
    assert time.monotonic() - start < 60
    assert [line for line in str(caught.value).splitlines() if line] == [
        "rank 0: ended 0.5 s after another had failed; its last lines:",
        f"rank 1: {cause}; its last lines:",
    ]


def test_past_the_deadline_a_worker_that_ignores_sigterm_and_its_child_are_killed(monkeypatch):
    monkeypatch.setattr(_launch, "_TERMINATE_SECONDS", 0.5)
    code = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        print(os.getpid(), child.pid)
        summary(ok=True)
        time.sleep(100)
    """
    with pytest.raises(_launch.LaunchError, match="rank 0: still running after 5 s") as caught:
        _launch.launch(1, python(code), timeout=5)
    pids = [int(word) for word in caught.value.outputs[0][0].split()]
    assert len(pids) == 2
    assert all(ends(pid) for pid in pids)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ending_the_parent_ends_the_workers(number, status):
    parent = parent_process(
        """
        try:
            _launch.launch(2, python("print(os.getpid()); time.sleep(100)"))
        except KeyboardInterrupt:
            sys.exit(130)
        """
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline().split()[-1]) for _ in range(2)]
    assert all(running(pid) for pid in pids)
    parent.send_signal(number)
    assert parent.wait(30) == status
    assert all(ends(pid) for pid in pids)


def test_workers_inherit_the_multicast_switches(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setenv("JAX_TWOSHOT_MULTICAST", "0")
    names = [
        "TORCH_SYMM_MEM_DISABLE_MULTICAST",
        "JAX_TWOSHOT_MULTICAST",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "MINE",
    ]
    code = f"summary(values=[os.environ.get(name) for name in {names}])"
    (result,) = _launch.launch(1, python(code), timeout=60, env={"MINE": "7"})
    assert result == {"values": ["1", "0", os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"), "7"]}


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A stand-in for NVIDIA's daemon that writes down how it was called; returns its log."""
    log = tmp_path / "calls"
    script = tmp_path / "nvidia-cuda-mps-control"
    script.write_text(
        f"#!/bin/sh\n"
        f'echo "$@ in $(stat -c %a $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY | xargs)" >> {log}\n'
        f'[ "$1" = -d ] && exit ${{REFUSE:-0}}\n'
        f"cat >> {log}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def test_one_gpu_runs_under_a_private_mps_daemon_that_is_stopped(control):
    code = """
        pipe, log = os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
        device = json.loads(os.environ["JAX_TWOSHOT_WORKER"])["device"]
        summary(pipe=pipe, log=log, device=device, preallocate=os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
    """
    first, second = _launch.launch(2, python(code), one_gpu=True, timeout=60)
    assert first == second
    assert (first["device"], first["preallocate"]) == (0, "false")
    assert control.read_text().splitlines() == ["-d in 700 700", " in 700 700", "quit"]
    assert not Path(first["pipe"]).exists()


def test_the_mps_daemon_is_stopped_when_a_worker_fails(control):
    with pytest.raises(_launch.LaunchError):
        _launch.launch(1, python("sys.exit(1)"), one_gpu=True, timeout=60)
    assert control.read_text().splitlines()[-1] == "quit"


def test_an_mps_daemon_that_does_not_start_is_an_error(control, monkeypatch):
    monkeypatch.setenv("REFUSE", "1")
    with pytest.raises(RuntimeError, match="nvidia-cuda-mps-control -d"):
        _launch.launch(1, python("summary()"), one_gpu=True, timeout=60)
    assert control.read_text().splitlines() == ["-d in 700 700"]


@pytest.mark.skipif(_launch.gpu_count() > 0, reason="shows the message of a machine without a GPU")
def test_the_example_says_what_to_run_without_a_gpu():
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "multiprocess.py"), "--ranks", "4"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 2
    assert ran.stderr == (
        "multiprocess.py needs 4 NVIDIA GPU(s), this machine has 0. "
        "Without a GPU, run: python examples/all_reduce.py\n"
    )
