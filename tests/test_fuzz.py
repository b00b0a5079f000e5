"""A few programs of ``fuzz.py``, always the same ones; ``python tests/fuzz.py --minutes N`` runs others."""

from __future__ import annotations

import fuzz
import numpy as np
import pytest

from jax_twoshot import reference

DEVICES = 8


@pytest.mark.parametrize("seed", range(12))
def test_every_bit_is_the_oracles(seed: int) -> None:
    program = fuzz.draw(seed, DEVICES)
    assert fuzz.run_in_threads([seed]) == 3 * sum(
        fuzz.inputs(program)[program.source(call.value)].size for call in program.calls
    )


def test_two_programs_at_once() -> None:
    assert fuzz.run_in_threads([100, 101]) > 0


def test_what_is_expected() -> None:
    """By hand: a sum over two axes of three, and a scan of two calls fed with it."""
    calls = (fuzz.Call(0, ("z", "x"), "auto", 1), fuzz.Call(1, ("y",), "auto", 2))
    program = fuzz.Program(0, (("x", 2), ("y", 2), ("z", 2)), "float32", ((3,),), False, calls, ())
    (x,) = fuzz.inputs(program)
    first, last = fuzz.expected(program, [x])
    scale = np.array([[[0.5, -0.25], [-0.25, 0.5]], [[-0.25, 0.5], [0.5, -0.25]]], np.float32)[..., None]
    for y in range(2):
        assert (first[:, y] == reference.all_reduce(x[:, y].reshape(4, 3))).all()
    for where in np.ndindex(2, 2):
        ranks = (where[0], slice(None), where[1])
        total = reference.all_reduce((first * scale + x)[ranks])
        assert (last[ranks] == reference.all_reduce(total * scale[ranks] + x[ranks])).all()


def test_a_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fuzz.expected

    def wrong(program: fuzz.Program, parts: list[np.ndarray]) -> list[np.ndarray]:
        results = [result.copy() for result in right(program, parts)]
        results[-1].view(f"u{results[-1].dtype.itemsize}")[...] ^= 1
        return results

    monkeypatch.setattr(fuzz, "expected", wrong)
    with pytest.raises(AssertionError, match="seed=3.* elements of Call.* are wrong"):
        fuzz.run_in_threads([3])


def test_seeds_differ_and_cover() -> None:
    drawn = [fuzz.draw(seed, DEVICES) for seed in range(200)]
    assert len({repr(program.calls) for program in drawn}) > 150
    assert {program.dtype for program in drawn} == {"bfloat16", "float16", "float32"}
    assert {program.sizes for program in drawn} == set(fuzz.MESHES)
    assert {shape for program in drawn for shape in program.shapes} == set(fuzz.SHAPES)
