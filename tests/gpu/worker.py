"""One rank of the tests of the CUDA backend, and the launcher of all of them.

    python tests/gpu/worker.py grid walk --ranks 4                       # four processes share GPU 0
    python tests/gpu/worker.py grid walk --ranks 2 --place gpu-each      # two processes, a GPU each
    python tests/gpu/worker.py grid walk --ranks 2 --place one-process   # one process, two GPUs
    python tests/gpu/worker.py grid walk --ranks 4 --place cpu           # one process, four CPU devices
    python tests/gpu/worker.py soak --ranks 4 --calls 1000000            # the long one, by hand

Every rank runs the same checks of ``checks.py``, compares the shards that it holds, and hands over what it
counted. No program has an XLA collective: NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_twoshot import _launch

PLACES = ("one-gpu", "gpu-each", "one-process", "cpu")
"""Where the ranks are: processes on GPU 0, processes on a GPU each, GPUs of one process, CPU devices of one process."""
BUSY_STEPS = 10
"""Steps of the loop that keeps a device busy: some ten microseconds each on a GPU."""


class Job:
    """The ranks of this process and how checks use them.

    Attributes:
      mesh: all ranks, on axis "tp".
      tp: how many they are.
      here: the ranks of this process.
      scale: part of each check's runs to do.
      calls: how many a soak makes.
      lost: a rank has died, so that JAX cannot shut down.
    """

    def __init__(self, scale: float, calls: int, ranks: int | None = None) -> None:
        devices = jax.devices()[:ranks]
        self.mesh = Mesh(np.array(devices), ("tp",))
        self.tp = len(devices)
        self.here = [rank for rank, d in enumerate(devices) if d.process_index == jax.process_index()]
        self.scale, self.calls, self.lost = scale, calls, False
        self._sharding = NamedSharding(self.mesh, P("tp"))
        self._barriers = itertools.count()
        self._work = jax.jit(lambda x: lax.fori_loop(0, BUSY_STEPS, lambda _, y: jnp.cos(y), x))
        zeros = np.zeros(1 << 16, np.float32)
        self._operands = {rank: jax.device_put(zeros, devices[rank]) for rank in self.here}
        for operand in self._operands.values():
            self._work(operand).block_until_ready()  # compiled before any rank waits for this one

    def runs(self, full: int) -> int:
        return max(1, round(full * self.scale))

    def place(self, parts: np.ndarray) -> jax.Array:
        """``[TP, ...]``, a row on each rank."""
        return jax.make_array_from_callback(parts.shape, self._sharding, parts.__getitem__)

    def program(self, f: Callable, mesh: Mesh | None = None, donate: Sequence[int] = ()) -> Any:
        """``f``, jitted on every rank: arguments and results are trees of ``[TP, ...]``, a row a rank."""

        def rank(*args: Any) -> Any:
            return jax.tree.map(lambda y: y[None], f(*jax.tree.map(lambda x: x[0], args)))

        spec = P("tp")
        mapped = jax.shard_map(rank, mesh=mesh or self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    def shape(self, shape: Sequence[int], dtype: Any, mesh: Mesh | None = None) -> jax.ShapeDtypeStruct:
        """What ``place`` makes of each rank's ``shape``, without data: for ``lower``."""
        sharding = NamedSharding(mesh, P("tp")) if mesh else self._sharding
        return jax.ShapeDtypeStruct((self.tp, *shape), dtype, sharding=sharding)

    def hold_up_one(self, random: np.random.Generator) -> None:
        """Makes one rank late: its host sleeps, or its device has other work first."""
        # Drawn on every process, so that all go on with the same numbers.
        rank, draw = random.integers(self.tp), random.random()
        if rank not in self.here:
            return
        if draw < 0.5:
            time.sleep(0.004 * draw)
        else:
            for _ in range(round(10 * draw)):
                self._work(self._operands[rank])

    def barrier(self, ranks: Sequence[int] | None = None, seconds: float = 60.0) -> None:
        """Waits until every process, or those of ``ranks``, is here."""
        if jax.process_count() > 1:
            name = f"gpu tests/{next(self._barriers)}"
            ids = None if ranks is None else list(ranks)
            _client().wait_at_barrier(name, int(1000 * seconds), process_ids=ids)


def _client() -> Any:
    """Of JAX's coordination service, which JAX does not export."""
    from jax._src import distributed

    return distributed.global_state.client


def run(args: argparse.Namespace) -> tuple[Job, dict[str, Any]]:
    """What each check counted here."""
    import checks

    job, results = Job(args.scale, args.calls, args.ranks), {}
    for name in args.checks:
        start = time.monotonic()
        results[name] = getattr(checks, name)(job)
        results[name]["seconds"] = round(time.monotonic() - start, 2)
        if job.here[0] == 0:
            print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    return job, results


def work(args: argparse.Namespace) -> None:
    """The whole life of a rank."""
    rank = _launch.initialize()
    import torch  # imported here, so that no check's deadline or time has it

    torch.cuda.init()
    job, results = run(args)
    if job.lost:
        # JAX's own shutdown would wait for the lost rank, then abort this process. Nor may the coordinator,
        # which is rank 0, go before the others.
        print(_launch._SUMMARY + json.dumps(results), flush=True)
        time.sleep(0 if rank else 2)
        os._exit(0)
    _launch.summary(**results)


def launch(
    ranks: int,
    checks: Sequence[str],
    *,
    place: str = "one-gpu",
    scale: float = 1.0,
    calls: int = 20_000,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs ``checks`` on ``ranks`` ranks at ``place``, one of `PLACES`; each process's results by check.

    Raises:
      _launch.LaunchError: a rank failed, said nothing, or was still running after ``timeout`` seconds.
      subprocess.SubprocessError: the same of the one process that has all ranks.
    """
    options = ["--ranks", str(ranks), "--place", place, "--scale", str(scale), "--calls", str(calls)]
    command = [sys.executable, __file__, *checks, *options, "--timeout", str(timeout)]
    environment = {"JAX_TWOSHOT_TIMEOUT": "60"} | dict(env or {})
    if place in ("one-gpu", "gpu-each"):
        return _launch.launch(ranks, command, one_gpu=place == "one-gpu", timeout=timeout, env=environment)
    # Lazily loaded, a kernel of one device can wait for those of the others, which wait for that device.
    environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER", **environment}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout + 10, check=True
    )
    return [json.loads(done.stdout.splitlines()[-1])]


def launch_and_judge(args: argparse.Namespace) -> int:
    options = {name: getattr(args, name) for name in ("place", "scale", "calls", "timeout")}
    try:
        found = launch(args.ranks, args.checks, **options)
    except (_launch.LaunchError, subprocess.SubprocessError) as error:
        print(error, file=sys.stderr)
        return 1
    wrong = {name: sum(part[name].get("wrong", 0) for part in found) for name in args.checks}
    print(f"{args.ranks} ranks ({args.place}), wrong elements: {wrong}")
    return 1 if any(wrong.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="+", help="functions of checks.py")
    parser.add_argument("--ranks", type=int, default=4, help="how many ranks (default: 4)")
    parser.add_argument("--place", choices=PLACES, default=PLACES[0], help=f"where they are (default: {PLACES[0]})")
    parser.add_argument("--scale", type=float, default=1.0, help="part of each check's runs (default: 1)")
    parser.add_argument("--calls", type=int, default=20_000, help="of the soak (default: 20000)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for the whole run (default: 120)")
    args = parser.parse_args()
    in_processes = args.place in ("one-gpu", "gpu-each")
    if in_processes and not _launch.launched():
        return launch_and_judge(args)
    # A rank that hangs says where before the launcher kills it.
    faulthandler.dump_traceback_later(max(1.0, args.timeout - 5), exit=True)
    if in_processes:
        work(args)
        return 0
    if args.place == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.ranks)
    _, results = run(args)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
