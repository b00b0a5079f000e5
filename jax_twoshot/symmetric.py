"""Symmetric memory: one allocation a rank, which every rank of its group can address.

``allocate`` is the whole seam: groups of JAX devices go in, an armed ``SymmetricBuffer`` for each device of
this process comes out. Behind it are three ways to get memory:

* **host** (CPU devices): plain memory of this process.
* **vmm** (one process, all GPUs local): memory mapped once, with access for every GPU of the group, by the
  driver's virtual memory management through ``cuda-bindings``.
* **torch** (one process a GPU): ``torch.distributed._symmetric_memory`` passes the memory between processes.

Processes talk through JAX's own key-value store (``jax.distributed``), under torch too: no port is opened,
two jobs on a host cannot clash, and a default torch process group is neither needed nor touched.

Set-up is all or nothing. A step ends on every process with the same outcome; if one fails, all raise with the
text of the one that failed, and nothing stays mapped. Every wait has the deadline of R9, with a warning at a tenth
of it. ``rearm`` makes the memory as new, in the same way, after ranks have lost each other.

Multicast needs all of: both switches on (``multicast_refusal`` is the only gate), a GPU for each rank, the
device attribute, an NVSwitch fabric, a rendezvous that gives an address, and a multicast store that arrives
everywhere. One process that lacks any of them moves all to peer stores, and its text is kept.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import itertools
import json
import logging
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from jax_twoshot import _settings
from jax_twoshot.protocol import WORD_BYTES, ceil_div

ALIGNMENT = 256
"""Bytes; what ``cuMemAlloc`` promises too."""

logger = logging.getLogger("jax_twoshot")

_DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_ALLOW_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class SymmetricMemoryError(RuntimeError):
    """Symmetric memory could not be set up; every process of the mesh raises it, with the same cause."""


@dataclasses.dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's allocation, as the device of that rank sees it. Addresses are 256-byte aligned.

    Attributes:
      device: ordinal of the device, as JAX knows it (``local_hardware_id``).
      rank: of this device in its group.
      bytes: usable size of the allocation.
      address: of this rank's own allocation.
      peers: addresses of every rank's allocation, in rank order; ``peers[rank] == address``.
      multicast: an address at which one ``multimem.st`` reaches every rank's allocation; None: use ``peers``.
      multicast_reason: why ``multicast`` is None, with the driver's text where the driver gave one.
      ranks_on_device: most ranks of the mesh that share one GPU (R5); the same on every process.
      sm_count: least number of multiprocessors of any GPU of the mesh (R5); 1 on CPU.
    """

    device: int
    rank: int
    bytes: int
    address: int
    peers: tuple[int, ...]
    multicast: int | None
    multicast_reason: str | None
    ranks_on_device: int
    sm_count: int
    _resources: ExitStack = dataclasses.field(repr=False, compare=False)
    _origin: _Origin = dataclasses.field(repr=False, compare=False)

    def close(self) -> None:
        """Unmaps all that this process got from the same ``allocate``; a second call does nothing.

        No kernel of this process may still use it. Other processes keep what they have mapped.
        """
        self._resources.close()


def allocate(
    groups: Sequence[Sequence[jax.Device]],
    size: int,
    word: int,
    prepare: Callable[[Sequence[SymmetricBuffer]], None] | None = None,
    *,
    owner: str = "symmetric memory",
    timeout: float | None = None,
) -> list[SymmetricBuffer]:
    """Allocates ``size`` bytes on every device, symmetric in each group, armed with ``word`` (R7).

    Collective: every process that owns a device of ``groups`` calls it, with the same arguments. When it
    returns on any process, every word of every rank's buffer holds ``word``.

    Args:
      groups: the devices of each group, in rank order; the same on every process.
      size: bytes a rank.
      word: the 32-bit sentinel.
      prepare: what else each process needs before the first call, given its buffers: a step like the others,
        so if it raises on one process, all raise.
      owner: what the memory is for; messages begin with it.
      timeout: seconds to wait for another process, 0 for ever; None: ``JAX_TWOSHOT_TIMEOUT``.

    Returns:
      The buffers of this process's devices, in the order of ``groups``.

    Raises:
      SymmetricMemoryError: a process failed a step, or did not reach it in time.
      ValueError: ``groups`` cannot have symmetric memory; the text names the fix.
    """
    if not _settings.multicast_allowed():
        # For the life of the process: torch reads it at each rendezvous, its user's own ones included.
        os.environ[_DISABLE_MULTICAST] = "1"
    members = _members(groups, jax.process_index())
    if not members:
        return []
    size = ceil_div(size, ALIGNMENT) * ALIGNMENT
    processes = sorted({device.process_index for group in groups for device in group})
    if groups[0][0].platform == "cpu":
        _require_one_process(processes)
        return _set_up(_HostMemory(members, size), _Peers(owner), word, prepare)
    if len(processes) == 1:
        return _set_up(_VmmMemory(members, size), _Peers(owner), word, prepare)
    _require_one_device_each(groups)
    store = _KeyValueStore(_jax_client(), _next_call(processes), _Deadline.of(timeout))
    peers = _Peers(owner, processes, jax.process_index(), store)
    return _set_up(_TorchMemory(members, size, peers), peers, word, prepare)


_calls: Counter[tuple[int, ...]] = Counter()


def _next_call(processes: Sequence[int]) -> str:
    """A name that the next collective call of these processes has on each of them, and no other call ever has."""
    _calls[tuple(processes)] += 1
    return f"{'-'.join(map(str, processes))}/{_calls[tuple(processes)]}"


def rearm(buffers: Sequence[SymmetricBuffer], word: int, clear: Callable[[], None]) -> None:
    """Arms ``buffers``, all that this process has of one ``allocate``, again with ``word``, in the order of R7.

    Collective, and as ``allocate`` all or nothing: a process waits for the others three deadlines long, since one of
    them may be in a call that has to fail first.

    Args:
      buffers: of this process.
      word: the 32-bit sentinel.
      clear: what else each process has to put back, while no device of the mesh works for it.

    Raises:
      SymmetricMemoryError: a process failed a step, or did not reach it in time. Nothing can be said of the memory.
    """
    origin = buffers[0]._origin
    memory, peers = origin.memory, origin.peers.patient(3)
    reset = f"reset {next(origin.resets)}"

    def arm() -> None:
        memory.fill(word)
        clear()

    peers.require(f"{reset}, settle", memory.settle)
    peers.require(f"{reset}, arm", arm)


@dataclasses.dataclass(frozen=True)
class _Member:
    """A device of this process, and its place."""

    device: int
    group: int
    rank: int
    tp: int


def _members(groups: Sequence[Sequence[jax.Device]], process: int) -> list[_Member]:
    return [
        _Member(device.local_hardware_id, index, rank, len(group))
        for index, group in enumerate(groups)
        for rank, device in enumerate(group)
        if device.process_index == process
    ]


def _require_one_process(processes: Sequence[int]) -> None:
    if len(processes) > 1:
        raise ValueError(
            f"groups: CPU devices share memory within one process, got {len(processes)} processes; use one "
            "process with --xla_force_host_platform_device_count, or lax.psum"
        )


def _require_one_device_each(groups: Sequence[Sequence[jax.Device]]) -> None:
    process, devices = Counter(device.process_index for group in groups for device in group).most_common(1)[0]
    if devices > 1:
        raise ValueError(
            f"groups: one of several processes may have one GPU, process {process} has {devices}; start one "
            "process a GPU (jax.distributed.initialize(..., local_device_ids=[i])), or one for all GPUs"
        )


# ---- Agreement between processes ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What one process made of a step."""

    value: Any = None
    error: str | None = None
    echo: bool = False
    """The error only says that another process failed."""


class _PeerFailed(RuntimeError):
    """Another process has failed the step that this one is in."""


class _Peers:
    """The processes that own the devices of a mesh; by default, this one alone. ``owner`` is what they do it for."""

    def __init__(
        self,
        owner: str,
        processes: Sequence[int] = (0,),
        process: int = 0,
        store: _KeyValueStore | None = None,
    ) -> None:
        self.owner = owner
        self.processes = processes
        self.process = process
        self.store = store

    def patient(self, times: int) -> _Peers:
        """The same processes, with so many times the deadline."""
        store = self.store and self.store.patient(times)
        return _Peers(self.owner, self.processes, self.process, store)

    def attempt(self, step: str, action: Callable[[], Any]) -> list[_Outcome]:
        """Runs ``action`` here and returns the outcome on each of ``processes``, once all have one."""
        try:
            outcome = _Outcome(value=action())
        except Exception as error:
            outcome = _Outcome(error=f"{type(error).__name__}: {error}", echo=isinstance(error, _PeerFailed))
        if self.store is None:
            return [outcome]
        self.store.set(f"{step}/{self.process}", json.dumps(dataclasses.asdict(outcome)).encode())
        return [outcome if p == self.process else self._outcome_of(p, step) for p in self.processes]

    def require(self, step: str, action: Callable[[], Any]) -> list[Any]:
        """As ``attempt``, but returns every process's value, or raises on every process."""
        outcomes = self.attempt(step, action)
        if text := self.failure(outcomes):
            raise SymmetricMemoryError(f"{self.owner}: step {step!r} failed on {text}{_fix(text)}")
        return [outcome.value for outcome in outcomes]

    def failure(self, outcomes: Sequence[_Outcome]) -> str | None:
        """The first cause among ``outcomes`` and the process it is from, the same on every process."""
        failed = [(o.echo, p, o.error) for p, o in zip(self.processes, outcomes, strict=True) if o.error]
        if not failed:
            return None
        _, process, error = min(failed)
        return f"process {process}: {error}"

    def waits_for(self, step: str, folder: str, process: int) -> str:
        """Who waits for whom in ``step``: for those of whom ``folder`` has no key, else for ``process``."""
        assert self.store is not None
        there = self.store.names(folder)
        missing = [p for p in self.processes if str(p) not in there]
        who = _processes_text(missing or [process])
        return f"{self.owner}: process {self.process} waits for {who} in step {step!r}"

    def _outcome_of(self, process: int, step: str) -> _Outcome:
        assert self.store is not None

        def waits_for() -> str:
            return self.waits_for(step, step, process)

        try:
            return _Outcome(**json.loads(self.store.get(f"{step}/{process}", waits_for)))
        except TimeoutError as error:
            raise SymmetricMemoryError(
                f"{waits_for()}: {error}; every process of the mesh must make and reset the same workspaces in the "
                "same order: look for one that failed, or is still busy"
            ) from None


def _processes_text(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _fix(text: str) -> str:
    """What to do about the causes that are not a fault of the machine."""
    fixes = {
        "out of memory": "XLA has taken the GPU's memory: lower XLA_PYTHON_CLIENT_MEM_FRACTION",
        "to send fd": "the processes need one PID namespace and one TMPDIR to pass memory to each other",
    }
    return next((f"; {fix}" for cause, fix in fixes.items() if cause in text.lower()), "")


@dataclasses.dataclass(frozen=True)
class _Deadline:
    """``seconds``, infinite for ever, and the ``setting`` that they come from."""

    seconds: float
    setting: str

    @classmethod
    def of(cls, timeout: float | None) -> _Deadline:
        own = timeout is not None
        seconds = timeout if own else _settings.timeout_seconds()
        return cls(seconds or math.inf, "Workspace(timeout=...)" if own else "JAX_TWOSHOT_TIMEOUT")


class _KeyValueStore:
    """JAX's key-value store under a prefix of its own, with the deadline of R9 on every wait."""

    SLICE_SECONDS = 0.5
    """How often a long wait looks whether a peer has failed."""

    def __init__(self, client: Any, call: str, deadline: _Deadline, times: int = 1) -> None:
        self.client = client
        self.call = call
        self.prefix = f"jax_twoshot/symmetric/{call}/"
        self.deadline, self.times = deadline, times

    def patient(self, times: int) -> _KeyValueStore:
        """The same keys, with so many times the deadline."""
        return _KeyValueStore(self.client, self.call, self.deadline, times)

    def set(self, key: str, value: bytes) -> None:
        self.client.key_value_set_bytes(self.prefix + key, value, allow_overwrite=True)

    def names(self, folder: str) -> list[str]:
        """The keys below ``folder``, without it."""
        entries = self.client.key_value_dir_get_bytes(f"{self.prefix}{folder}/")
        return [name.rsplit("/", 1)[-1] for name, _ in entries]

    def get(self, key: str, waits_for: Callable[[], str], step: str | None = None) -> bytes:
        """Waits for ``key``; while it does, a process that has failed ``step`` ends the wait.

        Past a tenth of the deadline it logs what it ``waits_for``.

        Raises:
          _PeerFailed: a process has failed ``step``.
          TimeoutError: past the deadline.
        """
        seconds = self.deadline.seconds * self.times
        start, warned = time.monotonic(), False
        while (left := start + seconds - time.monotonic()) > 0:
            if not warned and left < seconds - self.deadline.seconds / 10:
                logger.warning("%s, for %.3g s so far", waits_for(), seconds - left)
                warned = True
            milliseconds = max(1, int(1000 * min(left, self.SLICE_SECONDS)))
            try:
                return self.client.blocking_key_value_get_bytes(self.prefix + key, milliseconds)
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if step is not None:
                self._raise_if_failed(step)
        times = f"{self.times} times " if self.times > 1 else ""
        raise TimeoutError(f"{times}the deadline {self.deadline.setting} of {self.deadline.seconds:g} s has passed")

    def _raise_if_failed(self, step: str) -> None:
        for _, value in self.client.key_value_dir_get_bytes(f"{self.prefix}{step}/"):
            if error := json.loads(value)["error"]:
                raise _PeerFailed(error)


def _jax_client() -> Any:
    """The client of JAX's key-value store, which JAX does not export."""
    from jax._src import distributed

    client = getattr(distributed.global_state, "client", None)
    needed = ("key_value_set_bytes", "blocking_key_value_get_bytes", "key_value_dir_get_bytes")
    missing = [name for name in needed if not hasattr(client, name)]
    if missing:
        raise SymmetricMemoryError(
            f"symmetric memory: JAX {jax.__version__} offers no {', '.join(missing)} here; call "
            "jax.distributed.initialize() before the first use of JAX, on a JAX that this library supports"
        )
    return client


# ---- The steps ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the other processes must know of a device before memory is mapped."""

    host: str
    uuid: str
    ordinal: int
    group: int
    sm_count: int
    multicast_refusal: str | None


@dataclasses.dataclass(frozen=True)
class _Mapping:
    """A rank's view of its group's memory."""

    member: _Member
    peers: tuple[int, ...]
    multicast: int | None

    @property
    def address(self) -> int:
        return self.peers[self.member.rank]


class _Memory:
    """One way to get symmetric memory. What ``map`` pushes onto ``resources`` undoes it, in reverse order."""

    def __init__(self, members: list[_Member], size: int) -> None:
        self.members = members
        self.size = size
        self.resources = ExitStack()
        self.mappings: list[_Mapping] = []

    def describe(self) -> list[_Facts]:
        """One for each member."""
        raise NotImplementedError

    def map(self, step: str, multicast: bool, overlapping: bool) -> None:
        """Fills ``mappings``. Collective; ``overlapping``: two ranks of a group name the same ordinal."""
        raise NotImplementedError

    def fill(self, word: int) -> None:
        """Writes ``word`` to every word of the members' own allocations, and waits until that is done."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until the members' devices have done all that they were given so far."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Where buffers came from, for ``rearm``; ``resets`` numbers its steps, whose keys are used once."""

    memory: _Memory
    peers: _Peers
    resets: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))


def _set_up(
    memory: _Memory,
    peers: _Peers,
    word: int,
    prepare: Callable[[Sequence[SymmetricBuffer]], None] | None,
) -> list[SymmetricBuffer]:
    with memory.resources as resources:
        described = peers.require(
            "describe", lambda: (json.dumps(_settings.tuning()), [dataclasses.asdict(f) for f in memory.describe()])
        )
        _require_one_tuning([tuning for tuning, _ in described])
        facts = [_Facts(**fact) for _, of_process in described for fact in of_process]
        _require_one_host(facts)
        overlapping = max(Counter((f.group, f.ordinal) for f in facts).values()) > 1
        ranks_on_device = max(Counter(f.uuid for f in facts).values())
        reason = _refusal(facts, overlapping or ranks_on_device > 1) or _try_multicast(memory, peers)
        if reason is not None:
            peers.require("map", lambda: memory.map("map", False, overlapping))
        kept, origin = ExitStack(), _Origin(memory, peers)
        buffers = [
            SymmetricBuffer(
                device=m.member.device,
                rank=m.member.rank,
                bytes=memory.size,
                address=m.address,
                peers=m.peers,
                multicast=m.multicast,
                multicast_reason=reason,
                ranks_on_device=ranks_on_device,
                sm_count=min(f.sm_count for f in facts),
                _resources=kept,
                _origin=origin,
            )
            for m in memory.mappings
        ]
        if prepare is not None:
            peers.require("prepare", lambda: prepare(buffers))
        peers.require("arm", lambda: memory.fill(word))
        kept.push(resources.pop_all())
    return buffers


def _require_one_tuning(tunings: Sequence[str]) -> None:
    if len(set(tunings)) > 1:
        raise ValueError(
            f"JAX_TWOSHOT_TUNING: all processes must choose alike between one shot and two, and hence have the same "
            f"tables; got {' and '.join(sorted(set(tunings)))}; give every process the same file"
        )


def _require_one_host(facts: Sequence[_Facts]) -> None:
    hosts = sorted({f.host for f in facts})
    if len(hosts) > 1:
        raise ValueError(
            f"groups: all ranks must be on one host, got {', '.join(hosts)}; "
            "use a mesh axis within a host and lax.psum across hosts"
        )


def _refusal(facts: Sequence[_Facts], shared: bool) -> str | None:
    """The first reason against multicast, the same on every process."""
    for fact in facts:
        if fact.multicast_refusal:
            return f"GPU {fact.uuid}: {fact.multicast_refusal}"
    if len(facts) == len({fact.group for fact in facts}):
        return "each group has one rank, and nobody to store to"
    if shared:
        return (
            "ranks share a GPU, or know theirs by one ordinal because CUDA_VISIBLE_DEVICES hides the others"
        )
    return None


def _try_multicast(memory: _Memory, peers: _Peers) -> str | None:
    """Maps memory with a multicast address and proves that it works; else unmaps it and says why."""
    assert isinstance(memory, _DriverMemory)
    steps = (
        ("map multicast", memory.map_multicast),
        ("store multicast", memory.store_multicast),
        ("check multicast", memory.check_multicast),
    )
    for step, action in steps:
        if reason := peers.failure(peers.attempt(step, action)):
            memory.resources.close()
            return f"{step}: {reason}"
    return None


def _probe_word(rank: int) -> int:
    return 0x7073_0000 + rank


def multicast_refusal(driver: _Driver, ordinal: int) -> str | None:
    """Why this process may create no multicast object on its GPU, or None: the gate before every such object.

    With a switch off, this answers before the driver is asked anything.
    """
    if not _settings.multicast_allowed():
        return f"switched off by JAX_TWOSHOT_MULTICAST=0 or {_DISABLE_MULTICAST}=1"
    if not driver.attribute("MULTICAST_SUPPORTED", ordinal):
        return "the device attribute says that the GPU has no multicast"
    return driver.fabric_refusal(ordinal)


# ---- Host --------------------------------------------------------------------------------------------------


class _HostMemory(_Memory):
    """Plain memory of this process, for CPU devices."""

    def describe(self) -> list[_Facts]:
        host = socket.gethostname()
        return [
            _Facts(host, f"CPU {index}", index, member.group, 1, "host memory has no multicast")
            for index, member in enumerate(self.members)
        ]

    def map(self, step: str, multicast: bool, overlapping: bool) -> None:
        arrays = [np.empty(self.size + ALIGNMENT, np.uint8) for _ in self.members]
        self.resources.callback(arrays.clear)
        addresses = [ceil_div(array.ctypes.data, ALIGNMENT) * ALIGNMENT for array in arrays]
        for member in self.members:
            group = [a for a, m in zip(addresses, self.members, strict=True) if m.group == member.group]
            self.mappings.append(_Mapping(member, tuple(group), None))

    def fill(self, word: int) -> None:
        for mapping in self.mappings:
            words = (ctypes.c_uint32 * (self.size // WORD_BYTES)).from_address(mapping.address)
            np.ctypeslib.as_array(words).fill(word)

    def settle(self) -> None:
        """CPU devices work for calls only, and these have buffers of their own."""


# ---- CUDA driver -------------------------------------------------------------------------------------------

_MULTIMEM_STORE = b"""
.version 8.1
.target sm_90
.address_size 64
.visible .entry multimem_store(.param .u64 address, .param .u32 word) {
  .reg .b64 %a;
  .reg .b32 %w;
  ld.param.u64 %a, [address];
  ld.param.u32 %w, [word];
  multimem.st.relaxed.sys.global.u32 [%a], %w;
  ret;
}
\0"""
"""The kernels' own kind of store: an ordinary one to a multicast address is undefined, and proves nothing."""


class _Driver:
    """The CUDA driver API through ``cuda-bindings``; GPUs are named by ordinal."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise ImportError("symmetric memory on GPUs: pip install cuda-bindings") from error
        self.api: Any = driver
        self._contexts: dict[int, Any] = {}
        self.call("cuInit", 0)

    def call(self, function: str, *args: Any) -> Any:
        """Calls ``function`` and returns its result.

        Raises:
          RuntimeError: with the driver's own name and text of the error.
        """
        status, *results = getattr(self.api, function)(*args)
        if int(status):
            name, text = (getattr(self.api, f)(status)[1] for f in ("cuGetErrorName", "cuGetErrorString"))
            raise RuntimeError(f"{function}: {_text(name)} ({_text(text)})")
        return results[0] if results else None

    @contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """In the body, the primary context of a GPU, which JAX and torch use too, is the current one."""
        if ordinal not in self._contexts:  # kept: to release the last reference would end the context
            self._contexts[ordinal] = self.call("cuDevicePrimaryCtxRetain", self.device(ordinal))
        self.call("cuCtxPushCurrent", self._contexts[ordinal])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def device(self, ordinal: int) -> Any:
        return self.call("cuDeviceGet", ordinal)

    def attribute(self, name: str, ordinal: int) -> int:
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return self.call("cuDeviceGetAttribute", attribute, self.device(ordinal))

    def uuid(self, ordinal: int) -> str:
        """As ``nvidia-smi`` prints it, without its ``GPU-``."""
        hexadecimal = bytes(self.call("cuDeviceGetUuid", self.device(ordinal)).bytes).hex()
        cuts = (0, 8, 12, 16, 20, 32)
        return "-".join(hexadecimal[a:b] for a, b in itertools.pairwise(cuts))

    def fabric_refusal(self, ordinal: int) -> str | None:
        """None if the GPU is registered with an NVSwitch fabric.

        GPUs joined by NVLink bridges report multicast too, and fault in the first kernel that uses it, which
        ends the process's context: this must be known before a probe.
        """
        return _fabric_refusal(self.uuid(ordinal))

    def fill(self, ordinal: int, address: int, word: int, words: int) -> None:
        """Writes ``word`` ``words`` times and waits until it is done."""
        with self.current(ordinal):
            self.call("cuMemsetD32", address, word, words)
            self.call("cuCtxSynchronize")

    def settle(self, ordinal: int) -> None:
        """Waits until the GPU has done all that this process gave it."""
        with self.current(ordinal):
            self.call("cuCtxSynchronize")

    def load(self, ordinal: int, address: int, words: int) -> list[int]:
        host = np.empty(words, np.uint32)
        with self.current(ordinal):
            self.call("cuMemcpyDtoH", host.ctypes.data, address, host.nbytes)
        return host.tolist()

    def store_multicast(self, ordinal: int, address: int, word: int) -> None:
        """Stores ``word`` at a multicast address and waits until it is done."""
        with self.current(ordinal):
            module = self.call("cuModuleLoadData", _MULTIMEM_STORE)
            try:
                kernel = self.call("cuModuleGetFunction", module, b"multimem_store")
                arguments = ((address, word), (ctypes.c_uint64, ctypes.c_uint32))
                self.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0)
                self.call("cuCtxSynchronize")
            finally:
                self.call("cuModuleUnload", module)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class _FabricInfo(ctypes.Structure):
    """``nvmlGpuFabricInfo_t``."""

    _fields_ = [
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]


def _fabric_refusal(uuid: str) -> str | None:
    registered = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, info = ctypes.c_void_p(), _FabricInfo()
        codes = (
            nvml.nvmlInit_v2(),
            nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)),
            nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info)),
        )
    except (OSError, AttributeError) as error:
        return f"NVML cannot say whether the GPU is on an NVSwitch fabric: {error}"
    if any(codes) or info.state != registered or info.status:
        return f"not on an NVSwitch fabric (NVML {codes}, state {info.state}, status {info.status})"
    return None


class _DriverMemory(_Memory):
    """What the two kinds of GPU memory have in common."""

    @functools.cached_property
    def driver(self) -> _Driver:
        # Opened inside a step, so that where it is missing every process learns of it.
        return _Driver()

    def describe(self) -> list[_Facts]:
        return [
            _Facts(
                host=socket.gethostname(),
                uuid=self.driver.uuid(member.device),
                ordinal=member.device,
                group=member.group,
                sm_count=self.driver.attribute("MULTIPROCESSOR_COUNT", member.device),
                multicast_refusal=multicast_refusal(self.driver, member.device),
            )
            for member in self.members
        ]

    def fill(self, word: int) -> None:
        for m in self.mappings:
            self.driver.fill(m.member.device, m.address, word, self.size // WORD_BYTES)

    def settle(self) -> None:
        for m in self.mappings:
            self.driver.settle(m.member.device)

    def map_multicast(self) -> None:
        self.map("map multicast", multicast=True, overlapping=False)
        if not all(m.multicast for m in self.mappings):
            raise RuntimeError("the rendezvous gave no multicast address; torch's log has the driver's text")

    def store_multicast(self) -> None:
        """Stores a word of each member's own in every allocation of its group."""
        for m in self.mappings:
            assert m.multicast is not None
            address = m.multicast + m.member.rank * WORD_BYTES
            self.driver.store_multicast(m.member.device, address, _probe_word(m.member.rank))

    def check_multicast(self) -> None:
        """Looks for the words of all ranks in each member's own allocation."""
        for m in self.mappings:
            want = [_probe_word(rank) for rank in range(m.member.tp)]
            got = self.driver.load(m.member.device, m.address, m.member.tp)
            if got != want:
                raise RuntimeError(f"rank {m.member.rank} got {got} from multicast stores of {want}")


# ---- vmm: one process, several GPUs ------------------------------------------------------------------------


class _VmmMemory(_DriverMemory):
    """Memory of this process's GPUs by virtual memory management: one address, the same for every GPU."""

    def describe(self) -> list[_Facts]:
        for a, b in itertools.permutations(self.members, 2):
            self._require_peer_access(a, b)
        return super().describe()

    def _require_peer_access(self, a: _Member, b: _Member) -> None:
        if a.group != b.group or a.device == b.device:
            return
        gpus = (self.driver.device(m.device) for m in (a, b))
        if not self.driver.call("cuDeviceCanAccessPeer", *gpus):
            raise RuntimeError(
                f"GPU {a.device} cannot address the memory of GPU {b.device}: the ranks of a group need peer "
                "access over NVLink or PCIe (nvidia-smi topo -p2p w); use lax.psum on this machine"
            )

    def map(self, step: str, multicast: bool, overlapping: bool) -> None:
        self.resources.callback(self.mappings.clear)
        for _, members in itertools.groupby(self.members, lambda m: m.group):
            self._map_group(list(members), multicast)

    def _map_group(self, members: list[_Member], multicast: bool) -> None:
        devices = [m.device for m in members]
        with self.driver.current(devices[0]):
            team = self._team(len(devices)) if multicast else None
            size = self._whole_pages(devices, team)
            memories = [self._create("cuMemCreate", size, self._properties(device), 0) for device in devices]
            peers = tuple(self._map(memory, size, devices) for memory in memories)
            address = self._map_team(team, memories, size, devices) if team is not None else None
        self.mappings += [_Mapping(member, peers, address) for member in members]

    def _map_team(self, team: Any, memories: list[Any], size: int, devices: list[int]) -> int:
        """Binds the memories to a multicast object and maps it."""
        call = self.driver.call
        team.size = size
        handle = self._create("cuMulticastCreate", team)
        gpus = [self.driver.device(device) for device in devices]
        for gpu in gpus:  # all before the first bind, which waits for the team to be complete
            call("cuMulticastAddDevice", handle, gpu)
        for gpu, memory in zip(gpus, memories, strict=True):
            call("cuMulticastBindMem", handle, 0, memory, 0, size, 0)
            self.resources.callback(call, "cuMulticastUnbind", handle, gpu, 0, size)
        return self._map(handle, size, devices)

    def _create(self, function: str, *args: Any) -> Any:
        handle = self.driver.call(function, *args)
        self.resources.callback(self.driver.call, "cuMemRelease", handle)
        return handle

    def _map(self, handle: Any, size: int, devices: list[int]) -> int:
        """Maps ``handle`` for reading and writing by ``devices``; returns the address."""
        call = self.driver.call
        address = call("cuMemAddressReserve", size, 0, 0, 0)
        self.resources.callback(call, "cuMemAddressFree", address, size)
        call("cuMemMap", address, size, 0, handle, 0)
        self.resources.callback(call, "cuMemUnmap", address, size)
        access = [self._access(device) for device in sorted(set(devices))]
        call("cuMemSetAccess", address, size, access, len(access))
        return int(address)

    def _whole_pages(self, devices: list[int], team: Any) -> int:
        """``size`` as whole pages of every device, and of the multicast object if there is one."""
        api, call = self.driver.api, self.driver.call
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        pages = [call("cuMemGetAllocationGranularity", self._properties(d), least) for d in devices]
        if team is not None:
            team.size = self.size
            best = api.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
            pages.append(call("cuMulticastGetGranularity", team, best))
        return ceil_div(self.size, max(pages)) * max(pages)

    def _properties(self, device: int) -> Any:
        properties = self.driver.api.CUmemAllocationProp()
        properties.type = self.driver.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self.driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        return properties

    def _access(self, device: int) -> Any:
        access = self.driver.api.CUmemAccessDesc()
        access.location.type = self.driver.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = self.driver.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def _team(self, devices: int) -> Any:
        properties = self.driver.api.CUmulticastObjectProp()
        properties.numDevices = devices
        return properties


# ---- torch: one process a GPU ------------------------------------------------------------------------------


class _TorchMemory(_DriverMemory):
    """Memory of one GPU, shared with the processes of its group by torch's symmetric memory."""

    def __init__(self, members: list[_Member], size: int, peers: _Peers) -> None:
        super().__init__(members, size)
        assert peers.store is not None
        self._peers, self._store = peers, peers.store

    def describe(self) -> list[_Facts]:
        _require_torch(self.members[0].device)
        return super().describe()

    def map(self, step: str, multicast: bool, overlapping: bool) -> None:
        import torch

        (member,) = self.members
        device = torch.device("cuda", member.device)
        switches = {_ALLOW_OVERLAPPING: overlapping, _DISABLE_MULTICAST: not multicast}
        with torch.cuda.device(device), self._group(step, member) as group:
            symmetric = _c10d()._SymmetricMemory
            with _environment(switches):
                # Not symm_mem.empty: its memory pool would share and keep the allocation.
                tensor = symmetric.empty_strided_p2p((self.size,), (1,), torch.uint8, device)
            self._meet(step)  # perhaps for long: the process's own files and switches stay as they are
            with _environment(switches), _private_files():
                handle = symmetric.rendezvous(tensor, group)
        kept = [handle, tensor]
        self.resources.callback(kept.clear)
        peers = tuple(map(int, handle.buffer_ptrs))
        if peers[member.rank] != tensor.data_ptr():
            raise RuntimeError(f"torch {torch.__version__}: the rendezvous moved this rank's own buffer")
        self.resources.callback(self.mappings.clear)
        self.mappings.append(_Mapping(member, peers, handle.multicast_ptr or None))

    def _meet(self, step: str) -> None:
        """Waits until every process has its memory: a rank that then misses the others in torch's rendezvous never
        gives back what it has exported there, a file and the memory itself (torch 2.11)."""
        ready = f"{step} ready"
        self._store.set(f"{ready}/{self._peers.process}", b"1")
        for process in self._peers.processes:
            waits_for = functools.partial(self._peers.waits_for, step, ready, process)
            self._store.get(f"{ready}/{process}", waits_for, step)

    @contextmanager
    def _group(self, step: str, member: _Member) -> Iterator[str]:
        """Name of a torch process group of the member's group, registered for the rendezvous in the body.

        The rendezvous reads a group's rank, size and store and runs no collective, so the group has no
        backend, and only its own members create it. Older torch reads them from ``set_group_info``.
        """
        c10d = _c10d()
        name = f"{self._store.prefix}{step}/group {member.group}"
        store = c10d.PrefixStore(f"{step}/group {member.group}", _torch_store(self._peers, step))
        group = c10d.ProcessGroup(store, member.rank, member.tp)
        c10d._SymmetricMemory.set_group_info(name, member.rank, member.tp, store)
        c10d._register_process_group(name, group)
        try:
            yield name
        finally:
            c10d._unregister_process_group(name)


def _c10d() -> Any:
    """The layer under ``torch.distributed``, whose public calls make groups only beside a default group."""
    return importlib.import_module("torch._C._distributed_c10d")


def _require_torch(ordinal: int) -> None:
    fix = "install a CUDA build of torch, 2.11 or newer; or use one process for all GPUs, without torch"
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise ImportError(f"symmetric memory of several processes needs torch: {fix}") from error
    if not torch.distributed.is_available() or not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} cannot use the GPU (CUDA {torch.version.cuda}): {fix}")
    backend = _c10d()._SymmetricMemory.get_backend(torch.device("cuda", ordinal))
    if backend != "CUDA":
        raise RuntimeError(f"torch's symmetric memory uses {backend}, it must use CUDA: unset TORCH_SYMMMEM")


def _torch_store(peers: _Peers, step: str) -> Any:
    """A torch store on top of JAX's. A process that fails ``step`` ends the waits of the others."""
    import torch.distributed

    assert peers.store is not None
    store, counted = peers.store, _Exchanges()
    waits_for = f"{peers.owner}: process {peers.process} waits for its group in torch's rendezvous, step {step!r}"

    class JaxStore(torch.distributed.Store):
        def set(self, key: str, value: Any) -> None:  # torch's stub says str, its C++ passes bytes
            store.set(f"torch/{counted.anew(key)}", value)

        def get(self, key: str) -> bytes:
            return store.get(f"torch/{counted.anew(key)}", lambda: waits_for, step)

        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
            for key in keys:
                self.get(key)

    kept = JaxStore()
    _torch_stores.append(kept)
    return kept


class _Exchanges:
    """Counts the exchanges of one rendezvous from 0.

    Torch counts those of a process, for ever. After a rendezvous that only some ranks have begun, these would wait in
    every later one for keys that the others call otherwise (such waits were seen on an H200).
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def anew(self, key: str) -> str:
        """``key``, if it is ``.../CUDASymmetricMemory/COUNT/RANK`` with its count as of this rendezvous."""
        match = re.fullmatch(r"(.*SymmetricMemory)/(\d+)/(\d+)", key)
        if not match:
            return key
        name, count, rank = match.groups()
        return f"{name}/{int(count) - self._first.setdefault(name, int(count))}/{rank}"


_torch_stores: list[Any] = []
"""Torch keeps only the C++ half of a store alive, and for ever (``set_group_info``)."""


@contextmanager
def _private_files() -> Iterator[None]:
    """Keeps what the body creates from other users: torch passes memory through a socket in TMPDIR that has a name
    anyone can guess, and who may write to it can pass memory too."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def _environment(switches: dict[str, bool]) -> Iterator[None]:
    """Sets the variables that are True to 1 for the body. Torch reads them at each rendezvous."""
    before = {name: os.environ.get(name) for name, on in switches.items() if on}
    os.environ.update(dict.fromkeys(before, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
