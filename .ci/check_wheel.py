"""That an installed wheel brings its kernels: ``python check_wheel.py [TP,TP,... ARCH...]``, by default all.

For a machine that serves: no compiler, no ``JAX_TWOSHOT_CUBIN_PATH``, nothing in the cache.
"""

import os
import sys
import tempfile
from pathlib import Path

import jax_twoshot
from jax_twoshot import cubin


def main(tps: list[int], archs: list[str]) -> None:
    package = Path(jax_twoshot.__file__).parent
    if "site-packages" not in package.parts:
        sys.exit(f"{package}: not an installed wheel; run this outside the source tree")
    if cubin.compiler_version() is not None:
        sys.exit(f"{cubin.COMPILER} is installed: with it a missing kernel would not be missed")
    os.environ.pop("JAX_TWOSHOT_CUBIN_PATH", None)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["JAX_TWOSHOT_CACHE_DIR"] = empty
        wanted = [*cubin.variants(archs, tps), *cubin.rms_norm_kernels(archs, tps), *cubin.moe_tail_kernels(archs, tps)]
        found = [cubin.find(kernel) for kernel in wanted]
    print(f"jax_twoshot {jax_twoshot.__version__} in {package}: {len(found)} kernels for {', '.join(archs)}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main([int(tp) for tp in sys.argv[1].split(",")], sys.argv[2:])
    else:
        main(list(cubin.TP), list(cubin.ARCHS))
