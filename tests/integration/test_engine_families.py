"""Engines without a GPU, of families whose attention SGLang computes with kernels for GPUs: equal to transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.engine import EngineProcess
from slime.servers.engine_client import EngineClient
from tests.support.engines import Reference, engine_args, output_log_probs
from tests.support.model_families import SIZES, language_model, make_checkpoint

pytestmark = pytest.mark.integration

PROMPTS = [[(7 * i + 11 * k) % SIZES["vocab_size"] for k in range(length)] for i, length in enumerate((5, 40, 23, 70))]
LATENT = ("deepseek_v3", "moonlight", "kimi_k2", "glm4_moe_lite")
TOLERANCE = dict.fromkeys(LATENT, 1e-5)


@pytest.mark.parametrize("family", TOLERANCE)
def test_replies_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Before and after a push; the second turn of every conversation finds the first in the engine's cache."""
    old, new = (make_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in (11, 12))
    args = engine_args(old, sglang_skip_tokenizer_init=True)
    engine = EngineProcess(args, rank=0, host="127.0.0.1", log_path=tmp_path / "engine.log")
    engine.start()
    try:
        engine.wait_ready()
        client = engine.client(timeout=120)
        for checkpoint in (old, new):
            reference = Reference(checkpoint, language_model(checkpoint, family))
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
