"""Switches in the environment."""

from __future__ import annotations

import os

TRUE, FALSE = ("true", "1"), ("false", "0")


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return whether variable ``name`` is ``true`` or ``1``, in any case.

    Raises ValueError for anything but true, 1, false and 0.
    """
    value = os.environ.get(name, default)
    if value.lower() not in (*TRUE, *FALSE):
        raise ValueError(f"the environment variable {name} must be true, 1, false or 0, got {value!r}")
    return value.lower() in TRUE
