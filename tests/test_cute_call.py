"""``cute_call`` and ``cutedsl`` without a GPU: what a call becomes, what a kernel compiles to, what is refused."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cpu_mesh
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import CuteKernel, _cute_call, _extension, _ffi, cubin, protocol
from jax_twoshot.workspace import Gpus, View, Workspace, _one_arch

KERNELS = str(Path(__file__).parent / "gpu" / "kernels.py")
SUM = CuteKernel(KERNELS, "Sum")
DEFERRED = CuteKernel(KERNELS, "Sum", deferred=True)
H200 = Gpus("sm_90a", multicast=False, ranks_on_device=1, sm_count=132, one_shot_bytes=0)
CHUNKS = 16


def workspace_for(mesh: Mesh, gpu: Gpus = H200, **options: Any) -> Workspace:
    """A workspace of CPU devices that lowers as if they were GPUs."""
    workspace = Workspace(mesh, mesh.axis_names[-1], rows=4, width=64, **options)
    workspace.handle = replace(workspace.handle, gpu=gpu)
    return workspace


def call(x: jax.Array, workspace: Workspace, kernel: Any = SUM, **options: Any) -> jax.Array:
    options = {"grid": 1, "scalars": [CHUNKS], "out_shape": jax.ShapeDtypeStruct(x.shape, x.dtype)} | options
    return jax_twoshot.cute_call(kernel, x, workspace=workspace, **options)


def lower(workspace: Workspace, kernel: Any = SUM, platform: str = "cuda", **options: Any) -> str:
    """The program of one call on each rank, as text."""

    def f(x: jax.Array) -> jax.Array:
        return call(x, workspace, kernel, **options)

    axis = workspace.mesh.axis_names[-1]
    mapped = jax.shard_map(f, mesh=workspace.mesh, in_specs=P(axis), out_specs=P(axis))
    x = jax.ShapeDtypeStruct((workspace.mesh.shape[axis] * 2, 64), jnp.bfloat16)
    return jax.jit(mapped).trace(x).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache of kernels for the session's tests, none of them in the user's."""
    folder = tmp_path_factory.getbasetemp() / "cute_call"
    monkeypatch.setenv("JAX_TWOSHOT_CACHE_DIR", str(folder))
    monkeypatch.delenv("JAX_TWOSHOT_CUBIN_PATH", raising=False)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what has been compiled since."""
    done: list[str] = []
    compile_variant = cubin.compile_variant

    def counted(variant: cubin.Entry) -> cubin.Cubin:
        done.append(variant.name)
        return compile_variant(variant)

    monkeypatch.setattr(cubin, "compile_variant", counted)
    return done


# ---- The call ----------------------------------------------------------------------------------------------


def test_is_one_custom_call_with_the_kernel_and_no_address() -> None:
    text = lower(workspace_for(cpu_mesh(4)), grid=2, threads=64, ctas_per_sm=3)
    pattern = r"custom_call @jax_twoshot_cute_call\(%\w+\) \{.*mhlo.backend_config = \{(.*)\}, operand_layouts"
    (attributes,) = re.findall(pattern, text)
    image = re.search(r'image = "((?:[^"\\]|\\.)*)", ', attributes)
    assert image is not None and image[1].startswith(r"\7FELF")
    rest = dict(item.split(" = ") for item in attributes.replace(image[0], "").split(", "))
    number = rest.pop("workspace")
    assert re.fullmatch(r"\d{1,4} : i64", number)
    assert rest == {
        "ctas_per_sm": "3 : i64",
        "generations": "2 : i64",
        "grid": "2 : i64",
        "pdl": "true",
        "scalars": f"dense<{CHUNKS}> : tensor<1xi32>",
        "shared_memory": "0 : i64",
        "slot_chunks": "8 : i64",
        "symbol": '"Sum_0"',
        "threads": "64 : i64",
        "tp": "4 : i64",
        "version": f'"{jax_twoshot.__version__}"',
        "what": '"jax_twoshot.cute_call of Sum over axis \'tp\'"',
    }


def test_the_handler_reads_what_the_call_says() -> None:
    """The handler of CUDA, instantiated on CPU: it has decoded every attribute when it misses the workspace."""
    workspace = workspace_for(cpu_mesh(1), owners=1, tp=4)
    jax.ffi.register_ffi_target(_ffi.CUTE_TARGET, _extension.cute_handlers(), platform="cpu")
    kernel = cubin.Kernel(KERNELS, "Sum", (), 2, 1, 4, 1, "bfloat16", False, False, 128, 1, 0, "sm_90a")
    options = {"kernel": kernel, "workspace": workspace.handle, "grid": 1, "scalars": [8], "what": "it"}
    primitive = Primitive("cuda handler on cpu")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda ctx, x: _cute_call.lower(ctx, [x], **options), platform="cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"it: .* compiled for workspace \d+, which is not open"):
        jax.jit(primitive.bind)(jnp.ones(64, jnp.bfloat16))


def test_several_results_keep_their_structure() -> None:
    workspace = workspace_for(cpu_mesh(1), owners=1, tp=4)
    shapes = {"out": jax.ShapeDtypeStruct((3, 8), jnp.bfloat16), "more": [jax.ShapeDtypeStruct((2,), np.int32)]}
    traced = jax.make_jaxpr(lambda x: call(x, workspace, out_shape=shapes))(jnp.ones((4, 64), jnp.bfloat16))
    assert [(v.aval.shape, v.aval.dtype.name) for v in traced.jaxpr.outvars] == [((2,), "int32"), ((3, 8), "bfloat16")]


class TestType:
    """Of results under ``check_vma=True`` on a (dp, tp) mesh."""

    @staticmethod
    def varying(in_specs: P, check_vma: bool = True, **options: Any) -> set[str]:
        seen = []
        workspace = workspace_for(cpu_mesh(2, 4, names=("dp", "tp")))

        def f(x: jax.Array) -> jax.Array:
            y = call(x, workspace, **options)
            seen.append(set(jax.typeof(y).manual_axis_type.varying))
            return y

        specs = {"in_specs": in_specs, "out_specs": P(("dp", "tp")), "check_vma": check_vma}
        mapped = jax.shard_map(f, mesh=workspace.mesh, **specs)
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((16, 64), jnp.bfloat16))
        return seen[0]

    def test_varies_as_the_operands_do(self) -> None:
        assert self.varying(P("tp")) == {"tp"}
        assert self.varying(P(("dp", "tp"))) == {"dp", "tp"}
        assert self.varying(P()) == set()

    def test_varies_as_said(self) -> None:
        assert self.varying(P(("dp", "tp")), varying=["dp"]) == {"dp"}
        assert self.varying(P("dp"), varying=("dp", "tp")) == {"dp", "tp"}
        assert self.varying(P("tp"), varying=()) == set()

    def test_unchecked(self) -> None:
        assert self.varying(P("tp"), check_vma=False, varying=["tp"]) == set()

    def test_a_sum_is_replicated(self) -> None:
        workspace = workspace_for(cpu_mesh(4))
        shape = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)

        def of(varying: Any) -> Any:
            f = functools.partial(call, workspace=workspace, varying=varying)
            return jax.eval_shape(jax.shard_map(f, mesh=workspace.mesh, in_specs=P("tp"), out_specs=P()), shape)

        assert of(()).shape == (2, 64)
        with pytest.raises(ValueError, match="out_specs"):
            of(None)


# ---- Compiled ----------------------------------------------------------------------------------------------


@functools.cache
def compiled(name: str, arch: str = "sm_90a", *, owners: int = 4, deferred: bool = False, **parameters: Any) -> Any:
    """The compiler's output for a kernel of 4 ranks."""
    names = tuple(parameters.items()) + ((("deferred", True),) if deferred else ())
    return cubin.Kernel(KERNELS, name, names, 2, 1, 4, owners, "bfloat16", False, deferred, 128, 4, 0, arch).compile()


def count(ptx: str, instruction: str) -> int:
    return len(re.findall(rf"^\s*(?:@%p\d+ )?{instruction}", ptx, re.MULTILINE))


PUBLISH = r"st\.relaxed\.sys\.global\.v4\.u32 "
REARM = PUBLISH + r"\[%rd\d+\], \{-2147450880, -2147450880, -2147450880, -2147450880\};"


@pytest.mark.parametrize("arch", cubin.ARCHS)
def test_compiles_for_every_target(arch: str) -> None:
    image, ptx, symbol = compiled("Sum", arch)
    assert image[:4] == b"\x7fELF" and symbol == "Sum_0" and f".target {arch}" in ptx
    assert 0 < cubin._attribute(image, cubin._REGCOUNT) <= 65536 // (128 * 4)
    wait, trigger = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    if cubin.capability(arch) < (9, 0):
        assert wait == trigger == -1
    else:
        first_access = re.search(r"^\s*(ld|st|atom|red|multimem)\.(?!param)", ptx, re.MULTILINE)
        assert first_access is not None and 0 < wait < trigger < first_access.start()


def test_parameters_are_the_calls_and_then_those_of_every_kernel() -> None:
    """``slot_chunks`` to ``peers``, as `CudaWorkspace::Launch` packs them."""
    bits = re.findall(r"\.param \.[ub](\d+) ", compiled("Sum").ptx)
    assert [int(b) // 8 for b in bits] == [8, 8, 4, *(4, 4, 8, 8, 8, 8, 8, 4, 4), *[8] * 4]


def test_stores_of_one_call() -> None:
    """One to the owner, one to each of four ranks, and what is re-armed: four slots and a sum."""
    ptx = compiled("Sum").ptx
    assert count(ptx, REARM) == 4 + 1
    assert count(ptx, PUBLISH) == 1 + 4 + count(ptx, REARM)
    assert count(ptx, r"st\.relaxed\.gpu\.global\.u32 ") == 2  # the epoch and the count of calls
    assert count(ptx, r"add(\.rn)?\.f32 ") == 3 * 8


def test_the_stand_in_pushes_every_part_and_stores_a_sum_once() -> None:
    ptx = compiled("Sum", owners=1).ptx
    assert count(ptx, PUBLISH) == 4 + 1 + count(ptx, REARM)
    assert count(ptx, r"ld\.global\.v4\.u32 ") == 4


def test_deferred_rearm_is_of_the_call_before() -> None:
    """What is re-armed comes before any wait; the control block remembers for the next call."""
    ptx = compiled("Sum", deferred=True).ptx
    rearms = [match.start() for match in re.finditer(REARM, ptx)]
    assert len(rearms) == 4 + 1
    assert rearms[-1] < ptx.index("ld.relaxed.sys.global.v4.u32")
    assert count(ptx, r"st\.relaxed\.gpu\.global\.u32 ") == 3


def test_a_given_generation_is_a_constant() -> None:
    """No address comes from the epoch then."""

    def is_in_addresses(ptx: str) -> bool:
        (epoch,) = re.findall(r"ld\.relaxed\.gpu\.global\.v4\.u32 \{(%r\d+),", ptx)
        return re.search(rf"cvt\.u64\.u32\s+%rd\d+, {epoch};", ptx) is not None

    assert is_in_addresses(compiled("Sum").ptx)
    assert not is_in_addresses(compiled("Sum", generation=1).ptx)


def test_a_message_that_does_not_fit_fails_the_workspace() -> None:
    """A size is known when the kernel runs: the host's record says 3 where else is the phase of a wait."""
    phases = re.findall(r"st\.relaxed\.sys\.global\.u32 \[%rd\d+\], ([123]);", compiled("Sum").ptx)
    assert sorted(phases) == ["1", "1", "2", "2", "3"]  # a wait is slow or over


def test_parts_can_be_collected_one_by_one() -> None:
    ptx = compiled("PartsInOrder").ptx
    assert count(ptx, REARM) == 4
    assert count(ptx, PUBLISH) == 1 + 4
    assert count(ptx, r"add(\.rn)?\.f32 ") == 0


def test_the_page_for_kernel_authors_is_right(tmp_path: Path) -> None:
    """Its kernel compiles, and its call of the kernel is typed as replicated and lowered."""
    page = (Path(__file__).parents[1] / "docs" / "kernel_authors.md").read_text()
    kernel, program, built = re.findall(r"```python gpu\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "gated.py"
    path.write_text(kernel)
    mesh = cpu_mesh(4)
    workspace = workspace_for(mesh)
    names = {
        "jax": jax,
        "jax_twoshot": SimpleNamespace(Workspace=lambda *_, **__: workspace, cute_call=jax_twoshot.cute_call),
        "cutedsl": SimpleNamespace(compile_kernel=_cute_call.compile_kernel),
        "GatedSum": functools.partial(CuteKernel, path, "GatedSum"),
        "mesh": mesh,
        "P": P,
        "print": lambda *_: None,
    }
    exec(program, names)
    x = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16)
    lowered = names["gated_sum"].trace(x, x).lower(lowering_platforms=("cuda",))
    assert lowered.out_info.shape == (2, 64)
    assert lowered.as_text().count("custom_call @jax_twoshot_cute_call(") == 1
    with contextlib.chdir(tmp_path):
        exec(built, names)
    assert names["built"].symbol == "GatedSum_0"
    assert (tmp_path / "cubins" / f"{names['built'].variant.name}.cubin").read_bytes() == names["built"].image


# ---- The cache ---------------------------------------------------------------------------------------------


def test_a_kernel_is_compiled_once(compiles: list[str]) -> None:
    lower(workspace_for(cpu_mesh(2)), threads=32)
    assert compiles == ["Sum-tp2-bfloat16-peers-32x1-sm_90a"]
    lower(workspace_for(cpu_mesh(2)), threads=32, grid=3, scalars=[7])
    assert len(compiles) == 1
    lower(workspace_for(cpu_mesh(2), dtype=np.float16), threads=32)
    assert compiles[1:] == ["Sum-tp2-float16-peers-32x1-sm_90a"]


def test_the_text_of_the_file_counts(tmp_path: Path, compiles: list[str]) -> None:
    path = tmp_path / "kernels.py"
    for text in ("", "# a change\n", ""):
        path.write_text(Path(KERNELS).read_text() + text)
        lower(workspace_for(cpu_mesh(2)), CuteKernel(str(path), "Sum"), threads=96)
    assert len(compiles) == 2


def test_the_order_of_its_fields_does_not_name_a_kernel() -> None:
    assert CuteKernel(KERNELS, "Sum", deferred=True, a=1) == CuteKernel(KERNELS, "Sum", a=1, deferred=True)


def test_a_prebuilt_kernel_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its file have to be where it was, since it is not run."""
    built = _cute_call.compile_kernel(
        SUM, "sm_90a", addresses=2, scalars=1, tp=4, threads=160, folder=tmp_path / "cubins"
    )
    moved = shutil.copy(KERNELS, tmp_path / "kernels.py")
    monkeypatch.setattr(cubin, "compiler_version", lambda: None)
    with pytest.raises(cubin.CubinError, match=r"Sum-tp4.*not installed.\n.*cutedsl.compile_kernel\(\.\.\., 'sm_90a'"):
        lower(workspace_for(cpu_mesh(4)), CuteKernel(moved, "Sum"), threads=160)
    monkeypatch.setenv("JAX_TWOSHOT_CUBIN_PATH", str(tmp_path / "cubins"))
    text = lower(workspace_for(cpu_mesh(4)), CuteKernel(moved, "Sum"), threads=160)
    assert f'symbol = "{built.symbol}"' in text


# ---- Refusals ----------------------------------------------------------------------------------------------


@dataclass
class NotFrozen:
    pass


def test_what_is_no_kernel() -> None:
    @dataclass(frozen=True)
    class Local:
        pass

    workspace = workspace_for(cpu_mesh(4))
    for kernel in (NotFrozen(), Local(), SUM.source, None):
        with pytest.raises(TypeError, match="kernel must be an instance of a frozen dataclass at the top level"):
            lower(workspace, kernel)
    with pytest.raises(TypeError, match=r"parameter deferred of Sum must be a str, int, bool or float.*got \[\]"):
        CuteKernel(KERNELS, "Sum", deferred=[])  # type: ignore[arg-type]
    with pytest.raises(cubin.CubinError, match=r"^/nowhere.py: no file"):
        lower(workspace, CuteKernel("/nowhere.py", "Sum"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grid": 0}, "grid must be a whole number from 1 up, got 0"),
        ({"grid": 1.5}, "grid must be a whole number from 1 up, got 1.5"),
        ({"threads": 0}, "threads must be"),
        ({"ctas_per_sm": -1}, "ctas_per_sm must be"),
        ({"shared_memory": -1}, "shared_memory must be bytes from 0 up, got -1"),
        ({"scalars": [1 << 31]}, "scalars must be whole numbers of 32 bits, got 2147483648"),
        ({"scalars": [0.5]}, r"got 0.5; .*view\(np.int32\)"),
        ({"grid": 89}, r"grid must be at most 88 CTAs.*\(132 SMs, 1 CTAs an SM, 1 ranks a GPU\), got 89"),
    ],
)
def test_a_number_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^jax_twoshot.cute_call of Sum.*: .*{text}"):
        lower(workspace_for(cpu_mesh(4)), **options)


def test_a_grid_of_ranks_that_share_a_gpu_leaves_an_sm_free() -> None:
    shared = replace(H200, ranks_on_device=4)
    workspace = workspace_for(cpu_mesh(4), gpu=shared)
    assert workspace.grid(10**6) == (132 - 1) // 4
    assert workspace.grid(129) == 2
    assert workspace_for(cpu_mesh(4)).grid(10**6, ctas_per_sm=4) == 132 * 4 * 2 // 3
    with pytest.raises(ValueError, match="grid must be at most 32 CTAs"):
        lower(workspace, grid=33)


@pytest.mark.parametrize("scalars", [[], [1, 2]])
def test_other_parameters_than_the_kernels(scalars: list[int]) -> None:
    with pytest.raises(TypeError, match=rf"Sum.kernel: parameters must be 2 addresses .* {len(scalars)} scalars"):
        lower(workspace_for(cpu_mesh(4)), scalars=scalars, threads=224)


def test_shared_memory_that_nobody_gives(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    imports, begin = "from cutlass import", "        first = cute.arch.block_idx()"
    allocation = "        SmemAllocator().allocate_tensor(Int32, cute.make_layout(128))[0] = Int32(0)\n"
    text = Path(KERNELS).read_text().replace(imports, f"from cutlass.memory import SmemAllocator\n{imports}", 1)
    path.write_text(text.replace(begin, allocation + begin, 1))
    kernel, options = CuteKernel(path, "Sum"), {"addresses": 2, "scalars": 1, "tp": 2}
    with pytest.raises(ValueError, match="^shared_memory: Sum uses dynamic shared memory, got 0 bytes"):
        _cute_call.compile_kernel(kernel, "sm_90a", **options)
    assert _cute_call.compile_kernel(kernel, "sm_90a", shared_memory=512, **options).image[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("cutedsl.unpack(cutedsl.load(x), arguments.format)", "push: a chunk is four Uint32 words, .* got 8 values"),
        ("cutedsl.pack([Float32(0)] * 4, arguments.format)", "pack: a chunk is 8 bfloat16 values, got 4"),
    ],
)
def test_what_is_no_chunk(words: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    source = Path(KERNELS).read_text().replace("from cutlass import", "from cutlass import Float32, ", 1)
    path.write_text(source.replace("cutedsl.load(x + Int64(part * chunks + chunk) * 16), part", words))
    with pytest.raises(ValueError, match=f"^{text}"):
        _cute_call.compile_kernel(CuteKernel(path, "Sum"), "sm_90a", addresses=2, scalars=1, tp=2)


def test_deferred_rearm_needs_three_generations() -> None:
    with pytest.raises(ValueError, match="deferred=True needs a workspace of 3 generations"):
        lower(workspace_for(cpu_mesh(4)), DEFERRED)
    assert "generations = 3" in lower(workspace_for(cpu_mesh(4), generations=3), DEFERRED)


def test_three_generations_are_for_deferred_rearm() -> None:
    """What re-arms at once would leave to nobody what the deferring call before it has read."""
    workspace = workspace_for(cpu_mesh(4), generations=3)
    with pytest.raises(ValueError, match="deferred=False needs one of 2"):
        lower(workspace, SUM)
    with workspace, pytest.raises(ValueError, match="workspace does not fit this call: it has 3 generations"):
        f = functools.partial(jax_twoshot.all_reduce, axis_name="tp", workspace=workspace)
        mapped = jax.shard_map(f, mesh=workspace.mesh, in_specs=P("tp"), out_specs=P())
        jax.eval_shape(mapped, jnp.ones((8, 64), jnp.bfloat16))


def test_on_cpu() -> None:
    with pytest.raises(NotImplementedError, match="Sum over axis 'tp': a CuTe DSL kernel runs on CUDA only, .* cpu"):
        lower(workspace_for(cpu_mesh(4)), platform="cpu")


def test_a_program_may_have_another_path_for_cpu() -> None:
    """All of it is traced on either platform, the kernel's grid too."""

    def program(workspace: Workspace) -> Any:
        def f(x: jax.Array) -> jax.Array:
            return jax.lax.platform_dependent(
                x,
                cuda=lambda x: call(x, workspace, grid=workspace.grid(CHUNKS), varying=()),
                cpu=lambda x: jax_twoshot.all_reduce(x, "tp"),
            )

        return jax.jit(jax.shard_map(f, mesh=workspace.mesh, in_specs=P("tp"), out_specs=P()))

    x = np.ones((8, 64), jnp.bfloat16)
    assert (np.asarray(program(Workspace(cpu_mesh(4), "tp", rows=4, width=64))(x)) == 4).all()
    lowered = program(workspace_for(cpu_mesh(4))).trace(x).lower(lowering_platforms=("cuda",))
    assert "cute_call" in lowered.as_text()


def test_where_it_cannot_be_called() -> None:
    x = jnp.ones((8, 64), jnp.bfloat16)
    workspace = workspace_for(cpu_mesh(2, 2, names=("dp", "tp")))
    outside = r"inside jax.shard_map over the workspace's mesh \{'dp': 2, 'tp': 2\}"
    with pytest.raises(ValueError, match=outside):
        call(x, workspace)
    for mesh, options in ((cpu_mesh(4), {}), (workspace.mesh, {"axis_names": {"tp"}})):
        f = jax.shard_map(
            functools.partial(call, workspace=workspace), mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), **options
        )
        with pytest.raises(ValueError, match=outside):
            jax.eval_shape(f, x)
    workspace.close()
    with pytest.raises(ValueError, match="workspace is closed"):
        lower(workspace)
    with pytest.raises(TypeError, match="workspace must be a jax_twoshot.Workspace, got NoneType"):
        call(x, None)  # type: ignore[arg-type]


def test_other_devices_than_the_workspaces() -> None:
    workspace = workspace_for(cpu_mesh(4))
    other = cpu_mesh(4, first=4)
    f = jax.shard_map(functools.partial(call, workspace=workspace), mesh=other, in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(ValueError, match=r"runs on devices \(4, 5, 6, 7\), the workspace was made for \(0, 1, 2, 3\)"):
        jax.jit(f).trace(jnp.ones((8, 64), jnp.bfloat16)).lower(lowering_platforms=("cuda",))


def test_a_workspace_on_cpu_does_not_say_what_to_compile_for() -> None:
    workspace = workspace_for(cpu_mesh(4))
    workspace.handle = replace(workspace.handle, gpu=None)
    with pytest.raises(ValueError, match="made on cpu devices, so the GPU to compile for is not known"):
        lower(workspace)


# ---- Workspaces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generations", [2, 3])
def test_views_are_the_layouts(generations: int) -> None:
    layout = protocol.Layout(4, 5, generations)
    peers = tuple(1 << 20 | rank << 16 for rank in range(4))
    for multicast in (None, 7 << 20):
        buffer = SimpleNamespace(device=1, rank=2, address=peers[2], peers=peers, multicast=multicast)
        for generation in range(generations):
            view = View.of(layout, generation, buffer)
            assert (view.device, view.rank) == (1, 2)
            assert view.recv == peers[2] + layout.recv_offset(generation, 0, 0)
            assert view.gather == peers[2] + layout.gather_offset(generation, 0)
            for slot, chunk in ((0, 0), (3, 4), (1, 2)):
                there = view.recv + (slot * layout.slot_chunks + chunk) * 16
                assert there == peers[2] + layout.recv_offset(generation, slot, chunk)
                there = view.gather + (slot * layout.slot_chunks + chunk) * 16
                assert there == peers[2] + layout.gather_offset(generation, slot * layout.slot_chunks + chunk)
            assert view.peer_recv == tuple(peer + layout.recv_offset(generation, 0, 0) for peer in peers)
            assert view.peer_gather == tuple(peer + layout.gather_offset(generation, 0) for peer in peers)
            gather = layout.gather_offset(generation, 0)
            assert view.multicast_gather == (None if multicast is None else multicast + gather)


def test_gpus_of_several_kinds_are_named() -> None:
    a100, a10, h200 = (
        SimpleNamespace(device_kind=f"NVIDIA {kind}", compute_capability=capability)
        for kind, capability in (("A100", "8.0"), ("A10", "8.6"), ("H200", "9.0"))
    )
    with pytest.raises(ValueError, match=r"got NVIDIA A100 \(sm_80\), NVIDIA H200 \(sm_90a\); make a mesh"):
        _one_arch([a100, h200, a100])
    assert _one_arch([a100, a10]) == "sm_80"  # what is built for the one runs on the other


def test_there_are_no_views_on_cpu() -> None:
    workspace = Workspace(cpu_mesh(4), "tp", rows=1, width=64)
    with pytest.raises(ValueError, match=r"Workspace.views: there are no addresses, Workspace\(.* is not on GPUs"):
        workspace.views(1)
    with pytest.raises(ValueError, match="Workspace.views: generation must be 0 to 1, got 2"):
        workspace.views(2)


def test_the_stand_in_has_slots_for_whole_messages() -> None:
    workspace = Workspace(cpu_mesh(1), "tp", rows=4, width=64, owners=1, tp=8, generations=3)
    assert (workspace.tp, workspace.handle.owners) == (8, 1)
    assert workspace.handle.layout == protocol.Layout(8, 4 * 64 // 8, 3)
    group = Workspace(cpu_mesh(8), "tp", rows=4, width=64)
    assert (group.tp, group.handle.owners) == (8, 8)
    assert group.handle.layout == protocol.Layout(8, 4 * 64 // 8 // 8, 2)


@pytest.mark.parametrize(
    ("devices", "options", "text"),
    [
        (1, {"generations": 1}, "generations must be 2, or 3 for deferred re-arm, got 1"),
        (1, {"generations": 4}, "generations must be 2, or 3 for deferred re-arm, got 4"),
        (4, {"tp": 4}, r"tp goes with owners=1, else the mesh says it \(4\); got tp=4"),
        (1, {"owners": 2, "tp": 4}, "owners must be 1, .* got 2 on 1 devices"),
        (4, {"owners": 1, "tp": 4}, "owners must be 1, on axes of one device, .* got 1 on 4 devices"),
        (1, {"owners": 1}, r"tp must be one of \(2, 3, .*\), the ranks that owners=1 plays, got None"),
        (1, {"owners": 1, "tp": 1}, "tp must be one of .* got 1"),
    ],
)
def test_a_workspace_that_cannot_be(devices: int, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^Workspace: {text}"):
        Workspace(cpu_mesh(devices), "tp", rows=1, width=64, **options)
