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
