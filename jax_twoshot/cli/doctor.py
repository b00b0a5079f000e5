"""``doctor``: what is installed, what works here, what does not and why, and what to type next.

The fast path is the kernels on NVIDIA GPUs, a rank each. Every reason against it is a check of its own.

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
from pathlib import Path
from typing import Any, Literal

from jax_twoshot import _settings
from jax_twoshot.cli import PROG, machine

TRIED_DEVICES = 2
"""CPU devices that the trial runs on."""
TRIAL_SECONDS = 120
"""When a trial of a few seconds counts as hanging."""
LEAST_DRIVER = 12040
"""What ``ffi/cuda_driver.cc`` calls is in the drivers of CUDA 12.4 and newer."""
LEAST_TORCH = (2, 11)
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
"""NVIDIA's number as a PCI vendor."""


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
    """Everything ``doctor`` prints, as JSON can hold it; ``not_on_gpus`` names the checks that speak against the fast
    path. Never raises."""
    driver, gpus = _Driver(), list[Gpu]()
    cpu = _cpu_checks()
    cuda = _cuda_checks(driver, gpus)
    multicast = _try("multicast", lambda: _multicast(gpus))
    against = [check.name for check in (*cpu[:2], *cuda) if check.status == "no"]
    against = against or ([] if gpus else ["GPUs"])
    return {
        "ok": _all_yes(cpu) or not against,
        "not_on_gpus": against,
        "versions": machine.versions() | {"driver": driver.version_text},
        "devices": {"cpu": machine.processor(), "gpus": [asdict(gpu) for gpu in gpus]},
        "settings": settings(),
        "checks": [asdict(check) for check in (*cpu, *cuda, multicast)],
        "next": _next(cpu, cuda),
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
            _try("GPU targets", lambda: _targets(gpus)),
            _try("peer access", lambda: _peer_access(driver, gpus)),
            _try("JAX on CUDA", lambda: _jax_plugin(driver)),
            _try("symmetric memory", lambda: _symmetric_memory(driver)),
            _try("command buffers", _command_buffers),
        ]
    checks.append(_try("kernels", lambda: _kernels(gpus)))
    return [*checks, _try("kernel cache", _cache), _try("ranks", lambda: _ranks(gpus))] if gpus else checks


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
    for variable, read in (
        ("JAX_TWOSHOT_TIMEOUT", _settings.timeout_seconds),
        ("JAX_TWOSHOT_TUNING", _settings.tuning),
    ):
        try:
            read()
        except ValueError as error:
            return Check("settings", "no", str(error), fix=f"unset {variable}")
    seconds = _settings.timeout_seconds()
    return Check("settings", "yes", f"a rank waits {f'{seconds:g} s' if seconds else 'for ever'} for its peers")


def _extension() -> Check:
    """Also what the package kept to itself when it was imported, such as a JAX that it does not fit."""
    try:
        module = importlib.import_module("jax_twoshot._ffi")
        importlib.import_module("jax_twoshot._api")
    except (ImportError, ValueError) as error:
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


def _cuda(version: int) -> str:
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def _nvidia_on_pci() -> bool:
    """Whether the PCI bus has a display or compute device of NVIDIA's, driver or not."""
    display, accelerator = "0x03", "0x12"
    return any(
        (device / "vendor").read_text().strip() == _NVIDIA
        and (device / "class").read_text().startswith((display, accelerator))
        for device in _PCI_DEVICES.glob("*")
    )


class _Driver:
    """The CUDA driver, asked only what needs no context."""

    COMPUTE_CAPABILITY = (75, 76)
    """Numbers of the device attributes for major and minor."""

    def __init__(self) -> None:
        self.version: int | None = None

    @property
    def version_text(self) -> str | None:
        return None if self.version is None else _cuda(self.version)

    @property
    def extra(self) -> str:
        """The extra of this package that fits the driver."""
        return "cuda13" if (self.version or 0) >= 13000 else "cuda12"

    def check(self) -> Check:
        name = "NVIDIA driver"
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            if not _nvidia_on_pci():
                return Check(name, "no", f"{error}; there is no NVIDIA GPU on the PCI bus either")
            text = f"{error}, though an NVIDIA GPU is on the PCI bus: no driver, or a container started without it"
            return Check(name, "no", text, fix="nvidia-smi")
        self.version = self.integer("cuDriverGetVersion")
        if self.version < LEAST_DRIVER:
            text = f"supports {self.version_text}; {_cuda(LEAST_DRIVER)} or newer is needed"
            return Check(name, "no", text, fix="nvidia-smi")
        return Check(name, "yes", f"supports {self.version_text}")

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
        return Check("GPUs", "unknown", "there is no driver to ask")
    try:
        driver.call("cuInit", 0)
        found += [driver.gpu(ordinal) for ordinal in range(driver.integer("cuDeviceGetCount"))]
    except RuntimeError as error:
        return Check("GPUs", "no", str(error), fix=_unhide() or "nvidia-smi")
    if not found:
        hidden = "CUDA_VISIBLE_DEVICES hides them" if _unhide() else "nor does any variable hide them"
        return Check("GPUs", "no", f"the driver shows none; {hidden}", fix=_unhide() or "nvidia-smi")
    return Check("GPUs", "yes", "; ".join(f"{g.ordinal}: {g.name}, {_capability(g)}" for g in found))


def _unhide() -> str | None:
    return "unset CUDA_VISIBLE_DEVICES" if "CUDA_VISIBLE_DEVICES" in os.environ else None


def _use(gpus: Sequence[Gpu]) -> str:
    return f"export CUDA_VISIBLE_DEVICES={','.join(str(gpu.ordinal) for gpu in gpus)}"


def _capability(gpu: Gpu) -> str:
    return "compute capability {}.{}".format(*gpu.compute_capability)


def _targets(gpus: Sequence[Gpu]) -> Check:
    """Kernels exist for every GPU, and the same for all: a workspace loads one set."""
    from jax_twoshot import cubin

    by_target: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        try:
            by_target.setdefault(cubin.arch_for(gpu.compute_capability), []).append(gpu)
        except ValueError as error:
            others = [g for g in gpus if g.compute_capability != gpu.compute_capability]
            return Check("GPU targets", "no", f"GPU {gpu.ordinal}: {error}", fix=_use(others) if others else None)
    if len(by_target) > 1:
        text = "GPUs of several kinds cannot form one mesh: " + "; ".join(
            f"{target}: GPU {', '.join(str(gpu.ordinal) for gpu in group)}" for target, group in by_target.items()
        )
        return Check("GPU targets", "no", text, fix=_use(max(by_target.values(), key=len)))
    return Check("GPU targets", "yes", *by_target)


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
    name, fix = "JAX on CUDA", f"pip install 'jax_twoshot[{driver.extra}]'"
    found = [package for package in machine.CUDA_PACKAGES if package.endswith("-plugin")]
    plugins = {package: version for package in found if (version := machine.version(package))}
    text = ", ".join(f"{plugin} {version}" for plugin, version in plugins.items())
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Check(name, "no", f"JAX_PLATFORMS={platforms} keeps JAX off the GPUs", fix="unset JAX_PLATFORMS")
    if not plugins:
        return Check(name, "no", "JAX has no CUDA plugin installed, so it sees no GPU", fix)
    if driver.extra == "cuda12" and "jax-cuda12-plugin" not in plugins:
        return Check(name, "no", f"{text} needs a driver of CUDA 13, this one supports {driver.version_text}", fix)
    jaxlib = machine.version("jaxlib")
    if not any(version.split("+")[0] == jaxlib for version in plugins.values()):
        return Check(name, "no", f"{text} is not of jaxlib {jaxlib}'s version, so JAX leaves it out", fix)
    return Check(name, "unknown", f"{text} is installed; that it starts is not tried here")


def _symmetric_memory(driver: _Driver) -> Check:
    """One process needs cuda-bindings; one process a GPU needs a CUDA build of torch besides."""
    name, fix = "symmetric memory", f"pip install 'jax_twoshot[{driver.extra}]'"
    bindings, torch = machine.version("cuda-bindings"), machine.version("torch")
    if bindings is None:
        return Check(name, "no", "cuda-bindings is not installed", fix)
    one_process = f"cuda-bindings {bindings}: one process for all GPUs"
    if torch is None or "+cpu" in torch:
        return Check(name, "yes", f"{one_process}; torch is missing for one process a GPU")
    if tuple(map(int, re.findall(r"\d+", torch)[:2])) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return Check(name, "yes", f"{one_process}; torch {torch} is too old for one process a GPU, {least} is needed")
    return Check(name, "unknown", f"{one_process}; torch {torch}: whether it finds the GPUs is not tried here")


def _command_buffers() -> Check:
    """Without them the host launches each call: 5.9 us instead of 2.0, measured on one H200."""
    flags = re.findall(r"--xla_gpu_enable_command_buffer=(\S*)", os.environ.get("XLA_FLAGS", ""))
    if flags and "CUSTOM_CALL" not in flags[-1]:
        text = f"XLA_FLAGS has --xla_gpu_enable_command_buffer={flags[-1]}: calls are not replayed in CUDA graphs"
        return Check("command buffers", "no", text, fix="unset XLA_FLAGS")
    return Check("command buffers", "yes", "XLA_FLAGS leaves custom calls in them")


def _kernels(gpus: Sequence[Gpu]) -> Check:
    """Those for BF16, as many ranks as there are GPUs: found, or to be compiled when a workspace is made."""
    from jax_twoshot import cubin, protocol

    compiler, install = cubin.compiler_version(), "pip install 'jax_twoshot[compile]'"
    if not gpus and compiler is None:
        text = f"{cubin.COMPILER} is not installed, and no GPU says what to look for"
        return Check("kernels", "unknown", text, install)
    try:
        targets = sorted({cubin.arch_for(gpu.compute_capability) for gpu in gpus})
    except ValueError:
        return Check("kernels", "unknown", "there are none for one of the GPUs, see above")
    tp = len(gpus) if len(gpus) in cubin.TP else min(cubin.TP)
    wanted = [
        cubin.Variant(tp, "bfloat16", False, target, algorithm)
        for target in targets
        for algorithm in protocol.ALGORITHMS
    ]
    try:
        for folder, variant in itertools.product(cubin._given_folders(), wanted):
            if cubin._exists(folder, variant):
                cubin._read_given(folder, variant)
    except cubin.CubinError as error:
        given = "JAX_TWOSHOT_CUBIN_PATH" in os.environ
        again = "unset JAX_TWOSHOT_CUBIN_PATH" if given else "pip install --force-reinstall --no-deps jax_twoshot"
        return Check("kernels", "no", str(error), again)
    if compiler is not None:
        return Check("kernels", "yes", f"{cubin.COMPILER} {compiler} compiles those that are not found")
    try:
        for variant in wanted:
            cubin.find(variant)
    except cubin.CubinError as error:
        return Check("kernels", "no", str(error), install)
    return Check("kernels", "yes", f"for {tp} ranks found, {', '.join(targets)}")


def _cache() -> Check:
    """Where compiled kernels are kept can be written to, by this user alone."""
    from jax_twoshot import cubin

    folder, elsewhere = _settings.cache_dir(), "export JAX_TWOSHOT_CACHE_DIR=$(mktemp -d)"
    if not _writable(folder):
        return Check("kernel cache", "no", f"{folder} cannot be written to", elsewhere)
    try:
        cubin._require_own(*(folder / "cubins").glob("*"))
    except cubin.CubinError as error:
        return Check("kernel cache", "no", str(error), elsewhere)
    return Check("kernel cache", "yes", f"{folder} can be written to, by this user alone")


def _writable(folder: Path) -> bool:
    """Whether files can be made in ``folder``, or it in the nearest folder above that is there."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def _ranks(gpus: Sequence[Gpu]) -> Check:
    from jax_twoshot import cubin

    if len(gpus) == 1:
        text = "one GPU has nobody to sum with; several ranks can share it, for tests"
        return Check("ranks", "no", text, fix=f"{PROG} selftest --ranks 2 --one-gpu")
    if len(gpus) not in cubin.TP:
        most = max(tp for tp in cubin.TP if tp <= len(gpus))
        text = f"{len(gpus)} GPUs, and groups have {', '.join(map(str, cubin.TP))} ranks"
        return Check("ranks", "no", text, fix=_use(gpus[:most]))
    return Check("ranks", "yes", f"{len(gpus)}, a GPU each")


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
            _verdict(report),
            f"Next: {report['next']}",
        )
    )


def _verdict(report: dict[str, Any]) -> str:
    if not report["not_on_gpus"]:
        return "all_reduce can run here, on the GPUs as far as could be seen without starting CUDA."
    runs = "all_reduce can run here, on CPU devices only" if report["ok"] else "all_reduce cannot run here"
    return f"{runs}; see above: {', '.join(report['not_on_gpus'])}."


def _value(setting: dict[str, str | None]) -> str:
    if setting["value"] is None:
        return f"setting    {setting['name']} is not set: {setting['default']}"
    return f"setting    {setting['name']}={setting['value']}"
