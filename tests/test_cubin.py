"""Where compiled kernels come from: order, cache, damage, stale sources, no compiler."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jax_twoshot import cubin
from jax_twoshot.cubin import CubinError, Variant, arch_for, find

VARIANT = Variant(2, "float32", False, "sm_90a")
compile_once = functools.cache(cubin.compile_variant)


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """No cubins anywhere; the list of what has been compiled since."""
    done: list[Variant] = []

    def compile_variant(variant: Variant) -> cubin.Cubin:
        done.append(variant)
        return replace(compile_once(variant), sources=cubin.sources_digest())

    monkeypatch.setattr(cubin, "compile_variant", compile_variant)
    monkeypatch.setattr(cubin, "_PACKAGED", tmp_path / "packaged")
    monkeypatch.setenv("JAX_TWOSHOT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_TWOSHOT_CUBIN_PATH", raising=False)
    return done


@pytest.fixture
def explicit(monkeypatch, tmp_path, compiles) -> Path:
    """A folder on JAX_TWOSHOT_CUBIN_PATH with the kernel in it."""
    folder = tmp_path / "explicit"
    folder.mkdir()
    cubin._write(folder, compile_once(VARIANT))
    monkeypatch.setenv("JAX_TWOSHOT_CUBIN_PATH", str(folder))
    return folder


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(cubin, "compiler_version", lambda: None)


def cached(tmp_path: Path) -> tuple[Path, Path]:
    """The one entry of the cache: image and metadata."""
    (image,) = (tmp_path / "cache").rglob("*.cubin")
    (record,) = (tmp_path / "cache").rglob("*.json")
    return image, record


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- Variants and targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_arch_for(capability, arch):
    assert arch_for(capability) == arch


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (9, 1), (10, 1), (12, 1), (13, 0)])
def test_a_gpu_without_kernels(capability):
    with pytest.raises(
        ValueError, match=rf"^compute_capability: .* this GPU has {capability[0]}\.{capability[1]}"
    ):
        arch_for(capability)


def test_names_are_stable_and_different():
    assert VARIANT.name == "two_shot-tp2-float32-peers-sm_90a"
    assert Variant(16, "bfloat16", True, "sm_100a").name == "two_shot-tp16-bfloat16-multicast-sm_100a"
    assert Variant(3, "float16", False, "sm_80", "one_shot").name == "one_shot-tp3-float16-peers-sm_80"
    names = [variant.name for variant in cubin.variants(cubin.ARCHS)]
    assert len(set(names)) == len(names) == 2 * 8 * 3 * (2 * 4 + 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((9, "bfloat16", False, "sm_90a"), "^tp: .*got 9"),
        ((2, "int8", False, "sm_90a"), "^format: .*got 'int8'"),
        ((2, "bfloat16", False, "sm_75"), "^arch: .*got 'sm_75'"),
        ((2, "bfloat16", False, "sm_90a", "three_shot"), "^algorithm: .*got 'three_shot'"),
        ((2, "bfloat16", True, "sm_89"), "^multicast: .*sm_89.*multicast=False"),
    ],
)
def test_a_variant_that_does_not_exist(arguments, text):
    with pytest.raises(ValueError, match=text):
        Variant(*arguments)


# ---- Cache -------------------------------------------------------------------------------------------------


def test_compiled_once_then_read(compiles):
    first, second = find(VARIANT), find(VARIANT)
    assert compiles == [VARIANT]
    assert first == second
    assert second.image[:4] == b"\x7fELF"
    assert second.symbol.encode() in second.image
    assert 0 < second.registers <= 80
    assert second.compiler == f"nvidia-cutlass-dsl {cubin.compiler_version()}"


def test_metadata_names_its_image(compiles, tmp_path):
    find(VARIANT)
    image, record = cached(tmp_path)
    assert json.loads(record.read_text())["sha256"] == hashlib.sha256(image.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda image, record: flip_a_byte(image),
        lambda image, record: image.write_bytes(image.read_bytes()[:-1]),
        lambda image, record: image.unlink(),
        lambda image, record: record.unlink(),
        lambda image, record: record.write_bytes(record.read_bytes()[:40]),
        lambda image, record: record.write_bytes(b"\xff\xfe"),
        lambda image, record: record.write_text("3"),
        lambda image, record: record.write_text("{}"),
        lambda image, record: record.write_text(record.read_text().replace('"tp": 2', '"tp": 3')),
    ],
    ids=["flipped", "short", "no image", "no record", "half record", "no text", "number", "empty", "other"],
)
def test_a_damaged_entry_is_a_miss(compiles, tmp_path, damage):
    whole = find(VARIANT)
    damage(*cached(tmp_path))
    assert find(VARIANT) == whole
    assert compiles == [VARIANT] * 2
    assert find(VARIANT) == whole
    assert compiles == [VARIANT] * 2


@pytest.mark.parametrize("which", ["folder", "image", "record"])
@pytest.mark.parametrize("bits", [0o020, 0o002], ids=["group", "others"])
def test_what_others_may_write_to_is_refused(compiles, tmp_path, which, bits):
    find(VARIANT)
    image, record = cached(tmp_path)
    path = {"folder": image.parent, "image": image, "record": record}[which]
    assert path.stat().st_mode & 0o022 == 0
    path.chmod(path.stat().st_mode | bits)
    with pytest.raises(CubinError, match="another user may write to this.*\n.*chmod go-w") as error:
        find(VARIANT)
    assert str(error.value).startswith(f"{path}: ")
    assert compiles == [VARIANT]


def test_what_another_user_owns_is_refused(compiles, tmp_path, monkeypatch):
    find(VARIANT)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(CubinError, match=f"owner {uid}"):
        find(VARIANT)


def test_a_new_cache_is_private_whatever_the_umask(compiles, tmp_path):
    before = os.umask(0)
    try:
        find(VARIANT)
    finally:
        os.umask(before)
    image, record = cached(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in (image.parent, image, record)] == [0o700, 0o644, 0o644]
    find(VARIANT)
    assert compiles == [VARIANT]


@pytest.mark.parametrize("image", [b"", b"MZ" * 40, b"\x7fELF" + bytes(60)], ids=["empty", "no ELF", "not for GPUs"])
def test_what_is_no_cubin_is_refused_whatever_its_digest(compiles, explicit, image):
    cubin._write(explicit, replace(compile_once(VARIANT), image=image))
    with pytest.raises(CubinError, match="not a cubin"):
        find(VARIANT)


def test_a_process_that_died_between_the_two_files(compiles, tmp_path, monkeypatch):
    put = Path.replace

    def put_image_only(self, target):
        if target.suffix == ".json":
            raise KeyboardInterrupt
        return put(self, target)

    monkeypatch.setattr(Path, "replace", put_image_only)
    with pytest.raises(KeyboardInterrupt):
        find(VARIANT)
    monkeypatch.setattr(Path, "replace", put)
    assert list((tmp_path / "cache").rglob("*.cubin"))
    find(VARIANT)
    assert compiles == [VARIANT] * 2


def test_other_sources_or_another_compiler_are_a_miss(compiles, monkeypatch):
    find(VARIANT)
    monkeypatch.setattr(cubin, "sources_digest", lambda: "0" * 64)
    find(VARIANT)
    monkeypatch.setattr(cubin, "compiler_version", lambda: "99.0")
    find(VARIANT)
    assert compiles == [VARIANT] * 3


def test_processes_that_start_together_compile_once(tmp_path):
    script = f"""
import hashlib, os, sys
from pathlib import Path
from jax_twoshot import cubin
compile_variant = cubin.compile_variant
def counted(variant):
    with open({str(tmp_path / "count")!r}, "a") as file:
        file.write("x")
    return compile_variant(variant)
cubin.compile_variant = counted
cubin._PACKAGED = Path({str(tmp_path / "packaged")!r})
os.environ["JAX_TWOSHOT_CACHE_DIR"] = {str(tmp_path / "cache")!r}
os.environ.pop("JAX_TWOSHOT_CUBIN_PATH", None)
print("ready", flush=True)
sys.stdin.readline()
print(hashlib.sha256(cubin.find(cubin.Variant(2, "float32", False, "sm_90a")).image).hexdigest())
"""
    command = [sys.executable, "-c", script]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs == [hashlib.sha256(compile_once(VARIANT).image).hexdigest() + "\n"] * 3
    assert (tmp_path / "count").read_text() == "x"


def test_processes_share_the_compiling(compiles):
    others = [replace(VARIANT, algorithm="one_shot"), replace(VARIANT, tp=3)]
    wanted = [VARIANT, *others]
    assert [found.variant for found in cubin.find_all(wanted, share=4)] == wanted
    assert compiles == [*others, VARIANT]  # the fifth process of three kernels begins with the second


# ---- Given cubins ------------------------------------------------------------------------------------------


def test_order(compiles, explicit, monkeypatch):
    cubin._PACKAGED.mkdir()
    cubin._write(cubin._PACKAGED, replace(compile_once(VARIANT), symbol="packaged"))
    assert find(VARIANT).symbol == compile_once(VARIANT).symbol
    monkeypatch.delenv("JAX_TWOSHOT_CUBIN_PATH")
    assert find(VARIANT).symbol == "packaged"
    assert compiles == []


def test_what_the_explicit_folder_lacks_comes_from_the_next(compiles, explicit):
    other = replace(VARIANT, tp=3)
    assert find(other).variant == other
    assert compiles == [other]


def test_an_explicit_path_that_is_no_folder(explicit, monkeypatch):
    monkeypatch.setenv("JAX_TWOSHOT_CUBIN_PATH", str(explicit / "missing"))
    with pytest.raises(CubinError, match="^" + str(explicit / "missing") + ": JAX_TWOSHOT_CUBIN_PATH"):
        find(VARIANT)


@pytest.mark.parametrize("where", ["explicit", "packaged"])
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink])
def test_damage_is_an_error_whose_first_line_names_the_file(
    compiles, explicit, monkeypatch, where, suffix, damage
):
    if where == "packaged":
        monkeypatch.setattr(cubin, "_PACKAGED", explicit)
        monkeypatch.delenv("JAX_TWOSHOT_CUBIN_PATH")
    damage(explicit / f"{VARIANT.name}{suffix}")
    with pytest.raises(CubinError) as error:
        find(VARIANT)
    assert str(error.value).splitlines()[0].startswith(f"{explicit / VARIANT.name}.cubin: ")
    assert compiles == []


@pytest.mark.parametrize("where", ["explicit", "packaged"])
def test_stale_cubins_are_refused(compiles, explicit, monkeypatch, where):
    if where == "packaged":
        monkeypatch.setattr(cubin, "_PACKAGED", explicit)
        monkeypatch.delenv("JAX_TWOSHOT_CUBIN_PATH")
    old = cubin.sources_digest()[:16]
    monkeypatch.setattr(cubin, "sources_digest", lambda: "0" * 64)
    with pytest.raises(
        CubinError, match=rf"{VARIANT.name}.cubin: .*\({old}, not 0{{16}}\)\.\n.*--arch sm_90a -o "
    ):
        find(VARIANT)
    assert compiles == []


def test_the_digest_covers_every_kernel_source_and_the_protocol(monkeypatch, tmp_path):
    digests = {cubin.sources_digest()}
    sources = ["protocol.py", *(f"kernels/{path.name}" for path in (cubin._ROOT / "kernels").glob("*.py"))]
    assert len(sources) >= 6
    for changed in sources:
        root = tmp_path / changed.replace("/", "-")
        (root / "kernels").mkdir(parents=True)
        for source in sources:
            data = (cubin._ROOT / source).read_bytes()
            (root / source).write_bytes(data + b"\n" if source == changed else data)
        monkeypatch.setattr(cubin, "_ROOT", root)
        digests.add(cubin.sources_digest.__wrapped__())
    assert len(digests) == len(sources) + 1


# ---- Without a compiler ------------------------------------------------------------------------------------


def test_a_cached_cubin_needs_no_compiler(compiles, monkeypatch):
    whole = find(VARIANT)
    monkeypatch.setattr(cubin, "compiler_version", lambda: None)
    assert find(VARIANT) == whole


def test_nothing_found_and_no_compiler(compiles, no_compiler, tmp_path):
    with pytest.raises(CubinError) as error:
        find(VARIANT)
    text = str(error.value)
    assert text.splitlines()[0].startswith(f"{VARIANT.name}.cubin: in none of {tmp_path / 'packaged'}")
    assert "pip install 'jax_twoshot[compile]'" in text
    assert "JAX_TWOSHOT_CUBIN_PATH" in text
    assert "python -m jax_twoshot compile --arch sm_90a -o DIR" in text


def test_cubins_for_another_architecture_only(compiles, explicit, no_compiler):
    with pytest.raises(CubinError, match=f"{explicit} has this kernel for sm_90a only, .* needs sm_100a"):
        find(replace(VARIANT, arch="sm_100a"))


def test_compiling_without_a_compiler(no_compiler):
    with pytest.raises(CubinError, match=r"^nvidia-cutlass-dsl: .*pip install 'jax_twoshot\[compile\]'"):
        cubin.compile_variant(VARIANT)


# ---- python -m jax_twoshot compile -------------------------------------------------------------------------


def test_compile_all(compiles, monkeypatch, tmp_path, capsys):
    norms = cubin.rms_norm_kernels(["sm_90a"], (2,))
    assert len(norms) == 12 * 4
    tails = cubin.moe_tail_kernels(["sm_90a"], (2,))
    assert len(tails) == 6 * 4
    matmuls = cubin.matmul_kernels(["sm_90a"], (2,))
    assert len(matmuls) == 4 * 3
    monkeypatch.setattr(cubin, "rms_norm_kernels", lambda archs, tps: norms[:1])
    monkeypatch.setattr(cubin, "moe_tail_kernels", lambda archs, tps: tails[:1])
    monkeypatch.setattr(cubin, "matmul_kernels", lambda archs, tps: matmuls[:1])
    out = tmp_path / "a" / "b"
    done = cubin.compile_all(["sm_90a", "sm_80"], out, cubin.print_progress, (2,))
    assert len(done) == 21
    assert {path.name for path in out.iterdir()} == {
        f"{variant.name}{suffix}"
        for variant in (*cubin.variants(["sm_90a", "sm_80"], (2,)), norms[0], tails[0], matmuls[0])
        for suffix in (".cubin", ".json")
    }
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"[{number}/21]" for number in range(1, 22)]
    monkeypatch.setenv("JAX_TWOSHOT_CUBIN_PATH", str(out))
    assert find(VARIANT) in done
    assert len(compiles) == 21


def test_compile_all_for_an_unknown_target(compiles, tmp_path):
    with pytest.raises(ValueError, match="^arch: .*got 'sm_7000'"):
        cubin.compile_all(["sm_7000"], tmp_path)
    assert list(tmp_path.iterdir()) == []
