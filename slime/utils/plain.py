"""Any value as plain data: what YAML and JSON can hold, without secrets."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.utils.secrets import MASK, is_secret, mask_text


def plain(name: str, value: object) -> Any:
    """``value``, which is called ``name``, as plain data; what has no plain form is written as its ``repr``.

    Secrets are masked, at every depth: by the name of a value, and by what a text holds.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_secret(name) and value not in ("", [], {}):
        return MASK
    if isinstance(value, str):
        return mask_text(value, name)
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
    return mask_text(str(value) if isinstance(value, Path) else repr(value))
