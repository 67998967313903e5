"""Public path of the classes of an ``--sglang-config`` file; their home is ``slime.arguments``."""

from __future__ import annotations

from slime.arguments.files.sglang_config import ModelConfig, ServerGroupConfig, SglangConfig

__all__ = ["ModelConfig", "ServerGroupConfig", "SglangConfig"]
