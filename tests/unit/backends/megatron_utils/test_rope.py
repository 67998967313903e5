from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.model.provider import rope_settings
from tests.support.arguments import run_args

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def _args(tmp_path: Path, config: dict[str, Any], **flags: Any) -> Namespace:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return run_args(hf_checkpoint=str(tmp_path), **flags)


def test_defaults_without_a_checkpoint() -> None:
    assert rope_settings(run_args()) == {
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "seq_len_interpolation_factor": None,
        "rope_scaling": False,
        "rope_scaling_factor": 8.0,
    }


def test_flags_that_agree_with_the_checkpoint(tmp_path: Path) -> None:
    args = _args(
        tmp_path, {"rope_scaling": LLAMA3}, use_rope_scaling=True, rope_scaling_factor=32.0, rotary_base=500000
    )
    settings = rope_settings(args)
    assert (settings["rope_scaling"], settings["rope_scaling_factor"], settings["rotary_base"]) == (True, 32.0, 500000)


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    [
        ({"rope_scaling": LLAMA3}, {}, "--use-rope-scaling --rope-scaling-factor 32.0"),
        ({"rope_parameters": LLAMA3}, {"use_rope_scaling": True}, "factor 8.0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, {"use_rope_scaling": True}, "implements only"),
        ({"rope_theta": 1e6}, {"use_rope_scaling": True}, "drop the flag"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {}, "--rotary-seq-len-interpolation-factor 4.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, {}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, "'yarn'"),
        ({"text_config": {"rope_parameters": LLAMA3}}, {}, "--use-rope-scaling"),
    ],
)
def test_disagreement_is_an_error(tmp_path: Path, config: dict[str, Any], flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rope_settings(_args(tmp_path, config, **flags))


def test_linear_scaling(tmp_path: Path) -> None:
    args = _args(tmp_path, {"rope_scaling": {"type": "linear", "factor": 4.0}}, rotary_seq_len_interpolation_factor=4.0)
    assert rope_settings(args)["seq_len_interpolation_factor"] == 4.0
