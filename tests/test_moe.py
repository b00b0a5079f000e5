"""``moe_tail`` on CPU devices: bits against the oracle, types, derivatives, batching, errors; what CUDA is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, assert_bitwise, cpu_mesh, on_ranks, workspace_as_on_two_gpus
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import cubin, protocol, reference

EPS = 1e-5
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, np.inf, -np.inf, np.nan, 1.0, -1e-8]

tail = partial(jax_twoshot.moe_tail, axis_name="tp", eps=EPS)


def on_each(tp: int, array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array, (tp, *array.shape))


class Given(NamedTuple):
    """The operands of a call on ``tp`` ranks: a row a rank of the first four, the others as every rank has them."""

    experts: np.ndarray
    index: np.ndarray
    scale: np.ndarray
    shared: np.ndarray
    residual: np.ndarray
    weight: np.ndarray

    @classmethod
    def random(cls, tp: int, *rows: int, width: int, k: int, slots: int, dtype: Any = np.float32) -> Given:
        """Normal numbers; a fifth of the experts are on no rank, or beyond the last."""
        random = np.random.default_rng(0)

        def normals(*shape: int) -> np.ndarray:
            return (3 * random.standard_normal(shape, np.float32)).astype(dtype)

        index = random.integers(0, slots, (tp, *rows, k), np.int32)
        index = np.where(random.random(index.shape) < 0.2, random.choice([-1, -(2**31), slots], index.shape), index)
        return cls(
            normals(tp, slots, width),
            index.astype(np.int32),
            random.standard_normal(index.shape, np.float32),
            normals(tp, *rows, width),
            normals(*rows, width),
            normals(width),
        )

    @property
    def on_ranks(self) -> Given:
        """A row a rank of all."""
        return Given(*self[:4], *(on_each(len(self.experts), a) for a in self[4:]))

    def check(self, call: Callable = tail, eps: float = EPS) -> None:
        """Every rank has the oracle's bits."""
        got = on_ranks(call, cpu_mesh(len(self.experts)))(*self.on_ranks)
        assert_bitwise(got, tuple(on_each(len(self.experts), w) for w in reference.moe_tail(*self, eps)))


class TestOracle:
    def test_order_and_rounding(self) -> None:
        """Against loops over numbers."""
        given = Given.random(1, 3, width=8, k=5, slots=6)
        experts, index, scale, shared = (a[0] for a in given[:4])
        want = np.empty_like(shared)
        for row in range(3):
            for column in range(8):
                total = np.float32(0)
                for slot, factor in zip(index[row], scale[row], strict=True):
                    if 0 <= slot < 6:
                        total += factor * experts[slot, column]
                want[row, column] = total + shared[row, column]
        assert_bitwise(reference.moe_combine(experts, index, scale, shared), want)

    def test_a_part_is_rounded_once_and_the_sum_once(self) -> None:
        bf16 = DTYPES["bfloat16"]
        one, ones = np.zeros((2, 1, 1), np.int32), np.ones((2, 1, 8), bf16)
        experts, scale = (256 * ones).astype(bf16), np.full((2, 1, 1), 1.001, np.float32)
        # 256.256 + 0.75 = 257.006 rounds to 258 (between 256 and 258, above the middle); 258 * 2 + 1 = 517, to 516.
        shared = (0.75 * ones).astype(bf16)
        assert (reference.moe_combine(experts[0], one[0], scale[0], shared[0]) == 258).all()
        _, new_residual = reference.moe_tail(experts, one, scale, shared, ones[0], ones[0, 0], EPS)
        assert (new_residual == 516).all()


class TestBits:
    @pytest.mark.parametrize("tp", [2, 8])
    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize(
        ("rows", "width", "k", "slots"), [((), 8, 1, 1), ((3,), 576, 8, 40), ((2, 5), 2880, 4, 7), ((1,), 7168, 9, 300)]
    )
    def test_shapes(self, rows: tuple[int, ...], width: int, k: int, slots: int, name: str, tp: int) -> None:
        Given.random(tp, *rows, width=width, k=k, slots=slots, dtype=DTYPES[name]).check()

    @pytest.mark.parametrize("name", DTYPES)
    def test_special_values(self, name: str) -> None:
        random = np.random.default_rng(1)
        given = Given.random(4, 40, width=24, k=3, slots=20, dtype=DTYPES[name])
        with np.errstate(over="ignore"):
            arrays = given.experts, given.shared, given.residual
            experts, shared, residual = (random.choice(SPECIAL, a.shape).astype(DTYPES[name]) for a in arrays)
        # An expert that is not here adds nothing, whatever its scale.
        scale = np.where(given.index < 0, np.nan, random.choice(SPECIAL, given.scale.shape)).astype(np.float32)
        given._replace(experts=experts, shared=shared, residual=residual, scale=scale).check()

    def test_no_expert_here(self) -> None:
        given = Given.random(2, 4, width=16, k=2, slots=3)
        given._replace(index=np.full_like(given.index, -1)).check()

    def test_several_rounds_on_a_workspace_of_its_kind(self) -> None:
        with jax_twoshot.Workspace(cpu_mesh(4), "tp", rows=3, width=576, generations=3) as workspace:
            Given.random(4, 40, width=576, k=4, slots=60, dtype=DTYPES["bfloat16"]).check(
                partial(tail, workspace=workspace)
            )

    def test_empty(self) -> None:
        Given.random(2, 0, width=16, k=2, slots=3).check()

    def test_one_rank(self) -> None:
        given = Given.random(1, 3, width=64, k=4, slots=5)
        got = on_ranks(tail, cpu_mesh(1))(*given.on_ranks)
        for g, w in zip(got, reference.moe_tail(*given, EPS), strict=True):
            np.testing.assert_allclose(g[0], w, rtol=1e-5, atol=1e-5)

    def test_decoding(self) -> None:
        """Layers in a scan, each on what the one before left, beside another call."""
        tp, steps, given = 4, 5, Given.random(4, 6, width=576, k=4, slots=20, dtype=DTYPES["bfloat16"])

        def layers(*args: jax.Array) -> Any:
            experts, index, scale, shared, residual, weight = args

            def step(carry: Any, _: None) -> Any:
                y, h = tail(experts, index, scale, *carry, weight)
                z = jax_twoshot.all_reduce(y[:1], "tp")
                return (y * (1 + lax.axis_index("tp")).astype(y.dtype), h), (y, h, z)

            return lax.scan(step, (shared, residual), length=steps)[1]

        got = on_ranks(layers, cpu_mesh(tp))(*given.on_ranks)
        ranks = np.arange(1, tp + 1).reshape(tp, 1, 1).astype(given.shared.dtype)
        for step in range(steps):
            y, h = reference.moe_tail(*given, EPS)
            z = reference.all_reduce(on_each(tp, y[:1]))
            assert_bitwise([g[:, step] for g in got], [on_each(tp, w) for w in (y, h, z)], step)
            given = given._replace(shared=y * ranks, residual=h)


def formula(
    experts: jax.Array, index: jax.Array, scale: jax.Array, shared: jax.Array, residual: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The composition that the call stands for."""
    here = ((index >= 0) & (index < experts.shape[0]))[..., None]
    chosen = jnp.where(here, jnp.take(experts, index, axis=0, mode="clip"), 0)
    h = lax.psum(jnp.sum(scale[..., None] * chosen, -2) + shared, "tp") + residual
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * weight, h


class TestTransformations:
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_type_value_and_gradients(self, check_vma: bool) -> None:
        """Each of two groups of four; the results are typed as the same on all ranks of a group."""
        given = Given.random(4, 6, width=16, k=3, slots=8)
        columns = Given(*(np.concatenate(a, -1) for a in given[:4]), *given[4:])
        specs = (P(None, "tp"), P("dp", "tp"), P("dp", "tp"), P("dp", "tp"), P("dp"), P())

        def sharded(f: Callable) -> Callable:
            mesh = cpu_mesh(2, 4, names=("dp", "tp"))
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("dp"), check_vma=check_vma))

        assert_bitwise(sharded(tail)(*columns), reference.moe_tail(*given, EPS))

        def gradients(call: Callable) -> Any:
            def loss(experts: Any, scale: Any, shared: Any, residual: Any, weight: Any) -> jax.Array:
                y, h = sharded(call)(experts, columns.index, scale, shared, residual, weight)
                return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(h))

            floats = [a for name, a in columns._asdict().items() if name != "index"]
            return jax.grad(loss, (0, 1, 2, 3, 4))(*floats)

        for got, want in zip(gradients(tail), gradients(formula), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("batched", ["all", "experts", "index", "weight"])
    def test_batching(self, batched: str) -> None:
        """One call on the batched rows, or one for each weight."""
        tp, batch = 2, 3
        first = Given.random(tp, 4, width=16, k=3, slots=5)
        names = [n for n in Given._fields if batched == n or batched == "all" and n != "weight"]
        each = [
            first._replace(**{n: np.roll(getattr(first, n), i, axis=-1 if n == "weight" else 1) for n in names})
            for i in range(batch)
        ]
        stacked = first.on_ranks._replace(**{n: np.stack([getattr(g.on_ranks, n) for g in each], 1) for n in names})
        f = on_ranks(jax.vmap(tail, in_axes=tuple(0 if n in names else None for n in Given._fields)), cpu_mesh(tp))
        want = [np.stack(w) for w in zip(*(reference.moe_tail(*g, EPS) for g in each), strict=True)]
        assert_bitwise(f(*stacked), tuple(on_each(tp, w) for w in want))
        calls = f.lower(*stacked).as_text().count("jax_twoshot_moe_combine(")
        assert calls == (batch if batched == "weight" else 1)

    def test_dead_calls_drop(self) -> None:
        given = Given.random(2, 3, width=16, k=2, slots=4).on_ranks
        f = on_ranks(lambda *args: (tail(*args), args[0])[1], cpu_mesh(2))
        assert "jax_twoshot" not in f.lower(*given).compile().as_text()


class TestErrors:
    """Each names the function, the argument, the rule, what was given and the fix."""

    GIVEN = Given.random(4, 2, width=16, k=3, slots=5)
    ONE = Given(*(a[0] for a in GIVEN[:4]), *GIVEN[4:])

    def trace(self, given: Given, **options: Any) -> str:
        check_vma = options.pop("check_vma", False)
        specs = options.pop("in_specs", P())
        f = partial(jax_twoshot.moe_tail, **({"axis_name": "tp", "eps": EPS} | options))
        with pytest.raises((TypeError, ValueError, NameError)) as error:
            sharded = jax.shard_map(f, mesh=cpu_mesh(4), in_specs=specs, out_specs=P(), check_vma=check_vma)
            jax.jit(sharded).trace(*given)
        return str(error.value)

    @pytest.mark.parametrize(
        ("name", "dtype"), [("experts", "int32"), ("shared", "float16"), ("index", "uint32"), ("scale", "bfloat16")]
    )
    def test_dtypes(self, name: str, dtype: str) -> None:
        text = self.trace(self.ONE._replace(**{name: getattr(self.ONE, name).astype(dtype)}))
        assert "moe_tail: experts, shared, residual and weight must have one dtype" in text and dtype in text
        assert "index int32 and scale float32" in text and "astype" in text

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("experts", (5, 8)),
            ("experts", (0, 16)),
            ("experts", (2, 3, 16)),
            ("index", (3, 3)),
            ("index", ()),
            ("scale", (2, 1)),
            ("shared", (16,)),
            ("residual", (2, 8)),
            ("weight", (1, 16)),
        ],
    )
    def test_shapes(self, name: str, shape: tuple[int, ...]) -> None:
        text = self.trace(self.ONE._replace(**{name: np.zeros(shape, getattr(self.ONE, name).dtype)}))
        assert "moe_tail: experts must have the shape [slots, width]" in text and f"{shape}" in text

    @pytest.mark.parametrize("width", [6, 8196])
    def test_width(self, width: int) -> None:
        shapes = [(*a.shape[:-1], width if a.shape[-1] == 16 else 3) for a in self.ONE]
        text = self.trace(Given(*(np.zeros(shape, a.dtype) for shape, a in zip(shapes, self.ONE, strict=True))))
        assert "moe_tail: the width of weight must be a multiple of 4 and at most 8192 for float32" in text

    def test_eps(self) -> None:
        assert "moe_tail: eps must be a Python number" in self.trace(self.ONE, eps=-1.0)

    def test_residual_that_varies(self) -> None:
        given = self.ONE._replace(residual=np.zeros((8, 16), np.float32))
        specs = (P(), P(), P(), P(), P("tp"), P())
        text = self.trace(given, in_specs=specs, check_vma=True)
        assert "moe_tail: residual must be the same on all ranks" in text and "'tp'" in text

    def test_unknown_axis(self) -> None:
        text = self.trace(self.ONE, axis_name="z")
        assert "moe_tail: axis_name='z'" in text

    def test_a_workspace_of_two_generations(self) -> None:
        with jax_twoshot.Workspace(cpu_mesh(4), "tp", rows=2, width=16, dtype=np.float32) as workspace:
            text = self.trace(self.ONE, workspace=workspace)
        assert "it has 2 generations, and the call leaves it to the next one to re-arm what it has read" in text
        assert "generations=3" in text

    def test_all_reduce_refuses_a_workspace_of_three(self) -> None:
        with jax_twoshot.Workspace(cpu_mesh(2), "tp", rows=2, width=16, generations=3) as workspace:
            f = on_ranks(lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace), cpu_mesh(2))
            with pytest.raises(ValueError, match="it has 3 generations"):
                f.trace(np.ones((2, 16), DTYPES["bfloat16"]))


class TestCuda:
    """What is compiled for GPUs; it runs in ``tests/gpu``, and as PTX in ``test_moe_run.py``."""

    def lower(self, rows: int, width: int, k: int = 4, slots: int = 32) -> str:
        f = jax.shard_map(tail, mesh=cpu_mesh(2), in_specs=(*[P("tp")] * 4, P(), P()), out_specs=P())
        bf16 = jnp.bfloat16
        shapes = [((2 * slots, width), bf16), ((2 * rows, k), jnp.int32), ((2 * rows, k), jnp.float32)]
        shapes += [((2 * rows, width), bf16), ((rows, width), bf16), ((width,), bf16)]
        traced = jax.jit(f).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.parametrize(("rows", "grids"), [(1, [1]), (64, [64]), (150, [64, 64, 22])])
    def test_a_launch_for_each_round_of_whole_rows(self, rows: int, grids: list[int]) -> None:
        with workspace_as_on_two_gpus(generations=3):
            text = self.lower(rows, 4096)
        assert [int(grid) for grid in re.findall(r"\bgrid = (\d+)", text)] == grids
        assert re.findall(r"\bgenerations = (\d+)", text) == ["3"] * len(grids)
        scalars = re.findall(r"\bscalars = dense<\[([^]]*)\]>", text)
        eps = int(np.float32(EPS).view(np.int32))
        assert [list(map(int, s.split(","))) for s in scalars] == [[g, 512, 32, 4, eps] for g in grids]

    def test_only_a_workspace_of_three_generations_is_found(self) -> None:
        with workspace_as_on_two_gpus(), pytest.raises(ValueError) as error:
            self.lower(1, 4096)
        assert "moe_tail over axis 'tp': on CUDA it needs a workspace" in str(error.value)
        assert "dtype=..., generations=3)" in str(error.value)

    def test_a_row_that_does_not_fit(self) -> None:
        with workspace_as_on_two_gpus(generations=3) as workspace:
            workspace.handle = replace(workspace.handle, layout=protocol.Layout(2, 200, 3))
            with pytest.raises(ValueError, match="the workspace must hold a row, 4096 elements, it holds 3200"):
                self.lower(1, 4096)

    @pytest.mark.parametrize(
        ("tp", "name", "arch", "blocks"),
        [(2, "bfloat16", "sm_90a", 2), (16, "float32", "sm_90a", 4), (8, "float16", "sm_100a", 1)],
    )
    def test_no_rounding_is_left_to_the_compiler_and_nothing_spills(
        self, tp: int, name: str, arch: str, blocks: int
    ) -> None:
        compiled = cubin.moe_tail_kernel(tp, name, False, arch, blocks).compile()
        assert not re.findall(r"\bfma|\.ftz|\.approx|\bmad\.rn\.f32", compiled.ptx)
        assert 0 < cubin._attribute(compiled.cubin, cubin._REGCOUNT) <= 65536 // protocol.NORM_THREADS
        assert cubin._attribute(compiled.cubin, 0x11) == 0
