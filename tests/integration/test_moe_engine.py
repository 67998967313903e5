"""A mixture of experts on a real engine without a GPU: its log-probs, and the experts it reports for every token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from slime.backends.sglang_utils.engine import EngineProcess
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.support.engines import Reference, engine_args, output_log_probs

pytestmark = pytest.mark.integration

LAYERS, TOPK = 3, 2
PROMPT = [5, 17, 200, 3, 77, 250, 9]


def make_checkpoint(out: Path) -> Path:
    """Eight routed experts per layer, and one behind a gate that every token shares."""
    config = Qwen2MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=48, num_hidden_layers=LAYERS,
        shared_expert_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, num_experts=8,
        num_experts_per_tok=TOPK, norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        Qwen2MoeForCausalLM(config).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    args = engine_args(checkpoint, sglang_skip_tokenizer_init=True, use_rollout_routing_replay=True)
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=tmp_path_factory.mktemp("log") / "engine.log")
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


def choices(reference: Reference, tokens: list[int]) -> torch.Tensor:
    """Transformers' experts of every token but the last, ``[len(tokens) - 1, layers, topk]`` in ascending order."""
    with torch.no_grad():
        logits = reference.model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(TOPK).indices.sort().values for layer in logits], dim=1)[:-1]


def test_log_probs_and_experts_are_those_of_transformers(engine: EngineProcess, checkpoint: Path) -> None:
    reference = Reference(checkpoint)
    args = run_args(num_layers=LAYERS, moe_router_topk=TOPK)
    sample = Sample(prompt="", tokens=list(PROMPT))

    def generate(count: int) -> dict[str, Any]:
        reply = engine.client().generate(
            {
                "input_ids": sample.tokens,
                "sampling_params": {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True},
                "return_logprob": True,
                "return_routed_experts": True,
            }
        )
        expected = reference.log_probs(sample.tokens, reply["output_ids"])
        assert (output_log_probs(reply) - expected).abs().max() < 1e-4
        sample.append_response_tokens(
            args,
            tokens=reply["output_ids"],
            log_probs=output_log_probs(reply).tolist(),
            trainable=True,
            meta_info=reply["meta_info"],
        )
        return dict(reply["meta_info"])

    assert generate(12)["cached_tokens"] == 0
    # As after an interruption: the rest is asked for with what there is, whose experts the engine still has.
    assert generate(9)["cached_tokens"] > 0

    experts = sample.rollout_routed_experts
    assert experts.shape == (len(PROMPT) + 12 + 9 - 1, LAYERS, TOPK)
    assert torch.equal(experts.long().sort().values, choices(reference, sample.tokens))
