from __future__ import annotations

import pytest

from slime.models.facts import known_config, known_model, models


@pytest.mark.parametrize(
    ("checkpoint", "repository"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/models/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("/models/Qwen3-4B/", "Qwen/Qwen3-4B"),
        ("qwen3-4b", "Qwen/Qwen3-4B"),
        ("/models/Qwen3-4B-FP8", "Qwen/Qwen3-4B"),
        ("/models/Kimi-K2-Thinking_int4", "moonshotai/Kimi-K2-Thinking"),
        ("/models/DeepSeek-R1-bf16", "deepseek-ai/DeepSeek-R1"),
        ("/cache/models--Qwen--Qwen3-4B/snapshots/0123abc", "Qwen/Qwen3-4B"),
        ("/models/DeepSeek-V3-0324-5layer", "DeepSeek-V3-0324-5layer"),
        ("/models/GLM-4-9B-0414", "zai-org/GLM-4-9B-0414"),
    ],
)
def test_names(checkpoint, repository):
    known = known_model(checkpoint)
    assert known is not None
    assert known.repository == repository


@pytest.mark.parametrize("checkpoint", ["/models/Qwen3-4B/mine", "Qwen3-5B", "my-Qwen3-4B", "", "/", "FP8"])
def test_no_guessing(checkpoint):
    assert known_model(checkpoint) is None
    assert known_config(checkpoint) is None


def test_a_variant_differs_where_the_table_says():
    base, longer = known_config("Qwen3-30B-A3B"), known_config("Qwen3-30B-A3B-Instruct-2507")
    assert base is not None
    assert longer is not None
    assert {key for key in base if base[key] != longer[key]} == {"rope_theta", "max_position_embeddings"}


def test_the_config_is_a_copy():
    known_config("Qwen3-4B")["hidden_size"] = 0
    assert known_config("Qwen3-4B")["hidden_size"] == models()["qwen3-4B"].config["hidden_size"] == 2560
