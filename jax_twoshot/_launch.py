"""Runs one program as several JAX processes on this host, and ends all of them whatever happens.

The parent calls ``launch``; each worker calls ``initialize`` first and ``summary`` last. A worker that ends
without a summary has failed, whatever its exit status.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

_PLACE = "JAX_TWOSHOT_WORKER"
"""Set for workers alone, to JSON: no setting of a user's."""
_SUMMARY = "jax_twoshot-summary "
_MPS_CONTROL = "nvidia-cuda-mps-control"
_TERMINATE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
_LAST_LINES = 20


class LaunchError(RuntimeError):
    """A worker failed.

    Attributes:
      summaries: of each rank; None for one that printed none.
      outputs: all lines that each rank printed.
    """

    def __init__(self, text: str, summaries: list[dict[str, Any] | None], outputs: list[list[str]]) -> None:
        super().__init__(text)
        self.summaries = summaries
        self.outputs = outputs


# ---- In a worker -------------------------------------------------------------------------------------------


def initialize() -> int:
    """Joins the JAX processes that ``launch`` has started; returns this one's rank."""
    place = json.loads(os.environ[_PLACE])
    jax.distributed.initialize(
        place["address"], place["ranks"], place["rank"], local_device_ids=[place["device"]]
    )
    return place["rank"]


def launched() -> bool:
    """Whether this process is a worker."""
    return _PLACE in os.environ


def summary(**values: Any) -> None:
    """Hands ``values``, anything JSON can hold, to the parent, and leaves the others. A worker's last act."""
    print(_SUMMARY + json.dumps(values), flush=True)
    jax.distributed.shutdown()  # waits for the others: a coordinator that is gone makes each of them complain


# ---- In the parent -----------------------------------------------------------------------------------------


def gpu_count() -> int:
    """GPUs that a CUDA process can see; 0 without a driver. Makes no CUDA context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def launch(
    ranks: int,
    argv: Sequence[str],
    *,
    one_gpu: bool = False,
    timeout: float = 300.0,
    grace: float = 30.0,
    env: Mapping[str, str] | None = None,
    echo: bool = True,
    on_line: Callable[[int, str], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs ``argv`` in ``ranks`` processes and returns their summaries, in rank order.

    Rank ``r`` gets GPU ``r``. The workers inherit the environment, and the switches of multicast with it.

    Args:
      ranks: how many processes.
      argv: the worker's command line.
      one_gpu: all ranks share GPU 0, under an MPS daemon of their own where there is one.
      timeout: seconds after which all are ended.
      grace: seconds that the others get once one has failed.
      env: what else the workers' environment has.
      echo: print what the workers print, each line with its rank.
      on_line: what else to do with a rank and a line that it printed, as it comes; each rank has its own thread.

    Raises:
      LaunchError: a worker failed, printed no summary, or was still running at ``timeout``; the text has its
        last lines. No worker is left running.
      RuntimeError: the MPS daemon did not start.
    """
    # JAX's coordination service warns at every orderly end.
    shared = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    if one_gpu:
        # Lazily loaded, a kernel of one rank can wait for the kernels of the others, which wait for that rank.
        shared |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_MODULE_LOADING": "EAGER"}
    with ExitStack() as stack:
        stack.enter_context(_terminable())
        address = stack.enter_context(_reserved_address())
        if one_gpu and shutil.which(_MPS_CONTROL):
            shared |= stack.enter_context(_mps())
        workers = stack.enter_context(_ended([]))
        for rank in range(ranks):
            place = {"rank": rank, "ranks": ranks, "address": address, "device": 0 if one_gpu else rank}
            private = {_PLACE: json.dumps(place), "PYTHONUNBUFFERED": "1"}
            environment = {**os.environ, **shared, **(env or {}), **private}
            workers.append(_Worker(rank, argv, environment, echo, on_line))
        late = _wait(workers, timeout, grace)
    failures = [text for worker in workers if (text := worker.failure(late))]
    summaries = [worker.summary for worker in workers]
    if failures:
        raise LaunchError("\n".join(failures), summaries, [worker.lines for worker in workers])
    return [summary for summary in summaries if summary is not None]


class _Worker:
    """A process, the head of a process group of its own, and what it prints."""

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        echo: bool,
        on_line: Callable[[int, str], None] | None,
    ) -> None:
        self.rank = rank
        self.echo = echo
        self.on_line = on_line
        self.lines: list[str] = []
        self.summary: dict[str, Any] | None = None
        self.process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def signal(self, number: int) -> None:
        """To the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._take(line.rstrip("\n"))

    def _take(self, line: str) -> None:
        if line.startswith(_SUMMARY):
            self.summary = json.loads(line.removeprefix(_SUMMARY))
            return
        self.lines.append(line)
        if self.on_line:
            self.on_line(self.rank, line)
        if self.echo:
            print(f"[{self.rank}] {line}", flush=True)

    def failure(self, late: Mapping[int, str]) -> str | None:
        """Why this rank counts as failed, with its last lines; None if it does not."""
        status = self.process.returncode
        if self.rank in late:
            cause = late[self.rank]
        elif status:
            cause = f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"
        elif self.summary is None:
            cause = "no summary"
        else:
            return None
        return "\n".join([f"rank {self.rank}: {cause}; its last lines:", *self.lines[-_LAST_LINES:]])


@contextmanager
def _ended(workers: list[_Worker]) -> Iterator[list[_Worker]]:
    """After the body all of ``workers`` and their children have ended, by SIGKILL if need be."""
    try:
        yield workers
    finally:
        for worker in workers:
            worker.signal(signal.SIGTERM)
        end = time.monotonic() + _TERMINATE_SECONDS
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, end - time.monotonic()))
        for worker in workers:
            worker.signal(signal.SIGKILL)
            worker.process.wait()
            worker.reader.join(_TERMINATE_SECONDS)


def _wait(workers: Sequence[_Worker], timeout: float, grace: float) -> dict[int, str]:
    """Waits until all have ended or time is up; returns the ranks still running and why they were ended."""
    reason, end = f"still running after {timeout:g} s", time.monotonic() + timeout
    failed = False
    while running := [worker for worker in workers if worker.process.poll() is None]:
        if not failed and any(worker.process.returncode for worker in workers):
            failed = True
            if time.monotonic() + grace < end:
                reason, end = f"ended {grace:g} s after another had failed", time.monotonic() + grace
        if time.monotonic() > end:
            return {worker.rank: reason for worker in running}
        time.sleep(0.02)
    return {}


@contextmanager
def _reserved_address() -> Iterator[str]:
    """``host:port`` for the coordinator, which no other process can be given meanwhile.

    The port stays bound here, and is never listened on; the coordinator may bind it too, since both set
    ``SO_REUSEPORT`` (gRPC does by default). A port that was only free a moment ago could be taken by then.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


@contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """The environment of a CUDA multi-process service of our own, in private folders, for the body."""
    with tempfile.TemporaryDirectory(prefix="jax_twoshot-mps-", ignore_cleanup_errors=True) as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
        variables = {variable: str(Path(folder, name)) for variable, name in names.items()}
        for path in variables.values():
            Path(path).mkdir(mode=0o700)
        environment = {**os.environ, **variables}
        started = subprocess.run(
            [_MPS_CONTROL, "-d"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if started.returncode:
            raise RuntimeError(f"{_MPS_CONTROL} -d: {started.stdout}{started.stderr}".strip())
        try:
            yield variables
        finally:
            subprocess.run(
                [_MPS_CONTROL], env=environment, input="quit\n", capture_output=True, text=True, timeout=60
            )


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the body as Ctrl-C does, so that no worker outlives its parent."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
