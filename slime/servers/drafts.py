"""Draft models of speculative decoding, by what an engine reports of itself (``/server_info``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def separate_draft(info: Mapping[str, Any]) -> str | None:
    """Return the checkpoint of a draft model that has one of its own; None without, and for layers of the model."""
    draft = info.get("speculative_draft_model_path")
    if not info.get("speculative_algorithm") or draft in (None, info.get("model_path")):
        return None
    return str(draft)
