"""`replacing_psum`: which calls of psum it serves, which it leaves and why, and that it leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import decode_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, assert_bitwise, cpu_mesh, integers, on_ranks
from jax import lax
from jax.lax import psum
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import replacing_psum

PARTS = integers((8, 3))


def over_tp(x: jax.Array) -> jax.Array:
    return psum(x, "tp")


def replicated(f: Callable, **options: Any) -> jax.stages.Wrapped:
    return jax.jit(jax.shard_map(f, mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P(), **options))


def served(f: jax.stages.Wrapped, *args: Any) -> int:
    """Custom calls in the program that ``f`` would run here and now."""
    return f.lower(*args).as_text().count("custom_call @jax_twoshot_all_reduce")


def reasons(f: Callable, *args: Any) -> list[str]:
    """Why each psum of ``f``, traced now, was left; empty strings for those that were served."""
    with replacing_psum() as report:
        jax.jit(f).trace(*args)
    return [call.reason for call in report.calls]


@pytest.mark.parametrize("model", [decode_models.LLAMA, decode_models.MOE], ids=["llama", "moe"])
def test_decode_models_written_with_psum(model: decode_models.Model) -> None:
    """The same bits as with `all_reduce` in psum's place, token by token; the integer counter stays with psum."""
    explicit = decode_models.decode(model, jax_twoshot.all_reduce)
    with replacing_psum() as report:
        replaced = decode_models.decode(model)
    assert_bitwise(replaced.logits, explicit.logits)
    assert_bitwise(replaced.tokens, explicit.tokens)
    assert replaced.counters == explicit.counters and any(replaced.counters)
    assert {(call.dtype, call.served) for call in report.calls} == {("bfloat16", True), ("int32", False)}
    # Llama's two layers are one scan, traced once.
    assert len(report.served) == (3 if model is decode_models.LLAMA else 5)


with_jvp = jax.custom_jvp(over_tp)
with_jvp.defjvps(lambda tangent, total, x: over_tp(tangent))
with_vjp = jax.custom_vjp(over_tp)
with_vjp.defvjp(lambda x: (over_tp(x), None), lambda _, cotangent: (cotangent,))

ROUTES: dict[str, Callable] = {
    "module": lambda x: lax.psum(x, "tp"),
    "imported": over_tp,
    "pmean": lambda x: lax.pmean(x, "tp"),
    "tree": lambda x: lax.psum({"a": x}, "tp")["a"],
    "vmap": jax.vmap(over_tp),
    "scan": lambda x: lax.scan(lambda c, _: (c + over_tp(x), None), jnp.zeros(x.shape), length=2)[0],
    "cond": lambda x: lax.cond(x.shape[1] > 1, over_tp, lambda x: jnp.zeros(x.shape), x),
    "nested-jit": jax.jit(over_tp),
    "remat": jax.checkpoint(over_tp),
    "custom-jvp": with_jvp,
    "custom-vjp": with_vjp,
}


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_caches_hold_inside_and_outside_apart(route: Callable, check_vma: bool) -> None:
    """However psum is called: one function, traced outside, inside, outside, inside."""
    f = replicated(route, check_vma=check_vma)
    before = f(PARTS)
    assert served(f, PARTS) == 0
    with replacing_psum() as report:
        inside = f(PARTS)
        assert served(f, PARTS) == len(report.served) == 1 and not report.passed_on
    assert served(f, PARTS) == 0
    with replacing_psum() as again:
        f(PARTS)
        assert served(f, PARTS) == 1
    assert again.calls == [], "traced twice for one setting"
    assert_bitwise(inside, before)


def test_traced_inside_first() -> None:
    f = replicated(over_tp)
    with replacing_psum():
        assert served(f, PARTS) == 1
        f(PARTS)
        compiled = f.lower(PARTS).compile()
    assert served(f, PARTS) == 0
    assert "jax_twoshot" in compiled.as_text(), "what was compiled inside stays as it is"


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_sums_that_differentiation_makes(check_vma: bool) -> None:
    """Types checked: the transpose of a copy to all ranks is a sum. Unchecked: that of a sum is one."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(psum(x * w, "tp") ** 2)

    f = jax.jit(
        jax.shard_map(
            lambda x, w: jax.grad(loss, argnums=1)(x, w),
            mesh=cpu_mesh(8),
            in_specs=(P("tp"), P()),
            out_specs=P() if check_vma else P("tp"),
            check_vma=check_vma,
        )
    )
    w = integers((1, 3), seed=1)
    outside = f(PARTS, w)
    with replacing_psum() as report:
        assert_bitwise(f(PARTS, w), outside)
        assert served(f, PARTS, w) == 2
    # What all_reduce served, it also transposes.
    assert len(report.served) == (2 if check_vma else 1) and not report.passed_on
    assert "loss" in report.calls[0].where


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_without_jit(check_vma: bool) -> None:
    f = jax.shard_map(over_tp, mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P(), check_vma=check_vma)
    with replacing_psum() as report:
        result = f(PARTS)
    assert len(report.served) == 1
    assert_bitwise(result, PARTS.sum(axis=0, keepdims=True))


class TestPassedOn:
    """What all_reduce cannot do is psum's, with psum's result, and the report has the reason."""

    def check(self, f: Callable, x: Any, reason: str, calls: int = 1) -> None:
        on_eight = on_ranks(f, cpu_mesh(8))
        expected = on_eight(x)
        with replacing_psum() as report:
            result = on_eight(x)
            assert served(on_eight, x) == 0
        assert_bitwise(result, expected)
        assert len(report.passed_on) == len(report.calls) == calls
        assert all(reason in call.reason for call in report.calls), report

    def test_integers(self) -> None:
        self.check(over_tp, integers((8, 3), np.int32), "x has dtype int32, it takes bfloat16")

    def test_once_where_psum_binds_itself_again(self) -> None:
        self.check(jax.vmap(over_tp), integers((8, 3), np.int32), "x has dtype int32")

    def test_bool(self) -> None:
        self.check(over_tp, integers((8, 3)) > 0, "x has dtype int32")

    def test_groups(self) -> None:
        self.check(
            lambda x: psum(x, "tp", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]), PARTS, "axis_index_groups"
        )

    def test_axis_of_vmap(self) -> None:
        self.check(jax.vmap(lambda x: psum(x, "i"), axis_name="i"), PARTS, "has no axis 'i'")
        self.check(jax.vmap(lambda x: psum(x, ("i", "tp")), axis_name="i"), PARTS, "has no axis 'i'")

    def test_axis_of_an_array(self) -> None:
        self.check(lambda x: psum(x, (0, "tp")), PARTS, "0")

    def test_constant_is_no_sum_over_ranks(self) -> None:
        self.check(lambda x: x + psum(1, "tp") + psum(2.0, "tp"), PARTS, "", calls=0)

    def test_outside_shard_map(self) -> None:
        assert "outside jax.shard_map" in reasons(jax.vmap(lambda x: psum(x, "i"), axis_name="i"), PARTS)[0]

    def test_one_rank(self) -> None:
        f = jax.shard_map(over_tp, mesh=cpu_mesh(1), in_specs=P("tp"), out_specs=P(), check_vma=False)
        assert reasons(f, PARTS[:1]) == ["one rank along axis 'tp': nothing to sum"]

    def test_automatic_axis(self) -> None:
        mesh = cpu_mesh(2, 4, names=("dp", "tp"))
        f = jax.shard_map(over_tp, mesh=mesh, axis_names={"tp"}, in_specs=P("tp"), out_specs=P())
        assert "have to be manual or Explicit, ['dp'] are Auto" in reasons(f, PARTS)[0]

    def test_more_than_max_bytes(self) -> None:
        f = replicated(lambda x: (psum(x, "tp"), psum(x[:, :1], "tp")))
        with replacing_psum(max_bytes=4) as report:
            assert served(f, PARTS) == 1
        assert [call.reason for call in report.calls] == ["12 bytes are more than max_bytes=4", ""]
        with pytest.raises(ValueError, match="max_bytes must be at least 0, or None; got -1"):
            replacing_psum(max_bytes=-1).__enter__()

    @pytest.mark.parametrize(
        ("platform", "reason"),
        [("gpu", "on CUDA it needs a workspace"), ("tpu", "runs on CPU and CUDA devices, not on tpu")],
    )
    def test_nothing_to_run_it(self, platform: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        assert reason in reasons(replicated(over_tp), PARTS)[0]
        if platform == "gpu":
            with jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=1, width=3, dtype=np.float32):
                assert reasons(replicated(over_tp), PARTS) == [""]

    def test_several_processes_on_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert "this job has 2 processes" in reasons(replicated(over_tp), PARTS)[0]


class TestContext:
    def test_leaves_no_trace(self) -> None:
        def bound() -> bool:
            return "bind" in vars(lax.psum_p)

        with pytest.raises(RuntimeError, match="user's"), replacing_psum(), replacing_psum():
            assert bound()
            raise RuntimeError("the user's")
        assert not bound()
        assert served(replicated(over_tp), PARTS) == 0

    def test_nests(self) -> None:
        """The innermost decides and reports; then the outer one does again."""
        with replacing_psum() as outer:
            with replacing_psum(max_bytes=0) as inner:
                assert served(replicated(over_tp), PARTS) == 0
            assert served(replicated(lambda x: over_tp(x) + 1), PARTS) == 1
        assert (len(outer.served), len(outer.passed_on)) == (1, 0)
        assert (len(inner.served), len(inner.passed_on)) == (0, 1)

    def test_in_a_part_of_a_function(self) -> None:
        def body(x: jax.Array) -> jax.Array:
            y = over_tp(x)
            with replacing_psum():
                y += over_tp(2 * x)
            return y + over_tp(3 * x)

        f = replicated(body)
        assert served(f, PARTS) == 1
        assert_bitwise(f(PARTS), 6 * PARTS.sum(axis=0, keepdims=True))

    def test_is_one_threads_own(self) -> None:
        """Threads inside and outside trace at the same time; who leaves first takes nothing from the other."""
        counts: dict[str, list[int]] = {"inside": [], "outside": []}
        turns = threading.Barrier(2, timeout=60)

        def trace(name: str) -> None:
            for _ in range(3):
                turns.wait()
                counts[name].append(served(replicated(lambda x: over_tp(x)), PARTS))

        def inside() -> None:
            with replacing_psum():
                trace("inside")

        threads = [threading.Thread(target=inside), threading.Thread(target=trace, args=("outside",))]
        for thread in threads:
            thread.start()
        with replacing_psum():
            pass
        for thread in threads:
            thread.join()
        assert counts == {"inside": [1, 1, 1], "outside": [0, 0, 0]}


class TestTelling:
    @staticmethod
    def body(x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = x + psum(x[:, :2].astype(DTYPES["bfloat16"]), "tp").sum()
        return x + psum(jnp.int32(x.size) + lax.axis_index("tp"), ("tp",))

    def test_events(self) -> None:
        events: list[tuple[str, dict[str, Any]]] = []

        def listen(event: str, **fields: Any) -> None:
            if "/psum/" in event:
                events.append((event, fields))

        jax.monitoring.register_event_listener(listen)
        try:
            with replacing_psum():
                on_ranks(self.body, cpu_mesh(8)).trace(integers((8, 1, 3)))
        finally:
            jax.monitoring.unregister_event_listener(listen)
        assert [event for event, _ in events] == ["/jax_twoshot/psum/served"] * 2 + ["/jax_twoshot/psum/passed_on"]
        served, _, passed_on = (fields for _, fields in events)
        assert "test_replacing_psum.py" in served.pop("where")
        assert served == {"shape": "(1, 2)", "dtype": "bfloat16", "axes": "('tp',)", "reason": ""}
        assert passed_on["reason"].startswith("x has dtype int32")

    def test_table(self) -> None:
        with replacing_psum() as report:
            on_ranks(self.body, cpu_mesh(8)).trace(integers((8, 1, 3)))
        first = self.body.__code__.co_firstlineno
        lines = str(report).splitlines()
        assert lines[0] == "psum: 2 served by all_reduce, 1 passed on"
        assert lines[1].split() == ["decision", "times", "operand", "axes", "where", "reason"]
        assert lines[2].startswith("served     2      bfloat16[1,2]  tp    ")
        assert f"test_replacing_psum.py:{first + 3}" in lines[2] and "TestTelling.body" in lines[2]
        assert lines[3].startswith("passed on  1      int32[]        tp    ")
        assert lines[3].endswith("  x has dtype int32, it takes bfloat16, float16, float32")
        assert len(lines) == 4
