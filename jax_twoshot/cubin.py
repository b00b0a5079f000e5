"""Compiled kernels: found, or compiled once and kept. Importing this needs no compiler and no GPU.

A ``Variant`` is one of the all-reduce's own kernels, a ``Kernel`` any other: a class in a file, which may be a user's.

A cubin is two files, ``NAME.cubin`` and ``NAME.json``. The second, written last, holds the SHA-256 of the
first and what it was built from, so half an entry is never taken for a whole one. ``find`` looks in

1. ``JAX_TWOSHOT_CUBIN_PATH``, for a site that builds its own,
2. ``jax_twoshot/cubins/``, what the wheel brought,
3. the disk cache, ``JAX_TWOSHOT_CACHE_DIR``, one folder for each state of the sources and each compiler,
4. the compiler, if it is installed; the result goes into the cache.

In 1 and 2 a cubin that is damaged, or compiled from other kernel sources, is an error; in 3 it is a miss.
The cache has to be the user's own: what another user owns or can write to is code of theirs, and an error. 1 and 2 are
as trustworthy as whoever set the variable and installed the package. The driver sees no bytes but those that the
metadata's SHA-256 is of, and that are an ELF file for NVIDIA GPUs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import filelock

from jax_twoshot import _settings
from jax_twoshot.protocol import (
    ALGORITHMS,
    CTAS_PER_SM,
    FORMATS,
    MATMUL_FORMATS,
    MATMUL_ROW_TILES,
    MATMUL_THREADS,
    NORM_MAX_BLOCKS,
    NORM_THREADS,
    THREADS,
)

if TYPE_CHECKING:
    from jax_twoshot.kernels.build import Compiled

COMPILER = "nvidia-cutlass-dsl"
_INSTALL = "pip install 'jax_twoshot[compile]'"
TP = (2, 3, 4, 5, 6, 7, 8, 16)
"""Group sizes with kernels of their own."""
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Targets. Those before sm_90a have neither programmatic launch nor multicast."""

_ELF_MACHINE = slice(18, 20)
_EM_CUDA = b"\xbe\x00"
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


class _ForTarget:
    """What follows from the target of a kernel, of whichever kind."""

    tp: int
    format: str
    arch: str
    multicast: bool

    @property
    def pdl(self) -> bool:
        """Whether it is to be launched with programmatic stream serialization."""
        return _has_pdl_and_multicast(self.arch)

    def _check_multicast(self) -> None:
        if self.multicast and not _has_pdl_and_multicast(self.arch):
            raise ValueError(f"multicast: needs sm_90a or later, got arch {self.arch!r}; use multicast=False")

    def _compile(
        self, kernel: Any, addresses: int, scalars: int, bounds: tuple[int, int, int], *, owners: int, deferred: bool
    ) -> Compiled:
        """Compiles ``kernel`` for the target, without looking anywhere; ``bounds`` are `build.Bounds`."""
        from jax_twoshot.kernels import build, launch

        arguments = launch.Arguments.example(
            tp=self.tp,
            format=FORMATS[self.format],
            owners=owners,
            multicasts=self.multicast,
            deferred=deferred,
            pdl=self.pdl,
        )
        return build.compile_method(kernel, addresses, scalars, arguments, build.Bounds(*bounds), self.arch)


@dataclass(frozen=True)
class Variant(_ForTarget):
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
        self._check_multicast()

    @property
    def name(self) -> str:
        """Names its files."""
        return f"{self.algorithm}-tp{self.tp}-{self.format}-{_store(self.multicast)}-{self.arch}"

    @property
    def sources(self) -> str:
        """Digest of what decides its code."""
        return sources_digest()

    def compile(self) -> Compiled:
        """Compiles it, without looking anywhere."""
        from jax_twoshot.kernels.all_reduce import AllReduce

        kernel = AllReduce(algorithm=self.algorithm)
        return self._compile(kernel, 2, 1, (THREADS, CTAS_PER_SM, 0), owners=self.tp, deferred=False)

    def how_to_compile(self, folder: Path | str) -> str:
        """What puts it into ``folder``."""
        return _compile_command(self.arch, folder)


@dataclass(frozen=True)
class Kernel(_ForTarget):
    """A class with a ``@cute.kernel`` method ``kernel``, for one kind of workspace and one target.

    Attributes:
      source: where the class is: name of a module, or path of a ``.py`` file, which is run to get it.
      class_name: of the class, at the top level of its file.
      parameters: (name, value) of the keyword arguments it is made with, each a str, int, bool or float.
      addresses: operands and results: the method's first parameters.
      scalars: the method's ``Int32`` parameters after these.
      tp: ranks in the group.
      owners: ranks that own chunks: ``tp``, or 1 in the stand-in for one GPU.
      format: name of the message's element type, one of `protocol.FORMATS`.
      multicast: store what all ranks get once through a multicast address, else once to each peer.
      deferred: calls re-arm what the call before has read.
      threads: of a CTA.
      ctas_per_sm: CTAs that must fit one SM, which bounds the registers.
      shared_memory: dynamic bytes of a CTA.
      arch: target, one of `ARCHS`.

    Raises:
      ValueError: there can be no such kernel.
    """

    source: str
    class_name: str
    parameters: tuple[tuple[str, str | int | bool | float], ...]
    addresses: int
    scalars: int
    tp: int
    owners: int
    format: str
    multicast: bool
    deferred: bool
    threads: int
    ctas_per_sm: int
    shared_memory: int
    arch: str

    def __post_init__(self) -> None:
        for field, allowed in (("format", tuple(FORMATS)), ("arch", ARCHS), ("owners", (1, self.tp))):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}: {self.class_name} can be for {allowed}, got {getattr(self, field)!r}")
        self._check_multicast()

    @property
    def name(self) -> str:
        """Names its files."""
        kind = [f"tp{self.tp}", self.format, _store(self.multicast)]
        kind += ["stand_in"] * (self.owners < self.tp) + ["deferred"] * self.deferred
        launch = f"{self.threads}x{self.ctas_per_sm}" + f"x{self.shared_memory}" * bool(self.shared_memory)
        parameters = [f"{name}={value}" for name, value in self.parameters]
        return "-".join(quote(part, safe="=+") for part in (self.class_name, *parameters, *kind, launch, self.arch))

    @property
    def sources(self) -> str:
        """Digest of what decides its code: its own file, and what that is built on."""
        text = _source_path(self.source).read_bytes()
        return hashlib.sha256(f"{sources_digest()}\n".encode() + text).hexdigest()

    def how_to_compile(self, folder: Path | str) -> str:
        """What puts it into ``folder``."""
        if self.source.startswith(f"{__package__}."):
            return _compile_command(self.arch, folder)
        return (
            f"jax_twoshot.cutedsl.compile_kernel(..., {self.arch!r}, folder={str(folder)!r}) with the call's own "
            "arguments, which needs no GPU"
        )

    def compile(self) -> Compiled:
        """Compiles it, without looking anywhere."""
        kernel = getattr(_load(self.source), self.class_name)(**dict(self.parameters))
        bounds = (self.threads, self.ctas_per_sm, self.shared_memory)
        return self._compile(
            kernel, self.addresses, self.scalars, bounds, owners=self.owners, deferred=self.deferred
        )


def _store(multicast: bool) -> str:
    return "multicast" if multicast else "peers"


def _compile_command(arch: str, folder: Path | str) -> str:
    return f"python -m jax_twoshot compile --arch {arch} -o {folder}, which needs no GPU"


def _source_path(source: str) -> Path:
    """The file of a `Kernel.source`.

    Raises:
      CubinError: there is none.
    """
    if source.endswith(".py"):
        path = Path(source)
    else:
        spec = importlib.util.find_spec(source)
        path = Path(spec.origin if spec is not None and spec.origin else source)
    if not path.is_file():
        raise CubinError(f"{source}: no file with the source of a kernel; name an importable module, or a .py file")
    return path


def _load(source: str) -> ModuleType:
    """The module of a `Kernel.source`. A file is run anew: what is compiled is what its digest was made of."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = _source_path(source)
    spec = importlib.util.spec_from_file_location(f"jax_twoshot_kernel_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the compiler looks its functions up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


Entry = Variant | Kernel
"""What has a cubin."""


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

    variant: Entry
    image: bytes
    symbol: str
    registers: int
    sources: str
    compiler: str


class CubinError(RuntimeError):
    """There is no usable cubin. The first line names the file or the package that is to blame."""


# ---- Find --------------------------------------------------------------------------------------------------


def find(variant: Entry) -> Cubin:
    """The kernel of ``variant``, compiled now if it is nowhere else.

    Raises:
      CubinError: a cubin on ``JAX_TWOSHOT_CUBIN_PATH`` or in the package is damaged or stale; or there is
        none, and no compiler is installed; or ``JAX_TWOSHOT_CUBIN_PATH`` is no folder.
    """
    for folder in _given_folders():
        if _exists(folder, variant):
            return _read_given(folder, variant)
    for folder in _cache_folders(variant):
        _require_own(folder, *_paths(folder, variant))
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
    start = share % max(1, len(variants))
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


def _cache_folders(variant: Entry) -> list[Path]:
    """Of this compiler; without one, of any: the sources are what has to match."""
    version = compiler_version() or "*"
    return sorted((_settings.cache_dir() / "cubins").glob(f"{variant.sources[:16]}-{version}"))


def _exists(folder: Path, variant: Entry) -> bool:
    return any(path.exists() for path in _paths(folder, variant))


def _read_given(folder: Path, variant: Entry) -> Cubin:
    cubin = _read(folder, variant)
    if cubin.sources != variant.sources:
        raise CubinError(
            f"{_paths(folder, variant)[0]}: compiled from other sources than the kernel has now "
            f"({cubin.sources[:16]}, not {variant.sources[:16]}).\nCompile it again: {variant.how_to_compile(folder)}"
        )
    return cubin


def _nothing_found(variant: Entry) -> str:
    stem = variant.name.removesuffix(variant.arch)
    others = [
        f"{folder} has this kernel for {', '.join(archs)} only, and this GPU needs {variant.arch}."
        for folder in _given_folders()
        if (archs := [arch for arch in ARCHS if (folder / f"{stem}{arch}.cubin").exists()])
    ]
    places = ", ".join(map(str, (*_given_folders(), _settings.cache_dir())))
    lines = (
        f"{variant.name}.cubin: in none of {places}, and the compiler ({COMPILER}) is not installed.",
        *others,
        f"Install it ({_INSTALL}), or compile elsewhere ({variant.how_to_compile('DIR')}), and set "
        "JAX_TWOSHOT_CUBIN_PATH=DIR here.",
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


def compile_variant(variant: Entry) -> Cubin:
    """Compiles one kernel: 0.3 to 0.4 s, after 0.5 to 0.7 s for the compiler's import.

    Raises:
      CubinError: the compiler is not installed.
    """
    version = compiler_version()
    if version is None:
        raise CubinError(f"{COMPILER}: the compiler is not installed: {_INSTALL}")
    compiled = variant.compile()
    return Cubin(
        variant,
        compiled.cubin,
        compiled.symbol,
        _attribute(compiled.cubin, _REGCOUNT),
        variant.sources,
        f"{COMPILER} {version}",
    )


def _compile_into_cache(variant: Entry) -> Cubin:
    folder = _settings.cache_dir() / "cubins" / f"{variant.sources[:16]}-{compiler_version()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(folder)
    with filelock.FileLock(folder / f"{variant.name}.lock"):
        try:
            return _read(folder, variant)  # Another process was faster.
        except CubinError:
            cubin = compile_variant(variant)
            _write(folder, cubin)
            return cubin


def variants(archs: Iterable[str], tps: Iterable[int] = TP) -> list[Variant]:
    """Every kernel of the all-reduce for these targets and group sizes."""
    return [
        Variant(tp, name, multicast, arch, algorithm)
        for arch in archs
        for algorithm in ALGORITHMS
        for tp in tps
        for name in FORMATS
        for multicast in ((False, True) if _has_pdl_and_multicast(arch) else (False,))
    ]


def rms_norm_kernel(
    tp: int, format: str, multicast: bool, arch: str, algorithm: str, blocks: int, *, owners: int | None = None
) -> Kernel:
    """The kernel of ``all_reduce_rms_norm`` for rows of ``blocks`` blocks (`protocol.norm_blocks`)."""
    return Kernel(
        source="jax_twoshot.kernels.rms_norm",
        class_name="AllReduceRmsNorm",
        parameters=(("algorithm", algorithm), ("blocks", blocks)),
        addresses=5,
        scalars=3,
        tp=tp,
        owners=owners or tp,
        format=format,
        multicast=multicast,
        deferred=False,
        threads=NORM_THREADS,
        ctas_per_sm=1,
        shared_memory=0,
        arch=arch,
    )


def moe_tail_kernel(
    tp: int, format: str, multicast: bool, arch: str, blocks: int, *, owners: int | None = None
) -> Kernel:
    """The kernel of ``moe_tail`` for rows of ``blocks`` blocks: `rms_norm_kernel` with more in front."""
    return replace(
        rms_norm_kernel(tp, format, multicast, arch, "two_shot", blocks, owners=owners),
        source="jax_twoshot.kernels.moe",
        class_name="MoeTail",
        parameters=(("blocks", blocks),),
        addresses=8,
        scalars=5,
        deferred=True,
    )


def matmul_kernel(
    tp: int, format: str, multicast: bool, arch: str, row_tiles: int, *, owners: int | None = None
) -> Kernel:
    """The kernel of ``matmul_all_reduce`` for ``row_tiles`` times 16 rows, one of `protocol.MATMUL_ROW_TILES`."""
    return Kernel(
        source="jax_twoshot.kernels.matmul",
        class_name="MatmulAllReduce",
        parameters=(("row_tiles", row_tiles),),
        addresses=3,
        scalars=3,
        tp=tp,
        owners=owners or tp,
        format=format,
        multicast=multicast,
        deferred=False,
        threads=MATMUL_THREADS,
        ctas_per_sm=2 if row_tiles == 1 else 1,  # 2 with 32 rows would spill 208 bytes a thread
        shared_memory=0,
        arch=arch,
    )


def rms_norm_kernels(archs: Iterable[str], tps: Iterable[int] = TP) -> list[Kernel]:
    """Every kernel of ``all_reduce_rms_norm`` for these targets and group sizes."""
    return [
        rms_norm_kernel(v.tp, v.format, v.multicast, v.arch, v.algorithm, blocks)
        for v in variants(archs, tps)
        for blocks in range(1, NORM_MAX_BLOCKS + 1)
    ]


def moe_tail_kernels(archs: Iterable[str], tps: Iterable[int] = TP) -> list[Kernel]:
    """Every kernel of ``moe_tail`` for these targets and group sizes."""
    return [
        moe_tail_kernel(v.tp, v.format, v.multicast, v.arch, blocks)
        for v in variants(archs, tps)
        if v.algorithm == "two_shot"
        for blocks in range(1, NORM_MAX_BLOCKS + 1)
    ]


def matmul_kernels(archs: Iterable[str], tps: Iterable[int] = TP) -> list[Kernel]:
    """Every kernel of ``matmul_all_reduce`` for these targets and group sizes."""
    return [
        matmul_kernel(v.tp, v.format, v.multicast, v.arch, row_tiles)
        for v in variants(archs, tps)
        if v.algorithm == "two_shot" and v.format in MATMUL_FORMATS
        for row_tiles in MATMUL_ROW_TILES
    ]


def compile_all(
    archs: Iterable[str],
    out_dir: Path,
    progress: Callable[[int, int, Cubin], None] | None = None,
    tps: Iterable[int] = TP,
) -> list[Cubin]:
    """Compiles the library's kernels for ``archs`` and groups of ``tps`` ranks into ``out_dir``, for
    ``JAX_TWOSHOT_CUBIN_PATH`` or for a wheel.

    Raises:
      CubinError: the compiler is not installed.
      ValueError: an unknown target.
    """
    todo: list[Entry] = [
        kernel
        for kind in (variants, rms_norm_kernels, moe_tail_kernels, matmul_kernels)
        for kernel in kind(archs, tps)
    ]
    return compile_into(todo, out_dir, progress)


def compile_into(
    todo: Sequence[Entry], out_dir: Path, progress: Callable[[int, int, Cubin], None] | None = None
) -> list[Cubin]:
    """Compiles kernels into a folder.

    Args:
      todo: the kernels.
      out_dir: made if need be.
      progress: called after each kernel with its number, from 1, how many there are, and the kernel.

    Raises:
      CubinError: the compiler is not installed.
    """
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


def _paths(folder: Path, variant: Entry) -> tuple[Path, Path]:
    return folder / f"{variant.name}.cubin", folder / f"{variant.name}.json"


def _require_own(*paths: Path) -> None:
    """Refuses a folder or file of the cache that another user owns or may write to; what does not exist is fine."""
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CubinError(
                f"{path}: the cache holds code that runs on the GPU, and another user may write to this (owner "
                f"{status.st_uid}, mode {stat.filemode(status.st_mode)}).\n"
                "Remove it, or chmod go-w, or set JAX_TWOSHOT_CACHE_DIR to a folder of your own."
            )


def _write(folder: Path, cubin: Cubin) -> None:
    """Image first, metadata last, each put in its place in one step."""
    record = {
        "variant": _identity(cubin.variant),
        "symbol": cubin.symbol,
        "registers": cubin.registers,
        "sources": cubin.sources,
        "compiler": cubin.compiler,
        "sha256": hashlib.sha256(cubin.image).hexdigest(),
    }
    image_path, record_path = _paths(folder, cubin.variant)
    for path, data in ((image_path, cubin.image), (record_path, json.dumps(record, indent=1).encode())):
        partial = path.with_suffix(f"{path.suffix}.{os.getpid()}")
        partial.touch(mode=0o644)  # whatever the umask: `_require_own` looks
        partial.write_bytes(data)
        partial.replace(path)


def _read(folder: Path, variant: Entry) -> Cubin:
    image_path, record_path = _paths(folder, variant)
    try:
        record = json.loads(record_path.read_bytes())
        expected, identity = record.pop("sha256"), record.pop("variant")
        cubin = Cubin(variant, image_path.read_bytes(), **record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CubinError(
            f"{image_path}: not a whole entry with {record_path.name} ({error}). Compile it again."
        ) from error
    if hashlib.sha256(cubin.image).hexdigest() != expected or identity != _identity(variant):
        raise CubinError(f"{image_path}: damaged, not what {record_path.name} says. Compile it again.")
    if cubin.image[:4] != b"\x7fELF" or cubin.image[_ELF_MACHINE] != _EM_CUDA:
        raise CubinError(f"{image_path}: not a cubin. Compile it again.")
    return cubin


def _identity(variant: Entry) -> dict[str, Any]:
    """As JSON gives it back. Where the source lies is no part of it: its digest is."""
    fields = json.loads(json.dumps(asdict(variant)))
    fields.pop("source", None)
    return fields


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
