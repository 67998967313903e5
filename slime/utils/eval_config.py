"""Public path of the evaluation configuration; its home is ``slime.arguments.files.eval_config``."""

from __future__ import annotations

from typing import Any

_NAMES = ("EvalDatasetConfig", "build_eval_dataset_configs")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime.arguments.files import eval_config

    return getattr(eval_config, name)
