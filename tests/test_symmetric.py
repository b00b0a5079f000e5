"""Symmetric memory without a GPU.

* host: real memory.
* vmm: the real allocator on a driver that keeps its memory in this process and knows what is still mapped.
* torch: real processes that really agree over JAX's key-value store; torch's layer and the GPU are stand-ins.
  Where torch is installed, its own C++ layer runs on the store too.

This file is both the tests and the worker of the several-process ones.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import itertools
import logging
import os
import re
import socket
import subprocess
import sys
import time
import types
import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers import cpu_mesh

import jax_twoshot
from jax_twoshot import _ffi, _launch, symmetric, workspace

WORD = 0x8000_8000
SIZE = 1000
MULTICAST_SWITCHES = ("JAX_TWOSHOT_MULTICAST", "TORCH_SYMM_MEM_DISABLE_MULTICAST")


def gpu(ordinal: int, process: int = 0) -> Any:
    """What ``allocate`` reads of a ``jax.Device``."""
    return types.SimpleNamespace(platform="gpu", local_hardware_id=ordinal, process_index=process)


def words_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(address))


@pytest.fixture(autouse=True)
def switches(monkeypatch):
    """Both multicast switches on, whatever the machine says: no test here reaches a driver."""
    monkeypatch.setenv("JAX_TWOSHOT_MULTICAST", "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")


def test_importing_loads_neither_torch_nor_cuda_bindings():
    code = "import sys, jax_twoshot.symmetric; print([m for m in ('torch', 'cuda') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "[]\n", ran.stderr


# ---- host --------------------------------------------------------------------------------------------------


def test_host_memory_of_groups_in_any_order():
    d = jax.devices("cpu")
    groups = [[d[5], d[0], d[3]], [d[1], d[7], d[2]]]
    buffers = symmetric.allocate(groups, SIZE, WORD)
    assert [b.rank for b in buffers] == [0, 1, 2] * 2
    assert [b.device for b in buffers] == [device.local_hardware_id for group in groups for device in group]
    assert len({b.address for b in buffers}) == 6
    for group in (buffers[:3], buffers[3:]):
        assert {b.peers for b in group} == {tuple(b.address for b in group)}
    for b in buffers:
        assert (b.bytes, b.address % 256) == (1024, 0)
        assert (b.multicast, b.ranks_on_device, b.sm_count) == (None, 1, 1)
        assert (words_at(b.address, b.bytes) == WORD).all()
    words_at(buffers[1].address, 1024)[:] = 7
    assert (words_at(buffers[0].peers[1], 1024) == 7).all()
    assert (words_at(buffers[2].address, 1024) == WORD).all()
    for b in buffers + buffers:
        b.close()


# ---- vmm ---------------------------------------------------------------------------------------------------


class FakeDriver:
    """``cuda.bindings.driver`` with host memory. ``live`` counts what has not been given back."""

    PAGE = 2048

    def __init__(
        self, gpus: int = 4, fail: int | str | None = None, deaf: int | None = None, multicast: int = 1
    ) -> None:
        self.gpus, self.fail, self.deaf, self.multicast = gpus, fail, deaf, multicast
        self.calls: list[str] = []
        self.live: Counter[str] = Counter()
        self.memories: dict[int, np.ndarray] = {}
        self.teams: dict[int, dict[int, int]] = {}
        self.mapped: dict[int, int] = {}
        self.access: dict[int, set[int]] = {}
        self.ids = itertools.count(1)
        self.context: list[int] = []
        for enum in ("CUdevice_attribute", "CUmemAllocationType", "CUmemLocationType", "CUmemAccess_flags"):
            setattr(self, enum, _Names())
        self.CUmemAllocationGranularity_flags = self.CUmulticastGranularity_flags = _Names()
        self.CUmulticastObjectProp = types.SimpleNamespace
        self.CUmemAllocationProp = self.CUmemAccessDesc = lambda: types.SimpleNamespace(
            location=types.SimpleNamespace()
        )

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if not name.startswith("cu") or name.startswith("cuGetError"):
            return value

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if self.fail in (name, len(self.calls)):
                return (999,)
            result = value(*args)
            return (0,) if result is None else (0, result)

        return call

    def cuGetErrorName(self, status: int) -> Any:
        return 0, b"CUDA_ERROR_PLANNED"

    def cuGetErrorString(self, status: int) -> Any:
        return 0, b"as the test wants"

    def cuInit(self, flags: int) -> None:
        pass

    def cuDeviceGet(self, ordinal: int) -> int:
        assert 0 <= ordinal < self.gpus
        return 100 + ordinal

    def cuDeviceGetAttribute(self, attribute: str, gpu: int) -> int:
        known = {"MULTICAST_SUPPORTED": self.multicast, "MULTIPROCESSOR_COUNT": 132 - gpu % 100}
        return known[attribute.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuDeviceGetUuid(self, gpu: int) -> Any:
        return types.SimpleNamespace(bytes=bytes(range(gpu, gpu + 16)))

    def cuDeviceCanAccessPeer(self, a: int, b: int) -> int:
        assert a != b
        return 1

    def cuDevicePrimaryCtxRetain(self, gpu: int) -> int:
        return gpu

    def cuCtxPushCurrent(self, context: int) -> None:
        self.context.append(context)

    def cuCtxPopCurrent(self) -> int:
        return self.context.pop()

    def cuCtxSynchronize(self) -> None:
        assert self.context

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> int:
        return self.PAGE

    def cuMulticastGetGranularity(self, properties: Any, option: str) -> int:
        return 2 * self.PAGE

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> int:
        assert self.context and size % self.PAGE == 0
        handle = next(self.ids)
        self.memories[handle] = np.zeros(size, np.uint8)
        self.live["memory"] += 1
        return handle

    def cuMulticastCreate(self, properties: Any) -> int:
        assert properties.size % (2 * self.PAGE) == 0
        handle = next(self.ids)
        self.teams[handle] = {}
        self.live["memory"] += 1
        return handle

    def cuMulticastAddDevice(self, handle: int, gpu: int) -> None:
        assert gpu not in self.teams[handle]
        self.teams[handle][gpu] = 0

    def cuMulticastBindMem(
        self, handle: int, offset: int, memory: int, at: int, size: int, flags: int
    ) -> None:
        gpu = next(gpu for gpu, bound in self.teams[handle].items() if not bound)
        self.teams[handle][gpu] = memory
        self.live["bound"] += 1

    def cuMulticastUnbind(self, handle: int, gpu: int, offset: int, size: int) -> None:
        assert self.teams[handle][gpu] in self.memories, "memory was released before it was unbound"
        self.live["bound"] -= 1

    def cuMemRelease(self, handle: int) -> None:
        self.memories.pop(handle, None)
        self.live["memory"] -= 1

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        self.live["address"] += 1
        return next(self.ids) << 32

    def cuMemAddressFree(self, address: int, size: int) -> None:
        assert address not in self.mapped
        self.live["address"] -= 1

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        self.mapped[address] = handle
        self.live["map"] += 1

    def cuMemUnmap(self, address: int, size: int) -> None:
        del self.mapped[address]
        self.live["map"] -= 1

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> None:
        assert len(access) == count
        self.access[address] = {a.location.id for a in access}

    def words(self, address: int) -> np.ndarray:
        base = address >> 32 << 32
        return self.memories[self.mapped[base]][address - base :].view(np.uint32)

    def cuMemsetD32(self, address: int, word: int, count: int) -> None:
        assert self.context[-1] - 100 in self.access[address]
        self.words(address)[:count] = word

    def cuMemcpyDtoH(self, host: int, address: int, size: int) -> None:
        words_at(host, size)[:] = self.words(address)[: size // 4]

    def cuModuleLoadData(self, ptx: bytes) -> bytes:
        assert b"multimem.st" in ptx
        return ptx

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> bytes:
        return name

    def cuModuleUnload(self, module: bytes) -> None:
        pass

    def cuLaunchKernel(self, kernel: bytes, *rest: Any) -> None:
        (address, word), kinds = rest[-2]
        assert (kernel, kinds) == (b"multimem_store", (ctypes.c_uint64, ctypes.c_uint32))
        base = address >> 32 << 32
        for gpu, memory in self.teams[self.mapped[base]].items():
            if gpu - 100 != self.deaf:
                self.memories[memory][address - base :].view(np.uint32)[0] = word


class _Names:
    """An enumeration whose values are their names."""

    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture
def driver(monkeypatch):
    """Puts a ``FakeDriver`` under the real ``_Driver``, on an NVSwitch fabric."""

    def install(**options: Any) -> FakeDriver:
        fake = FakeDriver(**options)
        bindings = types.ModuleType("cuda.bindings")
        bindings.driver = fake  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setattr(symmetric, "_fabric_refusal", lambda uuid: None)
        return fake

    return install


def check_vmm(fake: FakeDriver, groups: list[list[int]]) -> list[symmetric.SymmetricBuffer]:
    """Allocates for groups of ordinals and checks all that holds with and without multicast."""
    buffers = symmetric.allocate([[gpu(o) for o in group] for group in groups], SIZE, WORD)
    assert [(b.device, b.rank) for b in buffers] == [(o, r) for group in groups for r, o in enumerate(group)]
    at = 0
    for group in groups:
        members, at = buffers[at : at + len(group)], at + len(group)
        assert {b.peers for b in members} == {tuple(b.address for b in members)}
        assert all(fake.access[b.address] == set(group) for b in members)
    assert len({b.address for b in buffers}) == len(buffers)
    for b in buffers:
        assert b.bytes == 1024
        assert (fake.words(b.address)[: b.bytes // 4] == WORD).all()
    assert fake.context == []
    return buffers


def check_nothing_live(fake: FakeDriver) -> None:
    assert not +fake.live and not -fake.live, fake.live
    assert not fake.mapped


def test_vmm_with_multicast(driver):
    fake = driver()
    buffers = check_vmm(fake, [[2, 0], [3, 1]])
    assert [b.multicast_reason for b in buffers] == [None] * 4
    for first, second in (buffers[:2], buffers[2:]):
        assert first.multicast == second.multicast
        team = fake.teams[fake.mapped[first.multicast]]
        assert list(team.values()) == [fake.mapped[a] for a in first.peers]
    assert {(b.ranks_on_device, b.sm_count) for b in buffers} == {(1, 129)}
    buffers[0].close()
    check_nothing_live(fake)
    buffers[0].close()
    buffers[3].close()
    check_nothing_live(fake)


@pytest.mark.parametrize(
    ("switch", "value"), [("JAX_TWOSHOT_MULTICAST", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")]
)
def test_with_a_switch_off_no_multicast_call_is_made(driver, monkeypatch, switch, value):
    monkeypatch.setenv(switch, value)
    monkeypatch.setattr(symmetric, "_fabric_refusal", lambda uuid: pytest.fail("asked for the fabric"))
    fake = driver()
    monkeypatch.setattr(fake, "cuDeviceGetAttribute", _only_sm_count, raising=False)
    buffers = check_vmm(fake, [[0, 1, 2, 3]])
    assert not [call for call in fake.calls if "Multicast" in call]
    assert all(b.multicast is None and "switched off" in b.multicast_reason for b in buffers)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"  # before torch can be used at all


def _only_sm_count(attribute: str, gpu: int) -> int:
    assert attribute == "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT", "asked for multicast"
    return 132


@pytest.mark.parametrize(
    "switch", [("JAX_TWOSHOT_MULTICAST", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")]
)
def test_the_gate_answers_before_it_asks_the_driver(monkeypatch, switch):
    monkeypatch.setenv(*switch)
    reason = symmetric.multicast_refusal(None, 0)  # type: ignore[arg-type]
    assert reason == "switched off by JAX_TWOSHOT_MULTICAST=0 or TORCH_SYMM_MEM_DISABLE_MULTICAST=1"


def test_without_the_device_attribute_or_a_fabric_there_is_no_multicast_object(driver, monkeypatch):
    fake = driver(multicast=0)
    (first, _) = check_vmm(fake, [[0, 1]])
    assert "the device attribute says" in first.multicast_reason
    assert not [call for call in fake.calls if "Multicast" in call]
    fake = driver()
    monkeypatch.setattr(symmetric, "_fabric_refusal", lambda uuid: f"no fabric at {uuid[:8]}")
    (first, _) = check_vmm(fake, [[0, 1]])
    assert first.multicast_reason == ("GPU 64656667-6869-6a6b-6c6d-6e6f70717273: no fabric at 64656667")
    assert not [call for call in fake.calls if "Multicast" in call]


def test_a_machine_without_nvml_has_no_fabric():
    if _launch.gpu_count():
        pytest.skip("this machine has NVML")
    assert symmetric._fabric_refusal("0").startswith(
        "NVML cannot say whether the GPU is on an NVSwitch fabric: "
    )


def test_several_ranks_on_one_gpu(driver):
    fake = driver()
    buffers = check_vmm(fake, [[1, 1, 1], [1, 0, 2]])
    assert {b.ranks_on_device for b in buffers} == {4}
    assert {b.multicast for b in buffers} == {None}
    assert not [call for call in fake.calls if "Multicast" in call]
    assert "ranks share a GPU" in buffers[0].multicast_reason


@pytest.mark.parametrize(
    "call",
    [
        "cuMulticastGetGranularity",
        "cuMulticastCreate",
        "cuMulticastAddDevice",
        "cuMulticastBindMem",
        "cuModuleLoadData",
    ],
)
def test_multicast_that_fails_gives_way_to_peer_stores_and_keeps_the_text(driver, call):
    fake = driver(fail=call)
    buffers = check_vmm(fake, [[0, 1], [2, 3]])
    step = "store" if call == "cuModuleLoadData" else "map"
    text = f"{step} multicast: process 0: RuntimeError: {call}: CUDA_ERROR_PLANNED (as the test wants)"
    assert {(b.multicast, b.multicast_reason) for b in buffers} == {(None, text)}
    assert +fake.live == {"memory": 4, "address": 4, "map": 4}
    buffers[0].close()
    check_nothing_live(fake)


def test_a_multicast_store_that_misses_a_gpu_gives_way_to_peer_stores(driver):
    fake = driver(deaf=2)
    buffers = check_vmm(fake, [[0, 1], [3, 2]])
    assert {b.multicast for b in buffers} == {None}
    want = [symmetric._probe_word(0), symmetric._probe_word(1)]
    assert buffers[0].multicast_reason == (
        f"check multicast: process 0: RuntimeError: rank 1 got [0, 0] from multicast stores of {want}"
    )
    assert +fake.live == {"memory": 4, "address": 4, "map": 4}


def test_a_failure_of_any_driver_call_leaves_nothing_mapped(driver, monkeypatch):
    monkeypatch.setenv("JAX_TWOSHOT_MULTICAST", "0")
    calls = driver(gpus=2)
    check_vmm(calls, [[0, 1]])
    assert len(calls.calls) == 39
    for number, name in enumerate(calls.calls, start=1):
        fake = driver(gpus=2, fail=number)
        with pytest.raises(
            symmetric.SymmetricMemoryError, match=rf"{name}: CUDA_ERROR_PLANNED \(as the test wants"
        ):
            symmetric.allocate([[gpu(0), gpu(1)]], SIZE, WORD)
        check_nothing_live(fake)


def test_a_failure_after_multicast_was_mapped_leaves_nothing_mapped(driver):
    fake = driver(fail="cuMemsetD32")
    with pytest.raises(
        symmetric.SymmetricMemoryError, match="step 'arm' failed on process 0: .* cuMemsetD32"
    ):
        symmetric.allocate([[gpu(0), gpu(1)]], SIZE, WORD)
    assert "cuMulticastUnbind" in fake.calls
    check_nothing_live(fake)


def test_what_else_to_prepare_is_a_step_before_arming(driver):
    fake = driver()
    seen: list[symmetric.SymmetricBuffer] = []

    def prepare(buffers: Any) -> None:
        seen.extend(buffers)
        assert all((fake.words(b.address) != WORD).all() for b in buffers)

    buffers = symmetric.allocate([[gpu(0), gpu(1)]], SIZE, WORD, prepare)
    assert seen == buffers
    assert all((fake.words(b.address)[:256] == WORD).all() for b in buffers)
    buffers[1].close()
    check_nothing_live(fake)

    def refuse(buffers: Any) -> None:
        raise ValueError("no cubin")

    fake = driver()
    with pytest.raises(
        symmetric.SymmetricMemoryError, match="step 'prepare' failed on process 0: ValueError: no cubin"
    ):
        symmetric.allocate([[gpu(0), gpu(1)]], SIZE, WORD, refuse)
    assert "cuMemCreate" in fake.calls
    check_nothing_live(fake)


@pytest.mark.parametrize("error", [RuntimeError("no such GPU"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_workspace_whose_set_up_fails_gives_back_what_it_has_opened(monkeypatch, error):
    held = set()

    def open_(cuda, buffers):
        held.add(cuda.id)
        cuda.native = object()

    def fill(memory, word):
        assert held, "kernels are there before memory is armed"
        raise error

    monkeypatch.setattr(workspace._CudaBuffers, "_open", open_)
    monkeypatch.setattr(_ffi, "close_cuda_workspace", held.remove)
    monkeypatch.setattr(symmetric._HostMemory, "fill", fill)
    with (
        jax_twoshot.Workspace(cpu_mesh(2), "tp", rows=1, width=64) as on_cpu,
        pytest.raises((symmetric.SymmetricMemoryError, KeyboardInterrupt)),
    ):
        workspace._CudaBuffers(on_cpu)
    assert not held and not workspace._closing


def test_memory_that_cannot_be_given_back_keeps_no_other_from_it(monkeypatch, caplog):
    closed = []

    def refuse():
        raise RuntimeError("cuMemUnmap: CUDA_ERROR_ILLEGAL_ADDRESS")

    def close():
        with workspace._closing_lock:  # as a workspace does that the garbage collector finds meanwhile
            closed.append(True)

    buffers = [types.SimpleNamespace(close=refuse), types.SimpleNamespace(close=close)]
    monkeypatch.setattr(workspace, "_closing", [(7, buffers), (8, buffers)])
    monkeypatch.setattr(_ffi, "cuda_workspace_in_use", lambda number: False)
    with workspace._closing_lock:
        workspace._free_unused()
    assert closed == [True, True] and not workspace._closing
    assert [r.getMessage() for r in caplog.records] == [
        f"workspace {n}: memory is not given back: cuMemUnmap: CUDA_ERROR_ILLEGAL_ADDRESS" for n in (7, 8)
    ]


def test_the_watcher_goes_on_after_an_error(monkeypatch, caplog):
    monkeypatch.setattr(workspace, "_WATCH_SECONDS", 0)
    rounds = iter([RuntimeError("no context"), None, SystemExit()])

    def log_slow_waits():
        if error := next(rounds):
            raise error

    monkeypatch.setattr(workspace, "_log_slow_waits", log_slow_waits)
    with pytest.raises(SystemExit):
        workspace._watch()
    assert [r.getMessage() for r in caplog.records] == ["watching the workspaces"]


def test_rearming_waits_for_the_gpus_before_it_fills(driver):
    fake = driver()
    buffers = symmetric.allocate([[gpu(0), gpu(1)]], SIZE, WORD)
    for reset in range(2):
        for buffer in buffers:
            fake.words(buffer.address)[:] = 7
        fake.calls.clear()
        symmetric.rearm(buffers, WORD, lambda: fake.calls.append("clear"))
        work = [call for call in fake.calls if call in ("cuCtxSynchronize", "cuMemsetD32", "clear")]
        assert work == ["cuCtxSynchronize"] * 2 + ["cuMemsetD32", "cuCtxSynchronize"] * 2 + ["clear"], reset
        assert all((fake.words(b.address)[:256] == WORD).all() for b in buffers)
    buffers[0].close()
    check_nothing_live(fake)


def test_rearming_that_fails_says_which_step(driver):
    buffers = symmetric.allocate([[gpu(0), gpu(1)]], SIZE, WORD, owner="workspace 5") if driver() else []
    with pytest.raises(
        symmetric.SymmetricMemoryError, match="workspace 5: step 'reset 1, arm' failed on process 0: OSError: planned"
    ):
        symmetric.rearm(buffers, WORD, _planned)
    symmetric.rearm(buffers, WORD, lambda: None)


def _planned() -> None:
    raise OSError("planned")


def test_gpus_that_cannot_reach_each_other_are_named(driver, monkeypatch):
    fake = driver()
    monkeypatch.setattr(fake, "cuDeviceCanAccessPeer", lambda a, b: int({a, b} != {101, 103}), raising=False)
    with pytest.raises(
        symmetric.SymmetricMemoryError, match="GPU 1 cannot address the memory of GPU 3.*lax.psum"
    ):
        symmetric.allocate([[gpu(0), gpu(1), gpu(3)]], SIZE, WORD)
    assert "cuMemCreate" not in fake.calls


def test_without_cuda_bindings_the_text_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(symmetric.SymmetricMemoryError, match="pip install cuda-bindings"):
        symmetric.allocate([[gpu(0), gpu(1)]], SIZE, WORD)


# ---- Several processes -------------------------------------------------------------------------------------


def test_several_gpus_in_one_of_several_processes_are_refused():
    with pytest.raises(ValueError, match="process 1 has 2; start one process a GPU"):
        symmetric.allocate([[gpu(0, 0), gpu(0, 1), gpu(1, 1)]], SIZE, WORD)


def test_cpu_devices_of_several_processes_are_refused():
    device = jax.devices("cpu")[0]
    other = types.SimpleNamespace(platform="cpu", local_hardware_id=0, process_index=1)
    with pytest.raises(ValueError, match="CPU devices share memory within one process, got 2 processes"):
        symmetric.allocate([[device, other]], SIZE, WORD)


def test_without_jax_distributed_the_text_says_what_to_call():
    with pytest.raises(symmetric.SymmetricMemoryError, match="call jax.distributed.initialize"):
        symmetric.allocate([[gpu(0, 0), gpu(1, 1)]], SIZE, WORD)


def test_a_process_outside_the_mesh_gets_nothing():
    assert symmetric.allocate([[gpu(0, 1), gpu(0, 2)]], SIZE, WORD) == []


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("torch.OutOfMemoryError: CUDA driver error: out of memory", "lower XLA_PYTHON_CLIENT_MEM_FRACTION"),
        ("RuntimeError: Failed to send fd: Connection refused", "one PID namespace"),
        ("RuntimeError: something else", ""),
    ],
)
def test_known_causes_carry_their_fix(text, fix):
    assert fix in symmetric._fix(text) and bool(fix) == bool(symmetric._fix(text))


class FakeGpu:
    """Stands for ``_Driver`` in a worker: each process has a GPU of its own unless ``shared``."""

    def __init__(self, process: int, faults: dict[str, int]) -> None:
        self.process, self.faults = process, faults

    def fails(self, fault: str) -> bool:
        return self.faults.get(fault) in (self.process, -1)

    def attribute(self, name: str, ordinal: int) -> int:
        return {
            "MULTICAST_SUPPORTED": not self.fails("attribute"),
            "MULTIPROCESSOR_COUNT": 132 - self.process,
        }[name]

    def uuid(self, ordinal: int) -> str:
        if self.fails("uuid"):
            raise RuntimeError("no such GPU")
        return "one" if self.fails("one_gpu") else f"gpu{self.process}"

    def fabric_refusal(self, ordinal: int) -> str | None:
        return None

    def fill(self, ordinal: int, address: int, word: int, words: int) -> None:
        if self.fails("fill"):
            raise RuntimeError("no fill")
        words_at(address, 4 * words)[:] = word

    def store_multicast(self, ordinal: int, address: int, word: int) -> None:
        if self.fails("store"):
            raise RuntimeError("no store")

    def settle(self, ordinal: int) -> None:
        if self.fails("settle"):
            raise RuntimeError("still busy")

    def load(self, ordinal: int, address: int, words: int) -> list[int]:
        return [0 if self.fails("load") else symmetric._probe_word(rank) for rank in range(words)]


class Tracked(types.SimpleNamespace):
    """Whose end a ``weakref`` can tell."""


class FakeTorch:
    """The part of torch's C++ layer that is used. As in torch, a rendezvous goes over the group's store."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.groups: dict[str, Any] = {}
        self.alive: Counter[str] = Counter()
        self.environments: list[tuple[str | None, str | None]] = []
        self.rendezvous_count = itertools.count()
        self._SymmetricMemory = self

    class Store:
        pass

    class PrefixStore:
        def __init__(self, prefix: str, store: Any) -> None:
            self.set = lambda key, value: store.set(f"{prefix}/{key}", value)
            self.get = lambda key: store.get(f"{prefix}/{key}")
            self.wait = lambda keys: store.wait([f"{prefix}/{key}" for key in keys])

    class ProcessGroup:
        def __init__(self, store: Any, rank: int, size: int) -> None:
            self.store, self.rank, self.size = store, rank, size

    def set_group_info(self, name: str, rank: int, size: int, store: Any) -> None:
        pass

    def get_backend(self, device: Any) -> str:
        return "NVSHMEM" if self.gpu.fails("backend") else "CUDA"

    def _register_process_group(self, name: str, group: Any) -> None:
        assert name not in self.groups
        self.groups[name] = group

    def _unregister_process_group(self, name: str) -> None:
        del self.groups[name]

    def empty_strided_p2p(self, size: tuple[int], stride: tuple[int], dtype: Any, device: Any) -> Any:
        assert stride == (1,)
        if self.gpu.fails("memory"):
            raise RuntimeError("CUDA driver error: out of memory")
        array = np.zeros(size[0] + 256, np.uint8)
        tensor = Tracked(array=array, data_ptr=lambda: -(-array.ctypes.data // 256) * 256)
        self.track("tensor", tensor)
        return tensor

    def rendezvous(self, tensor: Any, name: str) -> Any:
        group, count = self.groups[name], next(self.rendezvous_count)
        self.environments.append(
            tuple(os.environ.get(n) for n in (symmetric._DISABLE_MULTICAST, symmetric._ALLOW_OVERLAPPING))
        )
        assert "Umask:\t0077\n" in Path("/proc/self/status").read_text()
        if self.gpu.fails("rendezvous"):
            raise RuntimeError("CUDA driver error: invalid argument")
        group.store.set(f"{count}/{group.rank}", str(tensor.data_ptr()).encode())
        group.store.wait([f"{count}/{rank}" for rank in range(group.size)])
        addresses = [int(group.store.get(f"{count}/{rank}")) for rank in range(group.size)]
        multicast = os.environ[symmetric._DISABLE_MULTICAST] != "1" and not self.gpu.fails("no_multicast")
        handle = Tracked(buffer_ptrs=addresses, multicast_ptr=77 if multicast else 0)
        self.track("handle", handle)
        return handle

    def track(self, kind: str, thing: Any) -> None:
        self.alive[kind] += 1
        weakref.finalize(thing, self.alive.subtract, [kind])

    def install(self) -> None:
        """Makes ``import torch`` find this."""
        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(device=lambda device: nullcontext(), is_available=lambda: True)
        torch.device, torch.uint8, torch.__version__ = lambda kind, index: f"{kind}:{index}", "uint8", "0"
        torch.version = types.SimpleNamespace(cuda="13.0")
        distributed = types.ModuleType("torch.distributed")
        distributed.Store, distributed.is_available = self.Store, lambda: True
        torch.distributed = distributed
        sys.modules |= {
            "torch": torch,
            "torch.distributed": distributed,
            "torch._C": types.ModuleType("torch._C"),
        }
        sys.modules["torch._C._distributed_c10d"] = self  # type: ignore[assignment]


GROUPS = ((2, 0), (3, 1))
"""Of processes: a 2 x 2 mesh, reduced over its first axis, the ranks not in the order of the processes."""

SCENARIOS: dict[str, dict[str, Any]] = {
    # Which process fails, -1 for all. "switch": has JAX_TWOSHOT_MULTICAST=0; "absent": never calls.
    "multicast": {},
    "switched off by one": {"switch": 3},
    "no attribute on one": {"attribute": 2},
    "no address on one": {"no_multicast": 1},
    "store fails on one": {"store": 0},
    "load fails on one": {"load": 2},
    "one GPU": {"one_gpu": -1, "ordinals": (0, 0, 0, 0)},
    "one GPU by many names": {"one_gpu": -1},
    "hidden GPUs": {"ordinals": (0, 0, 0, 0)},
    "peers only": {"switch": -1},
    "no GPU on one": {"uuid": 1},
    "another backend on one": {"backend": 3},
    "no memory on one": {"memory": 2, "switch": -1},
    "rendezvous fails on one": {"rendezvous": 2, "switch": -1},
    "fill fails on one": {"fill": 3},
    "two hosts": {"host": 1},
    "one is absent": {"absent": 2, "timeout": 2.0},
    "reset": {"reset": True},
    "reset fails on one": {"reset": True, "settle": 1},
    "one does not reset": {"reset": True, "stays": 3, "timeout": 0.5},
    "afterwards": {},
}


class Warnings(logging.Handler):
    """What the library has logged since it was last asked."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


warnings = Warnings()


def outcome(process: int, faults: dict[str, Any]) -> dict[str, Any]:
    """Runs one scenario on this process."""
    gpu_, ordinals = FakeGpu(process, faults), faults.get("ordinals", (0, 1, 2, 3))
    torch = FakeTorch(gpu_)
    torch.install()
    symmetric._Driver = lambda: gpu_  # type: ignore[assignment, misc]
    socket.gethostname = lambda: "another" if gpu_.fails("host") else "here"
    os.environ["JAX_TWOSHOT_TIMEOUT"] = "60"
    os.environ["JAX_TWOSHOT_MULTICAST"] = "0" if gpu_.fails("switch") else "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "0"
    groups = [[gpu(ordinals[p], p) for p in group] for group in GROUPS]
    start = time.monotonic()
    try:
        (buffer,) = symmetric.allocate(groups, SIZE, WORD, owner="workspace 7", timeout=faults.get("timeout"))
    except (ValueError, symmetric.SymmetricMemoryError) as error:
        result = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    else:
        names = ("device", "rank", "bytes", "address", "peers", "multicast", "ranks_on_device", "sm_count")
        result = {name: getattr(buffer, name) for name in names} | {"reason": buffer.multicast_reason}
        result["armed"] = bool((words_at(buffer.address, buffer.bytes) == WORD).all())
        result["held"] = dict(torch.alive)
        if faults.get("reset"):
            result["reset"] = reset(buffer, faults.get("stays") == process)
        buffer.close()
        buffer.close()
    left = {
        name: os.environ.get(name) for name in (symmetric._DISABLE_MULTICAST, symmetric._ALLOW_OVERLAPPING)
    }
    gc.collect()
    return result | {
        "warnings": warnings.take(),
        "resources": {
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "shared memory": Path("/proc/self/maps").read_text().count("/dev/shm"),
        },
        "alive": sum(torch.alive.values()),
        "groups": len(torch.groups),
        "environments": torch.environments,
        "left": left,
    }


def reset(buffer: symmetric.SymmetricBuffer, stays: bool) -> dict[str, Any]:
    """Arms a used buffer again, or waits until the others have given up on this process."""
    words = words_at(buffer.address, buffer.bytes)
    words[:] = 7
    if stays:
        time.sleep(2.5)
        return {}
    try:
        symmetric.rearm([buffer], WORD, lambda: None)
        return {"armed": bool((words == WORD).all())}
    except symmetric.SymmetricMemoryError as error:
        return {"text": str(error), "armed": bool((words == WORD).any())}


def worker() -> None:
    jax.config.update("jax_platforms", "cpu")
    process = _launch.initialize()
    jax.devices()
    symmetric.logger.addHandler(warnings)
    results = {}
    for name, faults in SCENARIOS.items():
        if faults.get("absent") == process:
            symmetric._next_call((0, 1, 2, 3))
            time.sleep(3)
            results[name] = {}
        else:
            results[name] = outcome(process, faults)
    _launch.summary(**results)


@pytest.fixture(scope="module")
def results():
    """Outcome of each scenario, by name, on each of four processes."""
    of_process = _launch.launch(4, [sys.executable, __file__], timeout=240)
    return {name: [result[name] for result in of_process] for name in SCENARIOS}


def check_success(results: list[dict[str, Any]]) -> None:
    """What holds of every set-up that went well."""
    for group in GROUPS:
        addresses = [results[process]["address"] for process in group]
        for rank, process in enumerate(group):
            assert results[process]["rank"] == rank
            assert results[process]["peers"] == addresses
    for result in results:
        assert (result["bytes"], result["armed"], result["sm_count"]) == (1024, True, 129)
        assert result["held"] == {"tensor": 1, "handle": 1}
    check_clean(results)


def check_clean(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert (result["alive"], result["groups"]) == (0, 0)


def test_processes_agree_on_multicast(results):
    for name in ("multicast", "afterwards"):
        check_success(results[name])
        assert [(r["multicast"], r["reason"], r["ranks_on_device"]) for r in results[name]] == [
            (77, None, 1)
        ] * 4
        assert [r["device"] for r in results[name]] == [0, 1, 2, 3]
        assert [r["environments"] for r in results[name]] == [[["0", None]]] * 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "switched off by one",
            "GPU gpu3: switched off by JAX_TWOSHOT_MULTICAST=0 or TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
        ),
        ("no attribute on one", "GPU gpu2: the device attribute says that the GPU has no multicast"),
        (
            "no address on one",
            "map multicast: process 1: RuntimeError: the rendezvous gave no multicast address; torch's log "
            "has the driver's text",
        ),
        ("store fails on one", "store multicast: process 0: RuntimeError: no store"),
        (
            "load fails on one",
            "check multicast: process 2: RuntimeError: rank 0 got [0, 0] from multicast stores of "
            f"{[0x70730000, 0x70730001]}",
        ),
    ],
)
def test_one_process_without_multicast_moves_all_to_peer_stores(results, name, reason):
    check_success(results[name])
    assert [(r["multicast"], r["reason"]) for r in results[name]] == [(None, reason)] * 4
    for r in results[name]:
        assert r["environments"][-1] == ["1", None]  # torch is told to make no multicast object
        assert r["left"][symmetric._ALLOW_OVERLAPPING] is None


def test_a_switch_off_keeps_torch_from_multicast_for_good(results):
    check_success(results["peers only"])
    for r in results["peers only"]:
        assert r["environments"] == [["1", None]]
        assert r["left"][symmetric._DISABLE_MULTICAST] == "1"
    for process, r in enumerate(results["switched off by one"]):
        assert r["environments"] == [["1", None]]
        assert r["left"][symmetric._DISABLE_MULTICAST] == ("1" if process == 3 else "0")


def test_ranks_that_share_a_gpu_are_found_out_and_allowed(results):
    check_success(results["one GPU"])
    for r in results["one GPU"]:
        assert (r["ranks_on_device"], r["multicast"], r["device"]) == (4, None, 0)
        assert r["environments"] == [["1", "1"]]
        assert r["left"][symmetric._ALLOW_OVERLAPPING] is None
        assert "ranks share a GPU" in r["reason"]


def test_a_gpu_of_several_names_is_one_gpu(results):
    name = "one GPU by many names"
    check_success(results[name])
    for r in results[name]:
        assert (r["ranks_on_device"], r["multicast"], r["environments"]) == (4, None, [["1", None]])


def test_processes_that_each_see_one_gpu_work_with_peer_stores(results):
    check_success(results["hidden GPUs"])
    for r in results["hidden GPUs"]:
        assert (r["ranks_on_device"], r["multicast"], r["environments"]) == (1, None, [["1", "1"]])
        assert "CUDA_VISIBLE_DEVICES" in r["reason"]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (
            "no GPU on one",
            "SymmetricMemoryError",
            "workspace 7: step 'describe' failed on process 1: RuntimeError: no such GPU",
        ),
        (
            "another backend on one",
            "SymmetricMemoryError",
            "workspace 7: step 'describe' failed on process 3: RuntimeError: torch's symmetric memory "
            "uses NVSHMEM, it must use CUDA: unset TORCH_SYMMMEM",
        ),
        (
            "no memory on one",
            "SymmetricMemoryError",
            "workspace 7: step 'map' failed on process 2: RuntimeError: CUDA driver error: out of memory; XLA has "
            "taken the GPU's memory: lower XLA_PYTHON_CLIENT_MEM_FRACTION",
        ),
        (
            "rendezvous fails on one",
            "SymmetricMemoryError",
            "workspace 7: step 'map' failed on process 2: RuntimeError: CUDA driver error: invalid "
            "argument",
        ),
        (
            "fill fails on one",
            "SymmetricMemoryError",
            "workspace 7: step 'arm' failed on process 3: RuntimeError: no fill",
        ),
        (
            "two hosts",
            "ValueError",
            "groups: all ranks must be on one host, got another, here; use a mesh axis within a host and "
            "lax.psum across hosts",
        ),
    ],
)
def test_one_failure_is_everyones_with_the_same_text_and_nothing_stays_mapped(results, name, error, text):
    assert [(r["error"], r["text"]) for r in results[name]] == [(error, text)] * 4
    check_clean(results[name])


def test_no_rendezvous_begins_without_everyones_memory(results):
    """Torch keeps for good what a rank has exported in one that another misses."""
    assert [r["environments"] for r in results["no memory on one"]] == [[]] * 4


def test_a_failed_peer_ends_a_rendezvous_long_before_the_deadline(results):
    assert max(r["seconds"] for r in results["rendezvous fails on one"]) < 30  # the deadline is 60 s


def test_a_process_that_never_comes_is_named_at_the_deadline(results):
    for process in (0, 1, 3):
        r = results["one is absent"][process]
        assert r["error"] == "SymmetricMemoryError"
        assert r["text"] == (
            f"workspace 7: process {process} waits for process 2 in step 'describe': the deadline "
            "Workspace(timeout=...) of 2 s has passed; every process of the mesh must make and reset the same "
            "workspaces in the same order: look for one that failed, or is still busy"
        )
        (warning,) = r["warnings"]
        assert re.fullmatch(
            f"workspace 7: process {process} waits for process 2 in step 'describe', for 0.[2-9].* s so far", warning
        )
        check_clean([r])


def test_a_reset_arms_again_on_every_process(results):
    check_success(results["reset"])
    assert [r["reset"] for r in results["reset"]] == [{"armed": True}] * 4


def test_a_reset_that_fails_on_one_process_arms_nothing_and_fails_on_all(results):
    text = "workspace 7: step 'reset 1, settle' failed on process 1: RuntimeError: still busy"
    assert [r["reset"] for r in results["reset fails on one"]] == [{"text": text, "armed": False}] * 4
    check_clean(results["reset fails on one"])


def test_a_process_that_does_not_reset_is_named_at_three_deadlines(results):
    for process, result in enumerate(results["one does not reset"][:3]):
        text, armed = result["reset"].values()
        assert not armed
        assert text.startswith(
            f"workspace 7: process {process} waits for process 3 in step 'reset 1, settle': 3 times the deadline "
            "Workspace(timeout=...) of 0.5 s has passed; "
        )
    check_clean(results["one does not reset"])


def test_no_set_up_leaves_a_file_a_thread_or_shared_memory_behind(results):
    """Most of the scenarios between these two fail."""
    for process in range(4):
        assert results["afterwards"][process]["resources"] == results["multicast"][process]["resources"]


# ---- torch itself ------------------------------------------------------------------------------------------


def torch_worker() -> None:
    import datetime

    import torch
    import torch.distributed as dist

    jax.config.update("jax_platforms", "cpu")
    rank = _launch.initialize()
    jax.devices()
    os.environ["JAX_TWOSHOT_TIMEOUT"] = "60"
    store = symmetric._KeyValueStore(symmetric._jax_client(), "test", symmetric._Deadline.of(None))
    peers = symmetric._Peers("symmetric memory", (0, 1), rank, store)
    c10d = symmetric._c10d()
    result: dict[str, Any] = {}

    memory = symmetric._TorchMemory([symmetric._Member(0, 0, rank, 2)], SIZE, peers)
    with memory._group("map", memory.members[0]) as name:
        group = c10d._resolve_process_group(name)
        result["group"] = [group.rank(), group.size()]
    try:
        c10d._resolve_process_group(name)
    except Exception as error:
        result["unregistered"] = type(error).__name__
    result["default group"] = dist.is_initialized()

    # Beside a default group of the user's own. It is made on both before one may destroy it: Gloo, still connecting,
    # would fail with "Connection closed by peer".
    seconds = datetime.timedelta(seconds=60)
    default = dist.PrefixStore("default", symmetric._torch_store(peers, "default"))
    make = functools.partial(dist.init_process_group, "gloo", store=default, rank=rank, world_size=2, timeout=seconds)
    peers.require("default", make)
    with memory._group("map again", memory.members[0]) as name:
        result["beside"] = [c10d._resolve_process_group(name).size(), dist.get_rank()]
    dist.destroy_process_group()

    # Gloo's C++ drives the store as the rendezvous does: set, wait, get.
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", symmetric._torch_store(peers, "sum")), rank, 2, seconds
    )
    tensor = torch.tensor([rank + 1.0])
    gloo.allreduce([tensor]).wait()
    result["sum"] = tensor.item()

    # Torch's exchanges, whose count is the process's: another one here than there, once a rendezvous has failed.
    exchanges = dist.PrefixStore("count", symmetric._torch_store(peers, "count"))
    result["exchanged"] = []
    for count in (3 + 4 * rank, 4 + 4 * rank):
        mine, theirs = (f"CUDASymmetricMemory/{count}/{r}" for r in (rank, 1 - rank))
        exchanges.set(mine, f"{rank} of {count}")
        exchanges.wait([theirs])
        result["exchanged"].append(exchanges.get(theirs).decode())

    def fail_or_wait() -> None:
        if rank == 1:
            raise RuntimeError("planned")
        dist.ProcessGroupGloo(
            dist.PrefixStore("late", symmetric._torch_store(peers, "late")), rank, 2, seconds
        )

    # In front of a rendezvous, of which process 1 alone is said to have come.
    if rank == 1:
        store.set("map ready/1", b"1")
    store.get("map ready/1", lambda: "")
    result["waits"] = peers.waits_for("map", "map ready", 0)

    try:
        peers.require("late", fail_or_wait)
    except symmetric.SymmetricMemoryError as error:
        result["failure"] = str(error)  # had the deadline ended process 0's wait, its own error would be the first
    _launch.summary(**result)


def test_exchanges_are_counted_from_nought_in_each_rendezvous():
    """One process's count is ahead: it had begun a rendezvous that failed on the other."""
    ahead, behind = symmetric._Exchanges(), symmetric._Exchanges()
    for count in range(3):
        for rank in range(2):
            key = ahead.anew(f"map/group 0/CUDASymmetricMemory/{7 + count}/{rank}")
            assert key == behind.anew(f"map/group 0/CUDASymmetricMemory/{5 + count}/{rank}")
            assert key == f"map/group 0/CUDASymmetricMemory/{count}/{rank}"
    assert ahead.anew("gloo/0/1") == "gloo/0/1"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_runs_on_jaxs_key_value_store():
    results = _launch.launch(2, [sys.executable, __file__, "torch"], timeout=240)
    for rank, result in enumerate(results):
        assert result == {
            "group": [rank, 2],
            "unregistered": "RuntimeError",
            "default group": False,
            "beside": [2, rank],
            "sum": 3.0,
            "waits": f"symmetric memory: process {rank} waits for process 0 in step 'map'",
            "exchanged": [f"{1 - rank} of {count}" for count in ((3, 4) if rank else (7, 8))],
            "failure": "symmetric memory: step 'late' failed on process 1: RuntimeError: planned",
        }


if __name__ == "__main__":
    torch_worker() if sys.argv[1:] == ["torch"] else worker()
