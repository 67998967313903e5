"""Types of flags that check more than pydantic's own: dotted paths and regular expressions."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _dotted_path(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) or text.endswith(".py"):
        raise ValueError("expected a dotted path like package.module.function")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"expected a regular expression: {error}") from error
    return text


DottedPath = Annotated[str, AfterValidator(_dotted_path)]
"""``package.module.attribute``; whether it can be imported is found out where it is used."""
Pattern = Annotated[str, AfterValidator(_pattern)]
"""A regular expression."""
