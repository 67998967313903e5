"""Public path of the argument functions; their home is ``slime.arguments``."""

from __future__ import annotations

from typing import Any

_HOMES = {
    "parse_args": "slime.arguments.parse",
    "get_slime_extra_args_provider": "slime.arguments.provider",
    "parse_megatron_role_args": "slime.arguments.files.role_config",
    "slime_validate_args": "slime.arguments.rules",
    "configure_megatron_server_args": "slime.arguments.rules.teacher_server",
    "validate_megatron_server_args": "slime.arguments.rules.teacher_server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), "apply_rules" if name == "slime_validate_args" else name)
