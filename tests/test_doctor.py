"""``doctor``: every reason that it can find, on machines that a test machine without a GPU can only play."""

from __future__ import annotations

import ctypes
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from test_cli import command, python

import jax_twoshot
from jax_twoshot import _settings, cubin
from jax_twoshot.cli import doctor, machine, main


def test_doctor() -> None:
    text = command("doctor", JAX_TWOSHOT_MULTICAST="0").stdout
    assert f"jax {jax.__version__}" in text
    assert "JAX_TWOSHOT_MULTICAST=0" in text
    assert re.search("yes +CPU devices: [0-9]+ sums on 2 devices, every bit the oracle's", text)
    assert "no    multicast: switched off by JAX_TWOSHOT_MULTICAST=0" in text
    assert text.splitlines()[-1].startswith("Next: ")


def test_doctor_json() -> None:
    report = json.loads(command("doctor", "--json", JAX_TWOSHOT_CACHE_DIR="/somewhere").stdout)
    assert set(report) == {
        *("ok", "not_on_gpus", "versions", "devices", "settings", "checks", "next")
    }
    assert report["ok"] is True
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["jax-twoshot"] == jax_twoshot.__version__
    assert all(set(check) == {"name", "status", "text", "fix"} for check in report["checks"])
    status = {check["name"]: check["status"] for check in report["checks"]}
    assert status["settings"] == status["extension"] == status["CPU devices"] == "yes"
    assert {"NVIDIA driver", "GPUs", "kernels", "multicast"} <= set(status)
    assert set(status.values()) <= {"yes", "no", "unknown"}
    values = {setting["name"]: setting["value"] for setting in report["settings"]}
    assert values["JAX_TWOSHOT_CACHE_DIR"] == "/somewhere"
    assert values["JAX_TWOSHOT_CUBIN_PATH"] is None


def test_doctor_imports_neither_torch_nor_the_compiler() -> None:
    script = """
        import sys
        from jax_twoshot.cli import main
        main(["doctor"])
        print({"torch", "cutlass"} & set(sys.modules))
    """
    assert python(script).splitlines()[-1] == "set()"


def test_doctor_knows_every_setting() -> None:
    read = set(re.findall(r'environ\.get\(\s*"(JAX_TWOSHOT_\w+)"', inspect.getsource(_settings)))
    found = doctor.settings()
    assert len(read) >= 4
    assert read == {setting["name"] for setting in found}
    assert all(setting["meaning"] and setting["default"] for setting in found)
    (timeout,) = (setting for setting in found if setting["name"] == "JAX_TWOSHOT_TIMEOUT")
    assert timeout["meaning"].endswith("0 waits for ever")
    assert timeout["default"] == "300"


@pytest.mark.parametrize("variable", ["JAX_TWOSHOT_TIMEOUT", "JAX_TWOSHOT_TUNING"])
def test_doctor_with_a_bad_setting(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "soon")
    report = doctor.diagnose()
    checks = {check["name"]: check for check in report["checks"]}
    assert not report["ok"]
    assert "got 'soon'" in checks["settings"]["text"]
    assert checks["CPU devices"]["status"] == "unknown"
    assert report["next"] == f"unset {variable}"


def test_doctor_without_the_extension(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("_ffi", "_extension"):
        monkeypatch.delattr(jax_twoshot, name)
    monkeypatch.delitem(sys.modules, "jax_twoshot._ffi")
    monkeypatch.setitem(sys.modules, "jax_twoshot._extension", None)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert (
        "no    extension: jax_twoshot/_extension: the compiled part of jax_twoshot cannot be loaded" in text
    )
    assert "all_reduce cannot run here; see above: extension" in text
    assert text.splitlines()[-1] == "Next: pip install --force-reinstall --no-deps jax_twoshot"


def test_doctor_survives_its_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no such luck")

    for target, name in ((subprocess, "run"), (cubin, "compiler_version"), (ctypes, "CDLL")):
        monkeypatch.setattr(target, name, fail)
    checks = {check["name"]: check for check in doctor.diagnose()["checks"]}
    assert checks["CPU devices"]["status"] == "unknown"
    assert checks["CPU devices"]["text"] == "the check failed: OSError: no such luck"
    assert checks["kernels"]["status"] == "unknown"
    assert checks["NVIDIA driver"]["status"] == "no"


@pytest.mark.parametrize(
    "trial, text",
    [
        ("import os; os.abort()", "the self-test ended with exit code -6: it printed no error"),
        (
            "raise SystemExit('rank 1, wrong bits')",
            "the self-test ended with exit code 1: rank 1, wrong bits",
        ),
        ("import time; time.sleep(60)", "the self-test did not end in 3 s"),
    ],
)
def test_doctor_survives_a_crash_and_a_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trial: str, text: str
) -> None:
    """In the place of the Python that would run the trial, one that fails."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{trial}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", 3)
    report = doctor.diagnose()
    (check,) = (check for check in report["checks"] if check["name"] == "CPU devices")
    assert (check["status"], check["text"], report["ok"]) == ("no", text, False)


# ---- Machines with GPUs ------------------------------------------------------------------------------------


class FakeDriver:
    """libcuda of a machine with GPUs: the functions that make no context; any other is an error."""

    def __init__(
        self, version: int = 13000, access: int = 1, init: int = 0, gpus: tuple[tuple[int, int], ...] = ((9, 0), (9, 0))
    ) -> None:
        self.version, self.access, self.init, self.gpus = version, access, init, gpus

    def cuDriverGetVersion(self, out: Any) -> int:
        return self._give(out, self.version)

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuGetErrorString(self, status: int, out: Any) -> int:
        return self._give(out, b"no CUDA-capable device is detected")

    def cuDeviceGetCount(self, out: Any) -> int:
        return self._give(out, len(self.gpus))

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:
        return self._give(out, 40 + ordinal)

    def cuDeviceGetName(self, buffer: Any, size: int, device: int) -> int:
        buffer.value = b"NVIDIA Test"
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        return self._give(out, self.gpus[device - 40][{75: 0, 76: 1}[attribute]])

    def cuDeviceCanAccessPeer(self, out: Any, a: int, b: int) -> int:
        return self._give(out, self.access if (a, b) == (41, 40) else 1)

    @staticmethod
    def _give(out: Any, value: Any) -> int:
        out._obj.value = value
        return 0


COMPLETE = {
    "jaxlib": "0.12.0",
    "jax-cuda13-plugin": "0.12.0",
    "cuda-bindings": "13.0.1",
    "nvidia-cutlass-dsl": "4.8.1",
    "torch": "2.13.0",
}
"""Packages of a machine that lacks nothing."""
CUDA12 = {"jax-cuda13-plugin": None, "jax-cuda12-plugin": "0.12.0", "cuda-bindings": "12.9"}


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], dict[str, Any]]]:
    """``doctor``'s report, and its checks by name, on a machine with a driver and packages (None: not installed)."""
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "JAX_TWOSHOT_CUBIN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_TWOSHOT_MULTICAST", "0")
    monkeypatch.setenv("JAX_TWOSHOT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cubin, "_PACKAGED", tmp_path / "packaged")
    monkeypatch.setattr(doctor, "_cpu", lambda: doctor.Check("CPU devices", "yes", "not the matter here"))

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    def run(library: FakeDriver | None, packages: dict[str, str | None]) -> tuple[dict[str, Any], dict[str, Any]]:
        installed = COMPLETE | packages
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library or no_library(name))
        monkeypatch.setattr(machine, "version", installed.get)
        monkeypatch.setattr(cubin, "compiler_version", lambda: installed["nvidia-cutlass-dsl"])
        report = doctor.diagnose()
        return report, {check["name"]: check for check in report["checks"]}

    return run


def test_a_machine_that_lacks_nothing(diagnose: Any) -> None:
    report, checks = diagnose(FakeDriver(), {})
    assert report["versions"]["driver"] == "CUDA 13.0"
    assert [gpu["name"] for gpu in report["devices"]["gpus"]] == ["NVIDIA Test"] * 2
    assert checks["GPUs"]["text"].startswith("0: NVIDIA Test, compute capability 9.0; 1: ")
    assert checks["GPU targets"]["text"] == "sm_90a"
    assert checks["peer access"]["text"] == "between all 2 GPUs"
    assert checks["JAX on CUDA"]["status"] == "unknown", "that it starts was not tried, and must not be claimed"
    assert checks["symmetric memory"]["status"] == "unknown", "nor that torch finds the GPUs"
    assert checks["command buffers"]["status"] == checks["kernels"]["status"] == checks["ranks"]["status"] == "yes"
    assert checks["multicast"]["status"] == "no"
    assert report["not_on_gpus"] == []
    assert report["next"] == "python -m jax_twoshot selftest"
    assert "on the GPUs as far as could be seen" in doctor._text(report)


@pytest.mark.parametrize(
    ("driver", "packages", "environment", "name", "text", "command"),
    [
        ({"version": 12020}, CUDA12, {}, "NVIDIA driver", "supports CUDA 12.2; CUDA 12.4 or newer", "nvidia-smi"),
        ({"init": 100}, {}, {}, "GPUs", "cuInit: error 100 (no CUDA-capable device is detected)", "nvidia-smi"),
        ({"gpus": ()}, {}, {}, "GPUs", "nor does any variable hide them", "nvidia-smi"),
        (
            {"gpus": ()},
            {},
            {"CUDA_VISIBLE_DEVICES": ""},
            "GPUs",
            "CUDA_VISIBLE_DEVICES hides them",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            {"gpus": ((9, 0), (7, 5), (9, 0))},
            {},
            {},
            "GPU targets",
            "GPU 1: compute_capability: kernels exist for sm_80,",
            "export CUDA_VISIBLE_DEVICES=0,2",
        ),
        (
            {"gpus": ((8, 0), (9, 0), (9, 0))},
            {},
            {},
            "GPU targets",
            "sm_80: GPU 0; sm_90a: GPU 1, 2",
            "export CUDA_VISIBLE_DEVICES=1,2",
        ),
        ({"access": 0}, {}, {}, "peer access", "not from GPU 1 to 0", "nvidia-smi topo -p2p w"),
        (
            {},
            {"jax-cuda13-plugin": None},
            {},
            "JAX on CUDA",
            "JAX has no CUDA plugin installed",
            "pip install 'jax_twoshot[cuda13]'",
        ),
        (
            {"version": 12080},
            {},
            {},
            "JAX on CUDA",
            "jax-cuda13-plugin 0.12.0 needs a driver of CUDA 13, this one supports CUDA 12.8",
            "pip install 'jax_twoshot[cuda12]'",
        ),
        (
            {},
            {"jaxlib": "0.12.1"},
            {},
            "JAX on CUDA",
            "jax-cuda13-plugin 0.12.0 is not of jaxlib 0.12.1's version",
            "pip install 'jax_twoshot[cuda13]'",
        ),
        (
            {},
            {},
            {"JAX_PLATFORMS": "cpu"},
            "JAX on CUDA",
            "JAX_PLATFORMS=cpu keeps JAX off the GPUs",
            "unset JAX_PLATFORMS",
        ),
        (
            {"version": 12080},
            CUDA12 | {"cuda-bindings": None},
            {},
            "symmetric memory",
            "cuda-bindings is not installed",
            "pip install 'jax_twoshot[cuda12]'",
        ),
        (
            {},
            {},
            {"XLA_FLAGS": "--xla_a=1 --xla_gpu_enable_command_buffer=FUSION,CUBLAS"},
            "command buffers",
            "--xla_gpu_enable_command_buffer=FUSION,CUBLAS: calls are not replayed",
            "unset XLA_FLAGS",
        ),
        (
            {},
            {"nvidia-cutlass-dsl": None},
            {},
            "kernels",
            "two_shot-tp2-bfloat16-peers-sm_90a.cubin: in none of ",
            "pip install 'jax_twoshot[compile]'",
        ),
        (
            {},
            {},
            {"JAX_TWOSHOT_CUBIN_PATH": "/no/such/folder"},
            "kernels",
            "/no/such/folder: JAX_TWOSHOT_CUBIN_PATH has to name a folder",
            "unset JAX_TWOSHOT_CUBIN_PATH",
        ),
        (
            {},
            {},
            {"JAX_TWOSHOT_CACHE_DIR": "/dev/null/cache"},
            "kernel cache",
            "/dev/null/cache cannot be written to",
            "export JAX_TWOSHOT_CACHE_DIR=$(mktemp -d)",
        ),
        (
            {"gpus": ((9, 0),)},
            {},
            {},
            "ranks",
            "one GPU has nobody to sum with",
            "python -m jax_twoshot selftest --ranks 2 --one-gpu",
        ),
        (
            {"gpus": ((9, 0),) * 9},
            {},
            {},
            "ranks",
            "9 GPUs, and groups have 2, 3, 4, 5, 6, 7, 8, 16 ranks",
            "export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
        ),
    ],
)
def test_each_reason_against_the_fast_path(
    diagnose: Any,
    monkeypatch: pytest.MonkeyPatch,
    driver: dict[str, Any],
    packages: dict[str, str | None],
    environment: dict[str, str],
    name: str,
    text: str,
    command: str,
) -> None:
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    report, checks = diagnose(FakeDriver(**driver), packages)
    assert checks[name]["status"] == "no"
    assert text in checks[name]["text"]
    assert (report["not_on_gpus"], report["next"]) == ([name], command)
    assert report["ok"], "CPU devices work all the same"
    assert doctor._text(report).endswith(f"on CPU devices only; see above: {name}.\nNext: {command}")


def test_stale_kernels_of_the_package_are_a_reason_beside_a_compiler(diagnose: Any, tmp_path: Path) -> None:
    (tmp_path / "packaged").mkdir()
    (tmp_path / "packaged" / "one_shot-tp2-bfloat16-peers-sm_90a.cubin").write_bytes(b"half an entry")
    report, checks = diagnose(FakeDriver(), {})
    assert "one_shot-tp2-bfloat16-peers-sm_90a.cubin: not a whole entry" in checks["kernels"]["text"]
    assert report["next"] == "pip install --force-reinstall --no-deps jax_twoshot"


def test_a_cache_that_others_may_write_to(diagnose: Any, tmp_path: Path) -> None:
    shared = tmp_path / "cache" / "cubins" / "0-1"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    report, checks = diagnose(FakeDriver(), {})
    assert f"{shared}: the cache holds code that runs on the GPU" in checks["kernel cache"]["text"]
    assert report["next"] == "export JAX_TWOSHOT_CACHE_DIR=$(mktemp -d)"


@pytest.mark.parametrize(
    ("torch", "text"),
    [
        (None, "torch is missing for one process a GPU"),
        ("2.13.0+cpu", "torch is missing for one process a GPU"),
        ("2.9.1", "torch 2.9.1 is too old for one process a GPU, 2.11 is needed"),
    ],
)
def test_one_process_needs_no_torch(diagnose: Any, torch: str | None, text: str) -> None:
    _, checks = diagnose(FakeDriver(), {"torch": torch})
    assert checks["symmetric memory"]["status"] == "yes"
    assert checks["symmetric memory"]["text"] == f"cuda-bindings 13.0.1: one process for all GPUs; {text}"


@pytest.mark.parametrize(
    ("vendor", "kind", "text", "command"),
    [
        ("0x10de", "0x030200", "though an NVIDIA GPU is on the PCI bus", "nvidia-smi"),
        ("0x10de", "0x020000", "no NVIDIA GPU on the PCI bus either", "python -m jax_twoshot selftest"),
        ("0x8086", "0x030000", "no NVIDIA GPU on the PCI bus either", "python -m jax_twoshot selftest"),
    ],
    ids=["GPU", "network card", "other GPU"],
)
def test_no_driver(
    diagnose: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, kind: str, text: str, command: str
) -> None:
    device = tmp_path / "bus" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(doctor, "_PCI_DEVICES", tmp_path / "bus")

    report, checks = diagnose(None, {})
    assert checks["NVIDIA driver"]["text"].startswith("libcuda.so.1: cannot open shared object file")
    assert text in checks["NVIDIA driver"]["text"]
    assert (report["not_on_gpus"], report["next"]) == (["NVIDIA driver"], command)
