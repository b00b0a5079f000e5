"""``matmul_all_reduce`` on CPU devices, and what is compiled of it for GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DTYPES,
    assert_bitwise,
    assert_within_matmul_bound,
    cpu_mesh,
    integers,
    on_ranks,
    workspace_as_on_two_gpus,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import cubin, protocol, reference

matmul = partial(jax_twoshot.matmul_all_reduce, axis_name="tp")


def exact(a: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Each rank's product, of numbers for which it is exact in FP32."""
    return np.matmul(a.astype(np.float32), w.astype(np.float32)).astype(a.dtype)


@pytest.mark.parametrize("name", protocol.MATMUL_FORMATS)
@pytest.mark.parametrize(("shape", "width"), [((32,), 64), ((1, 96), 576), ((2, 3, 64), 128), ((64, 256), 192)])
def test_integers_have_the_oracles_bits(shape: tuple[int, ...], width: int, name: str) -> None:
    a, w = integers((4, *shape), DTYPES[name], most=3), integers((4, shape[-1], width), DTYPES[name], seed=1, most=3)
    got = on_ranks(matmul, cpu_mesh(4))(a, w)
    want = reference.all_reduce(exact(a.reshape(4, -1, shape[-1]), w))
    assert_bitwise(got, np.broadcast_to(want.reshape(*shape[:-1], width), got.shape))


@pytest.mark.parametrize("name", protocol.MATMUL_FORMATS)
def test_bound(name: str) -> None:
    random = np.random.default_rng(0)
    tp, rows, depth, width = 4, 16, 512, 128
    a, w = (random.standard_normal(s).astype(DTYPES[name]) for s in ((tp, rows, depth), (tp, depth, width)))
    got = np.asarray(on_ranks(matmul, cpu_mesh(tp))(a, w))
    assert_bitwise(got, np.broadcast_to(got[0], got.shape))
    assert_within_matmul_bound(got[0], a, w)


def test_one_rank_and_nothing() -> None:
    a, w = integers((1, 2, 32), DTYPES["bfloat16"]), integers((1, 32, 64), DTYPES["bfloat16"], seed=1)
    assert_bitwise(on_ranks(matmul, cpu_mesh(1))(a, w), exact(a, w))
    assert on_ranks(matmul, cpu_mesh(2))(a[:, :0].repeat(2, 0), w.repeat(2, 0)).shape == (2, 0, 64)


@pytest.mark.parametrize("check_vma", [True, False])
def test_type_and_gradients(check_vma: bool) -> None:
    """On a mesh with another axis; the result is typed as the same on all ranks of a group."""
    mesh = cpu_mesh(2, 4, names=("dp", "tp"))
    a, w = integers((6, 128), DTYPES["float16"], most=2), integers((128, 64), DTYPES["float16"], seed=1, most=2)

    def loss(f: Any, a: jax.Array, w: jax.Array) -> jax.Array:
        specs = {"in_specs": (P("dp", "tp"), P("tp")), "out_specs": P("dp")}
        return jnp.sum(jnp.sin(jax.shard_map(f, mesh=mesh, check_vma=check_vma, **specs)(a, w).astype(jnp.float32)))

    def plain(a: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(jnp.matmul(a, w, preferred_element_type=jnp.float32), "tp").astype(a.dtype)

    got, want = (jax.jit(jax.value_and_grad(partial(loss, f), (0, 1)))(a, w) for f in (matmul, plain))
    assert got[0] == want[0]
    for g, expected in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g.astype(np.float32), expected.astype(np.float32), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("w_dim", [None, 0])
def test_batching(w_dim: int | None) -> None:
    a, w = integers((2, 3, 4, 32), DTYPES["bfloat16"]), integers((2, 3, 32, 64), DTYPES["bfloat16"], seed=1)
    w = w if w_dim == 0 else w[:, 0]
    got = on_ranks(jax.vmap(matmul, in_axes=(0, w_dim)), cpu_mesh(2))(a, w)
    want = reference.all_reduce(exact(a, w if w_dim == 0 else w[:, None]))
    assert_bitwise(got, np.broadcast_to(want, got.shape))


class TestErrors:
    """Each names the function, the rule, what was given and the fix."""

    def text(self, a: Any, w: Any) -> str:
        f = jax.shard_map(matmul, mesh=cpu_mesh(4), in_specs=P(), out_specs=P(), check_vma=False)
        with pytest.raises((TypeError, ValueError)) as error:
            jax.jit(f).trace(a, w)
        assert "jax_twoshot.matmul_all_reduce: " in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize(
        ("a", "w", "words"),
        [
            ((2, 32), (64, 64), "got (2, 32) and (64, 64)"),
            ((), (32, 64), "got () and (32, 64)"),
            ((2, 32), (2, 32, 64), "got (2, 32) and (2, 32, 64)"),
            ((2, 48), (48, 64), "multiple of 32, got 48; fill up with zeros"),
            ((2, 32), (32, 96), "the width of w must be a multiple of 64, got 96; fill up with zeros"),
            ((5, 13, 32), (32, 64), "at most 64 rows, got 65 of shape (5, 13, 32); use jax_twoshot.all_reduce(a @ w"),
        ],
        ids=str,
    )
    def test_shapes(self, a: tuple[int, ...], w: tuple[int, ...], words: str) -> None:
        assert words in self.text(np.ones(a, jnp.bfloat16), np.ones(w, jnp.bfloat16))

    def test_dtypes(self) -> None:
        bf16 = np.ones((32, 64), jnp.bfloat16)
        assert "got float32 and float32" in self.text(np.ones((2, 32), np.float32), bf16.astype(np.float32))
        assert "got float16 and bfloat16; cast" in self.text(np.ones((2, 32), np.float16), bf16)

    def test_explicit_axis(self) -> None:
        mesh = jax.make_mesh((2, 4), ("dp", "tp"))
        operands = (np.ones((2, 64), jnp.bfloat16), np.ones((64, 64), jnp.bfloat16))
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="matmul_all_reduce: .*Explicit"):
            jax.jit(jax.shard_map(matmul, in_specs=P(), out_specs=P(), axis_names={"tp"})).trace(*operands)


class TestCuda:
    @pytest.fixture
    def workspace(self) -> Iterator[jax_twoshot.Workspace]:
        with workspace_as_on_two_gpus() as workspace:
            yield workspace

    def lower(self, rows: int) -> str:
        f = jax.vmap(matmul, in_axes=(0, None))  # a batch may have more rows than the call takes
        mapped = jax.shard_map(f, mesh=cpu_mesh(2), in_specs=(P(None, None, "tp"), P("tp")), out_specs=P())
        shapes = (rows, 1, 2 * 64), (2 * 64, 4096)
        traced = jax.jit(mapped).trace(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.parametrize(("rows", "scalars"), [(1, [1]), (70, [64, 6])])
    def test_a_launch_for_each_round_of_rows(self, rows: int, scalars: list[int], workspace: Any) -> None:
        text = self.lower(rows)
        assert [int(n) for n in re.findall(r"scalars = dense<\[(\d+), 64, 4096\]>", text)] == scalars

    def test_no_workspace(self) -> None:
        with pytest.raises(ValueError, match="matmul_all_reduce over axis 'tp': on CUDA it needs a workspace"):
            self.lower(1)

    @pytest.mark.parametrize(("name", "row_tiles"), [("bfloat16", 1), ("float16", 4)])
    def test_the_product_is_the_tensor_cores(self, name: str, row_tiles: int) -> None:
        """Each step of K is multiplied once, and each chunk of w that a lane reads is loaded once a stage."""
        compiled = cubin.matmul_kernel(8, name, False, "sm_90a", row_tiles).compile()
        kind = {"bfloat16": "bf16", "float16": "f16"}[name]
        products = len(re.findall(rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{kind}", compiled.ptx))
        assert products % (row_tiles * protocol.MATMUL_COLUMNS // 8 * protocol.MATMUL_DEPTH // 16) == 0 < products
        assert "L1::no_allocate" in compiled.ptx
