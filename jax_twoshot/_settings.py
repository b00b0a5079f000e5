"""Every environment variable of the library: name, meaning, default, and the one place that reads it.

==============================  =========================================================  ==========================
variable                        meaning                                                    default
==============================  =========================================================  ==========================
JAX_TWOSHOT_TIMEOUT             seconds that a rank waits for its peers before the call    300
                                fails (R9); 0 waits for ever
JAX_TWOSHOT_MULTICAST           0: store to each peer, create no multicast object          1
JAX_TWOSHOT_CUBIN_PATH          folder searched first for compiled kernels                 none
JAX_TWOSHOT_CACHE_DIR           folder of kernels compiled on this machine                 the user's cache folder
JAX_TWOSHOT_TUNING              file of ``bench --tune``: up to what size one shot is      what the library has
                                taken, the same on every process
==============================  =========================================================  ==========================

``TORCH_SYMM_MEM_DISABLE_MULTICAST=1``, PyTorch's own switch, turns multicast off here too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import platformdirs

from jax_twoshot import protocol


def timeout_seconds() -> float:
    """``JAX_TWOSHOT_TIMEOUT``: seconds, 0 for ever.

    Raises:
      ValueError: it is not a number of seconds.
    """
    return seconds_of("JAX_TWOSHOT_TIMEOUT", os.environ.get("JAX_TWOSHOT_TIMEOUT", "300"))


def seconds_of(setting: str, value: object) -> float:
    """A deadline in seconds, 0 for ever.

    Raises:
      ValueError: ``value`` is none; the text names ``setting``.
    """
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds <= 1e9:
        raise ValueError(f"{setting}: a number of seconds, 0 to wait for ever; got {value!r}")
    return seconds


def multicast_allowed() -> bool:
    """Whether a multicast object may be created at all: neither switch is off."""
    return os.environ.get("JAX_TWOSHOT_MULTICAST", "1") != "0" and os.environ.get(
        "TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"
    ) in ("", "0")


def cubin_path() -> Path | None:
    """``JAX_TWOSHOT_CUBIN_PATH``, or None."""
    text = os.environ.get("JAX_TWOSHOT_CUBIN_PATH")
    return Path(text) if text else None


def cache_dir() -> Path:
    """``JAX_TWOSHOT_CACHE_DIR``, or the user's cache folder for this library."""
    text = os.environ.get("JAX_TWOSHOT_CACHE_DIR")
    return Path(text) if text else Path(platformdirs.user_cache_dir("jax_twoshot"))


def tuning() -> dict[str, protocol.Table]:
    """``JAX_TWOSHOT_TUNING``: `protocol.BUILT_IN`, with what the file says in its place.

    Raises:
      ValueError: there is no such file, or it is none of ``bench --tune``.
    """
    text = os.environ.get("JAX_TWOSHOT_TUNING")
    if not text:
        return protocol.BUILT_IN
    try:
        tables = json.loads(Path(text).read_text())["tables"]
        given = {name: tuple(sorted((int(ranks), int(most)) for ranks, most in t)) for name, t in tables.items()}
        for name in given:
            protocol.BUILT_IN[name]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"JAX_TWOSHOT_TUNING: a file that `python -m jax_twoshot bench --tune --json FILE` wrote; got {text!r} "
            f"({type(error).__name__}: {error})"
        ) from None
    return protocol.BUILT_IN | given
