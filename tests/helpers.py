"""What the tests share: meshes, every rank's own result, bitwise comparison, scripts in a fresh process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import reference
from jax_twoshot.workspace import Gpus

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def cpu_mesh(*sizes: int, names: Sequence[str] = ("tp",), first: int = 0) -> Mesh:
    """A mesh of CPU devices, from device ``first`` on."""
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices("cpu")[first : first + count]).reshape(sizes), names)


@contextmanager
def workspace_as_on_two_gpus(generations: int = 2) -> Iterator[jax_twoshot.Workspace]:
    """A workspace on CPU that says what one on a mesh of two GPUs would: for lowering, without a GPU."""
    with jax_twoshot.Workspace(cpu_mesh(2), "tp", rows=64, width=4096, generations=generations) as workspace:
        workspace.handle = replace(workspace.handle, gpu=Gpus("sm_90a", False, 1, 132, 1 << 17))
        yield workspace


def on_ranks(f: Callable, mesh: Mesh, axes: Any = "tp") -> jax.stages.Wrapped:
    """``f``, jitted on every rank: arguments and results are trees of ``[TP, ...]``, a row a rank."""

    def rank(*args: Any) -> Any:
        return jax.tree.map(lambda y: y[None], f(*jax.tree.map(lambda x: x[0], args)))

    spec = P(axes)
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def all_reduce_on_ranks(parts: Any, mesh: Mesh | None = None, **options: Any) -> Any:
    """What each rank gets from one ``all_reduce`` of ``parts``, both a tree of ``[TP, ...]`` arrays."""
    mesh = mesh or cpu_mesh(jax.tree.leaves(parts)[0].shape[0])
    f = on_ranks(lambda tree: jax_twoshot.all_reduce(tree, "tp", **options), mesh)
    return jax.tree.map(np.asarray, f(parts))


def bits(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_bitwise(actual: Any, expected: Any, what: object = "") -> None:
    """Trees of arrays are equal bit for bit; the first wrong elements are named otherwise."""
    structures = {jax.tree.structure(tree) for tree in (actual, expected)}
    assert len(structures) == 1, f"{what}: {structures}"
    leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (actual, expected))
    for a, e in zip(*leaves, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype), what
        wrong = np.argwhere(bits(a) != bits(e))
        assert len(wrong) == 0, (
            f"{what}: {len(wrong)} of {a.size} elements of {e.dtype}{list(e.shape)} are wrong, the first at "
            f"{tuple(wrong[0].tolist())}: {a[tuple(wrong[0])]!r} instead of {e[tuple(wrong[0])]!r}"
        )


def assert_every_rank_has_the_sum(actual: Any, parts: Any, what: object = "") -> None:
    """``actual`` (a tree of ``[TP, ...]``) is the oracle's sum of ``parts``, bit for bit, on each rank."""
    expected = jax.tree.map(lambda p: np.broadcast_to(reference.all_reduce(np.asarray(p)), p.shape), parts)
    assert_bitwise(actual, expected, what)


def assert_within_matmul_bound(actual: np.ndarray, a: np.ndarray, w: np.ndarray) -> None:
    """``actual`` is as near the exact sum over ranks of ``a @ w`` as ``matmul_all_reduce`` promises."""
    wide_a, wide_w = a.astype(np.float64), w.astype(np.float64)
    parts, sizes = wide_a @ wide_w, np.abs(wide_a) @ np.abs(wide_w)
    total, unit = parts.sum(0), float(ml_dtypes.finfo(a.dtype).eps) / 2
    bound = unit * (np.abs(parts).sum(0) + np.abs(total)) + a.shape[-1] * 2.0**-22 * sizes.sum(0)
    assert (np.abs(actual.astype(np.float64) - total) <= bound).all()


def integers(shape: Sequence[int], dtype: Any = np.float32, seed: int = 0, most: int = 8) -> np.ndarray:
    """Small integers as floats: sums of a few are exact in each format, so in any order."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(dtype)


PRELUDE = """
import os, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
import jax_twoshot

mesh = Mesh(np.array(jax.devices("cpu")), ("tp",))

def sharded(f, **options):
    options = dict(in_specs=P("tp"), out_specs=P("tp"), check_vma=False) | options
    return jax.jit(jax.shard_map(f, mesh=mesh, **options))

def reduce(x):
    return jax_twoshot.all_reduce(x, "tp")

x = np.arange(8, dtype=np.float32)[:, None] + np.zeros((8, 2880), np.float32)

def check():
    "An ordinary call works."
    np.testing.assert_array_equal(sharded(reduce)(x), np.full((8, 2880), 28, np.float32))
"""
"""The first lines of a script: eight CPU devices, a mesh, a sharded call, and a check that calls work."""


def start_script(
    source: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = (), prelude: str = PRELUDE
) -> subprocess.Popen[str]:
    """A fresh Python on CPU that runs ``prelude`` and ``source``.

    Args:
      source: Python text; its indentation is removed.
      env: environment variables to add.
      prefix: a command to run Python under, such as ``("taskset", "-c", "0")``.
      prelude: text in front of ``source``.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_TWOSHOT_TIMEOUT": "60", **(env or {})}
    command = [*prefix, sys.executable, "-c", prelude + textwrap.dedent(source)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Waits for a script; after ``timeout`` seconds it is killed and the test fails."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        pytest.fail(f"the script did not end in {timeout} seconds: {process.args!r}\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run_script(
    source: str, env: Mapping[str, str] | None = None, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """``start_script`` and ``finish``."""
    return finish(start_script(source, env, **options), timeout)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def run_ok(source: str, env: Mapping[str, str] | None = None, **options: Any) -> str:
    """``run_script`` that must exit with 0; returns its standard output."""
    done = run_script(source, env, **options)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
