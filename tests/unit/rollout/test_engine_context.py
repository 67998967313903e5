"""Requests that an engine would refuse are not sent."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.requests.generate_request import engine_context_len, generate_payload, longest_prompt
from slime.utils.types import Sample
from tests.support.arguments import run_args


def args(tmp_path: Path, config: dict[str, Any], **values: Any) -> Namespace:
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return run_args(hf_checkpoint=str(directory), **values)


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        ({"max_position_embeddings": 100}, {}, 100),
        ({"max_position_embeddings": 100}, {"sglang_context_length": 40}, 40),
        ({"max_position_embeddings": 100}, {"debug_train_only": True}, None),
        ({"max_position_embeddings": 100}, {"rollout_external": True}, None),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, None),
        ({"text_config": {"max_position_embeddings": 7}}, {}, 7),
        ({}, {}, None),
    ],
)
def test_the_longest_sequence_of_the_engines(config, values, expected, tmp_path):
    found = args(tmp_path, config, **values)
    assert engine_context_len(found) == expected
    assert longest_prompt(found) == (None if expected is None else expected - 1)


@pytest.mark.parametrize(
    ("groups", "given", "expected"),
    [
        ("{num_gpus: 1}", None, 100),
        ("{num_gpus: 1}", 60, 60),
        ("{num_gpus: 1, overrides: {context_length: 50}}, {num_gpus: 1}", 60, 50),
        ("{num_gpus: 1, overrides: {context-length: 70}}", 60, 70),
        ("{worker_type: placeholder, num_gpus: 1}", None, None),
    ],
)
def test_groups_of_the_first_model_may_take_less(groups, given, expected, tmp_path):
    file = tmp_path / "engines.yaml"
    file.write_text(f"""
sglang:
  - {{name: actor, server_groups: [{groups}]}}
  - {{name: judge, server_groups: [{{num_gpus: 1, overrides: {{context_length: 3}}}}]}}
""")
    values = {"sglang_config": str(file), "sglang_context_length": given}
    assert engine_context_len(args(tmp_path, {"max_position_embeddings": 100}, **values)) == expected


def test_a_checkpoint_that_is_not_there_limits_nothing():
    assert engine_context_len(run_args(hf_checkpoint="/nowhere")) is None


@pytest.mark.parametrize(("prompt", "asked"), [(10, 20), (80, 20), (81, 19), (99, 1)])
def test_a_request_asks_for_no_more_than_there_is_room_for(prompt, asked, tmp_path):
    run = args(tmp_path, {"max_position_embeddings": 100})
    sample = Sample(index=1, tokens=[1] * prompt)
    payload = generate_payload(run, sample, {"max_new_tokens": 20}, False)
    assert payload["sampling_params"]["max_new_tokens"] == asked
    assert not sample.remove_sample


@pytest.mark.parametrize("prompt", [100, 101, 500])
def test_a_prompt_without_room_is_left_out_of_training(prompt, tmp_path, caplog):
    run = args(tmp_path, {"max_position_embeddings": 100})
    sample = Sample(index=5, tokens=[1] * prompt)
    assert generate_payload(run, sample, {"max_new_tokens": 20}, False) is None
    assert (sample.status, sample.remove_sample) == (Sample.Status.TRUNCATED, True)
    assert f"sample index=5 is left out of training: its prompt of {prompt} tokens" in caplog.text


def test_a_response_that_fills_the_context_is_truncated_and_trained_on(tmp_path):
    run = args(tmp_path, {"max_position_embeddings": 100})
    sample = Sample(index=5, tokens=[1] * 100, response_length=40)
    assert generate_payload(run, sample, {"max_new_tokens": 50}, False) is None
    assert (sample.status, sample.remove_sample) == (Sample.Status.TRUNCATED, False)


def test_a_response_without_any_limit_of_its_own_is_refused(tmp_path):
    run = args(tmp_path, {"max_position_embeddings": 100})
    with pytest.raises(ValueError, match="set --rollout-max-response-len"):
        generate_payload(run, Sample(tokens=[1]), {"max_new_tokens": None}, False)
