"""What JAX does to functions, as it does to psum: types, derivatives, batching, control flow, caches."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DTYPES,
    PRELUDE,
    all_reduce_on_ranks,
    assert_bitwise,
    assert_every_rank_has_the_sum,
    cpu_mesh,
    integers,
    on_ranks,
    run_ok,
    run_script,
)
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import protocol

REDUCERS = (jax_twoshot.all_reduce, lax.psum)


def over_tp(x: jax.Array) -> jax.Array:
    return jax_twoshot.all_reduce(x, "tp")


def custom_calls(lowered: jax.stages.Lowered) -> list[str]:
    """Names of the all-reduce's custom calls in a lowered program."""
    return [name for name in re.findall(r"custom_call @(\w+)", lowered.as_text()) if "twoshot" in name]


def same_as_psum(f: Callable[[Callable], Any]) -> None:
    """``f(all_reduce)`` is ``f(psum)``, bit for bit: the data are integers."""
    ours, theirs = (jax.tree.map(np.asarray, f(reduce)) for reduce in REDUCERS)
    assert jax.tree.leaves(ours)
    assert_bitwise(ours, theirs)


class TestTypes:
    """Under check_vma, `jax.typeof` is psum's: varying over the axes of x less the reduced ones."""

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
    @pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b"), ("b", "a")], ids=str)
    @pytest.mark.parametrize("spec", [P("a", "b"), P("a"), P(None, "b"), P()], ids=str)
    def test_same_type_and_value(self, spec: P, axes: tuple[str, ...], dtype: Any) -> None:
        """Also of what does not vary over a reduced axis: psum multiplies it by the axis' size. (psum
        refuses a mix of varying and unvarying axes, so it is called once an axis.)"""
        types = []
        kept = P(*(None if name in axes else name for name in spec))

        def f(reduce):
            def inner(x):
                y = reduce(x, axes) if reduce is not lax.psum else functools.reduce(lax.psum, axes, x)
                types.append(jax.typeof(y))
                return y

            mesh = cpu_mesh(2, 4, names=("a", "b"))
            sharded = jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=kept)
            return jax.jit(sharded)(integers((4, 16), dtype))

        same_as_psum(f)
        assert len(types) == 2 and types[0] == types[1], types

    def test_pytree_and_scalar(self) -> None:
        def f(reduce):
            def inner(x):
                tree = reduce({"a": x[0, 0], "b": [x]}, "tp")
                for y in jax.tree.leaves(tree):
                    assert jax.typeof(y).manual_axis_type.varying == frozenset()
                return tree

            return jax.jit(jax.shard_map(inner, mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P()))(
                integers((8, 3))
            )

        same_as_psum(f)

    def test_replicated_is_not_promised_falsely(self) -> None:
        """Reduced over one axis only, the result varies over the other: out_specs P() must be refused."""
        for reduce in REDUCERS:
            f = jax.shard_map(
                lambda x, reduce=reduce: reduce(x, "b"),
                mesh=cpu_mesh(2, 4, names=("a", "b")),
                in_specs=P("a", "b"),
                out_specs=P(),
            )
            with pytest.raises(ValueError, match="out_specs"):
                jax.jit(f)(integers((4, 16)))


def loss(y: jax.Array) -> jax.Array:
    return jnp.sum(y * y * jnp.arange(1.0, 1 + y.shape[-1]))


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
class TestDerivatives:
    @pytest.mark.parametrize("out", [P(), P("tp")], ids=["replicated", "sharded"])
    def test_gradient_outside(self, out: P, check_vma: bool) -> None:
        def f(reduce):
            g = jax.shard_map(
                lambda x: reduce(2 * x, "tp") * (x if out == P("tp") else 3.0),
                mesh=cpu_mesh(8),
                in_specs=P("tp"),
                out_specs=out,
                check_vma=check_vma,
            )
            return jax.jit(jax.value_and_grad(lambda x: loss(g(x))))(integers((8, 3)))

        same_as_psum(f)

    @pytest.mark.parametrize("after", [True, False], ids=["of-the-sum", "sum-of-the-loss"])
    def test_gradient_inside(self, after: bool, check_vma: bool) -> None:
        def f(reduce):
            def inner(x):
                objective = lambda x: loss(reduce(x, "tp")) if after else reduce(loss(x), "tp")  # noqa: E731
                return jax.grad(objective)(x)

            g = jax.shard_map(
                inner, mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P("tp"), check_vma=check_vma
            )
            return jax.jit(g)(integers((8, 3)))

        same_as_psum(f)

    def test_gradient_of_replicated_weights(self, check_vma: bool) -> None:
        """The tensor-parallel layer itself: sharded and replicated parameters."""

        def f(reduce):
            def layer(x, w1, w2, b):
                return reduce((x @ w1) @ w2, "tp") + b

            spec = (P(), P(None, "tp"), P("tp", None), P())
            g = jax.shard_map(layer, mesh=cpu_mesh(8), in_specs=spec, out_specs=P(), check_vma=check_vma)
            shapes = [(3, 4), (4, 16), (16, 5), (5,)]
            args = [integers(shape, seed=seed, most=2) for seed, shape in enumerate(shapes)]
            return jax.jit(jax.grad(lambda *args: jnp.sum(g(*args) ** 2), argnums=(0, 1, 2, 3)))(*args)

        same_as_psum(f)

    def test_jvp(self, check_vma: bool) -> None:
        def f(reduce):
            g = jax.shard_map(
                lambda x: reduce(x * x, "tp"),
                mesh=cpu_mesh(8),
                in_specs=P("tp"),
                out_specs=P(),
                check_vma=check_vma,
            )
            return jax.jit(lambda x, t: jax.jvp(g, (x,), (t,)))(integers((8, 5)), integers((8, 5), seed=1))

        same_as_psum(f)

    def test_jvp_and_vjp_inside(self, check_vma: bool) -> None:
        def f(reduce):
            def inner(x, t):
                g = lambda x: reduce(x * x, "tp")  # noqa: E731
                y, tangent = jax.jvp(g, (x,), (t,))
                cotangent = jax.vjp(g, x)[1](y)[0]
                return y, tangent, cotangent

            g = jax.shard_map(
                inner,
                mesh=cpu_mesh(8),
                in_specs=P("tp"),
                out_specs=(P(), P(), P("tp")),
                check_vma=check_vma,
            )
            return jax.jit(g)(integers((8, 5)), integers((8, 5), seed=1))

        same_as_psum(f)

    def test_second_order(self, check_vma: bool) -> None:
        def f(reduce):
            g = jax.shard_map(
                lambda x: reduce(x * x * x, "tp"),
                mesh=cpu_mesh(8),
                in_specs=P("tp"),
                out_specs=P(),
                check_vma=check_vma,
            )
            scalar = lambda x: jnp.sum(g(x) ** 2)  # noqa: E731
            x, v = integers((8, 2), most=3), integers((8, 2), seed=1, most=3)
            forward_over_reverse = jax.jit(lambda x, v: jax.jvp(jax.grad(scalar), (x,), (v,)))(x, v)
            reverse_over_reverse = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(scalar)(x), v)))(x)
            return forward_over_reverse, reverse_over_reverse, jax.jit(jax.hessian(scalar))(x)

        same_as_psum(f)

    def test_of_an_argument_that_is_not_differentiated(self, check_vma: bool) -> None:
        def f(reduce):
            g = jax.shard_map(
                lambda x, y: reduce(x, "tp") * y,
                mesh=cpu_mesh(8),
                in_specs=(P("tp"), P("tp")),
                out_specs=P("tp"),
                check_vma=check_vma,
            )
            return jax.jit(jax.grad(lambda y: jnp.sum(g(integers((8, 3)), y))))(integers((8, 3), seed=1))

        same_as_psum(f)


class TestBatching:
    @pytest.mark.parametrize(("dim", "out"), [(0, 0), (1, 0), (2, 1), (-1, -1)])
    def test_inside(self, dim: int, out: int) -> None:
        def f(reduce):
            batched = jax.vmap(lambda x: reduce(x, "tp") + 1, in_axes=dim, out_axes=out)
            return on_ranks(batched, cpu_mesh(8))(integers((8, 3, 4, 5)))

        same_as_psum(f)

    def test_outside(self) -> None:
        def f(reduce):
            g = jax.shard_map(
                lambda x, w: reduce(x * w, "tp"), mesh=cpu_mesh(8), in_specs=(P("tp"), P()), out_specs=P()
            )
            return jax.jit(jax.vmap(g, in_axes=(1, None)))(integers((8, 6, 3)), integers((1, 3), seed=1))

        same_as_psum(f)

    def test_of_a_gradient(self) -> None:
        def f(reduce):
            g = jax.shard_map(
                lambda x: reduce(x * x, "tp"), mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P()
            )
            return jax.jit(jax.vmap(jax.grad(lambda x: loss(g(x)))))(integers((4, 8, 3)))

        same_as_psum(f)

    def test_is_one_call(self) -> None:
        batched = jax.vmap(jax.vmap(over_tp))
        f = on_ranks(batched, cpu_mesh(8))
        assert len(custom_calls(f.lower(integers((8, 3, 4, 5))))) == 1


scaled = jax.custom_vjp(over_tp)
scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (lax.pcast(3 * ct, "tp", to="varying"),))

def counted(x: jax.Array) -> jax.Array:
    def body(state):
        return state[0] + 1, over_tp(x)

    return lax.while_loop(lambda state: state[0] < 3, body, (0, over_tp(x)))[1]


BODIES: dict[str, Callable] = {
    "scan": lambda x: lax.scan(lambda c, _: (c + 1, over_tp(x)), 0, length=3)[1][2],
    "scan-carry": lambda x: lax.scan(lambda c, _: (over_tp(c + x - c), None), over_tp(x), length=3)[0],
    "while": counted,
    "fori": lambda x: lax.fori_loop(0, 3, lambda _, y: over_tp(x + 0 * y), over_tp(x)),
    "cond": lambda x: lax.cond(over_tp(x)[0, 0] < 1000, over_tp, lambda x: over_tp(2 * x), x),
    "remat": jax.checkpoint(over_tp),
    "nested-jit": jax.jit(over_tp),
    "custom-vjp": scaled,
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_control_flow_is_typed_as_replicated(body: Callable) -> None:
    """check_vma on, out_specs P(): traces, and is right."""
    x = integers((8, 16), DTYPES["bfloat16"])
    f = jax.shard_map(body, mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P())
    assert_bitwise(jax.jit(f)(x), x.sum(axis=0, keepdims=True, dtype=np.float32).astype(x.dtype))


@pytest.mark.parametrize("name", ["scan", "cond", "remat", "nested-jit", "custom-vjp"])
def test_gradients_of_control_flow(name: str) -> None:
    x = integers((8, 16))
    f = jax.shard_map(BODIES[name], mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P())
    total = x.sum(axis=0, keepdims=True)
    expected = np.broadcast_to((6 if name == "custom-vjp" else 2) * total, x.shape)
    assert_bitwise(jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(x), expected)


def test_dead_and_equal_calls_drop() -> None:
    """Pure, like psum: no effect is declared, so a call whose result nobody reads costs nothing."""

    def f(x):
        jax_twoshot.all_reduce(x * 2, "tp")
        return jax_twoshot.all_reduce(x, "tp") + jax_twoshot.all_reduce(x, "tp")

    mesh = cpu_mesh(8)
    on_eight = on_ranks(f, mesh)
    parts = integers((8, 4))
    assert not jax.make_jaxpr(on_eight)(parts).effects
    compiled = on_eight.lower(parts).compile()
    assert len(re.findall(r"custom-call\(.*twoshot", str(compiled.as_text()))) == 1
    assert_bitwise(compiled(parts), np.broadcast_to(2 * parts.sum(axis=0), parts.shape))


def test_has_a_named_scope() -> None:
    """Profiles show what it is."""
    compiled = on_ranks(over_tp, cpu_mesh(8)).lower(integers((8, 4))).compile()
    assert re.search(r'op_name="[^"]*jax_twoshot', str(compiled.as_text()))


def test_one_device_program_with_an_ordered_callback_between() -> None:
    from jax.experimental import io_callback

    parts, seen = integers((8, 4, 72)), []
    before = all_reduce_on_ranks(parts)
    one = jax.jit(lambda x: io_callback(lambda v: seen.append(float(v)), None, x, ordered=True))
    for i in range(3):
        one(jax.device_put(np.float32(i), jax.devices("cpu")[0]))
        assert_bitwise(all_reduce_on_ranks(parts), before)
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def test_delete_everything_and_again() -> None:
    parts = integers((8, 4, 72))
    expected = np.broadcast_to(parts.sum(axis=0), parts.shape)
    for _ in range(10):
        compiled = on_ranks(over_tp, cpu_mesh(8)).lower(parts).compile()
        assert_bitwise(compiled(parts), expected)
        del compiled
        gc.collect()
        jax.clear_caches()


def test_a_row_count_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """At its first call, and not at the second or the hundredth."""
    f, parts = on_ranks(over_tp, cpu_mesh(2)), [integers((2, rows, 64)) for rows in (1, 6, 3)]
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        for part in parts * 100:
            jax.block_until_ready(f(part))
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    assert len(compiled) == len(parts), compiled


class TestClosedWorkspace:
    def test_compiled_programs_keep_what_they_need(self) -> None:
        mesh, parts = cpu_mesh(8), integers((8, 4, 72), DTYPES["bfloat16"])
        workspace = jax_twoshot.Workspace(mesh, "tp", rows=2, width=72)
        f = on_ranks(functools.partial(jax_twoshot.all_reduce, axis_name="tp", workspace=workspace), mesh)
        expected = np.broadcast_to(parts.sum(axis=0, dtype=np.float32).astype(parts.dtype), parts.shape)
        assert_bitwise(f(parts), expected)
        workspace.close()
        workspace.close()
        assert_bitwise(f(parts), expected)
        del workspace
        gc.collect()
        assert_bitwise(f(parts), expected)

    def test_with_statement(self) -> None:
        mesh, parts = cpu_mesh(8), integers((8, 4, 72), DTYPES["bfloat16"])
        with jax_twoshot.Workspace(mesh, "tp", rows=4, width=72) as workspace:
            all_reduce_on_ranks(parts, workspace=workspace)
        with pytest.raises(ValueError, match="closed"):
            all_reduce_on_ranks(parts, workspace=workspace)


class TestExplicitAxes:
    """A shard_map over "tp" alone, where "dp" is an Explicit axis: each device's part is a message of its own."""

    MESH_AXES = {"dp": 2, "tp": 4}

    def mesh(self) -> Mesh:
        return jax.make_mesh(tuple(self.MESH_AXES.values()), tuple(self.MESH_AXES))

    def partly_manual(self, f: Callable, mesh: Mesh, check_vma: bool = True) -> Callable:
        return jax.shard_map(
            f, mesh=mesh, axis_names={"tp"}, in_specs=P(None, "tp"), out_specs=P(), check_vma=check_vma
        )

    def operand(self, mesh: Mesh, dtype: Any = np.float32) -> jax.Array:
        return jax.device_put(integers((8, 12), dtype), jax.NamedSharding(mesh, P("dp", "tp")))

    @pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
    def test_value_type_and_sharding(self, dtype: Any, check_vma: bool) -> None:
        """psum is traced only: that of BF16 would abort the process here (JAX 0.11.2)."""
        types = []

        def body(x: jax.Array) -> jax.Array:
            y = over_tp(2 * x)
            types.append((jax.typeof(y), jax.typeof(lax.psum(x, "tp"))))
            return y

        mesh = self.mesh()
        x = self.operand(mesh, dtype)
        y = jax.jit(self.partly_manual(body, mesh, check_vma))(x)
        assert_bitwise(y, 2 * np.asarray(x).reshape(8, 4, 3).sum(axis=1, dtype=np.float32).astype(dtype))
        assert all(ours == psums for ours, psums in types)
        assert y.sharding.spec == P("dp", None)

    @pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
    def test_gradient(self, check_vma: bool) -> None:
        mesh = self.mesh()
        x = self.operand(mesh)
        f = self.partly_manual(over_tp, mesh, check_vma)
        total = np.asarray(x).reshape(8, 4, 3).sum(axis=1)
        assert_bitwise(jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(x), np.tile(2 * total, 4))

    def test_parts_are_never_gathered_for_it(self) -> None:
        """What the custom call gets is a device's own rows, four of eight."""
        mesh = self.mesh()
        lowered = jax.jit(self.partly_manual(over_tp, mesh)).lower(self.operand(mesh))
        (types,) = re.findall(r"custom_call @jax_twoshot_all_reduce.* : \(tensor<(\w+)>", lowered.as_text())
        assert types == "4x3xf32"

    def test_lowers_for_cuda(self) -> None:
        mesh = self.mesh()
        with jax_twoshot.Workspace(mesh, "tp", rows=8, width=12, dtype=np.float32):
            traced = jax.jit(self.partly_manual(over_tp, mesh)).trace(self.operand(mesh))
            assert len(custom_calls(traced.lower(lowering_platforms=("cuda",)))) == 1

    def test_auto_axis_is_refused(self) -> None:
        mesh = cpu_mesh(2, 4, names=("dp", "tp"))
        with pytest.raises(NotImplementedError, match=r"manual or Explicit, \['dp'\] are Auto.*leave axis_names out"):
            jax.jit(self.partly_manual(over_tp, mesh)).trace(integers((8, 12)))


class TestAheadOfTime:
    def test_compiled_without_arrays(self) -> None:
        """From shapes and shardings alone; then it runs, and refuses another shape."""
        sharding = jax.NamedSharding(cpu_mesh(8), P("tp"))
        f = jax.jit(jax.shard_map(over_tp, mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P()))
        compiled = f.lower(jax.ShapeDtypeStruct((8, 40), np.float32, sharding=sharding)).compile()
        parts = integers((8, 40))
        assert_bitwise(compiled(jax.device_put(parts, sharding)), parts.sum(axis=0, keepdims=True))
        with pytest.raises(TypeError, match="float32"):
            compiled(jax.device_put(parts[:, :8], sharding))

    def test_donated_operand(self) -> None:
        """Summed in place of its own memory, over and over: 8 times the sum each turn."""
        sharding = jax.NamedSharding(cpu_mesh(8), P("tp"))
        step = jax.jit(
            jax.shard_map(over_tp, mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P("tp"), check_vma=False),
            donate_argnums=0,
        )
        parts = integers((8, 40))
        x, total = jax.device_put(parts, sharding), parts.sum(axis=0)
        assert "input_output_alias" in step.lower(x).compile().as_text()
        for turn in range(4):
            before, x = x, step(x)
            assert before.is_deleted()
            assert_bitwise(x, np.broadcast_to(8**turn * total, parts.shape), what=turn)


class TestPersistence:
    """What is compiled can be kept: no address and nothing of this process is in the program."""

    def test_no_address_in_the_program(self) -> None:
        """The same text from two fresh processes, one of which has made other programs before."""
        source = """
            if os.environ["BUSY"] == "1":
                check()
                junk = [np.zeros(1000003) for _ in range(50)]
            f = sharded(reduce)
            lowered = f.lower(jax.ShapeDtypeStruct((8, 2880), jnp.bfloat16))
            print(lowered.as_text())
            print(lowered.compile().as_text())
        """
        texts = [run_ok(source, {"BUSY": busy}) for busy in ("0", "1")]
        assert "jax_twoshot" in texts[0]
        assert texts[0] == texts[1]
        numbers = [int(n, 0) for n in re.findall(r"\b(?:0x[0-9a-fA-F]+|\d+)\b", texts[0])]
        assert max(numbers) < 1 << 32, "an address?"

    def test_persistent_compile_cache(self, tmp_path: Any) -> None:
        source = """
            jax.config.update("jax_compilation_cache_dir", os.environ["CACHE"])
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            events = []
            jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/")[-1]))
            y = sharded(reduce)(x)
            assert (np.asarray(y) == 28).all()
            print(events.count("cache_hits"), events.count("cache_misses"))
        """
        first, second = (run_ok(source, {"CACHE": str(tmp_path)}).split() for _ in range(2))
        assert int(first[0]) == 0 and int(first[1]) > 0, first
        assert int(second[0]) > 0 and int(second[1]) == 0, second

    def test_another_version_misses(self) -> None:
        """The key of the cache is the program's text, so the text holds the version."""
        lowered = on_ranks(over_tp, cpu_mesh(8)).lower(integers((8, 40)))
        assert importlib.metadata.version("jax_twoshot") in lowered.as_text()

    def test_export_round_trip(self) -> None:
        mesh, x = cpu_mesh(8), integers((8, 40), DTYPES["bfloat16"])
        f = jax.jit(
            jax.shard_map(
                over_tp, mesh=mesh, in_specs=P("tp"), out_specs=P()
            )
        )
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls(f.lower(x))]
        assert checks
        exported = jax.export.export(f, platforms=["cpu"], disabled_checks=checks)(x)
        again = jax.export.deserialize(exported.serialize())
        on_mesh = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("tp")))
        assert_bitwise(jax.jit(again.call)(on_mesh), f(x))

    def test_exported_program_runs_in_another_process(self, tmp_path: Any) -> None:
        """One that imports jax_twoshot; else the error names what is missing."""
        env = {"FILE": str(tmp_path / "program")}
        run_ok(
            """
            import re
            f = sharded(reduce, out_specs=P())
            spec = jax.ShapeDtypeStruct((8, 40), jnp.float32)
            names = set(re.findall(r"custom_call @(\\w*twoshot\\w*)", f.lower(spec).as_text()))
            checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
            exported = jax.export.export(f, disabled_checks=checks)(spec)
            open(os.environ["FILE"], "wb").write(exported.serialize())
            """,
            env,
        )
        run = """
            program = jax.export.deserialize(open(os.environ["FILE"], "rb").read())
            backwards = Mesh(jax.devices()[::-1], ("tp",))
            x = jax.device_put(x[:, :40], jax.NamedSharding(backwards, P("tp")))
            assert (np.asarray(jax.jit(program.call)(x)) == 28).all()
            """
        run_ok(run, env)
        without = "\n".join(line for line in PRELUDE.splitlines() if line != "import jax_twoshot")
        failed = run_script(run, env, prelude=without + "\n")
        assert failed.returncode == 1
        assert "No FFI handler registered for jax_twoshot_all_reduce" in failed.stderr


def test_two_meshes_and_two_threads() -> None:
    """Programs over disjoint devices at the same time."""
    wrong: list[str] = []

    def work(first: int) -> None:
        devices = np.array(jax.devices("cpu")[first : first + 4])
        f = on_ranks(over_tp, Mesh(devices, ("tp",)))
        for seed in range(50):
            parts = integers((4, 4, 72), seed=seed + first)
            if not (np.asarray(f(parts)) == parts.sum(axis=0)).all():
                wrong.append(f"devices from {first}, seed {seed}")

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class TestAlgorithm:
    """What is asked for reaches the handler of CUDA, through everything that JAX does to a function."""

    @staticmethod
    def asked(f: Callable[[jax.Array], jax.Array], x: Any) -> list[str]:
        """The attribute of each custom call of ``f``, lowered for CUDA over four ranks."""
        mesh = cpu_mesh(4)
        with jax_twoshot.Workspace(mesh, "tp", rows=1, width=64):
            lowered = on_ranks(f, mesh).trace(x).lower(lowering_platforms=("cuda",))
        assert custom_calls(lowered)
        return re.findall(r'custom_call @jax_twoshot\w*\(.*algorithm = "(\w+)"', lowered.as_text())

    @pytest.mark.parametrize("algorithm", ["auto", *protocol.ALGORITHMS])
    def test_attribute(self, algorithm: str) -> None:
        def reduce(x: jax.Array) -> jax.Array:
            return jax_twoshot.all_reduce(x, "tp", algorithm=algorithm)

        def gradient(x: jax.Array) -> jax.Array:
            return jax.grad(lambda x: reduce(x).astype(jnp.float32).sum())(x)

        x = integers((4, 3, 40), DTYPES["bfloat16"])
        assert self.asked(reduce, x) == [algorithm]
        assert self.asked(jax.vmap(reduce), x) == [algorithm]
        assert self.asked(lambda x: jax.jvp(reduce, (x,), (x,))[1], x) == [algorithm]
        assert set(self.asked(gradient, x)) == {algorithm}

    def test_default(self) -> None:
        assert self.asked(over_tp, integers((4, 40), DTYPES["bfloat16"])) == ["auto"]

    def test_two_calls_that_differ_in_it_are_two(self) -> None:
        def both(x: jax.Array) -> jax.Array:
            return sum(jax_twoshot.all_reduce(x, "tp", algorithm=name) for name in protocol.ALGORITHMS)

        assert self.asked(both, integers((4, 40), DTYPES["bfloat16"])) == list(protocol.ALGORITHMS)

    @pytest.mark.parametrize("algorithm", ["auto", *protocol.ALGORITHMS])
    def test_cpu_takes_each(self, algorithm: str) -> None:
        parts = np.random.default_rng(0).standard_normal((8, 4099)).astype(DTYPES["bfloat16"])
        assert_every_rank_has_the_sum(all_reduce_on_ranks(parts, algorithm=algorithm), parts)
