"""Engines without a GPU, of families whose attention SGLang computes with kernels for GPUs: equal to transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from tests.support.breadth import few
from tests.support.engines import Reference, engine_args, output_log_probs
from tests.support.model_families import SIZES, language_model, make_checkpoint

pytestmark = pytest.mark.integration

PROMPTS = [[(7 * i + 11 * k) % SIZES["vocab_size"] for k in range(length)] for i, length in enumerate((5, 40, 23, 70))]
LATENT = ("deepseek_v3", "moonlight", "kimi_k2", "glm4_moe_lite")
SPARSE = ("deepseek_v32", "glm5", "glm5.2")
WINDOWS = ("gemma3", "gemma4", "gemma4_moe", "gpt_oss")
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
TOLERANCE = {
    **dict.fromkeys((*LATENT, *SPARSE, "minimax_m2", "mixtral", *WINDOWS), 1e-5), **dict.fromkeys(DELTA_NETS, 3e-5),
}  # fmt: skip
"""Tiny delta nets multiply the rounding of their states: transformers with its cache and without differs by 2e-5.
Mixtral's engine answers on every change in test_mbridge.py; GLM-5's layers are among those of GLM-5.2."""


@pytest.mark.parametrize("family", few(TOLERANCE, TOLERANCE.keys() - {"mixtral", "glm5"}))
def test_replies_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Before and after a push; the second turn of every conversation finds the first in the engine's cache."""
    sizes = {"num_hidden_layers": 4} if family == "glm5.2" else {}  # rounding of 8 layers reaches 7e-6
    old, new = (make_checkpoint(tmp_path / str(seed), family, seed=seed, **sizes) for seed in (11, 12))
    args = engine_args(old, sglang_skip_tokenizer_init=True, sglang_chunked_prefill_size=64)  # of 70 in the last prompt
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=tmp_path / "engine.log")
    engine.start()
    try:
        engine.wait_ready()
        client = engine.client(timeout=120)
        for checkpoint in (old, new):
            reference = Reference(checkpoint, with_exact_rule(language_model(checkpoint, family)))
            turns = check(client, reference, PROMPTS, TOLERANCE[family])
            check(client, reference, turns, TOLERANCE[family], cached=True)
            client.update_weights_from_disk(new, weight_version="new")
    finally:
        engine.stop()


def check(
    client: EngineClient, reference: Reference, prompts: list[list[int]], tolerance: float, *, cached: bool = False
) -> list[list[int]]:
    """Compare the replies to ``prompts``, which share the engine; return the prompts of the next turns."""

    def generate(case: tuple[int, list[int]]) -> dict[str, Any]:
        params = {"max_new_tokens": 12, "temperature": float(case[0] % 2), "ignore_eos": True}
        return dict(client.generate({"input_ids": case[1], "sampling_params": params, "return_logprob": True}))

    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(generate, enumerate(prompts)))
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        output = reply["output_ids"]
        assert (reply["meta_info"]["cached_tokens"] > 4) == cached  # of the first turn, the warm-up's token
        difference = (output_log_probs(reply) - reference.log_probs(prompt, output)).abs().max().item()
        assert difference <= tolerance, f"{len(prompt)} tokens, {difference:.1e}"
        assert i % 2 or reference.are_best(prompt, output)
    return [[*prompt, *reply["output_ids"], 9] for prompt, reply in zip(prompts, replies, strict=True)]


def with_exact_rule(model: Any) -> Any:
    """Replace the delta rule of transformers, which is up to 1e-4 off in log-probs: it subtracts sums in fp32."""
    model.config.use_cache = False
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            module.chunk_gated_delta_rule = delta_rule
    return model


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: object
) -> tuple[torch.Tensor, None]:
    """Apply it in fp64, token by token; query, key, value: [1, tokens, heads, dim], g, beta: [1, tokens, heads]."""
    q, k, v = (x[0].double() for x in (query, key, value))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state = torch.zeros(k.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    outputs = []
    for t in range(len(v)):
        state = state * g[0, t].double().exp()[:, None, None]
        found = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - found) * beta[0, t].double()[:, None])
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) / q.shape[2] ** 0.5)
    return torch.stack(outputs)[None].to(value.dtype), None
