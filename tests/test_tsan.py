"""The CPU protocol under ThreadSanitizer: eight threads, no report, and always this round's data.

By hand, for longer: ``python tests/test_tsan.py SECONDS ROUNDS`` builds and runs the same driver, up to the
first limit (0: none). A third argument sets the generations: with 1 a push is lost, and a wait reports it.
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
    HERE / "tsan" / "driver.cc",
    *(FFI / f"{name}.cc" for name in ("all_reduce_cpu", "arithmetic", "mailbox_registry", "shared_words")),
]
# -Wno-tsan: GCC warns that it does not see fences. The shared words are all atomic, so it needs none.
SANITIZED = ("-O1", "-g", "-fsanitize=thread", "-Wno-tsan")
AS_RELEASED = ("-O3",)


def build(folder: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    program = folder / "program"
    compiler = os.environ.get("CXX", "g++")
    options = ["-std=c++17", "-ffp-contract=off", "-pthread", f"-I{FFI}", *flags]
    command = [compiler, *options, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    return subprocess.run([program, *arguments], env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [pytest.param(SANITIZED, "8", id="sanitized"), pytest.param(AS_RELEASED, "3", id="as-released")],
)
def test_no_report_and_right_sums(flags: Sequence[str], seconds: str, tmp_path: Path) -> None:
    done = run(build(tmp_path, SOURCES, flags), seconds, "1000000")
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "ThreadSanitizer" not in done.stderr
    rounds = re.fullmatch(r"(\d+) rounds right\n", done.stdout)
    assert rounds and int(rounds[1]) >= 100, done.stdout


def test_sanitizer_is_on(tmp_path: Path) -> None:
    """A race on purpose is reported: silence above means something."""
    source = tmp_path / "race.cc"
    source.write_text("#include <thread>\nint n;\nint main() { std::thread t([] { ++n; }); ++n; t.join(); }")
    done = run(build(tmp_path, [source], SANITIZED))
    assert done.returncode == 66 and "data race" in done.stderr, done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = run(build(Path(folder), SOURCES, SANITIZED), *sys.argv[1:])
    print(result.stdout, result.stderr, sep="", end="")
    sys.exit(result.returncode)
