"""Fused layers on CPU devices: bits against the oracle, types, derivatives, batching, errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, assert_bitwise, cpu_mesh, on_ranks, workspace_as_on_two_gpus
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import _fused, _matmul, _moe, cubin, protocol, reference
from jax_twoshot.workspace import Gpus

EPS = 1e-5
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, np.inf, -np.inf, np.nan, 1.0, -1e-8]

rms_norm = partial(jax_twoshot.all_reduce_rms_norm, axis_name="tp", eps=EPS)


def normals(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def operands(tp: int, *shape: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a call: x a row a rank, the residual, the weight."""
    x = normals(tp, *shape, dtype=dtype)
    return x, normals(*shape, dtype=dtype, seed=1), normals(shape[-1], dtype=dtype, seed=2)


def on_each(tp: int, array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array, (tp, *array.shape))


def check(x: np.ndarray, residual: np.ndarray, weight: np.ndarray, call: Callable = rms_norm, eps: float = EPS) -> None:
    """Every rank has the oracle's bits."""
    tp = len(x)
    got = on_ranks(call, cpu_mesh(tp))(x, on_each(tp, residual), on_each(tp, weight))
    want = reference.all_reduce_rms_norm(x, residual, weight, eps)
    assert_bitwise(got, tuple(on_each(tp, w) for w in want), (x.shape, x.dtype))


class TestOracle:
    """``reference.rms_norm`` against loops over numbers."""

    @staticmethod
    def pairwise(numbers: list[np.float32]) -> np.float32:
        if len(numbers) == 1:
            return numbers[0]
        middle = 1 << (len(numbers) - 1).bit_length() - 1
        return TestOracle.pairwise(numbers[:middle]) + TestOracle.pairwise(numbers[middle:])

    @pytest.mark.parametrize(
        ("width", "block"), [(4, 4), (12, 12), (2048, 2048), (2052, 1028), (4096, 2048), (4100, 1368), (8192, 2048)]
    )
    def test_order(self, width: int, block: int) -> None:
        x = normals(width, seed=width)
        columns = []
        for column in range(block):
            total = np.float32(0)
            for index in range(column, width, block):
                total += x[index] * x[index]
            columns.append(total)
        scale = np.float32(1) / np.sqrt(self.pairwise(columns) / np.float32(width) + np.float32(EPS))
        weight = normals(width, seed=1)
        assert_bitwise(reference.rms_norm(x, weight, EPS), x * scale * weight)

    @pytest.mark.parametrize("name", DTYPES)
    def test_value(self, name: str) -> None:
        x, weight = normals(3, 2880, dtype=DTYPES[name]), normals(2880, dtype=DTYPES[name], seed=1)
        wide = x.astype(np.float64)
        want = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS) * weight.astype(np.float64)
        got = reference.rms_norm(x, weight, EPS).astype(np.float64)
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-21}[name]
        np.testing.assert_allclose(got, want, rtol=unit * 1.01, atol=1e-7)

    def test_residual_is_added_before_the_rounding(self) -> None:
        x = np.array([[256.0], [0.75]], DTYPES["bfloat16"]).repeat(8, 1)
        residual = np.full(8, 0.5, DTYPES["bfloat16"])
        _, new_residual = reference.all_reduce_rms_norm(x, residual, residual, EPS)
        assert (new_residual == 258).all()  # 257.25; the sum alone rounds to 256, as does 256.5 then


class TestBits:
    @pytest.mark.parametrize("tp", [2, 3, 8])
    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("shape", [(8,), (3, 576), (2, 5, 2880), (2, 4096), (5, 7168)], ids=str)
    def test_shapes(self, shape: tuple[int, ...], name: str, tp: int) -> None:
        check(*operands(tp, *shape, dtype=DTYPES[name]))

    @pytest.mark.parametrize("name", DTYPES)
    def test_widest(self, name: str) -> None:
        chunk = protocol.FORMATS[name].chunk
        check(*operands(2, 1, protocol.NORM_MAX_BLOCKS * protocol.NORM_THREADS * chunk, dtype=DTYPES[name]))

    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("eps", [0, 1e-6, 1.0])
    def test_special_values(self, eps: float, name: str) -> None:
        random = np.random.default_rng(0)
        with np.errstate(over="ignore"):
            x, residual = (random.choice(SPECIAL, (n, 40, 24)).astype(DTYPES[name]) for n in (4, 1))
            x[:, 20:], residual[:, 20:] = (random.choice(SPECIAL[:4], (n, 20, 24)).astype(DTYPES[name]) for n in (4, 1))
            weight = random.choice(SPECIAL[:4] + [1.0, -2.0], 24).astype(DTYPES[name])
        check(x, residual[0], weight, partial(rms_norm, eps=eps), eps)

    def test_several_rounds(self) -> None:
        x, residual, weight = operands(4, 40, 576, dtype=DTYPES["bfloat16"])
        with jax_twoshot.Workspace(cpu_mesh(4), "tp", rows=3, width=576) as workspace:
            check(x, residual, weight, partial(rms_norm, workspace=workspace))

    def test_empty(self) -> None:
        check(*operands(2, 0, 16))

    def test_one_rank(self) -> None:
        x, residual, weight = operands(1, 3, 64)
        got = on_ranks(rms_norm, cpu_mesh(1))(x, residual[None], weight[None])
        want = reference.all_reduce_rms_norm(x, residual, weight, EPS)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g[0], w, rtol=1e-6)

    def test_decoding(self) -> None:
        """Sizes that walk, in a scan, beside other calls: as layers of a decoder chain them."""
        tp, steps = 4, 6

        def layers(x: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
            def step(carry: Any, _: None) -> Any:
                y, h = rms_norm(*carry, weight)
                z = jax_twoshot.all_reduce(y[:1], "tp")
                return ((y * (1 + lax.axis_index("tp")).astype(y.dtype)), h), (y, h, z)

            return lax.scan(step, (x, residual), length=steps)[1]

        for rows in (1, 6, 3):
            x, residual, weight = operands(tp, rows, 576, dtype=DTYPES["bfloat16"])
            got = on_ranks(layers, cpu_mesh(tp))(x, on_each(tp, residual), on_each(tp, weight))
            ranks = np.arange(1, tp + 1).reshape(tp, 1, 1).astype(x.dtype)
            for step in range(steps):
                y, residual = reference.all_reduce_rms_norm(x, residual, weight, EPS)
                z = reference.all_reduce(on_each(tp, y[:1]))
                assert_bitwise([g[:, step] for g in got], [on_each(tp, w) for w in (y, residual, z)], (rows, step))
                x = y * ranks


def formula(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The composition that the call stands for."""
    h = lax.psum(x, "tp") + residual
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * weight, h


class TestTransformations:
    MESH = staticmethod(lambda: cpu_mesh(2, 4, names=("dp", "tp")))
    SPECS = (P("dp", "tp"), P("dp"), P())

    def sharded(self, f: Callable, **options: Any) -> Callable:
        return jax.jit(jax.shard_map(f, mesh=self.MESH(), in_specs=self.SPECS, out_specs=P("dp"), **options))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_type_and_value(self, check_vma: bool) -> None:
        """Each of two groups of four; the result is typed as the same on all ranks of a group."""
        x, residual, weight = operands(4, 6, 16)
        columns = x.transpose(1, 0, 2).reshape(6, -1)
        got = self.sharded(rms_norm, check_vma=check_vma)(columns, residual, weight)
        assert_bitwise(got, reference.all_reduce_rms_norm(x, residual, weight, EPS))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_gradients(self, check_vma: bool) -> None:
        x, residual, weight = operands(4, 6, 16)
        columns = x.transpose(1, 0, 2).reshape(6, -1)

        def gradients(call: Callable) -> Any:
            def loss(*args: jax.Array) -> jax.Array:
                y, h = self.sharded(call, check_vma=check_vma)(*args)
                return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(h))

            return jax.grad(loss, (0, 1, 2))(columns, residual, weight)

        for got, want in zip(gradients(rms_norm), gradients(formula), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)

    def test_jvp_with_one_tangent(self) -> None:
        x, residual, weight = operands(2, 3, 16)

        def tangents(call: Callable) -> Any:
            def f(x: jax.Array, r: jax.Array, w: jax.Array) -> Any:
                return jax.jvp(lambda r: call(x, r, w), (r,), (jnp.ones_like(r),))[1]

            return on_ranks(f, cpu_mesh(2))(x, on_each(2, residual), on_each(2, weight))

        for got, want in zip(tangents(rms_norm), tangents(formula), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("x_dim", "residual_dim"), [(0, 0), (1, 2), (None, 0), (2, None)])
    def test_batching_is_one_call(self, x_dim: int | None, residual_dim: int | None) -> None:
        tp, batch = 2, 3
        x, residual, weight = operands(tp, batch, 4, 16)
        xs = x[:, 0] if x_dim is None else np.moveaxis(x, 1, 1 + x_dim)
        residuals = residual[0] if residual_dim is None else np.moveaxis(residual, 0, residual_dim)
        f = on_ranks(jax.vmap(rms_norm, in_axes=(x_dim, residual_dim, None)), cpu_mesh(tp))
        args = xs, on_each(tp, residuals), on_each(tp, weight)
        want = reference.all_reduce_rms_norm(
            x if x_dim is not None else np.repeat(x[:, :1], batch, 1),
            residual if residual_dim is not None else np.repeat(residual[:1], batch, 0),
            weight,
            EPS,
        )
        assert_bitwise(f(*args), tuple(on_each(tp, w) for w in want))
        assert f.lower(*args).as_text().count("jax_twoshot_all_reduce_rms_norm(") == 1

    def test_batched_weight(self) -> None:
        x, residual, _ = operands(2, 3, 4, 16)
        weights = normals(3, 16, seed=5)
        got = on_ranks(jax.vmap(rms_norm), cpu_mesh(2))(x, on_each(2, residual), on_each(2, weights))
        each = [reference.all_reduce_rms_norm(x[:, i], residual[i], weights[i], EPS) for i in range(3)]
        assert_bitwise(got, tuple(on_each(2, np.stack(w)) for w in zip(*each, strict=True)))

    def test_dead_calls_drop(self) -> None:
        f = on_ranks(lambda x, r, w: (rms_norm(x, r, w), x)[1], cpu_mesh(2))
        x, residual, weight = operands(2, 3, 16)
        text = f.lower(x, on_each(2, residual), on_each(2, weight)).compile().as_text()
        assert "jax_twoshot" not in text


class TestErrors:
    """Each names the function, the argument, the rule, what was given and the fix."""

    def trace(self, x: Any, residual: Any, weight: Any, **options: Any) -> str:
        specs = options.pop("in_specs", P())
        check_vma = options.pop("check_vma", False)
        f = partial(jax_twoshot.all_reduce_rms_norm, **({"axis_name": "tp", "eps": EPS} | options))
        with pytest.raises((TypeError, ValueError, NameError)) as error:
            sharded = jax.shard_map(f, mesh=cpu_mesh(4), in_specs=specs, out_specs=P(), check_vma=check_vma)
            jax.jit(sharded).trace(x, residual, weight)
        text = str(error.value)
        assert "all_reduce_rms_norm" in text
        return text

    def test_dtypes(self) -> None:
        x, half = np.ones((2, 16), np.float32), np.ones((2, 16), np.float16)
        text = self.trace(x, half, np.ones(16, np.float32))
        assert "float32, float16 and float32" in text and "astype" in text
        assert "int32" in self.trace(x.astype(np.int32), x.astype(np.int32), np.ones(16, np.int32))

    @pytest.mark.parametrize(("residual", "weight"), [((3, 16), (16,)), ((2, 16), (8,)), ((2, 16), (2, 16))])
    def test_shapes(self, residual: tuple[int, ...], weight: tuple[int, ...]) -> None:
        text = self.trace(*(np.ones(shape, np.float32) for shape in ((2, 16), residual, weight)))
        assert all(str(shape) in text for shape in ((2, 16), residual, weight))

    @pytest.mark.parametrize("width", [6, 8196])
    def test_width(self, width: int) -> None:
        text = self.trace(*(np.ones(shape, np.float32) for shape in ((2, width), (2, width), width)))
        assert "multiple of 4 and at most 8192 for float32" in text and str(width) in text and "all_reduce" in text

    @pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), True, "1e-6", None])
    def test_eps(self, eps: Any) -> None:
        ones = np.ones((2, 16), np.float32)
        text = self.trace(ones, ones, ones[0], eps=eps)
        assert "eps" in text and repr(eps) in text

    def test_residual_that_varies(self) -> None:
        ones = np.ones((2, 64), np.float32)
        specs = (P(None, "tp"), P(None, "tp"), P())
        text = self.trace(ones, ones, ones[0, :16], in_specs=specs, check_vma=True)
        assert "residual" in text and "'tp'" in text and "in_spec" in text

    def test_unknown_axis(self) -> None:
        ones = np.ones((2, 16), np.float32)
        assert "'z'" in self.trace(ones, ones, ones[0], axis_name="z")

    def test_explicit_axis(self) -> None:
        mesh = jax.make_mesh((2, 4), ("dp", "tp"))
        operands = (np.ones((2, 64), np.float32), np.ones((2, 64), np.float32), np.ones(64, np.float32))
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="all_reduce_rms_norm: .*Explicit"):
            jax.jit(jax.shard_map(rms_norm, in_specs=P(), out_specs=P(), axis_names={"tp"})).trace(*operands)


class TestCuda:
    """What is compiled for GPUs; it runs in ``tests/gpu``."""

    @pytest.fixture
    def workspace(self) -> Iterator[jax_twoshot.Workspace]:
        with workspace_as_on_two_gpus() as workspace:
            yield workspace

    def lower(self, rows: int, width: int) -> str:
        f = jax.shard_map(rms_norm, mesh=cpu_mesh(2), in_specs=(P(None, "tp"), P(), P()), out_specs=P())
        shapes = ((rows, 2 * width), (rows, width), (width,))
        traced = jax.jit(f).trace(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.parametrize(("rows", "grids"), [(1, [1]), (64, [64]), (150, [64, 64, 22])])
    def test_a_launch_for_each_round_of_whole_rows(self, rows: int, grids: list[int], workspace: Any) -> None:
        text = self.lower(rows, 4096)
        assert text.count("@jax_twoshot_cute_call") == len(grids)
        assert [int(grid) for grid in re.findall(r"\bgrid = (\d+)", text)] == grids

    def test_few_kernels_for_all_row_counts(self, workspace: Any) -> None:
        """A new row count compiles none, if one that takes the same way has been there."""
        handle, fmt = workspace.handle, workspace.format
        norms, tails, products = (
            {launch(rows)[0].name for rows in range(1, 65)}
            for launch in (
                lambda rows: _fused.launch(handle, fmt, rows, 4096, EPS),
                lambda rows: _moe.launch(handle, fmt, rows, 4096, 4, 2, EPS),
                lambda rows: _matmul.launch(handle, fmt, rows, 64, 4096),
            )
        )
        assert len(norms) == len(protocol.ALGORITHMS)
        assert len(tails) == 1
        assert len(products) == len(protocol.MATMUL_ROW_TILES)

    def test_a_row_that_does_not_fit(self, workspace: Any) -> None:
        workspace.handle = replace(workspace.handle, layout=protocol.Layout(2, 200))
        with pytest.raises(ValueError, match="the workspace must hold a row, 4096 elements, it holds 3200"):
            self.lower(1, 4096)

    def test_no_workspace(self) -> None:
        with pytest.raises(ValueError, match="all_reduce_rms_norm over axis 'tp': on CUDA it needs a workspace"):
            self.lower(1, 4096)

    @pytest.mark.parametrize("algorithm", protocol.ALGORITHMS)
    @pytest.mark.parametrize(("tp", "name", "blocks"), [(2, "bfloat16", 1), (8, "bfloat16", 2), (4, "float32", 2)])
    def test_no_rounding_is_left_to_the_compiler(self, tp: int, name: str, blocks: int, algorithm: str) -> None:
        compiled = cubin.rms_norm_kernel(tp, name, False, "sm_90a", algorithm, blocks).compile()
        assert not re.findall(r"\bfma|\.ftz|\.approx|\bmad\.rn\.f32", compiled.ptx)
        assert len(re.findall(r"\bsqrt\.rn\.f32", compiled.ptx)) == 1
        assert len(re.findall(r"\bdiv\.rn\.f32", compiled.ptx)) == 2


class TestStandIn:
    """Of one GPU for a group: the calls refuse it, their kernels are for it too."""

    @pytest.fixture
    def workspace(self) -> Iterator[jax_twoshot.Workspace]:
        with jax_twoshot.Workspace(cpu_mesh(1), "tp", rows=3, width=576, owners=1, tp=4) as workspace:
            workspace.handle = replace(workspace.handle, gpu=Gpus("sm_90a", False, 1, 132, 0))
            yield workspace

    @pytest.mark.parametrize(
        "call",
        [
            jax_twoshot.all_reduce,
            lambda x, axis, **more: jax_twoshot.all_reduce_rms_norm(x, x, x[0], axis, eps=EPS, **more),
            lambda x, axis, **more: jax_twoshot.matmul_all_reduce(x, x.T[:, :1].repeat(64, 1), axis, **more),
            lambda x, axis, **more: jax_twoshot.moe_tail(
                *(x, jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2), jnp.float32), x, x, x[0], axis), eps=EPS, **more
            ),
        ],
        ids=["all_reduce", "all_reduce_rms_norm", "matmul_all_reduce", "moe_tail"],
    )
    def test_the_calls_refuse_it_and_do_not_find_it(self, call: Callable, workspace: Any) -> None:
        """Over an axis of one device there would be nothing to sum: ``x`` has no axis of ranks."""
        x = jnp.ones((3, 64), jnp.bfloat16)
        mapped = partial(jax.shard_map, mesh=cpu_mesh(1), in_specs=P(), out_specs=P(), check_vma=False)
        with pytest.raises(ValueError, match=r"it is the stand-in for 4 ranks on one GPU \(owners=1\), .*cute_call"):
            jax.jit(mapped(lambda x: call(x, "tp", workspace=workspace))).trace(x)
        jax.block_until_ready(jax.jit(mapped(lambda x: call(x, "tp")))(x))

    def test_the_kernels_are_made_for_it(self, workspace: Any) -> None:
        handle, fmt = workspace.handle, workspace.format
        launches = [
            _fused.launch(handle, fmt, 3, 576, EPS),
            _matmul.launch(handle, fmt, 3, 64, 576),
            _moe.launch(handle, fmt, 3, 576, 4, 2, EPS),
        ]
        assert [(kernel.tp, kernel.owners) for kernel, _, _ in launches] == [(4, 1)] * 3

    def test_a_kernel_is_called_on_it(self, workspace: Any) -> None:
        kernel, grid, scalars = _fused.launch(workspace.handle, workspace.format, 3, 576, EPS)
        shape = jax.ShapeDtypeStruct((3, 576), jnp.bfloat16)
        call = partial(
            jax_twoshot.cute_call,
            jax_twoshot.CuteKernel(kernel.source, kernel.class_name, **dict(kernel.parameters)),
            **{"workspace": workspace, "out_shape": [shape, shape], "scalars": scalars, "grid": grid, "threads": 512},
        )
        operands = jnp.ones((4, 3, 576), jnp.bfloat16), jnp.ones(shape.shape, shape.dtype), jnp.ones(576, shape.dtype)
        text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        assert re.findall(r"\b(grid|tp) = (\d+)", text) == [("grid", "3"), ("tp", "4")]
