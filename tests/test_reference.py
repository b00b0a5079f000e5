"""The oracle against bits computed by hand, and against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_twoshot import reference

INF = float("inf")


class Binary(NamedTuple):
    """An IEEE 754 binary format."""

    precision: int
    """Significant bits, the hidden one included."""
    least_exponent: int
    """Of the unit of the subnormals."""
    greatest: Fraction


def binary(dtype: type) -> Binary:
    info = ml_dtypes.finfo(dtype)
    return Binary(
        info.nmant + 1, int(info.minexp) - info.nmant, Fraction(*float(info.max).as_integer_ratio())
    )


def rounded(value: Fraction, to: Binary) -> Fraction | float:
    """``value`` to the nearest number of the format, ties to even, beyond the greatest to infinity."""
    if value == 0:
        return value
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - to.precision + 1, to.least_exponent)
    nearest = round(value / unit) * unit  # round() of a Fraction takes ties to even
    return nearest if abs(nearest) <= to.greatest else INF if value > 0 else -INF


FLOAT32 = binary(np.float32)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def all_reduce_bits(name: str, parts: list[int]) -> int:
    """The sum of one element, given and returned as bits."""
    dtype = np.dtype(DTYPES[name])
    result = reference.all_reduce(np.array(parts, f"u{dtype.itemsize}").view(dtype))
    assert result.dtype == dtype and result.shape == ()
    return int(bits(np.atleast_1d(result))[0])


def exact_sum(values: list[Fraction], to: Binary) -> Fraction | float:
    """R3 for finite values, in rational numbers."""
    total: Fraction | float = values[0]
    for value in values[1:]:
        if isinstance(total, float):
            break  # infinity plus a finite number
        total = rounded(total + value, FLOAT32)
    return total if isinstance(total, float) else rounded(total, to)


HAND = {
    # 256 + 7 x 0.75: each partial sum is exact in FP32, 261.25 rounds once to 262 (BF16 would stay at 256).
    "fp32-accumulation": ("bfloat16", [0x4380] + 7 * [0x3F40], 0x4383),
    # 1 + 2^-8 is half-way between 1 and 1 + 2^-7: to even, down. 1 + 3 x 2^-8: to even, up.
    "tie-down": ("bfloat16", [0x3F80, 0x3B80], 0x3F80),
    "tie-up": ("bfloat16", [0x3F81, 0x3B80], 0x3F82),
    # Rank order: (2^24 + 1) - 2^24 is 0 in FP32, (2^24 - 2^24) + 1 is 1.
    "order-loses-one": ("bfloat16", [0x4B80, 0x3F80, 0xCB80], 0x0000),
    "order-keeps-one": ("bfloat16", [0x4B80, 0xCB80, 0x3F80], 0x3F80),
    "float32-order": ("float32", [0x4B800000, 0x3F800000, 0xCB800000], 0x00000000),
    "all-minus-zero": ("bfloat16", 4 * [0x8000], 0x0000),
    "all-minus-zero-float16": ("float16", 2 * [0x8000], 0x0000),
    "all-minus-zero-float32": ("float32", 3 * [0x80000000], 0x00000000),
    "cancellation": ("float16", [0x3C00, 0xBC00], 0x0000),
    # Subnormals are exact: no flush to zero.
    "subnormals": ("bfloat16", [0x8001, 0x8001, 0x8001], 0x8003),
    "subnormal-cancels": ("bfloat16", [0x8001, 0x0001], 0x0000),
    "subnormals-float16": ("float16", [0x8001, 0x8001], 0x8002),
    "subnormals-float32": ("float32", [0x80000001, 0x80000001], 0x80000002),
    "overflow": ("bfloat16", [0x7F7F, 0x7F7F], 0x7F80),
    "overflow-float16": ("float16", [0x7BFF, 0xFBFF, 0xFBFF, 0xFBFF], 0xFC00),
    # The partial sums of FP16 live in FP32, so 2 x 65504 - 65504 comes back.
    "no-overflow-on-the-way": ("float16", [0x7BFF, 0x7BFF, 0xFBFF], 0x7BFF),
    # 65504 + 16 is half-way to the next power of two: ties to even, which is infinity.
    "overflow-by-rounding": ("float16", [0x7BFF, 0x4C00], 0x7C00),
    "infinity": ("bfloat16", [0x3F80, 0xFF80, 0x3F80], 0xFF80),
    "infinities-cancel": ("bfloat16", [0x7F80, 0xFF80], 0x7FFF),
    "nan": ("bfloat16", [0xFFC1, 0x3F80], 0x7FFF),
    "signalling-nan": ("bfloat16", [0x3F80, 0x7F81], 0x7FFF),
    "nan-float16": ("float16", [0xFE00, 0x0000], 0x7FFF),
    "nan-float32": ("float32", [0xFFC00001, 0x00000000], 0x7FFFFFFF),
}


@pytest.mark.parametrize(("name", "parts", "expected"), HAND.values(), ids=HAND.keys())
def test_by_hand(name: str, parts: list[int], expected: int) -> None:
    result = all_reduce_bits(name, parts)
    assert result == expected, f"{result:#x} != {expected:#x}"


def test_keeps_the_shape_and_the_input() -> None:
    parts = np.full((3, 2, 0, 5), -0.0, np.float16)
    assert reference.all_reduce(parts).shape == (2, 0, 5)
    parts = np.full((3, 4), -0.0, np.float32)
    reference.all_reduce(parts)
    assert (bits(parts) == 0x80000000).all()


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
def test_against_fractions(name: str, data: st.DataObject) -> None:
    dtype = np.dtype(DTYPES[name])
    exponent = int(bits(np.array([INF], dtype))[0])
    finite = st.integers(0, 2 ** (8 * dtype.itemsize) - 1).filter(lambda b: b & exponent != exponent)
    close = st.integers(0, 64).map(lambda i: int(bits(np.array([1], dtype))[0]) + i)
    tiny = st.integers(0, 64)
    parts = data.draw(st.lists(st.one_of(finite, close, tiny), min_size=2, max_size=64))

    values = np.array(parts, f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    exact = exact_sum([Fraction(*v.as_integer_ratio()) for v in values.tolist()], binary(DTYPES[name]))
    expected = np.array([float(exact)]).astype(dtype)
    assert all_reduce_bits(name, parts) == bits(expected)[0]


@pytest.mark.parametrize("name", DTYPES)
@given(data=st.data())
def test_publishes_no_minus_zero_and_one_nan(name: str, data: st.DataObject) -> None:
    dtype = np.dtype(DTYPES[name])
    width = 8 * dtype.itemsize
    minus_zero = 1 << (width - 1)
    edge = [0, minus_zero, 1, minus_zero + 1, 2 ** (width - 1) - 1, 2**width - 1]
    pattern = st.one_of(st.sampled_from(edge), st.integers(0, 2**width - 1))
    result = all_reduce_bits(name, data.draw(st.lists(pattern, min_size=2, max_size=8)))
    assert result != minus_zero
    is_nan = bool(np.isnan(np.array([result], f"u{dtype.itemsize}").view(dtype)[0]))
    assert is_nan == (result == minus_zero - 1)
