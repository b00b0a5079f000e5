"""Eight CPU devices before anything uses JAX, waits that end in a minute, Hypothesis without deadlines."""

from __future__ import annotations

import os

import jax
from hypothesis import settings

os.environ.setdefault("JAX_TWOSHOT_TIMEOUT", "60")
jax.config.update("jax_num_cpu_devices", 8)
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
