"""The machine and the installation: devices, names, versions, date."""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jax_twoshot.cli import UsageError
from jax_twoshot.protocol import MIN_RANKS

CPU_DEVICES = 8
"""How many devices a machine without a GPU gets where nothing else is asked for."""

PACKAGES = ("jax", "jaxlib", "jax-twoshot", "numpy")
CUDA_PACKAGES = (
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "cuda-bindings",
    "nvidia-cutlass-dsl",
    "torch",
)


def devices(count: int | None) -> list[jax.Device]:
    """The first ``count`` devices of JAX's default platform, by default all. CPU devices are made here.

    Raises:
      UsageError: there are not as many, or there is only one.
    """
    with contextlib.suppress(RuntimeError):  # too late: JAX is in use, and has the devices that it has
        jax.config.update("jax_num_cpu_devices", count or CPU_DEVICES)
    found = jax.devices()
    if len(found) < (count or MIN_RANKS):
        raise UsageError(
            f"argument --devices: {count or MIN_RANKS} or more are needed, there {_are(len(found))}: "
            f"{describe(found)}; for CPU devices set JAX_PLATFORMS=cpu"
        )
    return found[:count]


def _are(count: int) -> str:
    return f"is {count}" if count == 1 else f"are {count}"


def describe(found: Sequence[jax.Device]) -> str:
    """Such as ``8 x NVIDIA H200``, or ``8 CPU devices on AMD EPYC 7B13, 2 cores``."""
    kinds = Counter(d.device_kind if d.platform != "cpu" else "cpu" for d in found)
    texts = [
        f"{n} CPU devices on {processor()}" if kind == "cpu" else f"{n} x {kind}" for kind, n in kinds.items()
    ]
    return ", ".join(texts)


def processor() -> str:
    """Name of the CPU, and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str | None]:
    """Of Python and of every package that matters here; None: not installed. None of them is imported."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES + CUDA_PACKAGES}


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def facts(found: Sequence[jax.Device]) -> dict[str, Any]:
    """What a measurement or a verdict is worth little without."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "devices": [d.device_kind for d in found],
        },
        "versions": versions(),
    }
