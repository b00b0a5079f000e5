"""``python -m jax_twoshot``: the command line, which ``jax_twoshot.cli`` defines."""

import sys

from jax_twoshot.cli import main

sys.exit(main())
