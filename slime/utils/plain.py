"""Any value as plain data: what YAML and JSON can hold, without secrets."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

MASK = "***"
WORDS = ("api_key", "wandb_key", "admin_key", "secret", "password", "auth_token", "hf_token", "token_file", "_db_url")


@lru_cache(maxsize=8192)
def is_secret(name: str) -> bool:
    """True when the setting ``name`` (an attribute or a flag) holds a key, a token or a password."""
    text = name.lower().replace("-", "_")
    return any(word in text for word in WORDS)


def plain(name: str, value: Any) -> Any:
    """``value``, which is called ``name``, as plain data; what has no plain form is written as its ``repr``.

    The values of keys, tokens and passwords are masked, at every depth.
    """
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name) and value not in ("", [], {}):
        return MASK
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, argparse.Namespace):
        return {k: plain(k, v) for k, v in sorted(vars(value).items())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain("", item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain("", item) for item in value), key=str)
    return str(value) if isinstance(value, Path) else repr(value)
