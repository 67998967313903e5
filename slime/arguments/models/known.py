"""Find the published model that a checkpoint is a copy of, by the name of its directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

from slime.arguments.models.facts import models

# A checkpoint in another number format has the same architecture.
_FORMAT = re.compile(r"[-_.](fp8|fp4|nvfp4|mxfp4|mxfp8|bf16|fp16|int4|int8|awq|gptq)$", re.IGNORECASE)


@dataclass(frozen=True)
class KnownModel:
    """A published model: its repository (or the name by which a shortened one is known), its script, its config."""

    repository: str
    script: str
    config: dict[str, Any]


def known_model(checkpoint: str) -> KnownModel | None:
    """The published model named like ``checkpoint``, a path or a repository name; None when the table has none.

    ``/models/Qwen3-4B``, ``Qwen/Qwen3-4B``, ``Qwen3-4B-FP8`` and a snapshot directory of the Hugging Face cache are all
    ``Qwen/Qwen3-4B``. Case does not matter.
    """
    name = _base_name(checkpoint)
    while name not in _by_name():
        shorter = _FORMAT.sub("", name)
        if shorter == name:
            return None
        name = shorter
    return _by_name()[name]


def known_config(checkpoint: str) -> dict[str, Any] | None:
    """The config of the published model named like ``checkpoint``, in Hugging Face vocabulary; see ``known_model``."""
    model = known_model(checkpoint)
    return None if model is None else dict(model.config)


def _base_name(checkpoint: str) -> str:
    parts = PurePath(checkpoint).parts
    cached = next((part for part in parts if part.startswith("models--")), None)
    if cached is not None:
        return cached.split("--")[-1].lower()
    return parts[-1].lower() if parts else ""


@cache
def _by_name() -> dict[str, KnownModel]:
    found: dict[str, KnownModel] = {}
    for model in models().values():
        for repository in (*model.repositories, *model.local_names, *model.variants):
            config = {**model.config, **model.variants.get(repository, {})}
            found.setdefault(_base_name(repository), KnownModel(repository, model.script, config))
    return found
