"""What a trace of the profiler shows of the all-reduces, as `examples/draw_trace.py` reads it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from helpers import cpu_mesh, integers, on_ranks

import jax_twoshot

CALLS = 3


def load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


draw_trace = load("draw_trace")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one run of a loop of three calls on four devices."""

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, CALLS, lambda _, y: jax_twoshot.all_reduce(0.25 * y, "tp"), x)

    f, parts = on_ranks(body, cpu_mesh(4)), integers((4, 8, 64))
    jax.block_until_ready(f(parts))
    folder = tmp_path_factory.mktemp("traces")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=options):
        result = jax.block_until_ready(f(parts))
    np.testing.assert_array_equal(result, np.broadcast_to(0.25 * parts.sum(axis=0), parts.shape))
    return folder


def test_each_call_of_each_device_is_in_the_trace(traces: Path) -> None:
    devices = draw_trace.read(traces)
    assert list(devices) == [0, 1, 2, 3]
    for spans in devices.values():
        ours = [span for span in spans if span.name.startswith("jax_twoshot_all_reduce")]
        assert len(ours) == CALLS < len(spans)
        ends = [0.0, *(span.start + span.length for span in ours)]
        assert all(end <= span.start for end, span in zip(ends, ours, strict=False)), "one after another"
        assert not any(span.name.startswith(draw_trace.CONTAINERS) for span in spans)


@pytest.mark.parametrize(("picture", "magic"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_picture(
    traces: Path, tmp_path: Path, picture: str, magic: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert draw_trace.main([str(traces), str(tmp_path / picture)]) == 0
    assert (tmp_path / picture).read_bytes().startswith(magic)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" operations are jax_twoshot")[0].split(" of ")[0] for line in lines] == [
        f"device {device}: {CALLS}" for device in range(4)
    ]


def test_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        draw_trace.main([str(tmp_path), "p.png"])
    assert f"{tmp_path}: no perfetto_trace.json.gz; trace with create_perfetto_trace=True" in capsys.readouterr().err
