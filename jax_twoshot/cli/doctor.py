"""``doctor``: what is installed, what works here, what does not and why, and what to type next.

Nothing is taken on trust that can be tried cheaply, and no CUDA context is made: GPUs are asked through the
driver alone, and JAX is started in another process, on CPU devices. What cannot be found out that way is
reported as unknown.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jax_twoshot import _settings
from jax_twoshot.cli import PROG, machine

TRIED_DEVICES = 2
"""CPU devices that the trial runs on."""
TRIAL_SECONDS = 120
"""When a trial of a few seconds counts as hanging."""


@dataclass(frozen=True)
class Check:
    """One question, answered.

    Attributes:
      name: what was looked at.
      status: whether it works; unknown: it could not be found out, or only by starting CUDA.
      text: what was found, or why not.
      fix: the command to type if the answer is no.
    """

    name: str
    status: Literal["yes", "no", "unknown"]
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]


def run(args: argparse.Namespace) -> int:
    report = diagnose()
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0 if report["ok"] else 1


def diagnose() -> dict[str, Any]:
    """Everything ``doctor`` prints, as JSON can hold it. Never raises."""
    driver, gpus = _Driver(), list[Gpu]()
    cpu = _cpu_checks()
    cuda = _cuda_checks(driver, gpus)
    multicast = _try("multicast", lambda: _multicast(gpus))
    cuda_may_work = bool(gpus) and _all_yes(cpu[:2]) and all(check.status != "no" for check in cuda)
    return {
        "ok": _all_yes(cpu) or cuda_may_work,
        "versions": machine.versions() | {"driver": driver.version_text},
        "devices": {"cpu": machine.processor(), "gpus": [asdict(gpu) for gpu in gpus]},
        "settings": settings(),
        "checks": [asdict(check) for check in (*cpu, *cuda, multicast)],
        "next": _next(cpu, cuda if gpus else []),
    }


def _cpu_checks() -> list[Check]:
    checks = [_try("settings", _settings_valid), _try("extension", _extension)]
    if _all_yes(checks):
        return [*checks, _try("CPU devices", _cpu)]
    return [*checks, Check("CPU devices", "unknown", "not tried, see above")]


def _cuda_checks(driver: _Driver, gpus: list[Gpu]) -> list[Check]:
    """Fills ``gpus``."""
    checks = [_try("NVIDIA driver", driver.check), _try("GPUs", lambda: _gpus(driver, gpus))]
    if gpus:
        checks += [
            _try("peer access", lambda: _peer_access(driver, gpus)),
            _try("JAX on CUDA", lambda: _jax_plugin(driver)),
            _try("symmetric memory", lambda: _symmetric_memory(driver)),
        ]
    return [*checks, _try("kernels", lambda: _kernels(gpus))]


def settings() -> list[dict[str, str | None]]:
    """Name, meaning, default and value (None: not set) of each variable in the table of ``_settings``."""
    lines = (_settings.__doc__ or "").splitlines()
    rule = next((i for i, line in enumerate(lines) if line.startswith("===")), None)
    if rule is None:  # python -OO
        return []
    spans = [match.span() for match in re.finditer("=+", lines[rule])]
    found: list[dict[str, str | None]] = []
    for line in itertools.takewhile(lambda line: not line.startswith("==="), lines[rule + 3 :]):
        name, meaning, default = (line[start:end].strip() for start, end in spans)
        if name:
            found.append(
                {"name": name, "meaning": meaning, "default": default, "value": os.environ.get(name)}
            )
        else:
            found[-1]["meaning"] = f"{found[-1]['meaning']} {meaning}"
    return found


def _try(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a doctor that falls ill says so
        return Check(name, "unknown", f"the check failed: {type(error).__name__}: {error}")


def _all_yes(checks: Sequence[Check]) -> bool:
    return all(check.status == "yes" for check in checks)


def _next(cpu: Sequence[Check], cuda: Sequence[Check]) -> str:
    fixes = [check.fix for check in (*cpu, *cuda) if check.status == "no" and check.fix]
    return fixes[0] if fixes else f"{PROG} selftest"


# ---- CPU ---------------------------------------------------------------------------------------------------


def _settings_valid() -> Check:
    try:
        seconds = _settings.timeout_seconds()
    except ValueError as error:
        return Check("settings", "no", str(error), fix="unset JAX_TWOSHOT_TIMEOUT")
    return Check(
        "settings", "yes", f"a rank waits {f'{seconds:g} s' if seconds else 'for ever'} for its peers"
    )


def _extension() -> Check:
    try:
        module = importlib.import_module("jax_twoshot._ffi")
    except ImportError as error:
        return Check("extension", "no", str(error), fix="pip install --force-reinstall --no-deps jax_twoshot")
    return Check("extension", "yes", f"{module._extension.__file__} speaks the protocol of this package")


def _cpu() -> Check:
    """A real trial, in a process of its own: it may crash or hang, and with JAX it would start CUDA here."""
    command = [sys.executable, "-m", "jax_twoshot", "selftest", "--devices", str(TRIED_DEVICES), "--json"]
    fix = f"JAX_PLATFORMS=cpu {PROG} selftest"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return Check("CPU devices", "no", f"the self-test did not end in {TRIAL_SECONDS} s", fix)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        return Check(
            "CPU devices", "no", f"the self-test ended with exit code {done.returncode}: {last}", fix
        )
    calls = sum(group["calls"] for group in json.loads(done.stdout)["groups"])
    return Check("CPU devices", "yes", f"{calls} sums on {TRIED_DEVICES} devices, every bit the oracle's")


# ---- CUDA --------------------------------------------------------------------------------------------------


class _Driver:
    """The CUDA driver, asked only what needs no context."""

    COMPUTE_CAPABILITY = (75, 76)
    """Numbers of the device attributes for major and minor."""

    def __init__(self) -> None:
        self.version: int | None = None

    @property
    def version_text(self) -> str | None:
        return None if self.version is None else f"CUDA {self.version // 1000}.{self.version % 1000 // 10}"

    @property
    def extra(self) -> str:
        """The extra of this package that fits the driver."""
        return "cuda13" if (self.version or 0) >= 13000 else "cuda12"

    def check(self) -> Check:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return Check("NVIDIA driver", "no", f"{error}; GPUs cannot be used here")
        self.version = self.integer("cuDriverGetVersion")
        return Check("NVIDIA driver", "yes", f"supports {self.version_text}")

    def call(self, function: str, *args: Any) -> None:
        """Raises RuntimeError, with the driver's text, if it fails."""
        if status := getattr(self._library, function)(*args):
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{function}: error {status} ({(text.value or b'no text').decode()})")

    def integer(self, function: str, *args: Any) -> int:
        """The one integer that ``function`` returns through its first argument."""
        result = ctypes.c_int()
        self.call(function, ctypes.byref(result), *args)
        return result.value

    def gpu(self, ordinal: int) -> Gpu:
        device = self.integer("cuDeviceGet", ordinal)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), device)
        major, minor = (
            self.integer("cuDeviceGetAttribute", number, device) for number in self.COMPUTE_CAPABILITY
        )
        return Gpu(ordinal, name.value.decode(), (major, minor))


def _gpus(driver: _Driver, found: list[Gpu]) -> Check:
    """Fills ``found``."""
    if driver.version is None:
        return Check("GPUs", "no", "there is no driver to ask")
    try:
        driver.call("cuInit", 0)
        found += [driver.gpu(ordinal) for ordinal in range(driver.integer("cuDeviceGetCount"))]
    except RuntimeError as error:
        return Check("GPUs", "no", str(error))
    if not found:
        return Check("GPUs", "no", "the driver shows none; CUDA_VISIBLE_DEVICES may hide them")
    return Check("GPUs", "yes", "; ".join(f"{g.ordinal}: {g.name}, {_capability(g)}" for g in found))


def _capability(gpu: Gpu) -> str:
    return "compute capability {}.{}".format(*gpu.compute_capability)


def _peer_access(driver: _Driver, gpus: Sequence[Gpu]) -> Check:
    if len(gpus) == 1:
        return Check("peer access", "yes", "not needed: there is one GPU, and ranks can only share it")
    handles = [driver.integer("cuDeviceGet", gpu.ordinal) for gpu in gpus]
    refused = [
        f"{a} to {b}"
        for a, b in itertools.permutations(range(len(gpus)), 2)
        if not driver.integer("cuDeviceCanAccessPeer", handles[a], handles[b])
    ]
    if refused:
        return Check("peer access", "no", f"not from GPU {', '.join(refused)}", fix="nvidia-smi topo -p2p w")
    return Check("peer access", "yes", f"between all {len(gpus)} GPUs")


def _jax_plugin(driver: _Driver) -> Check:
    plugins = [name for name in machine.CUDA_PACKAGES if name.endswith("-plugin") and machine.version(name)]
    if not plugins:
        fix = f"pip install 'jax_twoshot[{driver.extra}]'"
        return Check("JAX on CUDA", "no", "JAX has no CUDA plugin installed, so it sees no GPU", fix)
    text = ", ".join(f"{name} {machine.version(name)}" for name in plugins)
    return Check("JAX on CUDA", "unknown", f"{text} is installed; that it starts is not tried here")


def _symmetric_memory(driver: _Driver) -> Check:
    """One process needs cuda-bindings; one process a GPU needs a CUDA build of torch besides."""
    bindings, torch = machine.version("cuda-bindings"), machine.version("torch")
    fix = f"pip install 'jax_twoshot[{driver.extra}]'"
    if bindings is None:
        return Check("symmetric memory", "no", "cuda-bindings is not installed", fix)
    if torch is None or "+cpu" in torch:
        text = f"cuda-bindings {bindings}: one process for all GPUs; torch is missing for one process a GPU"
        return Check("symmetric memory", "yes", text)
    text = f"cuda-bindings {bindings}, torch {torch}; whether torch finds the GPUs is not tried here"
    return Check("symmetric memory", "unknown", text)


def _kernels(gpus: Sequence[Gpu]) -> Check:
    from jax_twoshot import cubin, protocol

    if (compiler := cubin.compiler_version()) is not None:
        return Check("kernels", "yes", f"{cubin.COMPILER} {compiler} compiles those that are not found")
    fix = "pip install 'jax_twoshot[compile]'"
    if not gpus:
        return Check(
            "kernels", "unknown", f"{cubin.COMPILER} is not installed, and no GPU says what to look for", fix
        )
    tp = len(gpus) if len(gpus) in cubin.TP else min(cubin.TP)
    try:
        archs = sorted({cubin.arch_for(gpu.compute_capability) for gpu in gpus})
        for arch, algorithm in itertools.product(archs, protocol.ALGORITHMS):
            cubin.find(cubin.Variant(tp, "bfloat16", False, arch, algorithm))
    except (ValueError, cubin.CubinError) as error:
        return Check("kernels", "no", str(error), fix)
    return Check("kernels", "yes", f"for {tp} ranks found, {', '.join(archs)}")


def _multicast(gpus: Sequence[Gpu]) -> Check:
    """Asks the gate that decides at set-up; nothing is created."""
    from jax_twoshot import symmetric

    if not _settings.multicast_allowed():
        nobody: Any = None
        return Check("multicast", "no", str(symmetric.multicast_refusal(nobody, 0)))
    if not gpus:
        return Check("multicast", "unknown", "not switched off; there is no GPU to ask")
    try:
        driver = symmetric._Driver()
    except (ImportError, RuntimeError) as error:
        return Check("multicast", "unknown", f"not switched off; the GPUs cannot be asked: {error}")
    reasons = {gpu.ordinal: symmetric.multicast_refusal(driver, gpu.ordinal) for gpu in gpus}
    refused = [f"GPU {ordinal}: {reason}" for ordinal, reason in reasons.items() if reason]
    if refused:
        return Check("multicast", "no", "; ".join(refused))
    return Check(
        "multicast", "yes", "not switched off, and no GPU objects; a trial store at set-up has the last word"
    )


# ---- Text --------------------------------------------------------------------------------------------------


def _text(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    absent = ", ".join(name for name, version in report["versions"].items() if not version)
    return "\n".join(
        (
            f"versions   {versions}",
            f"           absent: {absent or 'none'}",
            f"system     {platform.platform()}; {report['devices']['cpu']}",
            "",
            *(f"{_value(s)}\n           {s['meaning']}" for s in report["settings"]),
            "",
            *(
                f"{c['status']:>7}    {c['name']}: {c['text']}".replace("\n", "\n" + 11 * " ")
                for c in report["checks"]
            ),
            "",
            "all_reduce can run here." if report["ok"] else "all_reduce cannot run here.",
            f"Next: {report['next']}",
        )
    )


def _value(setting: dict[str, str | None]) -> str:
    if setting["value"] is None:
        return f"setting    {setting['name']} is not set: {setting['default']}"
    return f"setting    {setting['name']}={setting['value']}"
