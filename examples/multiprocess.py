"""A sum over several processes, one GPU each: what a tensor-parallel decode job looks like to the library.

    python examples/multiprocess.py --ranks 4             # GPUs 0 to 3
    python examples/multiprocess.py --ranks 4 --one-gpu   # four processes share GPU 0

The command starts itself once for each rank. Every rank joins the others through ``jax.distributed``, makes a
workspace, sums inside ``jax.jit`` + ``jax.shard_map`` and compares each bit of its own result with NumPy.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import _launch, reference

ROWS, WIDTH, CALLS = 64, 7168, 10


def parts(call: int, ranks: int, rows: int) -> np.ndarray:
    """What each rank puts into a call: ``[ranks, rows, WIDTH]`` BF16, the same numbers on every process."""
    values = np.random.default_rng(call).standard_normal((ranks, rows, WIDTH), np.float32)
    return values.astype(jnp.bfloat16)


def worker() -> None:
    rank = _launch.initialize()
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("tp",))
    sharding = NamedSharding(mesh, P("tp"))
    wrong = 0
    with jax_twoshot.Workspace(mesh, "tp", rows=ROWS, width=WIDTH):

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
        def step(x: jax.Array) -> jax.Array:
            return jax_twoshot.all_reduce(x, "tp")

        for call in range(CALLS):
            given = parts(call, ranks, rows=1 + call * (ROWS - 1) // (CALLS - 1))
            # Each process hands over its own shard only.
            x = jax.make_array_from_process_local_data(sharding, given[rank : rank + 1], given.shape)
            (shard,) = step(x).addressable_shards
            got, want = np.asarray(shard.data)[0], reference.all_reduce(given)
            wrong += int((got.view(np.uint16) != want.view(np.uint16)).sum())
    print(f"{jax.local_devices()[0]}: {CALLS} sums over {ranks} ranks, {wrong} wrong values")
    _launch.summary(rank=rank, wrong=wrong)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default: 2)")
    parser.add_argument(
        "--one-gpu", action="store_true", help="all ranks share GPU 0, under MPS if it is there"
    )
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the whole run (default: 300)")
    options = parser.parse_args()
    gpus, needed = _launch.gpu_count(), 1 if options.one_gpu else options.ranks
    if gpus < needed:
        print(
            f"multiprocess.py needs {needed} NVIDIA GPU(s), this machine has {gpus}. "
            + ("Try --one-gpu." if gpus else "Without a GPU, run: python examples/all_reduce.py"),
            file=sys.stderr,
        )
        return 2
    try:
        results = _launch.launch(
            options.ranks, [sys.executable, __file__], one_gpu=options.one_gpu, timeout=options.timeout
        )
    except _launch.LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    wrong = sum(result["wrong"] for result in results)
    print(f"{options.ranks} ranks, {CALLS} sums of up to {ROWS} x {WIDTH} BF16: {wrong} wrong values")
    return 1 if wrong else 0


if __name__ == "__main__":
    if _launch.launched():
        worker()
    else:
        sys.exit(main())
