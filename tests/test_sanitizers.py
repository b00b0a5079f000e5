"""The CPU protocol under sanitizers: eight threads, no report, and always this round's data.

By hand, for longer: ``python tests/test_sanitizers.py thread SECONDS ROUNDS`` (or ``address``, or ``released``) builds
and runs the same driver, up to the first limit (0: none). One more argument sets the generations: with 1 a push is
lost, and a wait reports it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cpp import FFI, NATIVE, SANITIZERS, build, run, run_by_hand, run_without_report

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


def build_program(folder: Path, build_as: str) -> Path:
    return build(folder / "program", SOURCES, FLAGS[build_as])


@pytest.mark.parametrize(("build_as", "seconds"), [("thread", "5"), ("address", "2"), ("released", "2")])
def test_no_report_and_right_sums(build_as: str, seconds: str, tmp_path: Path) -> None:
    said = run_without_report(build_program(tmp_path, build_as), seconds, "1000000")
    rounds = re.fullmatch(r"(\d+) rounds right\n", said)
    assert rounds and int(rounds[1]) >= 100, said


@pytest.mark.parametrize("mistake", MISTAKES)
def test_sanitizer_is_on(mistake: str, tmp_path: Path) -> None:
    """A mistake on purpose is reported: silence above means something."""
    body, report = MISTAKES[mistake]
    source = tmp_path / "mistake.cc"
    source.write_text(f"#include <thread>\nint main() {{ {body} }}")
    done = run(build(tmp_path / "program", [source], FLAGS["thread" if mistake == "thread" else "address"]))
    assert done.returncode == 66 and report in done.stderr, done.stderr


if __name__ == "__main__":
    run_by_hand(build_program)
