"""The host side of a workspace on GPUs, against a stand-in for the CUDA driver (``tests/native/libcuda.h``): what it
leaves when the driver refuses, which threads may use it at once, and that Python goes on while it waits.

By hand, for longer: ``python tests/test_cuda_workspace.py thread calls SECONDS`` (or ``address``).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp import FFI, NATIVE, SANITIZERS, build, build_libcuda, run_by_hand, run_without_report
from helpers import run_ok


def build_program(folder: Path, sanitizer: str) -> Path:
    flags = SANITIZERS[sanitizer]
    libcuda = build_libcuda(folder, flags)
    parts = ("all_reduce_cuda", "call_counts", "cuda_driver", "wait_text")
    sources = [NATIVE / "cuda_workspace.cc", *(FFI / f"{name}.cc" for name in parts)]
    return build(folder / "program", sources, [*flags, str(libcuda), "-Wl,-rpath,$ORIGIN", "-ldl"])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Under ThreadSanitizer, which sees what is used after it was freed as well; the stand-in counts what is left."""
    return build_program(tmp_path_factory.mktemp("thread"), "thread")


def test_any_call_of_the_driver_may_fail(program: Path) -> None:
    """The driver's text comes, nothing is left, and the next attempt works."""
    said = run_without_report(program, "setup")
    counts = [int(n) for n in re.findall(r"\d+", said)]
    assert len(counts) == 3 and min(counts) >= 4, said


def test_calls_beside_threads_that_watch_and_reset(program: Path) -> None:
    said = run_without_report(program, "calls", "3")
    counts = [int(n) for n in re.findall(r"\d+", said)]
    assert len(counts) == 5 and min(counts) > 0, said


def test_python_goes_on_while_the_driver_is_waited_for(tmp_path: Path) -> None:
    """A thread that waits for the driver, or for another one that does, keeps nobody from starting the call that the
    driver waits for."""
    behind_another = "begin_reset", "end_reset", "slow_waits", "end_slow_waits"
    said = run_ok(
        """
        driver = ctypes.CDLL(os.environ["LIBCUDA"], mode=ctypes.RTLD_GLOBAL)
        opened = []

        def open_workspace():
            cubins = [("two_shot", "bfloat16", b"code", "symbol", False)]
            ranks = [(0, 0, 4096, 0, [4096, 8192])]
            layout = protocol.Layout(2, 64, 2)
            opened.append(_ffi.open_cuda_workspace(1, "tp", layout, 20.0, 1024, 1, 132, cubins, ranks))

        def close():
            opened.clear()
            _ffi.close_cuda_workspace(1)

        def wait_in(symbol, call, then=None):
            driver.hold(symbol)
            threads = [threading.Thread(target=call)]
            threads[0].start()
            while driver.waiting() != 1:
                time.sleep(0.01)
            if then is not None:
                threads.append(threading.Thread(target=then))
                threads[1].start()
                time.sleep(0.1)
            assert all(thread.is_alive() for thread in threads)
            driver.hold(None)
            for thread in threads:
                thread.join()
            print((then or call).__name__, flush=True)

        wait_in(b"cuCtxSynchronize", open_workspace)
        wait_in(b"cuCtxSynchronize", opened[0].clear)
        wait_in(b"cuStreamSynchronize", opened[0].rounds_done)
        for name in ("begin_reset", "end_reset", "slow_waits", "end_slow_waits"):
            wait_in(b"cuStreamSynchronize", opened[0].rounds_done, getattr(opened[0], name))
        wait_in(b"cuMemFree", close)
        assert driver.held() == 0
        """,
        env={"LIBCUDA": str(build_libcuda(tmp_path))},
        prelude="import ctypes, os, threading, time\nfrom jax_twoshot import _ffi, protocol\n",
        timeout=60,
    )
    assert said.split() == ["open_workspace", "clear", "rounds_done", *behind_another, "close"]


if __name__ == "__main__":
    run_by_hand(build_program)
