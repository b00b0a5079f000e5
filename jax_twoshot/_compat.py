"""Every branch on JAX's version, each with its reason and its floor. The floor of all is JAX 0.10.2."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import jax


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
    export."""
    devices = getattr(getattr(ctx.module_context.axis_context, "mesh", None), "devices", None)
    return None if devices is None else tuple(device.id for device in devices.flat)
