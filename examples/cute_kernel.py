"""A CuTe DSL kernel of one's own on a workspace: the sum over the ranks of a * b, multiplied while it is pushed.

With one GPU, its four slots play four ranks; with several, each is a rank. Without a GPU the kernel is compiled only.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from cutlass import Int32, Int64, cute, range_constexpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import cutedsl, reference

ROWS, WIDTH = 16, 7168


@dataclass(frozen=True)
class SumOfProducts:
    """a, b: ``[parts, chunks]`` chunks; out: ``[chunks]``, the same on every rank. It takes any number of them."""

    @cute.kernel
    def kernel(self, a: Int64, b: Int64, out: Int64, chunks: Int32, arguments: cutedsl.Arguments) -> None:
        first = cute.arch.block_idx()[0] * cute.arch.block_dim()[0] + cute.arch.thread_idx()[0]
        step = cute.arch.grid_dim()[0] * cute.arch.block_dim()[0]
        cutedsl.wait_for_predecessor(arguments)
        call = cutedsl.begin(arguments, chunks)
        for chunk in range(first, chunks, step):
            for part in range_constexpr(call.parts):  # 1; in the stand-in for one GPU, all ranks'
                at = Int64(part * chunks + chunk) * 16
                left = cutedsl.unpack(cutedsl.load(a + at), arguments.format)
                right = cutedsl.unpack(cutedsl.load(b + at), arguments.format)
                product = [x * y for x, y in zip(left, right, strict=True)]
                cutedsl.push(call, chunk, cutedsl.pack(product, arguments.format), part)
        cutedsl.settle(call)
        for index in range(first, call.mine, step):
            cutedsl.reduce(call, index)
        before = cutedsl.arrive(call)
        for chunk in range(first, chunks, step):
            cutedsl.store(out + Int64(chunk) * 16, cutedsl.collect(call, chunk))
        cutedsl.advance(call, before)


def run() -> int:
    """Calls it on all GPUs and compares each bit; how many values are wrong."""
    mesh = jax.make_mesh((jax.device_count(),), ("tp",))
    stand_in = {"owners": 1, "tp": 4} if mesh.size == 1 else {}
    with jax_twoshot.Workspace(mesh, "tp", rows=ROWS, width=WIDTH, **stand_in) as workspace:

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P())
        def step(a: jax.Array, b: jax.Array) -> jax.Array:
            chunks = ROWS * WIDTH // 8
            return jax_twoshot.cute_call(
                SumOfProducts(),
                a,
                b,
                workspace=workspace,
                out_shape=jax.ShapeDtypeStruct((ROWS, WIDTH), a.dtype),
                scalars=[chunks],
                grid=workspace.grid(chunks),
                varying=(),
            )

        random = np.random.default_rng(0)
        a, b = random.standard_normal((2, workspace.tp, ROWS, WIDTH), np.float32).astype(jnp.bfloat16)
        got = np.asarray(step(*jax.device_put((a, b), NamedSharding(mesh, P("tp")))))
    want = reference.all_reduce((a.astype(np.float32) * b.astype(np.float32)).astype(jnp.bfloat16))
    wrong = int((got.view(np.uint16) != want.view(np.uint16)).sum())
    print(f"{workspace.tp} ranks on {mesh.size} GPU(s): {wrong} of {want.size} values are wrong")
    return wrong


if __name__ == "__main__":
    if jax.default_backend() == "gpu":
        raise SystemExit(run() > 0)
    compiled = cutedsl.compile_kernel(SumOfProducts(), "sm_90a", addresses=3, scalars=1, tp=4)
    print(f"no GPU: compiled {compiled.symbol} for sm_90a, {compiled.registers} registers; it was not run")
