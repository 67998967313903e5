"""MTP layers: how many a checkpoint has, and which engines draft with trained ones."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from slime.arguments.rules import mtp
from tests.support.arguments import run_args

KNOWN = "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("layers", "config", "said"),
    [
        (None, {"model_type": "qwen3"}, []),
        (None, {"model_type": "mimo", KNOWN: 1}, []),
        (1, {"model_type": "mimo", KNOWN: 1}, []),
        (1, {"model_type": "qwen3_next"}, []),
        (1, {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}, []),
        (2, {"model_type": "mimo", KNOWN: 1}, ["--mtp-num-layers is 2 but num_nextn_predict_layers is 1"]),
        (1, {"model_type": "kimi_k2", KNOWN: 0}, ["--mtp-num-layers is 1 but num_nextn_predict_layers is 0"]),
        (1, {"model_type": "glm4_moe"}, ["--mtp-num-layers is 1 but the checkpoint has 0"]),
        (2, {"model_type": "qwen3_next"}, ["--mtp-num-layers is 2 but the checkpoint has 1"]),
        (
            1,
            {"model_type": "qwen3"},
            ["--mtp-num-layers is 1 but the MTP layers of qwen3 are not supported"],
        ),
    ],
)
def test_as_many_layers_as_the_checkpoint_has(layers: int | None, config: dict[str, Any], said: list[str]) -> None:
    assert mtp.differences(run_args(mtp_num_layers=layers), config) == said


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ({}, True),
        ({"colocate": True}, False),
        ({"update_weight_transport": "disk"}, False),
        ({"sglang_speculative_algorithm": None}, False),
        ({"enable_mtp_training": False}, False),
    ],
)
def test_a_draft_model_that_does_not_get_the_trained_layers(flags: dict[str, Any], warned: bool) -> None:
    values = {
        "enable_mtp_training": True,
        "mtp_num_layers": 1,
        "pipeline_model_parallel_layout": None,
        "sglang_speculative_algorithm": "EAGLE",
        "colocate": False,
        "update_weight_transport": "nccl",
        "warnings": [],
    }
    args = Namespace(**{**values, **flags})
    mtp.check(args)
    assert [("--sglang-speculative-algorithm" in warning) for warning in args.warnings] == [True] * warned


@pytest.mark.parametrize("layout", ["Et|tmL", "Et|t,m,L", "Et*3|(tt|)*2t(m)*1L", "E t | t m*1 L"])
def test_layouts_whose_last_stage_predicts(layout: str) -> None:
    mtp.check(
        Namespace(mtp_num_layers=1, enable_mtp_training=False, pipeline_model_parallel_layout=layout, warnings=[])
    )
