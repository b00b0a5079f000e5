"""The CPU protocol under sanitizers: eight threads, no report, and always this round's data.

By hand, for longer: ``python tests/test_sanitizers.py thread SECONDS ROUNDS`` (or ``address``, or ``released``) builds
and runs the same driver, up to the first limit (0: none). One more argument sets the generations: with 1 a push is
lost, and a wait reports it.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest
from cpp import FFI, NATIVE, SANITIZERS, build, run

SOURCES = [
    NATIVE / "cpu_protocol.cc",
    *(FFI / f"{name}.cc" for name in ("all_reduce_cpu", "arithmetic", "mailbox_registry", "shared_words")),
]
FLAGS = {**SANITIZERS, "released": ("-O3",)}
MISTAKES = {
    "thread": ("int n; std::thread t([&n] { ++n; }); ++n; t.join();", "data race"),
    "address": ("int* n = new int[3]; std::thread t([n] { n[3] = 1; }); t.join(); delete[] n;", "heap-buffer-overflow"),
    "undefined": ("int n = 2147483647; std::thread t([&n] { ++n; }); t.join();", "signed integer overflow"),
}


@pytest.mark.parametrize(("build_as", "seconds"), [("thread", "5"), ("address", "2"), ("released", "2")])
def test_no_report_and_right_sums(build_as: str, seconds: str, tmp_path: Path) -> None:
    done = run(build(tmp_path / "program", SOURCES, FLAGS[build_as]), seconds, "1000000")
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
    done = run(build(tmp_path / "program", [source], FLAGS["thread" if mistake == "thread" else "address"]))
    assert done.returncode == 66 and report in done.stderr, done.stderr


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = run(build(Path(folder) / "program", SOURCES, FLAGS[sys.argv[1]]), *sys.argv[2:])
    print(result.stdout, result.stderr, sep="", end="")
    sys.exit(result.returncode)
