"""Engines that answer by a function of the conversation, and environments to act in."""

from __future__ import annotations

import pytest

from slime.rollout import data_source, sglang_rollout
from slime.rollout.environments import episode
from tests.support.agents import ToolTokenizer


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> ToolTokenizer:
    """One token per character, with a chat template that has tools."""
    tool_tokenizer = ToolTokenizer()
    for module in (sglang_rollout, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *a, **k: tool_tokenizer)
    monkeypatch.setattr(episode, "_failures", type(episode._failures)())
    monkeypatch.setattr(episode, "_template_warned", set())
    return tool_tokenizer
