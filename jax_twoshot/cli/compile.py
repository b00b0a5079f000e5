"""``compile``: the CUDA kernels of whole architectures, for ``JAX_TWOSHOT_CUBIN_PATH`` or for a wheel."""

from __future__ import annotations

import argparse
import sys

from jax_twoshot import cubin
from jax_twoshot.cli import UsageError


def run(args: argparse.Namespace) -> int:
    archs, tps = args.arch or cubin.ARCHS, args.tp or cubin.TP
    for option, given, known in (("--arch", archs, cubin.ARCHS), ("--tp", tps, cubin.TP)):
        if unknown := sorted(set(given) - set(known)):
            raise UsageError(
                f"argument {option}: kernels exist for {', '.join(map(str, known))}; got {', '.join(map(str, unknown))}"
            )
    try:
        done = cubin.compile_all(archs, args.output, cubin.print_progress, tps)
    except (cubin.CubinError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(done)} kernels are in {args.output}. To use them:")
    print(f"export JAX_TWOSHOT_CUBIN_PATH={args.output.resolve()}")
    return 0
