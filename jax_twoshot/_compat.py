"""Every branch on JAX's version, each with its reason and its floor. The floor of all is JAX 0.10.2."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P


def varying(aval: Any) -> frozenset[str]:
    """The manual axes over which a value of type ``aval`` may differ; empty where types are not checked."""
    return frozenset(aval.manual_axis_type.varying)


def with_varying(aval: Any, axes: AbstractSet[str]) -> Any:
    """``aval``, varying over exactly ``axes``."""
    return aval.update(manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset(axes)))


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
