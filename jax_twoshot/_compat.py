"""Every branch on JAX's version, each with its reason and its floor; and which versions there may be."""

from __future__ import annotations

import logging
import re
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
from jax.sharding import PartitionSpec as P

import jax_twoshot

if TYPE_CHECKING:
    from jax.extend.core import Primitive

OLDEST_JAXLIB = "0.10.2"
"""Also in ``pyproject.toml``, as the dependency and as what the extension is built with."""
NEWEST_JAXLIB = "0.12"
"""The newest that the tests were run with; newer patches of it count as tried."""


def check_jaxlib(running: str, built: str = OLDEST_JAXLIB) -> None:
    """Raises where the extension cannot work, and logs a warning where nobody has tried it.

    Args:
      running: version of the installed jaxlib.
      built: version of that whose headers the extension was built with. XLA refuses handlers that are newer than
        itself, and only when JAX is first used: then the whole backend is refused.

    Raises:
      ImportError: ``running`` is older than what is supported, or than ``built``.
    """
    ours = f"jax_twoshot {jax_twoshot.__version__}"
    if _numbers(running) < _numbers(OLDEST_JAXLIB):
        raise ImportError(
            f"{ours} needs jaxlib {OLDEST_JAXLIB} or newer, this is jaxlib {running}: pip install -U jax jaxlib"
        )
    if _numbers(running) < _numbers(built):
        raise ImportError(
            f"{ours}: its extension was built with jaxlib {built} and runs with that or newer, this is jaxlib "
            f"{running}: pip install --force-reinstall --no-deps jax_twoshot, which builds with {OLDEST_JAXLIB}"
        )
    newest = _numbers(NEWEST_JAXLIB)
    if _numbers(running)[: len(newest)] > newest:
        logging.getLogger("jax_twoshot").warning(
            "%s was tried with jaxlib %s to %s, this is jaxlib %s: `python -m jax_twoshot selftest` says if it works",
            *(ours, OLDEST_JAXLIB, NEWEST_JAXLIB, running),
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("dev")[0]))


check_jaxlib(jaxlib.__version__)


def varying(aval: Any) -> frozenset[str]:
    """The manual axes over which a value of type ``aval`` may differ; empty where types are not checked."""
    return frozenset(aval.manual_axis_type.varying)


def with_varying(aval: Any, axes: AbstractSet[str]) -> Any:
    """``aval``, varying over exactly ``axes``."""
    return aval.update(manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset(axes)))


def array_type(shape: tuple[int, ...], dtype: Any, axes: AbstractSet[str]) -> Any:
    """The type of an array that varies over exactly ``axes`` of the mesh of here."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    return with_varying(jax.core.ShapedArray(shape, dtype, sharding=None if mesh.empty else sharding), axes)


def lowering_devices(ctx: Any) -> tuple[int, ...] | None:
    """Ids of the devices that a program is being compiled for, in mesh order; None where JAX does not say, as in an
    export or in a shard_map inside another."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return tuple(device.id for device in mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def psum_primitives() -> frozenset[Primitive]:
    """What `jax.lax.psum` binds, with types checked and without: not public, and named otherwise before JAX 0.8, so it
    is asked."""
    mesh = jax.sharding.AbstractMesh((2,), ("ranks",), axis_types=(jax.sharding.AxisType.Auto,))

    def bound(check_vma: bool) -> Primitive:
        reduce = jax.shard_map(
            lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=P("ranks"), out_specs=P(), check_vma=check_vma
        )
        (shard_map,) = jax.make_jaxpr(reduce)(jax.ShapeDtypeStruct((2,), "float32")).eqns
        (psum,) = shard_map.params["jaxpr"].eqns
        return psum.primitive

    return frozenset({bound(True), bound(False)})
