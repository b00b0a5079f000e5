"""Compiled kernels: found, or compiled once and kept. Importing this needs no compiler and no GPU.

A cubin is two files, ``NAME.cubin`` and ``NAME.json``. The second, written last, holds the SHA-256 of the
first and what it was built from, so half an entry is never taken for a whole one. ``find`` looks in

1. ``JAX_TWOSHOT_CUBIN_PATH``, for a site that builds its own,
2. ``jax_twoshot/cubins/``, what the wheel brought,
3. the disk cache, ``JAX_TWOSHOT_CACHE_DIR``, one folder for each state of the sources and each compiler,
4. the compiler, if it is installed; the result goes into the cache.

In 1 and 2 a cubin that is damaged, or compiled from other kernel sources, is an error; in 3 it is a miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import filelock

from jax_twoshot import _settings
from jax_twoshot.protocol import ALGORITHMS, FORMATS

COMPILER = "nvidia-cutlass-dsl"
_INSTALL = "pip install 'jax_twoshot[compile]'"
TP = (2, 3, 4, 5, 6, 7, 8, 16)
"""Group sizes with kernels of their own."""
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Targets. Those before sm_90a have neither programmatic launch nor multicast."""

_NV_INFO = 0x7000_0000
"""Type of the ELF section in which a cubin describes itself."""
_REGCOUNT = 0x2F
_SIZED_VALUE = 4

_ROOT = Path(__file__).parent
_PACKAGED = _ROOT / "cubins"


def capability(arch: str) -> tuple[int, int]:
    """``(9, 0)`` of ``"sm_90a"``."""
    return divmod(int(arch.removeprefix("sm_").rstrip("a")), 10)


def arch_for(compute_capability: tuple[int, int]) -> str:
    """The target whose cubins run on a GPU of this compute capability.

    Raises:
      ValueError: there is none.
    """
    major, minor = compute_capability
    for arch in reversed(ARCHS):
        # What is built for "sm_90a" runs on 9.0 only; what is built for "sm_80" on 8.0 and later 8.x.
        target = capability(arch)
        if target == (major, minor) or (not arch.endswith("a") and target[0] == major and target[1] <= minor):
            return arch
    raise ValueError(
        f"compute_capability: kernels exist for {', '.join(ARCHS)}; this GPU has {major}.{minor}"
    )


def _has_pdl_and_multicast(arch: str) -> bool:
    return capability(arch) >= (9, 0)


@dataclass(frozen=True)
class Variant:
    """What is fixed when a kernel is compiled.

    Attributes:
      tp: ranks in the group, one of `TP`.
      format: name of the element type, one of `protocol.FORMATS`.
      multicast: store what all ranks get once through a multicast address, else once to each peer.
      arch: target, one of `ARCHS`.
      algorithm: one of `protocol.ALGORITHMS`.

    Raises:
      ValueError: there is no such kernel.
    """

    tp: int
    format: str
    multicast: bool
    arch: str
    algorithm: str = "two_shot"

    def __post_init__(self) -> None:
        choices = {"tp": TP, "format": tuple(FORMATS), "arch": ARCHS, "algorithm": ALGORITHMS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: kernels exist for {allowed}, got {getattr(self, name)!r}")
        if self.multicast and not _has_pdl_and_multicast(self.arch):
            raise ValueError(f"multicast: needs sm_90a or later, got arch {self.arch!r}; use multicast=False")

    @property
    def pdl(self) -> bool:
        """Whether it is to be launched with programmatic stream serialization."""
        return _has_pdl_and_multicast(self.arch)

    @property
    def name(self) -> str:
        """Names its files."""
        store = "multicast" if self.multicast else "peers"
        return f"{self.algorithm}-tp{self.tp}-{self.format}-{store}-{self.arch}"


@dataclass(frozen=True)
class Cubin:
    """A kernel, ready for `cuLibraryLoadData`.

    Attributes:
      variant: what it was compiled for.
      image: the bytes of the cubin.
      symbol: name of the kernel in it.
      registers: registers of a thread.
      sources: digest of the kernel sources that it was compiled from.
      compiler: name and version of the compiler.
    """

    variant: Variant
    image: bytes
    symbol: str
    registers: int
    sources: str
    compiler: str


class CubinError(RuntimeError):
    """There is no usable cubin. The first line names the file or the package that is to blame."""


# ---- Find --------------------------------------------------------------------------------------------------


def find(variant: Variant) -> Cubin:
    """The kernel of ``variant``, compiled now if it is nowhere else.

    Raises:
      CubinError: a cubin on ``JAX_TWOSHOT_CUBIN_PATH`` or in the package is damaged or stale; or there is
        none, and no compiler is installed; or ``JAX_TWOSHOT_CUBIN_PATH`` is no folder.
    """
    for folder in _given_folders():
        if _exists(folder, variant):
            return _read_given(folder, variant)
    for folder in _cache_folders():
        try:
            return _read(folder, variant)
        except CubinError:
            continue
    if compiler_version() is None:
        raise CubinError(_nothing_found(variant))
    return _compile_into_cache(variant)


def find_all(variants: Sequence[Variant], share: int = 0) -> list[Cubin]:
    """`find` of each. Processes that start together give different ``share``s: each begins with another kernel, and
    finds in the cache what the others have compiled meanwhile."""
    start = share % len(variants)
    found = {variant: find(variant) for variant in (*variants[start:], *variants[:start])}
    return [found[variant] for variant in variants]


def _given_folders() -> Iterator[Path]:
    explicit = _settings.cubin_path()
    if explicit is not None:
        if not explicit.is_dir():
            raise CubinError(
                f"{explicit}: JAX_TWOSHOT_CUBIN_PATH has to name a folder; unset it, or make that one"
            )
        yield explicit
    yield _PACKAGED


def _cache_folders() -> list[Path]:
    """Of this compiler; without one, of any: the sources are what has to match."""
    version = compiler_version() or "*"
    return sorted((_settings.cache_dir() / "cubins").glob(f"{sources_digest()[:16]}-{version}"))


def _exists(folder: Path, variant: Variant) -> bool:
    return any(path.exists() for path in _paths(folder, variant))


def _read_given(folder: Path, variant: Variant) -> Cubin:
    cubin = _read(folder, variant)
    if cubin.sources != sources_digest():
        raise CubinError(
            f"{_paths(folder, variant)[0]}: compiled from other kernel sources than this jax_twoshot's "
            f"({cubin.sources[:16]}, not {sources_digest()[:16]}).\n"
            f"Compile it again: python -m jax_twoshot compile --arch {variant.arch} -o {folder}"
        )
    return cubin


def _nothing_found(variant: Variant) -> str:
    stem = variant.name.removesuffix(variant.arch)
    others = [
        f"{folder} has this kernel for {', '.join(archs)} only, and this GPU needs {variant.arch}."
        for folder in _given_folders()
        if (archs := [arch for arch in ARCHS if (folder / f"{stem}{arch}.cubin").exists()])
    ]
    places = ", ".join(map(str, (*_given_folders(), _settings.cache_dir())))
    command = f"python -m jax_twoshot compile --arch {variant.arch} -o DIR"
    lines = (
        f"{variant.name}.cubin: in none of {places}, and the compiler ({COMPILER}) is not installed.",
        *others,
        f"Install it ({_INSTALL}), or compile on a machine that has it, which needs no GPU ({command}), "
        "and set JAX_TWOSHOT_CUBIN_PATH=DIR here.",
    )
    return "\n".join(lines)


# ---- Compile -----------------------------------------------------------------------------------------------


@cache
def sources_digest() -> str:
    """SHA-256 of what decides the code of a kernel."""
    digest = hashlib.sha256()
    for path in (_ROOT / "protocol.py", *sorted((_ROOT / "kernels").glob("*.py"))):
        source = path.read_bytes()
        digest.update(f"{path.name} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def compiler_version() -> str | None:
    """Version of the compiler package, or None if it is not installed."""
    try:
        return metadata.version(COMPILER)
    except metadata.PackageNotFoundError:
        return None


def compile_variant(variant: Variant) -> Cubin:
    """Compiles one kernel: about 0.3 s, after 1 s for the compiler's import.

    Raises:
      CubinError: the compiler is not installed.
    """
    version = compiler_version()
    if version is None:
        raise CubinError(f"{COMPILER}: the compiler is not installed: {_INSTALL}")
    from jax_twoshot.kernels.all_reduce import AllReduce, compile_kernel

    kernel = AllReduce(
        variant.tp,
        FORMATS[variant.format],
        algorithm=variant.algorithm,
        multicast=variant.multicast,
        pdl=variant.pdl,
    )
    compiled = compile_kernel(kernel, variant.arch)
    return Cubin(
        variant,
        compiled.cubin,
        compiled.symbol,
        _attribute(compiled.cubin, _REGCOUNT),
        sources_digest(),
        f"{COMPILER} {version}",
    )


def _compile_into_cache(variant: Variant) -> Cubin:
    folder = _settings.cache_dir() / "cubins" / f"{sources_digest()[:16]}-{compiler_version()}"
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / f"{variant.name}.lock"):
        try:
            return _read(folder, variant)  # Another process was faster.
        except CubinError:
            cubin = compile_variant(variant)
            _write(folder, cubin)
            return cubin


def variants(archs: Iterable[str]) -> list[Variant]:
    """Every kernel for these targets."""
    return [
        Variant(tp, name, multicast, arch, algorithm)
        for arch in archs
        for algorithm in ALGORITHMS
        for tp in TP
        for name in FORMATS
        for multicast in ((False, True) if _has_pdl_and_multicast(arch) else (False,))
    ]


def compile_all(
    archs: Iterable[str], out_dir: Path, progress: Callable[[int, int, Cubin], None] | None = None
) -> list[Cubin]:
    """Compiles every kernel for ``archs`` into ``out_dir``, for ``JAX_TWOSHOT_CUBIN_PATH`` or for a wheel.

    Args:
      archs: targets, of `ARCHS`.
      out_dir: made if need be.
      progress: called after each kernel with its number, from 1, how many there are, and the kernel.

    Raises:
      CubinError: the compiler is not installed.
      ValueError: an unknown target.
    """
    todo = variants(archs)
    out_dir.mkdir(parents=True, exist_ok=True)
    done = []
    for number, variant in enumerate(todo, start=1):
        done.append(compile_variant(variant))
        _write(out_dir, done[-1])
        if progress is not None:
            progress(number, len(todo), done[-1])
    return done


def print_progress(number: int, total: int, cubin: Cubin) -> None:
    """A line for each kernel; on a terminal, one line that changes."""
    line = f"[{number}/{total}] {cubin.variant.name}: {len(cubin.image)} bytes, {cubin.registers} registers"
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="\n" if number == total else "", flush=True)
    else:
        print(line, flush=True)


# ---- Files -------------------------------------------------------------------------------------------------


def _paths(folder: Path, variant: Variant) -> tuple[Path, Path]:
    return folder / f"{variant.name}.cubin", folder / f"{variant.name}.json"


def _write(folder: Path, cubin: Cubin) -> None:
    """Image first, metadata last, each put in its place in one step."""
    record = asdict(cubin) | {"sha256": hashlib.sha256(cubin.image).hexdigest()}
    del record["image"]
    image_path, record_path = _paths(folder, cubin.variant)
    for path, data in ((image_path, cubin.image), (record_path, json.dumps(record, indent=1).encode())):
        partial = path.with_suffix(f"{path.suffix}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(path)


def _read(folder: Path, variant: Variant) -> Cubin:
    image_path, record_path = _paths(folder, variant)
    try:
        record = json.loads(record_path.read_bytes())
        expected = record.pop("sha256")
        cubin = Cubin(**record | {"variant": Variant(**record["variant"]), "image": image_path.read_bytes()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CubinError(
            f"{image_path}: not a whole entry with {record_path.name} ({error}). Compile it again."
        ) from error
    if hashlib.sha256(cubin.image).hexdigest() != expected or cubin.variant != variant:
        raise CubinError(f"{image_path}: damaged, not what {record_path.name} says. Compile it again.")
    return cubin


def _attribute(image: bytes, wanted: int) -> int:
    """An attribute that the cubin states of its one kernel."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, entries = struct.unpack_from("<HH", image, 0x3A)
    for index in range(entries):
        kind, at, size = struct.unpack_from("<4xI16xQQ", image, table + index * entry_size)
        end = at + size if kind == _NV_INFO else at
        while at < end:
            form, attribute, length = struct.unpack_from("<BBH", image, at)
            if (form, attribute) == (_SIZED_VALUE, wanted):
                return struct.unpack_from("<4xI", image, at + 4)[0]  # After the kernel's symbol number.
            at += 4 + (length if form == _SIZED_VALUE else 0)
    raise ValueError(f"a cubin without the attribute {wanted:#x} in its .nv.info")
