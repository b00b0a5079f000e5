"""Bad input: each is an exception that names the argument, the rule, what was given and the fix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import all_reduce_on_ranks, cpu_mesh
from jax.sharding import PartitionSpec as P

import jax_twoshot

X = np.ones((8, 16), np.float32)


def trace(axis_name: Any = "tp", x: Any = X, mesh: Any = None, options: Any = None, **shard_map: Any) -> None:
    """Traces ``all_reduce``: every error of this file comes before anything is compiled."""
    mesh = mesh or cpu_mesh(8)
    f = jax.shard_map(
        lambda x: jax_twoshot.all_reduce(x, axis_name, **(options or {})),
        mesh=mesh,
        in_specs=shard_map.pop("in_specs", P("tp")),
        out_specs=P(),
        check_vma=False,
        **shard_map,
    )
    jax.jit(f).trace(x)


class Says:
    """A text that contains all the fragments, in any order."""

    def __init__(self, *fragments: str) -> None:
        self.fragments = fragments

    def check(self, error: pytest.ExceptionInfo) -> None:
        text = str(error.value)
        missing = [fragment for fragment in self.fragments if fragment not in text]
        assert not missing, f"{missing} not in: {text}"


@pytest.mark.parametrize(
    "dtype",
    [np.int8, np.int32, np.uint8, np.uint32, np.bool_, np.complex64, jnp.float8_e4m3fn],
    ids=lambda d: np.dtype(d).name,
)
def test_dtype(dtype: Any) -> None:
    with pytest.raises(TypeError) as error:
        trace(x=np.ones((8, 16)).astype(dtype))
    Says("all_reduce", np.dtype(dtype).name, "bfloat16", "float16", "float32", "lax.psum").check(error)


def test_dtype_of_one_leaf() -> None:
    with pytest.raises(TypeError) as error:
        trace(x={"good": X, "bad": X.astype(np.int32)})
    Says("int32", "lax.psum").check(error)


def test_not_an_array() -> None:
    f = jax.shard_map(
        lambda x: jax_twoshot.all_reduce("text", "tp"), mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P()
    )
    with pytest.raises(TypeError):
        jax.jit(f).trace(X)


@pytest.mark.parametrize("algorithm", ["oneshot", "", None, 1], ids=str)
def test_algorithm(algorithm: Any) -> None:
    with pytest.raises(ValueError) as error:
        trace(options={"algorithm": algorithm})
    Says("algorithm", "'auto'", "'two_shot'", "'one_shot'", f"got {algorithm!r}").check(error)


@pytest.mark.parametrize("axis_name", ["nope", ("tp", "nope"), ("nope",)], ids=str)
def test_unknown_axis(axis_name: Any) -> None:
    with pytest.raises(NameError) as error:
        trace(axis_name)
    Says("axis_name", "nope", "('tp',)").check(error)


@pytest.mark.parametrize("axis_name", [(), ("tp", "tp"), 3, None], ids=str)
def test_axis_name_that_names_no_axes(axis_name: Any) -> None:
    with pytest.raises((ValueError, TypeError, NameError)) as error:
        trace(axis_name)
    Says("axis_name", repr(axis_name)).check(error)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_outside_shard_map(jit: bool) -> None:
    f = lambda x: jax_twoshot.all_reduce(x, "tp")  # noqa: E731
    with pytest.raises(NameError) as error:
        (jax.jit(f) if jit else f)(X)
    Says("all_reduce", "axis_name", "'tp'", "shard_map").check(error)


def test_outside_shard_map_with_a_mesh_set() -> None:
    with jax.set_mesh(cpu_mesh(8)), pytest.raises((NameError, ValueError)) as error:
        jax.jit(lambda x: jax_twoshot.all_reduce(x, "tp"))(X)
    Says("axis_name", "'tp'", "shard_map").check(error)


def test_axis_of_vmap() -> None:
    """psum sums over such an axis in one device; there are no ranks here."""
    with pytest.raises((NameError, ValueError)) as error:
        jax.vmap(lambda x: jax_twoshot.all_reduce(x, "batch"), axis_name="batch")(X)
    Says("axis_name", "'batch'", "shard_map").check(error)


def test_axis_that_is_not_manual() -> None:
    with pytest.raises(ValueError) as error:
        trace(
            mesh=cpu_mesh(2, 4, names=("dp", "tp")), in_specs=P("dp"), axis_names={"dp"}
        )  # "tp" is left to the compiler
    Says("axis_name", "'tp'", "manual", "('dp',)", "axis_names").check(error)


class TestWorkspace:
    @pytest.mark.parametrize("argument", ["rows", "width"])
    @pytest.mark.parametrize("value", [0, -1, -(1 << 40), 2.5, "8", None, True])
    def test_sizes(self, argument: str, value: Any) -> None:
        with pytest.raises((ValueError, TypeError)) as error:
            jax_twoshot.Workspace(cpu_mesh(8), "tp", **{"rows": 8, "width": 64, argument: value})
        Says("Workspace", argument, repr(value)).check(error)

    @pytest.mark.parametrize("axis_names", ["nope", ("tp", "nope"), (), ("tp", "tp")], ids=str)
    def test_mesh_without_the_axis(self, axis_names: Any) -> None:
        with pytest.raises((ValueError, NameError)) as error:
            jax_twoshot.Workspace(cpu_mesh(8), axis_names, rows=8, width=64)
        Says("Workspace", "axis_names", repr(axis_names), "('tp',)").check(error)

    @pytest.mark.parametrize("dtype", [np.int32, np.float64, "complex64"], ids=str)
    def test_dtype(self, dtype: Any) -> None:
        with pytest.raises(TypeError) as error:
            jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=8, width=64, dtype=dtype)
        Says("Workspace", "dtype", np.dtype(dtype).name, "bfloat16").check(error)

    @pytest.mark.parametrize("timeout", ["soon", -1, float("nan"), [1]], ids=str)
    def test_timeout(self, timeout: Any) -> None:
        with pytest.raises(ValueError) as error:
            jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=8, width=64, timeout=timeout)
        Says("Workspace: timeout", "seconds", "0 to wait for ever", repr(timeout)).check(error)

    def test_reset_of_a_closed_one(self) -> None:
        workspace = jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=8, width=64, timeout=5)
        workspace.reset()
        workspace.close()
        with pytest.raises(ValueError) as error:
            workspace.reset()
        Says("Workspace.reset", "closed", "make a new one").check(error)

    def test_mesh_that_is_none(self) -> None:
        devices: Any = jax.devices("cpu")
        with pytest.raises(TypeError) as error:
            jax_twoshot.Workspace(devices, "tp", rows=8, width=64)
        Says("Workspace", "mesh", "list").check(error)

    def test_closed(self) -> None:
        workspace = jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=8, width=64, dtype=np.float32)
        workspace.close()
        with pytest.raises(ValueError) as error:
            trace(options={"workspace": workspace})
        Says("workspace", "closed", "Workspace").check(error)

    def test_not_a_workspace(self) -> None:
        with pytest.raises(TypeError) as error:
            trace(options={"workspace": 7})
        Says("workspace", "int", "Workspace").check(error)

    def test_of_another_mesh(self) -> None:
        with jax_twoshot.Workspace(cpu_mesh(4), "tp", rows=8, width=64, dtype=np.float32) as workspace:
            with pytest.raises(ValueError) as error:
                trace(options={"workspace": workspace})
            Says("workspace", "mesh", "4", "8").check(error)

    def test_of_other_axes(self) -> None:
        mesh = cpu_mesh(2, 4, names=("dp", "tp"))
        with jax_twoshot.Workspace(mesh, "dp", rows=8, width=64, dtype=np.float32) as workspace:
            with pytest.raises(ValueError) as error:
                trace(mesh=mesh, options={"workspace": workspace})
            Says("workspace", "dp", "tp").check(error)

    def test_of_another_dtype(self) -> None:
        with jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=8, width=64) as workspace:
            with pytest.raises(ValueError) as error:
                trace(options={"workspace": workspace})
            Says("workspace", "bfloat16", "float32").check(error)


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(NameError):
        trace("nope")
    assert (all_reduce_on_ranks(X) == 8).all()
