"""Builds and runs the C++ programs of ``tests/native``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
FFI = Path(__file__).parent.parent / "ffi"
SANITIZERS = {
    # -Wno-tsan: GCC warns that it does not see fences. The shared words are all atomic, so it needs none.
    "thread": ("-O1", "-g", "-fsanitize=thread", "-Wno-tsan"),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}


def build(output: Path, sources: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """Compiles and links ``sources``; ``flags`` come last, libraries among them."""
    options = ["-std=c++20", "-ffp-contract=off", "-pthread", f"-I{FFI}", f"-I{NATIVE}"]
    command = [os.environ.get("CXX", "g++"), *options, *map(str, sources), "-o", str(output), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return output


def build_libcuda(folder: Path, flags: Sequence[str] = ()) -> Path:
    """The stand-in for the CUDA driver, under the name by which the library asks for it."""
    shared = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    return build(folder / "libcuda.so.1", [NATIVE / "libcuda.cc"], [*flags, *shared])


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program; a sanitizer's first report ends it with status 66."""
    options = dict.fromkeys(("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS"), "halt_on_error=1 exitcode=66")
    return subprocess.run([program, *arguments], env={**os.environ, **options}, capture_output=True, text=True)


def run_without_report(program: Path, *arguments: str) -> str:
    """``run`` that must exit with 0 and report nothing; returns its standard output."""
    done = run(program, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_by_hand(build_program: Callable[[Path, str], Path]) -> None:
    """A test's own command line: how to build the program, and the program's arguments."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(build_program(Path(folder), sys.argv[1]), *sys.argv[2:])
    print(done.stdout, done.stderr, sep="", end="")
    sys.exit(done.returncode)
