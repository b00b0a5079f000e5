"""The values: bit for bit the oracle's on every rank, whatever is summed and in whatever shape it comes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    DTYPES,
    all_reduce_on_ranks,
    assert_bitwise,
    assert_every_rank_has_the_sum,
    bits,
    cpu_mesh,
    integers,
    on_ranks,
    run_ok,
)
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import protocol, reference

ROWS = (0, 1, 3, 31, 32, 64, 200)
WIDTHS = (1, 7, 8, 32, 576, 2880, 7168, 7169)


@functools.cache
def pool(name: str) -> np.ndarray:
    """2^20 elements: a half ordinary numbers, a quarter any bits at all, a quarter numbers that go wrong."""
    dtype = np.dtype(DTYPES[name])
    unsigned = np.dtype(f"u{dtype.itemsize}")
    random = np.random.default_rng(len(name))
    count = 1 << 18
    info = jnp.finfo(dtype)
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, info.max, info.min, info.tiny, -info.tiny], dtype
    )
    subnormal = np.arange(1, 9).astype(unsigned).view(dtype)  # the eight smallest numbers there are
    payloads = np.array([~unsigned.type(0), protocol.FORMATS[name].nan - 2], unsigned).view(dtype)
    special = np.concatenate([special, subnormal, -subnormal, payloads])
    ordinary = random.normal(scale=30, size=2 * count).astype(np.float32).astype(dtype)
    anything = random.integers(0, 256, count * dtype.itemsize).astype(np.uint8).view(dtype)
    return random.permutation(np.concatenate([ordinary, anything, random.choice(special, count)]))


def draw(name: str, shapes: list[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Arrays of the given shapes out of the pool, each from another place in it."""
    values, start = pool(name), 0
    for shape in shapes:
        size = int(np.prod(shape))
        yield np.take(values, np.arange(start, start + size), mode="wrap").reshape(shape)
        start += size + 12345


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("tp", range(2, 9))
def test_bitwise_oracle(tp: int, name: str) -> None:
    """Rows x widths; what has one width is one program, whose calls XLA:CPU runs in any order."""
    for width in WIDTHS:
        parts = list(draw(name, [(tp, rows, width) for rows in ROWS]))
        for result, part in zip(all_reduce_on_ranks(parts), parts, strict=True):
            assert_every_rank_has_the_sum(result, part, what=f"tp {tp}, shape {part.shape[1:]}")


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 5), (0,), (3, 0, 2), (2, 1, 1, 2, 129)])
def test_any_rank_of_array(shape: tuple[int, ...], name: str) -> None:
    part = next(draw(name, [(8, *shape)]))
    assert_every_rank_has_the_sum(all_reduce_on_ranks(part), part)


def test_pytree_of_mixed_types() -> None:
    tree = {
        "a": next(draw("bfloat16", [(8, 3, 7)])),
        "b": (next(draw("float32", [(8,)])), [next(draw("float16", [(8, 0, 9)]))]),
        "none": None,
    }
    assert_every_rank_has_the_sum(all_reduce_on_ranks(tree), tree)


def test_empty_pytree() -> None:
    on_two = on_ranks(lambda x: (x, jax_twoshot.all_reduce({}, "tp")), cpu_mesh(2))
    assert on_two(np.zeros((2, 1), np.float32))[1] == {}


@pytest.mark.parametrize("name", DTYPES)
class TestMinusZero:
    """-0.0 is the sentinel: what looks like "not yet written" must not be waited for."""

    @pytest.mark.parametrize("value", [0.0, -0.0])
    def test_all_zero(self, value: float, name: str) -> None:
        result = all_reduce_on_ranks(np.full((8, 8, 2880), value, DTYPES[name]))
        assert not bits(result).any()

    def test_every_mix_in_a_chunk(self, name: str) -> None:
        """Each lane of a chunk +0 or -0 in all 2^lanes ways, another way on each rank."""
        lanes = protocol.FORMATS[name].chunk
        ways = np.arange(2**lanes)
        negative = (ways[None, :, None] + 37 * np.arange(8)[:, None, None]) >> np.arange(lanes) & 1
        result = all_reduce_on_ranks(np.where(negative, -0.0, 0.0).astype(DTYPES[name]))
        assert result.shape == (8, 2**lanes, lanes)
        assert not bits(result).any()

    def test_in_one_lane(self, name: str) -> None:
        lanes = protocol.FORMATS[name].chunk
        part = np.ones((8, lanes, lanes), DTYPES[name])
        part[:, np.arange(lanes), np.arange(lanes)] = -0.0
        expected = np.where(np.eye(lanes), 0, 8).astype(DTYPES[name])
        assert_bitwise(all_reduce_on_ranks(part), np.broadcast_to(expected, part.shape))

    @pytest.mark.parametrize("zero", range(8))
    def test_only_one_rank_is_zero(self, zero: int, name: str) -> None:
        part = integers((8, 3, 16), DTYPES[name])
        part[zero] = -0.0
        assert_every_rank_has_the_sum(all_reduce_on_ranks(part), part)

    def test_200_calls(self, name: str) -> None:
        part = np.full((8, 4, 40), -0.0, DTYPES[name])

        def loop(x: jax.Array) -> jax.Array:
            return lax.scan(lambda y, _: (-jax_twoshot.all_reduce(y, "tp"), None), x, length=200)[0]

        result = on_ranks(loop, cpu_mesh(8))(part)
        assert (bits(result) == protocol.FORMATS[name].negative_zero).all()


def test_minus_zero_in_the_first_call_of_a_process() -> None:
    run_ok("""
        y = np.asarray(sharded(reduce)(np.full((8, 2880), -0.0, jnp.bfloat16)))
        assert not y.view(np.uint16).any()
    """)


@pytest.mark.parametrize("name", DTYPES)
def test_subnormals_are_exact(name: str) -> None:
    """XLA:CPU runs its threads with flush-to-zero; -0.0 and negative subnormals stay apart all the same."""
    dtype = np.dtype(DTYPES[name])
    minus_one_unit = int(bits(np.array([-0.0], dtype))[0]) + 1
    part = np.full((8, 8, 2880), minus_one_unit, f"u{dtype.itemsize}").view(dtype)
    result = all_reduce_on_ranks(part)
    assert (bits(result) == minus_one_unit + 7).all()  # -8 units
    part[4:] = -part[4:]
    assert not bits(all_reduce_on_ranks(part)).any()


def test_no_row_is_another_row() -> None:
    """Rows 1, 38, ..., 1074, each with its own number, in two digits that BF16 holds exactly."""
    wrong = {}
    for rows in range(1, 1101, 37):
        digits = np.stack([np.arange(rows) // 32, np.arange(rows) % 32], axis=-1)
        part = np.tile(digits, (8, 1, 64)).astype(DTYPES["bfloat16"])
        result = all_reduce_on_ranks(part).astype(np.float32)
        bad = np.argwhere(result != 8 * part.astype(np.float32))
        if len(bad):
            wrong[rows] = np.unique(bad[:, 1]).tolist()
    assert wrong == {}


def test_chain_equals_one_call_at_a_time() -> None:
    """64 layers whose consumer follows at once, against the same with a wait after every layer."""
    part = next(draw("bfloat16", [(8, 1, 7168)]))
    part = np.where(np.isfinite(part.astype(np.float32)), part, part.dtype.type(1))

    def layer(x: jax.Array) -> jax.Array:
        y = jnp.roll(jax_twoshot.all_reduce(x, "tp"), 1, axis=-1) * jnp.bfloat16(0.125)
        return jnp.where(lax.axis_index("tp") % 3 == 0, -y, y)

    mesh = cpu_mesh(8)
    one = on_ranks(layer, mesh)
    expected = part
    for _ in range(64):
        expected = jax.block_until_ready(one(expected))
    chain = on_ranks(lambda x: lax.fori_loop(0, 64, lambda _, y: layer(y), x), mesh)
    for _ in range(20):
        assert_bitwise(chain(part), expected)


VIEWS = {
    "transposed": lambda x: x.T,
    "strided": lambda x: x[:, ::2],
    "reversed": lambda x: x[::-1],
    "swapped": lambda x: jnp.swapaxes(x.reshape(4, 6, 10), 0, 2),
    "broadcast": lambda x: jnp.broadcast_to(x[:1], x.shape),
    "slice": lambda x: x[3:7, 1:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_views(view, jit: bool) -> None:
    part = integers((8 * 24, 10), DTYPES["bfloat16"])

    def sharded(reduce):
        f = jax.shard_map(
            lambda x: reduce(view(x), "tp"), mesh=cpu_mesh(8), in_specs=P("tp"), out_specs=P()
        )
        return (jax.jit(f) if jit else f)(part)

    assert_bitwise(sharded(jax_twoshot.all_reduce), sharded(lax.psum))


def test_column_major_operand() -> None:
    part = integers((24, 8 * 10))
    mesh = cpu_mesh(8)
    column_major = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P(None, "tp")))
    f = jax.jit(
        jax.shard_map(
            lambda x: jax_twoshot.all_reduce(x, "tp"), mesh=mesh, in_specs=P(None, "tp"), out_specs=P()
        ),
        in_shardings=column_major,
    )
    expected = part.reshape(24, 8, 10).sum(axis=1)
    assert_bitwise(f(jax.device_put(part, column_major)), expected)


def test_operand_straight_from_a_dot() -> None:
    h, w = integers((5, 8 * 16), seed=1), integers((8 * 16, 48), seed=2)
    f = jax.jit(
        jax.shard_map(
            lambda h, w: jax_twoshot.all_reduce(h @ w, "tp"),
            mesh=cpu_mesh(8),
            in_specs=(P(None, "tp"), P("tp", None)),
            out_specs=P(),
        )
    )
    assert_bitwise(f(h, w), h @ w)


class TestCapacity:
    """Larger than the workspace: several rounds, the same bits."""

    @pytest.mark.parametrize("name", DTYPES)
    def test_around_the_capacity(self, name: str) -> None:
        with jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=8, width=64, dtype=DTYPES[name]) as workspace:
            for rows in (7, 8, 9, 80, 1):
                part = next(draw(name, [(8, rows, 64)]))
                result = all_reduce_on_ranks(part, workspace=workspace)
                assert_every_rank_has_the_sum(result, part, what=f"{rows} rows")

    @pytest.mark.parametrize("rows", [1, 2, 40])
    @pytest.mark.parametrize("tp", [2, 3, 8])
    def test_workspace_size_does_not_change_the_bits(self, tp: int, rows: int) -> None:
        """A chunk a rank and a round, many rounds, a partial last round: as without a workspace."""
        part = next(draw("bfloat16", [(tp, 37, 129)]))
        with jax_twoshot.Workspace(cpu_mesh(tp), "tp", rows=rows, width=8, dtype=part.dtype) as workspace:
            small = all_reduce_on_ranks(part, workspace=workspace)
        assert_bitwise(small, all_reduce_on_ranks(part))
        assert_every_rank_has_the_sum(small, part)

    def test_sizes_that_vary_on_one_workspace(self) -> None:
        """Large, small, large, empty, ...: in one program, and from program to program."""
        rows = [64, 1, 64, 0, 3, 200, 2, 64]
        with jax_twoshot.Workspace(cpu_mesh(8), "tp", rows=64, width=48) as workspace:
            for seed in range(3):
                parts = [integers((8, r, 48), DTYPES["bfloat16"], seed) for r in rows]

                def chain(parts):
                    """Each message waits for the one before it."""
                    sums, token = [], jnp.zeros((), jnp.bfloat16)
                    for part in parts:
                        sums.append(jax_twoshot.all_reduce(part + token, "tp", workspace=workspace))
                        token = jnp.zeros_like(token) * jnp.sum(sums[-1][:1, 0])
                    return sums

                assert_every_rank_has_the_sum(on_ranks(chain, cpu_mesh(8))(parts), parts)
                for part in parts:
                    assert_every_rank_has_the_sum(all_reduce_on_ranks(part, workspace=workspace), part)

    @pytest.mark.parametrize("rows", [1 << 18, 1 << 19])
    def test_enormous_workspace(self, rows: int) -> None:
        """Messages of 2^31 and 2^32 bytes: refused before memory is taken, or right and lazy."""
        out = run_ok(f"""
            from jax.errors import JaxRuntimeError
            try:
                with jax_twoshot.Workspace(mesh, "tp", rows={rows}, width=4096) as workspace:
                    f = sharded(lambda x: jax_twoshot.all_reduce(x, "tp", workspace=workspace))
                    y = f(x.astype(jnp.bfloat16))
                assert (np.asarray(y) == 28).all()
                print("right")
            except (ValueError, MemoryError, JaxRuntimeError) as error:
                assert "rows" in str(error), error
                print("refused")
            # Not getrusage's, in which a child has its parent's peak too.
            (peak,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
            assert peak < 2 << 20, f"took {{peak}} KiB"
        """)
        assert out.split() in (["right"], ["refused"])

    @pytest.mark.parametrize("workspace", [False, True], ids=["default", "workspace"])
    @pytest.mark.parametrize("donate", [False, True], ids=["plain", "donated"])
    def test_entries_obey_one_rule(self, donate: bool, workspace: bool) -> None:
        """Normal and oversize arrays, plain and donated."""
        mesh = cpu_mesh(8)
        options = {"workspace": jax_twoshot.Workspace(mesh, "tp", rows=4, width=2880)} if workspace else {}
        f = jax.jit(
            jax.shard_map(
                lambda x: jax_twoshot.all_reduce(x, "tp", **options),
                mesh=mesh,
                in_specs=P("tp"),
                out_specs=P("tp"),
                check_vma=False,
            ),
            donate_argnums=(0,) if donate else (),
        )
        for rows in (4, 128, 4):
            part = next(draw("bfloat16", [(8, rows, 2880)]))
            given = jax.device_put(part.reshape(-1, 2880), NamedSharding(mesh, P("tp")))
            result = np.asarray(f(given)).reshape(part.shape)
            assert given.is_deleted() == donate
            assert_every_rank_has_the_sum(result, part)


def test_the_oracle_is_not_a_plain_bf16_sum() -> None:
    """FP32 inside, one rounding: 256 + 7 x 0.75 is 262, where BF16 sums would stay at 256."""
    part = np.full((8, 16), 0.75, DTYPES["bfloat16"])
    part[0] = 256
    assert (all_reduce_on_ranks(part).astype(np.float32) == 262).all()
    assert (reference.all_reduce(part).astype(np.float32) == 262).all()


def test_bits_do_not_depend_on_the_batch() -> None:
    """A row's sum is the same alone, among others, and at another place in the message."""
    part = next(draw("bfloat16", [(8, 64, 576)]))
    together = all_reduce_on_ranks(part)
    assert_bitwise(all_reduce_on_ranks(part[:, 5:6]), together[:, 5:6])
    assert_bitwise(all_reduce_on_ranks(part[:, ::-1].copy()), together[:, ::-1])
