"""Which ranks form a group: meshes of one to three axes, sub-groups, permuted and partial device lists."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from helpers import (
    DTYPES,
    all_reduce_on_ranks,
    assert_bitwise,
    assert_every_rank_has_the_sum,
    bits,
    cpu_mesh,
    finish,
    free_port,
    integers,
    on_ranks,
    run_script,
    start_script,
)
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import reference

XYZ = ("x", "y", "z")
AXES = [axes for count in (1, 2, 3) for axes in itertools.permutations(XYZ, count)]


def of_all_devices(reduce, axes, parts: np.ndarray, mesh: Mesh) -> np.ndarray:
    """``reduce(x, axes)`` with ``parts[i]`` on the mesh's i-th device, and what each device gets."""
    return np.asarray(on_ranks(lambda x: reduce(x, axes), mesh, axes=tuple(mesh.axis_names))(parts))


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4), (2, 1, 3), (4, 2, 1), (1, 1, 1)])
@pytest.mark.parametrize("axes", AXES, ids=",".join)
def test_axes_of_a_3d_mesh(axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Any axes in any order, some of size 1, in as many groups as the others make: as psum."""
    mesh = cpu_mesh(*shape, names=XYZ)
    parts = integers((mesh.size, 31, 32), DTYPES["bfloat16"])
    expected = of_all_devices(lax.psum, axes, parts, mesh)
    assert_bitwise(of_all_devices(jax_twoshot.all_reduce, axes, parts, mesh), expected)


@pytest.mark.parametrize("rows", [31, 32])
@pytest.mark.parametrize("width", [32, 64, 256])
def test_as_public_decode_models_call_it(rows: int, width: int) -> None:
    """``psum(x, ("z", "y"))`` on a mesh (x, y, z), bit for bit: ranks count along the mesh's axes."""
    mesh = cpu_mesh(1, 2, 4, names=XYZ)
    parts = np.random.default_rng(0).normal(size=(8, rows, width)).astype(DTYPES["bfloat16"])
    for axes in (("z", "y"), ("y", "z"), ("x", "z", "y")):
        result = of_all_devices(jax_twoshot.all_reduce, axes, parts, mesh)
        assert_every_rank_has_the_sum(result, parts, what=axes)


@pytest.mark.parametrize("axes", ["a", "b"])
def test_groups_are_apart(axes: str) -> None:
    """Every group of a 2-D mesh gets its own members' sum, bit for bit."""
    mesh = cpu_mesh(2, 4, names=("a", "b"))
    parts = np.random.default_rng(1).normal(size=(2, 4, 5, 100)).astype(DTYPES["bfloat16"])
    result = of_all_devices(jax_twoshot.all_reduce, axes, parts.reshape(8, 5, 100), mesh).reshape(parts.shape)
    along = "ab".index(axes)
    expected = np.expand_dims(reference.all_reduce(np.moveaxis(parts, along, 0)), along)
    assert_bitwise(result, np.broadcast_to(expected, parts.shape))


@pytest.mark.parametrize("seed", range(3))
def test_permuted_devices(seed: int) -> None:
    """Rank r contributes 2^r, and values whose sum depends on the order: which device it is cannot matter."""
    devices = np.random.default_rng(seed).permutation(np.array(jax.devices("cpu")))
    parts = np.random.default_rng(9).normal(size=(8, 3, 576)).astype(DTYPES["bfloat16"])
    parts[:, 0] = (2.0 ** np.arange(8))[:, None]
    result = all_reduce_on_ranks(parts, Mesh(devices, ("tp",)))
    assert (result[:, 0].astype(np.float32) == 255).all()
    assert_every_rank_has_the_sum(result, parts)
    assert_bitwise(result, all_reduce_on_ranks(parts))


@pytest.mark.parametrize("chosen", [[2, 3, 4, 5], [7, 1, 4], [6, 0]])
def test_some_of_the_devices(chosen: list[int]) -> None:
    devices = np.array(jax.devices("cpu"))[chosen]
    parts = integers((len(chosen), 4, 72), DTYPES["float16"])
    assert_every_rank_has_the_sum(all_reduce_on_ranks(parts, Mesh(devices, ("tp",))), parts)


def test_meshes_take_turns() -> None:
    """One traced function on several meshes, back and forth."""
    backwards = Mesh(jax.devices("cpu")[::-1], ("tp",))
    meshes = [cpu_mesh(8), cpu_mesh(2), cpu_mesh(4, first=4), cpu_mesh(4), backwards]
    for seed, mesh in enumerate(meshes * 3):
        parts = integers((mesh.size, 2, 40), seed=seed)
        assert_every_rank_has_the_sum(all_reduce_on_ranks(parts, mesh), parts)


def test_one_rank_is_the_identity() -> None:
    """As psum over an axis of size 1: nothing is summed, so nothing is rewritten."""
    parts = np.array([[-0.0, np.nan, 1.5, -np.inf]], np.float32)
    assert_bitwise(all_reduce_on_ranks(parts), parts)


def test_replicated_result_is_equal_on_every_device() -> None:
    parts = np.random.default_rng(2).normal(size=(8 * 5, 130)).astype(DTYPES["bfloat16"])
    f = jax.shard_map(
        lambda x: jax_twoshot.all_reduce(x, "tp"), mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P()
    )
    result = jax.jit(f)(parts)
    expected = bits(reference.all_reduce(parts.reshape(8, 5, 130)))
    assert len(result.addressable_shards) == 8
    for shard in result.addressable_shards:
        assert (bits(np.asarray(shard.data)) == expected).all(), shard.device


def test_explicit_axes() -> None:
    """``jax.make_mesh`` gives Explicit axes."""
    mesh = jax.make_mesh((8,), ("tp",), devices=jax.devices("cpu"))
    parts = integers((8 * 4, 96), DTYPES["bfloat16"])
    x = jax.device_put(parts, NamedSharding(mesh, P("tp")))
    f = jax.shard_map(lambda x: jax_twoshot.all_reduce(x, "tp"), mesh=mesh, in_specs=P("tp"), out_specs=P())
    assert_bitwise(jax.jit(f)(x), reference.all_reduce(parts.reshape(8, 4, 96)))


def test_workspace_of_a_group_of_axes() -> None:
    mesh = cpu_mesh(2, 2, 2, names=XYZ)
    parts = integers((8, 9, 100), DTYPES["bfloat16"])
    with jax_twoshot.Workspace(mesh, ("z", "x"), rows=4, width=64) as workspace:
        for axes in (("z", "x"), ("x", "z")):
            ours = of_all_devices(
                lambda x, axes: jax_twoshot.all_reduce(x, axes, workspace=workspace), axes, parts, mesh
            )
            assert_bitwise(ours, of_all_devices(lax.psum, axes, parts, mesh))


def test_bf16_in_a_partial_manual_shard_map() -> None:
    """lax.psum aborts the process here. Right, or a text that names the axis which is not manual."""
    done = run_script("""
        grid = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("dp", "tp"))
        f = jax.shard_map(reduce, mesh=grid, in_specs=P(None, "tp"), out_specs=P(), axis_names={"tp"})
        try:
            y = jax.jit(f)(jnp.ones((6, 64), jnp.bfloat16))
        except Exception as error:
            assert "manual" in str(error) and "dp" in str(error), error
        else:
            assert y.shape == (6, 16) and (np.asarray(y) == 4).all()
        check()
        print("alive")
    """)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_two_processes() -> None:
    """Two processes of four CPU devices: right, or an error that says "one process"; no crash, no hang."""
    source = """
        import os, jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import jax_twoshot

        jax.config.update("jax_num_cpu_devices", 4)
        jax.distributed.initialize(os.environ["ADDRESS"], 2, int(os.environ["PROCESS"]))
        mesh = Mesh(np.array(jax.devices()), ("tp",))
        assert mesh.size == 8
        x = jax.make_array_from_callback(
            (8, 64), NamedSharding(mesh, P("tp")), lambda i: np.full((1, 64), i[0].start, np.float32)
        )
        try:
            f = lambda x: jax_twoshot.all_reduce(x, "tp")
            y = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P()))(x)
            assert all((np.asarray(shard.data) == 28).all() for shard in y.addressable_shards)
            print("right")
        except NotImplementedError as error:
            assert "one process" in str(error), error
            print("refused")
    """
    address = f"localhost:{free_port()}"
    environments = [{"ADDRESS": address, "PROCESS": str(i)} for i in range(2)]
    started = [start_script(source, env, prelude="") for env in environments]
    done = [finish(process) for process in started]
    assert [process.returncode for process in done] == [0, 0], done
    assert done[0].stdout == done[1].stdout in ("right\n", "refused\n")
