"""``compile``: the CUDA kernels of whole architectures, for ``JAX_TWOSHOT_CUBIN_PATH`` or for a wheel."""

from __future__ import annotations

import argparse
import sys

from jax_twoshot import cubin
from jax_twoshot.cli import UsageError


def run(args: argparse.Namespace) -> int:
    unknown = sorted(set(args.arch or ()) - set(cubin.ARCHS))
    if unknown:
        raise UsageError(
            f"argument --arch: kernels exist for {', '.join(cubin.ARCHS)}; got {', '.join(unknown)}"
        )
    try:
        done = cubin.compile_all(args.arch or cubin.ARCHS, args.output, cubin.print_progress)
    except (cubin.CubinError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(done)} kernels are in {args.output}. To use them:")
    print(f"export JAX_TWOSHOT_CUBIN_PATH={args.output.resolve()}")
    return 0
