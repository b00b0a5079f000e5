"""Eight CPU devices before anything uses JAX, waits that end in a minute, Hypothesis without deadlines, and Ctrl-C as
in a terminal."""

from __future__ import annotations

import os
import signal

import jax
from hypothesis import settings

os.environ.setdefault("JAX_TWOSHOT_TIMEOUT", "60")
jax.config.update("jax_num_cpu_devices", 8)
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so a shell starts what goes on in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
