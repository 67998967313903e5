"""Settings that a push of weights does not renew, from the reports of engines about themselves."""

from __future__ import annotations

from typing import Any

import pytest

from slime.arguments.passthrough import catalog
from slime.ray.manager.engines.renewable import REARRANGED, TAKE_QUANTIZED, Transport, transport_of, what_a_push_misses
from tests.support.arguments import run_args

PLAIN: dict[str, Any] = {
    "model_path": "/m", "quantization": None, "moe_runner_backend": "auto", "attention_backend": "fa3",
    "speculative_algorithm": None, "speculative_draft_model_path": None, "cpu_offload_gb": 0, "enable_lora": None,
    "lora_paths": None, "weight_cache_mode": "off", "kv_cache_dtype": "auto", "quantization_param_path": None,
}  # fmt: skip
ALL: tuple[Transport, ...] = ("broadcast", "tensor", "disk")
DRAFT = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/draft"}

OWN = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/m"}


def refused(transport: Transport, **changes: Any) -> str:
    return "\n".join(what_a_push_misses({**PLAIN, **changes}, transport)[0])


@pytest.mark.parametrize("transport", ALL)
def test_an_engine_without_such_settings_is_renewed(transport: Transport) -> None:
    assert what_a_push_misses(PLAIN, transport) == ([], [])
    assert what_a_push_misses({}, transport) == ([], [])
    assert what_a_push_misses({**PLAIN, "quantization": "unquant"}, transport) == ([], [])


def test_an_engine_of_a_quantized_checkpoint_is_pushed_what_that_stores() -> None:
    for quantization in (None, "fp8"):
        assert what_a_push_misses({**PLAIN, "quantization": quantization}, "tensor", "fp8") == ([], [])
    (sentence,), _ = what_a_push_misses({**PLAIN, "quantization": "awq"}, "tensor", "fp8")
    assert (
        "--sglang-quantization awq: the engine holds quantized weights, and the trainer sends them as --hf-" in sentence
    )
    (sentence,), _ = what_a_push_misses({**PLAIN, "moe_runner_backend": "flashinfer_trtllm"}, "disk", "fp8")
    assert "give --sglang-moe-runner-backend triton" in sentence


@pytest.mark.parametrize(
    ("changes", "transports", "said"),
    [
        ({"quantization": "fp8"}, ALL, "--sglang-quantization fp8: the engine holds quantized weights"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, ALL[:2], "chosen by SGLang"),
        ({"moe_runner_backend": "aiter"}, ALL[:2], "give --sglang-moe-runner-backend triton"),
        ({"attention_backend": "intel_amx"}, ALL[:2], "packs its weights once"),
        ({"cpu_offload_gb": 4}, ALL, "--sglang-cpu-offload-gb 4"),
        ({"enable_lora": True}, ALL, "--sglang-enable-lora"),
        ({"lora_paths": ["a"]}, ALL, "--sglang-enable-lora"),
        ({"weight_cache_mode": "client"}, ALL, "--sglang-weight-cache-mode client"),
        (DRAFT, ("disk",), "--sglang-speculative-draft-model-path /draft"),
        ({"offload_group_size": 2}, ALL, "--sglang-offload-group-size 2"),
        ({**OWN, "speculative_token_map": "/map"}, ALL, "--sglang-speculative-token-map /map"),
        (
            {**OWN, "speculative_draft_model_quantization": "fp8"},
            ALL,
            "--sglang-speculative-draft-model-quantization fp8",
        ),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], transports: tuple[Transport, ...], said: str) -> None:
    for transport in ALL:
        assert (said in refused(transport, **changes)) == (transport in transports)


def test_settings_that_are_warned_of() -> None:
    scales = {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": "/scales.json"}
    for changes, said in ((scales, "measured with the first weights"), (DRAFT, "keeps its weights")):
        wrong, warned = what_a_push_misses({**PLAIN, **changes}, "broadcast")
        assert wrong == []
        assert said in warned[0]
    assert what_a_push_misses({**PLAIN, "quantization_param_path": "/scales.json"}, "disk") == ([], [])


def test_draft_layers_of_the_model_itself_are_renewed() -> None:
    for transport in ALL:
        assert what_a_push_misses({**PLAIN, **OWN}, transport) == ([], [])
        assert what_a_push_misses({**PLAIN, **OWN, "speculative_draft_model_path": None}, transport) == ([], [])
    taken = {**PLAIN, **OWN, "quantization": "fp8", "speculative_draft_model_quantization": "fp8"}
    assert what_a_push_misses(taken, "broadcast", "fp8") == ([], [])


def test_a_draft_model_of_its_own_may_have_settings_of_its_own() -> None:
    changes = {**DRAFT, "speculative_token_map": "/map", "speculative_draft_model_quantization": "fp8"}
    for transport in ALL[:2]:
        refusals, warned = what_a_push_misses({**PLAIN, **changes}, transport)
        assert refusals == []
        assert "keeps its weights" in warned[0]


def test_quantized_experts_are_refused_for_being_quantized() -> None:
    assert "moe-runner-backend" not in refused("tensor", quantization="fp8", moe_runner_backend="flashinfer_trtllm")


def test_experts_in_int4_are_rearranged_again_after_a_push() -> None:
    int4 = {**PLAIN, "quantization": "compressed-tensors"}
    for runner in ("auto", "marlin", "triton"):
        assert what_a_push_misses({**int4, "moe_runner_backend": runner}, "tensor", "compressed-tensors") == ([], [])
    (sentence,), _ = what_a_push_misses(
        {**int4, "moe_runner_backend": "flashinfer_trtllm"}, "tensor", "compressed-tensors"
    )
    assert "rearranges quantized weights when they are loaded" in sentence


def test_the_names_are_those_of_the_pinned_sglang() -> None:
    records = {record["dest"]: record for record in catalog.records(catalog.SGLANG)}
    assert set(PLAIN) <= set(records)
    named = {*REARRANGED, *(runner for runners in TAKE_QUANTIZED.values() for runner in runners)}
    assert named | {"flashinfer_trtllm_routed", "triton"} <= set(records["moe_runner_backend"]["choices"])


def test_the_transport_of_a_run() -> None:
    assert transport_of(run_args()) == "broadcast"
    assert transport_of(run_args(colocate=True)) == "tensor"
    assert transport_of(run_args(colocate=True, update_weight_transport="disk")) == "disk"


def test_what_is_written_into_an_engines_memory_must_be_what_is_loaded_and_stay_there() -> None:
    assert transport_of(run_args(update_weight_transport="p2p")) == "p2p"
    assert what_a_push_misses(PLAIN, "p2p") == what_a_push_misses({}, "p2p") == ([], [])
    assert "draft layers are not written" in refused("p2p", **OWN)
    assert "--sglang-enable-memory-saver: the memory" in refused("p2p", enable_memory_saver=True)
    assert "packs its weights once" in refused("p2p", attention_backend="intel_amx")
    assert "give --sglang-moe-runner-backend triton" in refused("p2p", moe_runner_backend="aiter")
    (sentence,), _ = what_a_push_misses({**PLAIN, "quantization": "fp8"}, "p2p", "fp8")
    assert "--hf-checkpoint is quantized (fp8), and plain weights alone are written" in sentence


def test_engines_that_are_sent_adapters_keep_their_weights() -> None:
    info = {**PLAIN, "enable_lora": True, "attention_backend": "intel_amx"}
    assert what_a_push_misses(info, "broadcast", adapters=True) == ([], [])
