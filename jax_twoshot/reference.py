"""What every rank must end with, in NumPy: the oracle of R1, R3, R10 and R11 for tests, ``selftest`` and ``bench``."""

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
    return _round(_sum(parts), parts.dtype)


def all_reduce_rms_norm(
    parts: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """What ``jax_twoshot.all_reduce_rms_norm`` gives every rank, bit for bit.

    Args:
      parts: ``[TP, ..., width]`` array of BF16, FP16 or FP32; ``parts[r]`` is what rank ``r`` puts in.
      residual: ``[..., width]`` array of the same dtype, added last, in FP32.
      weight: ``[width]`` array of the same dtype.
      eps: added to the mean square, as an FP32 number.

    Returns:
      ``(normalised, new_residual)``, both ``[..., width]``: the sum rounded once, and its ``rms_norm``.
    """
    with np.errstate(all="ignore"):
        new_residual = _round(_sum(parts) + residual.astype(np.float32), parts.dtype)
    return rms_norm(new_residual, weight, eps), new_residual


def moe_tail(
    experts: np.ndarray,
    index: np.ndarray,
    scale: np.ndarray,
    shared: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """What ``jax_twoshot.moe_tail`` gives every rank, bit for bit.

    Args:
      experts: ``[TP, slots, width]`` array of BF16, FP16 or FP32; ``experts[r]`` is rank ``r``'s, and so are
        ``index[r]``, ``scale[r]`` and ``shared[r]``.
      index: ``[TP, ..., k]`` integers.
      scale: ``[TP, ..., k]`` array of FP32.
      shared: ``[TP, ..., width]`` array of the dtype of ``experts``.
      residual: ``[..., width]`` array of the same dtype.
      weight: ``[width]`` array of the same dtype.
      eps: added to the mean square, as an FP32 number.

    Returns:
      `all_reduce_rms_norm` of what `moe_combine` makes of each rank's: ``(normalised, new_residual)``.
    """
    parts = np.stack([moe_combine(*each) for each in zip(experts, index, scale, shared, strict=True)])
    return all_reduce_rms_norm(parts, residual, weight, eps)


def moe_combine(experts: np.ndarray, index: np.ndarray, scale: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """A rank's part of ``moe_tail``'s sum, ``[..., width]``, with every rounding fixed (R11).

    From +0.0 up, in FP32, each operation rounded to nearest even: ``scale[..., i] * experts[index[..., i]]`` for each
    ``i`` whose index is a row of ``experts``, then ``shared``; the result is rounded as a sum is (R3).
    """
    total = np.zeros(shared.shape, np.float32)
    with np.errstate(all="ignore"):
        for choice in range(index.shape[-1]):
            row, factor = index[..., choice], scale[..., choice, None]
            here = (row >= 0) & (row < len(experts))
            term = factor * experts[np.where(here, row, 0)].astype(np.float32)
            total = np.where(here[..., None], total + term, total)
        return _round(total + shared.astype(np.float32), shared.dtype)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm of the rows of ``x``, with every rounding fixed (R10).

    ``x * (1 / sqrt(sum(x * x) / width + eps)) * weight`` from left to right in FP32, each operation rounded to nearest
    even; the squares are added in the order of ``protocol.norm_blocks``; the result is rounded as a sum is (R3).
    """
    width, fmt = x.shape[-1], protocol.FORMATS[x.dtype.name]
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32)
        mean = _sum_of_squares(wide, fmt) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
        return _round(wide * scale[..., None] * weight.astype(np.float32), x.dtype)


def _sum_of_squares(x: np.ndarray, fmt: protocol.Format) -> np.ndarray:
    blocks, block_chunks = protocol.norm_blocks(fmt.chunks(x.shape[-1]))
    squares = _fill_up(x * x, blocks * block_chunks * fmt.chunk)
    squares = squares.reshape(*x.shape[:-1], blocks, block_chunks * fmt.chunk)
    total = squares[..., 0, :]
    for block in range(1, blocks):
        total = total + squares[..., block, :]
    total = _fill_up(total, 1 << (total.shape[-1] - 1).bit_length())
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


def _fill_up(x: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _sum(parts: np.ndarray) -> np.ndarray:
    """In FP32, from rank 0 up, -0.0 read as +0.0."""
    fmt = protocol.FORMATS[parts.dtype.name]
    bits = np.dtype(f"uint{8 * fmt.itemsize}")
    parts = np.ascontiguousarray(parts)
    published = np.where(parts.view(bits) == fmt.negative_zero, bits.type(0), parts.view(bits)).view(parts.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        total = published[0].astype(np.float32)
        for part in published[1:]:
            total = total + part.astype(np.float32)
    return total


def _round(total: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """To nearest even, with one form of NaN and no -0.0."""
    fmt = protocol.FORMATS[dtype.name]
    bits = np.dtype(f"uint{8 * fmt.itemsize}")
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = np.asarray(total.astype(dtype)).view(bits)
    rounded = np.where(np.isnan(total), bits.type(fmt.nan), rounded)
    return np.where(rounded == fmt.negative_zero, bits.type(0), rounded).view(dtype)
