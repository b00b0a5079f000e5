"""What ``ffi/module.cc`` defines; ``_ffi.py`` is its only user, and gives it types."""

from typing import Any

def __getattr__(name: str) -> Any: ...
