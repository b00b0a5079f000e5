"""What every rank must end with, in NumPy: the oracle of R1 and R3 for tests, ``selftest`` and ``bench``."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (gives NumPy the name "bfloat16")
import numpy as np

from jax_twoshot import protocol


def all_reduce(parts: np.ndarray) -> np.ndarray:
    """The sum that all ranks of a group agree on, bit for bit.

    Args:
      parts: ``[TP, ...]`` array of BF16, FP16 or FP32; ``parts[r]`` is what rank ``r`` puts in.

    Returns:
      ``[...]`` array of the same dtype: -0.0 read as +0.0 (R1), added in FP32 from rank 0 up, rounded to nearest
      even once (R3), with one form of NaN and no -0.0.

    Raises:
      KeyError: the dtype is none of ``protocol.FORMATS``.
    """
    fmt = protocol.FORMATS[parts.dtype.name]
    bits = np.dtype(f"uint{8 * fmt.itemsize}")
    parts = np.ascontiguousarray(parts)
    published = np.where(parts.view(bits) == fmt.negative_zero, bits.type(0), parts.view(bits)).view(parts.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        total = published[0].astype(np.float32)
        for part in published[1:]:
            total = total + part.astype(np.float32)
        rounded = np.asarray(total.astype(parts.dtype)).view(bits)
    rounded = np.where(np.isnan(total), bits.type(fmt.nan), rounded)
    return np.where(rounded == fmt.negative_zero, bits.type(0), rounded).view(parts.dtype)
