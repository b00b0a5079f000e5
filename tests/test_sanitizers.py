"""The CPU protocol under sanitizers: eight threads, no report, and always this round's data.

By hand, for longer: ``python tests/test_sanitizers.py thread SECONDS ROUNDS`` (or ``address``, or ``released``) builds
and runs the same driver, up to the first limit (0: none). One more argument sets the generations: with 1 a push is
lost, and a wait reports it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FFI = HERE.parent / "ffi"
SOURCES = [
    HERE / "sanitizers" / "driver.cc",
    *(FFI / f"{name}.cc" for name in ("all_reduce_cpu", "arithmetic", "mailbox_registry", "shared_words")),
]
FLAGS = {
    # -Wno-tsan: GCC warns that it does not see fences. The shared words are all atomic, so it needs none.
    "thread": ("-O1", "-g", "-fsanitize=thread", "-Wno-tsan"),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "released": ("-O3",),
}
MISTAKES = {
    "thread": ("int n; std::thread t([&n] { ++n; }); ++n; t.join();", "data race"),
    "address": ("int* n = new int[3]; std::thread t([n] { n[3] = 1; }); t.join(); delete[] n;", "heap-buffer-overflow"),
    "undefined": ("int n = 2147483647; std::thread t([&n] { ++n; }); t.join();", "signed integer overflow"),
}


def build(folder: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    program = folder / "program"
    compiler = os.environ.get("CXX", "g++")
    options = ["-std=c++20", "-ffp-contract=off", "-pthread", f"-I{FFI}", *flags]
    command = [compiler, *options, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = dict.fromkeys(("TSAN_OPTIONS", "ASAN_OPTIONS", "UBSAN_OPTIONS"), "halt_on_error=1 exitcode=66")
    return subprocess.run([program, *arguments], env={**os.environ, **options}, capture_output=True, text=True)


@pytest.mark.parametrize(("build_as", "seconds"), [("thread", "5"), ("address", "2"), ("released", "2")])
def test_no_report_and_right_sums(build_as: str, seconds: str, tmp_path: Path) -> None:
    done = run(build(tmp_path, SOURCES, FLAGS[build_as]), seconds, "1000000")
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    rounds = re.fullmatch(r"(\d+) rounds right\n", done.stdout)
    assert rounds and int(rounds[1]) >= 100, done.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_sanitizer_is_on(mistake: str, tmp_path: Path) -> None:
    """A mistake on purpose is reported: silence above means something."""
    body, report = MISTAKES[mistake]
    source = tmp_path / "mistake.cc"
    source.write_text(f"#include <thread>\nint main() {{ {body} }}")
    done = run(build(tmp_path, [source], FLAGS["thread" if mistake == "thread" else "address"]))
    assert done.returncode == 66 and report in done.stderr, done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = run(build(Path(folder), SOURCES, FLAGS[sys.argv[1]]), *sys.argv[2:])
    print(result.stdout, result.stderr, sep="", end="")
    sys.exit(result.returncode)
