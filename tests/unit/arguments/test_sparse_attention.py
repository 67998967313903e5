"""Sparse attention: which layers select, and that every pipeline stage begins with one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import ArgumentError
from slime.arguments.rules import sparse_attention
from slime.models import hf_fields
from slime.models.facts import models
from tests.support.arguments import dry, parse, run_args

GLM_5_2 = [0, 1, 2, *range(6, 78, 4)]
"""The layers of GLM-5.2 that have an indexer: 21 of 78."""
EIGHT = {"model_type": "glm_moe_dsa", "num_hidden_layers": 8, "index_topk": 8, "index_topk_freq": 2}
SPEC = ["slime_plugins.models.glm5.glm5", "get_glm5_spec"]


def selecting(**config: Any) -> list[int]:
    return [i for i, selects in enumerate(hf_fields.selecting_layers(config)) if selects]


def test_which_layers_select() -> None:
    assert selecting(**models()["glm5.2-744B-A40B"].config) == GLM_5_2
    assert len(GLM_5_2) == 21
    for name in ("glm5-744B-A40B", "deepseek-v3.2"):
        config = models()[name].config
        assert selecting(**config) == list(range(config["num_hidden_layers"]))
    assert selecting(**models()["deepseek-v3"].config) == []
    assert selecting(**EIGHT) == [0, 1, 3, 5, 7]
    assert selecting(**EIGHT, index_skip_topk_offset=1) == [0, 2, 4, 6]
    assert selecting(**EIGHT, index_topk_pattern="FSSFFSSS") == [0, 3, 4]
    kinds = ["full", "shared", "shared", "full", *["shared"] * 4]
    assert selecting(**EIGHT, index_topk_pattern="FSSFFSSS", indexer_types=kinds) == [0, 3]


def test_transformers_reads_the_same_layers() -> None:
    from transformers import GlmMoeDsaConfig

    for fields in ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"index_topk_freq": 3}, {}):
        theirs = GlmMoeDsaConfig(num_hidden_layers=26, **fields).indexer_types
        ours = selecting(model_type="glm_moe_dsa", num_hidden_layers=26, index_topk=8, **fields)
        assert ours == [i for i, kind in enumerate(theirs) if kind == "full"]


def test_the_order_of_rotation() -> None:
    assert hf_fields.interleaves_indexer({"model_type": "glm_moe_dsa"})
    assert not hf_fields.interleaves_indexer({"model_type": "deepseek_v32"})
    assert not hf_fields.interleaves_indexer({"model_type": "glm_moe_dsa", "indexer_rope_interleave": False})


def check(tmp_path: Path, config: dict[str, Any], **values: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    defaults = {"num_layers": config["num_hidden_layers"], "spec": SPEC, "hf_checkpoint": str(tmp_path)}
    sparse_attention.check(run_args(**{**defaults, **values}))


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        ({"pipeline_model_parallel_size": 1}, None),
        ({"pipeline_model_parallel_size": 2}, None),  # layers 0 and 4
        ({"pipeline_model_parallel_size": 4}, None),
        ({"pipeline_model_parallel_size": 8}, "1, 3, 5, 7"),
        ({"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}, "1, 3, 5, 7"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, None),
        ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3}, "3"),
        ({"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 2}, None),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tttttL"}, "3"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*2|t*6,L"}, None),
        ({"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "E|t*4|t*4,L"}, None),
    ],
)
def test_every_stage_begins_with_a_layer_that_selects(layout: dict[str, Any], wrong: str | None, tmp_path: Any) -> None:
    config = {**EIGHT, "index_skip_topk_offset": 1}
    if wrong is None:
        check(tmp_path, config, **layout)
        return
    with pytest.raises(ArgumentError) as caught:
        check(tmp_path, config, **layout)
    assert f"pipeline stages begin with layers {wrong} of {tmp_path}/config.json" in str(caught.value)
    assert "begin with one of the layers 0, 2, 4, 6 (--decoder-first-pipeline-num-layers" in str(caught.value)


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    stages = {"pipeline_model_parallel_size": 8}
    check(tmp_path, {**EIGHT, "index_topk_freq": 1}, **stages)
    check(tmp_path, {"model_type": "qwen3", "num_hidden_layers": 8}, **stages, spec=None)
    check(tmp_path, EIGHT, **stages, custom_model_provider_path="mine.provider")
    check(tmp_path, EIGHT, **stages, num_layers=7)  # said where the flags are compared with the checkpoint


def test_flags_that_change_nothing_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse("--freeze-indexer", "--allgather-cp")
    assert args.freeze_indexer
    assert args.allgather_cp
    said = " ".join(capsys.readouterr().err.split())
    assert "--freeze-indexer has no effect: the indexer is never trained" in said
    assert "--allgather-cp has no effect: context-parallel ranks gather the keys" in said


@pytest.mark.parametrize("name", ["glm5-744B-A40B", "deepseek-v3.2"])
def test_mtp_layers_are_refused(name: str, tmp_path: Path) -> None:
    config = models()[name].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ("--num-layers", config["num_hidden_layers"])
    with pytest.raises(ArgumentError, match=f"the MTP layers of {config['model_type']} are not supported"):
        dry("--hf-checkpoint", tmp_path, *sizes, "--mtp-num-layers", 1)
