"""The command line, as a user types it; and its parts where a machine without a GPU cannot show them."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import cpu_mesh
from jax import lax

import jax_twoshot
from jax_twoshot import cubin, reference
from jax_twoshot.cli import bench, machine, main, selftest, terminal

COMMAND = (sys.executable, "-m", "jax_twoshot")


@pytest.fixture(autouse=True, scope="module")
def eight_devices() -> None:
    """In use before a command runs in this process, which would else make as many devices as it needs."""
    assert len(jax.devices()) == 8


def command(*args: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m jax_twoshot`` and checks its exit code, and that no traceback is shown to the user."""
    done = subprocess.run(
        (*COMMAND, *args), env=_environment(env), timeout=120, capture_output=True, text=True
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def python(script: str, **env: str) -> str:
    """Standard output of a script in a fresh process."""
    script = inspect.cleandoc(script)
    done = subprocess.run(
        (sys.executable, "-c", script), env=_environment(env), timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return {**ours, "JAX_PLATFORMS": "cpu", "JAX_TWOSHOT_TIMEOUT": "60", **env}


# ---- Arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "doctor", "selftest", "bench", "compile"])
def test_help(name: str) -> None:
    text = command(*name.split(), "--help").stdout
    assert text.startswith(f"usage: python -m jax_twoshot {name}".rstrip())


def test_help_imports_no_command() -> None:
    script = """
        import sys
        from jax_twoshot.cli import main
        try:
            main(["bench", "--help"])
        except SystemExit:
            pass
        print({"jax_twoshot.cli.bench", "cutlass", "matplotlib", "torch", "tqdm"} & set(sys.modules))
    """
    assert python(script).splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("", "required: COMMAND"),
        ("frobnicate", "invalid choice: 'frobnicate'"),
        ("selftest --devices 1", "argument --devices: a whole number from 2 to 64 is needed, got '1'"),
        ("selftest --devices many", "argument --devices: a whole number from 2 to 64 is needed, got 'many'"),
        ("bench --rows 1,0", "argument --rows: a whole number from 1 up is needed, got '0'"),
        ("bench --width -3", "argument --width: a whole number from 1 up is needed, got '-3'"),
        ("bench --repeats 1", "argument --repeats: a whole number from 2 up is needed, got '1'"),
        ("bench --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        (
            "bench --json /no/such/x",
            "argument --json: a file in an existing folder is needed, got '/no/such/x'",
        ),
        ("bench --plot x.txt", "argument --plot: a file name that ends in .png, .svg or .pdf is needed"),
        ("compile -o x", "one of the arguments --arch --all is required"),
        ("compile --arch sm_90a", "the following arguments are required: -o"),
        ("compile --arch sm_90a sm_1 -o x", "argument --arch: kernels exist for sm_80,"),
    ],
)
def test_bad_arguments(arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


def test_more_devices_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """This process has its eight already; on GPUs nobody can make more either."""
    with pytest.raises(SystemExit) as exit_:
        main(["selftest", "--devices", "9"])
    assert exit_.value.code == 2
    assert "argument --devices: 9 or more are needed, there are 8: 8 CPU devices" in capsys.readouterr().err


def test_bad_arguments_from_the_shell() -> None:
    assert "whole number" in command("bench", "--rows", "none", code=2).stderr


# ---- selftest ----------------------------------------------------------------------------------------------


def _selftest(devices: int = 2, full: bool = False, json: bool = False) -> int:
    return selftest.run(Namespace(devices=devices, full=full, json=json))


def test_selftest() -> None:
    done = command("selftest", "--devices", "4")
    rows = [re.split(" {2,}", line) for line in done.stdout.splitlines()[2:-1]]
    assert [row[0] for row in rows] == [
        "shapes",
        "special values",
        "several rounds",
        "calls in a scan",
        "sub-groups",
    ]
    assert [row[1] for row in rows] == ["2,3,4"] * 4 + ["2"]
    assert all(row[3] == row[-1] == "0" and int(row[5]) > 0 for row in rows)
    assert "every bit is the oracle's" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("[42/42] sub-groups, float32, sum over ")


def test_selftest_json() -> None:
    summary = json.loads(command("selftest", "--devices", "2", "--json").stdout)
    assert summary["ok"] is True
    assert summary["failure"] is summary["first_difference"] is None
    assert len(summary["machine"]["devices"]) == 2
    assert sum(group["cases"] for group in summary["groups"]) == summary["cases"] == 12
    assert summary["versions"]["jaxlib"]


def test_selftest_fails_with_a_broken_oracle(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single bit, in the last element of (31, 32) alone."""
    true_all_reduce = reference.all_reduce

    def broken(parts: np.ndarray) -> np.ndarray:
        total = true_all_reduce(parts)
        if total.shape == (31, 32) and total.dtype == np.float32:
            total.view(np.uint32)[-1, -1] ^= 1
        return total

    monkeypatch.setattr(reference, "all_reduce", broken)
    assert _selftest(json=True) == 1
    out, err = capsys.readouterr()
    summary = json.loads(out)
    first = summary["first_difference"]
    assert not summary["ok"]
    assert [group["wrong"] for group in summary["groups"]] == [2, 2, 0, 0], (
        "on both ranks, with either values"
    )
    assert first["case"] == "shapes, float32, sum over tp of tp=2"
    assert (first["shape"], first["rank"], first["element"]) == ([31, 32], 0, [30, 31])
    assert int(first["got"], 16) ^ int(first["expected"], 16) == 1
    assert len(first["got"]) == len("0x") + 8
    assert "rank 0, element (30, 31): bits 0x" in err


def test_selftest_tells_psum_from_all_reduce(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """psum has its own NaN and its own order: wrong sums must be seen, not only a wrong oracle."""
    monkeypatch.setattr(jax_twoshot, "all_reduce", lambda x, axes, workspace: lax.psum(x, axes))
    assert _selftest() == 1
    out, err = capsys.readouterr()
    assert "FAILED, after 12 of 12 cases" in out
    assert "first difference: special values" in err


def test_selftest_stops_at_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def all_reduce(x: jax.Array, axes: Any, workspace: Any) -> jax.Array:
        raise RuntimeError("rank 1 never came")

    monkeypatch.setattr(jax_twoshot, "all_reduce", all_reduce)
    assert _selftest() == 1
    out, err = capsys.readouterr()
    assert "FAILED, after 1 of 12 cases" in out
    assert "shapes, bfloat16, sum over tp of tp=2: RuntimeError: rank 1 never came" in err


def test_selftest_cases_are_the_same_in_every_process() -> None:
    script = """
        import zlib
        from jax_twoshot.cli import selftest
        cases = selftest.cases([2, 4])
        print(len(cases), [zlib.crc32(x.tobytes()) for case in cases[::5] for x in selftest.inputs(case)])
    """
    assert python(script, PYTHONHASHSEED="1") == python(script, PYTHONHASHSEED="2")


def test_selftest_full_has_the_whole_grid() -> None:
    full, default = selftest.cases([8], full=True), selftest.cases([8])
    assert len(full) == len(default)
    assert {len(case.shapes) for case in full if case.group == "shapes"} == {56}


@pytest.mark.parametrize("axes", [("x",), ("z",), ("z", "x"), ("x", "y", "z")])
def test_expected_sums_of_sub_groups(axes: tuple[str, ...]) -> None:
    """Against a group at a time, its ranks counted along the mesh's axes."""
    names, sizes = "xyz", (2, 3, 4)
    case = selftest.Case("", tuple(zip(names, sizes, strict=True)), axes, "bfloat16", ((5,),), 5)
    (part,) = selftest.inputs(case)
    got = selftest.expected(case, part)
    for place in np.ndindex(*sizes):
        group = [
            part[other]
            for other in np.ndindex(*sizes)
            if all(name in axes or a == b for name, a, b in zip(names, other, place, strict=True))
        ]
        assert len(group) == case.tp
        assert got[place].tobytes() == reference.all_reduce(np.stack(group)).tobytes()


def test_special_values_are_in_the_inputs() -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        (case,) = (c for c in selftest.cases([2]) if (c.group, c.dtype) == ("special values", dtype))
        values = np.concatenate([part.ravel() for part in selftest.inputs(case)])
        bits = values.view(f"u{values.dtype.itemsize}")
        with np.errstate(invalid="ignore"):
            assert (values != values).any() and (values == np.inf).any() and (values == -np.inf).any()
        assert (bits == 0).any() and (bits == 1).any(), "+0.0 and the smallest subnormal"
        top = 1 << (8 * values.dtype.itemsize - 1)
        assert (bits == top).any() and (bits == top + 1).any(), "-0.0 and the smallest negative subnormal"


# ---- bench -------------------------------------------------------------------------------------------------

TINY = ("--devices", "2", "--width", "64", "--repeats", "2", "--calls", "3")


def test_bandwidths() -> None:
    assert bench.algbw(3 * 10**9, 2.0) == 1.5
    assert bench.busbw(10**9, 1.0, 2) == 1.0
    assert bench.busbw(10**9, 1.0, 8) == 1.75
    m = bench.Measurement("jax_twoshot", 1, 14336, 8, 0, [3e-6, 1e-6, 2e-6, 4e-6, 10e-6])
    assert m.median == 3e-6
    assert m.quartiles == (2e-6, 4e-6)
    assert m.spread == pytest.approx(2 / 3)
    assert m.algbw == pytest.approx(4.7787, rel=1e-4)
    assert m.busbw == pytest.approx(8.3627, rel=1e-4)


def test_rows_of_the_table() -> None:
    ours = bench.Measurement("jax_twoshot", 4, 1000, 2, 0, [2e-6, 2e-6])
    psum = bench.Measurement("psum", 4, 1000, 2, 7, [5e-6, 5e-6])
    other_size = bench.Measurement("psum", 1, 250, 2, 0, [5e-6, 5e-6])
    everything = [other_size, ours, psum]
    row = ("1000", "4", "psum", "5.00", "0%", "0.200", "0.200", "7", "2.50")
    assert bench._row(psum, everything) == row
    assert bench._row(ours, everything)[-1] == "1.00"
    assert bench._row(other_size, everything)[-1] == "-", "there is nothing to compare it with"


def test_bench(tmp_path: Path) -> None:
    from matplotlib import image

    out, picture = tmp_path / "samples.json", tmp_path / "time.png"
    done = command("bench", *TINY, "--rows", "3,1", "--json", str(out), "--plot", str(picture))
    table = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert [(row[0], row[1], row[2], row[7]) for row in table] == [
        ("128", "1", "jax_twoshot", "0"),
        ("128", "1", "psum", "0"),
        ("384", "3", "jax_twoshot", "0"),
        ("384", "3", "psum", "0"),
    ]
    assert "[12/12]" in done.stderr
    report = json.loads(out.read_text())
    assert report["program"] == {"width": 64, "dtype": "bfloat16", "repeats": 2, "calls": 3}
    assert report["versions"]["jax"] == jax.__version__
    assert len(report["machine"]["devices"]) == 2
    assert report["date"].endswith(" UTC")
    assert report["not_measured"] == {}
    assert [len(m["seconds"]) for m in report["measurements"]] == [2] * 4
    for m in report["measurements"]:
        assert m["median_seconds"] == pytest.approx(sum(m["seconds"]) / 2)
        assert (
            m["busbw_gb_per_s"]
            == m["algbw_gb_per_s"]
            == pytest.approx(m["bytes"] / m["median_seconds"] / 1e9)
        )
    height, width, _ = image.imread(picture).shape
    assert height > 600 and width > 900


def test_bench_json_on_standard_output() -> None:
    done = command("bench", *TINY, "--rows", "1", "--dtype", "float32", "--json", "-")
    assert [m["peer"] for m in json.loads(done.stdout)["measurements"]] == ["jax_twoshot", "psum"]
    assert "algbw GB/s" in done.stderr


def test_bench_says_why_a_peer_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(program: bench.Program) -> bench.Run:
        raise ValueError("no two ranks may share a GPU")

    absent = bench.Peer("absent", lambda program: "it is not installed", bitwise=False)
    monkeypatch.setattr(bench, "PEERS", (*bench.PEERS, absent, bench.Peer("refusing", refuse, bitwise=False)))
    assert main(["bench", *TINY, "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert "# absent is not in the table: it is not installed" in out
    assert "# refusing is not in the table: no two ranks may share a GPU" in out


def test_bench_counts_wrong_sums(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours in another order of ranks, and a peer that sums nothing."""

    def scaled(factor: float) -> Any:
        return lambda program: bench.compile_program(program, lambda x: lax.psum(x, "tp") * factor)

    peers = (
        bench.Peer("jax_twoshot", scaled(1.0078125), bitwise=True),
        bench.Peer("nearly", scaled(1.0078125), bitwise=False),
        bench.Peer("idle", lambda program: lambda x, _=(): x, bitwise=False),
    )
    monkeypatch.setattr(bench, "PEERS", peers)
    assert main(["bench", *TINY, "--rows", "1"]) == 1
    table = [line.split() for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    wrong = {row[2]: int(row[7]) for row in table}
    assert wrong["jax_twoshot"] > 64
    assert wrong["nearly"] == 0
    assert wrong["idle"] > 64


def test_bench_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "version", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *TINY, "--plot", "x.png"])
    assert exit_.value.code == 2
    assert "pip install 'jax_twoshot[bench]'" in capsys.readouterr().err


def test_checked_program_is_the_oracles() -> None:
    """Every peer's check: five sums of sums, of which only the first is of different parts."""
    program = bench.Program(cpu_mesh(4), 3, 50, "float32", 100, 0.25).checked()
    assert (program.calls, program.scale) == (5, 1.0)
    total = reference.all_reduce(program.parts())
    np.testing.assert_array_equal(program.expected(), total * 4.0**4)


# ---- compile -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, archs, tps",
    [
        (["--arch", "sm_90a", "sm_100a"], ("sm_90a", "sm_100a"), cubin.TP),
        (["--all", "--tp", "8,2"], cubin.ARCHS, (2, 8)),
    ],
)
def test_compile(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    archs: tuple[str, ...],
    tps: tuple[int, ...],
) -> None:
    asked = []

    def compile_all(archs: Any, out_dir: Path, progress: Any, tps: Any) -> list[str]:
        asked.append((tuple(archs), out_dir, tuple(tps)))
        return ["a cubin"]

    monkeypatch.setattr(cubin, "compile_all", compile_all)
    assert main(["compile", *arguments, "-o", str(tmp_path)]) == 0
    assert asked == [(archs, tmp_path, tps)]
    assert capsys.readouterr().out.endswith(f"export JAX_TWOSHOT_CUBIN_PATH={tmp_path}\n")


def test_compile_without_the_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cubin, "compiler_version", lambda: None)
    assert main(["compile", "--arch", "sm_90a", "-o", str(tmp_path)]) == 1
    assert "pip install 'jax_twoshot[compile]'" in capsys.readouterr().err


# ---- Terminal ----------------------------------------------------------------------------------------------


def test_table() -> None:
    assert terminal.table(("test", "n", "us"), [("a", "1", "10.5"), ("long name", "20", "3")], left=1) == (
        "# test      n    us\n"
        "a           1  10.5\n"
        "long name  20     3"
    )  # fmt: skip


def test_plain_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """Quick steps print one line, the last."""
    with terminal.Progress(3) as progress:
        for text in "abc":
            progress.step(text)
    assert capsys.readouterr().err == "[3/3] c\n"


def test_bar_on_a_terminal() -> None:
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 80))
    script = "from jax_twoshot.cli.terminal import Progress\nwith Progress(2) as p: p.step('a'); p.step('b')"
    subprocess.run((sys.executable, "-c", script), stderr=child, timeout=60, check=True)
    assert select.select([parent], [], [], 10)[0], "nothing was shown"
    shown = os.read(parent, 1 << 16).decode()
    os.close(child)
    os.close(parent)
    assert "0%|" in shown and "0/2" in shown
