from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.model import provider as model_provider


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_biases_of_experts_and_counts_of_tokens_stay_fp32(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_megatron()
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.backends.megatron_utils.model import experts

    monkeypatch.setattr(experts, "mark_routed_experts", lambda model: None)  # it asks for parallel groups
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[half]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_ffn_hidden_size=8,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        bf16=half == "bf16",
        fp16=half == "fp16",
        params_dtype=dtype,
    )
    router = TopKRouter(config, pg_collection=mock.MagicMock())
    bias = torch.tensor([14.9731, 14.9702, 14.9689, 14.9755])
    router.expert_bias.copy_(bias)
    model = model_provider._on_device(config, torch.nn.Sequential(router))

    assert router.weight.dtype == dtype
    assert torch.equal(router.expert_bias, bias)
    assert router.local_tokens_per_expert.dtype == torch.float32
    assert [name for name in model.state_dict() if "expert" in name] == ["0.expert_bias"]


# What Megatron saves of one optimizer, and of a chain: of experts, and of the rest.
ONE = {"optimizer": {}, "param_state_sharding_type": "fully_reshardable"}
CHAIN = {0: ONE, 1: ONE}


@pytest.mark.parametrize(("saved", "held", "own"), [(CHAIN, 2, 1), ({"param_groups": []}, 1, 2), (ONE, 1, 3)])
def test_a_resume_with_other_optimizers_is_refused(saved: dict[Any, Any], held: int, own: int) -> None:
    import_megatron()
    from slime.backends.megatron_utils.state.optimizer import check_optimizers

    check_optimizers(saved, SimpleNamespace(chained_optimizers=[None] * held), Path("iter_1"))
    with pytest.raises(ValueError, match=rf"state of {held} optimizers, this run has {own}: .*--no-load-optim"):
        check_optimizers(saved, SimpleNamespace(chained_optimizers=[None] * own), Path("iter_1"))


def test_an_export_is_called_what_its_weights_are_and_not_what_the_biases_of_experts_are(tmp_path: Path) -> None:
    from slime.weights.hf.writer import write_dtype

    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    bias, weight = ((8,), torch.float32), ((8, 4), torch.bfloat16)
    write_dtype(tmp_path, [bias, weight, bias])
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "bfloat16"}
