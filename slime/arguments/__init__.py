"""Command line arguments: every flag is declared once here, with its type, default, description and checks.

Nothing here imports torch, ray, megatron, sglang or transformers; names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.arguments.device import finalize_for_device
    from slime.arguments.errors import ArgumentError
    from slime.arguments.files.run_config import dump, to_yaml
    from slime.arguments.parse import parse_args

__all__ = ["ArgumentError", "dump", "finalize_for_device", "parse_args", "to_yaml"]

_HOMES = {
    "ArgumentError": "errors",
    "dump": "files.run_config",
    "finalize_for_device": "device",
    "parse_args": "parse",
    "to_yaml": "files.run_config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
