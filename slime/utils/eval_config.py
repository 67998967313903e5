"""The evaluation data sets of the arguments, under the name plugins import."""

from __future__ import annotations

from typing import Any

from slime.arguments.files.eval_config import EvalDatasetConfig, build_eval_dataset_configs

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs", "ensure_dataset_list"]


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """Return the ``datasets`` of an eval file, a list of mappings or a mapping by name, as a list with names.

    Raises TypeError for anything else.
    """
    if config is None:
        return []
    if isinstance(config, dict):
        return [{"name": name, **(entry or {})} for name, entry in config.items()]
    if isinstance(config, (list, tuple)):
        return [dict(entry) for entry in config]
    raise TypeError(f"eval datasets must be a list of mappings or a mapping by name, got {type(config).__name__}")
