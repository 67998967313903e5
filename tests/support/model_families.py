"""A tiny random checkpoint of every model family, what transformers computes from it, and what the ranks do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.megatron_checks import logits_and_weights
from tests.support.megatron_model import model_args, output_gradient, sequences
from tests.support.megatron_references import Reference
from tests.support.ranks import switch_layout
from tools.tiny_model import stacked_experts

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 1024,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {  # the longest sequence is longer than what the positions were made for
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "head_dim": 8, "attention_bias": False,
}  # fmt: skip
SIGMOID = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
PUBLISHED: dict[str, Any] = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
INTERVAL = {"full_attention_interval": 2}
"""Both: what SGLang reads in the published configs of these architectures, and transformers does not write."""
SPARSE = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}  # of 8 heads 1 score in 256 is 0: these tie
HYBRID = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    **INTERVAL, "rope_parameters": {**PARTIAL_ROPE, "partial_rotary_factor": 0.25},
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True}
GEMMA3 = {
    **WINDOWS, "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    },
}  # fmt: skip
GEMMA4 = {
    **WINDOWS, "global_head_dim": 32, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 4.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
    },
}  # fmt: skip
GPT_OSS = {
    "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
SHARED_EXPERT = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip


class Tiny(NamedTuple):
    """``model_type`` of transformers with ``fields`` over SIZES.

    ``config`` is written over ``config.json`` afterwards; ``carried`` are tensors of parts that are not built;
    ``whole``: the language model of a vision-language checkpoint of this ``model_type``.
    """

    model_type: str
    fields: dict[str, Any]
    config: dict[str, Any] = {}  # noqa: RUF012  read only
    carried: tuple[str, ...] = ()
    whole: str = ""


FAMILIES: dict[str, Tiny] = {
    "glm4": Tiny("glm4", {"attention_bias": True, "rope_parameters": PARTIAL_ROPE}),
    "glm4-32B": Tiny("glm4", {"attention_bias": False, "rope_parameters": PARTIAL_ROPE, "tie_word_embeddings": True}),
    "mimo": Tiny("qwen2", {}, {"model_type": "mimo"}, ("model.mtp_layers.0.input_proj.weight",)),
    "deepseek_v3": Tiny(
        "deepseek_v3",
        {**LATENT, **SIGMOID, "rope_parameters": YARN, "n_group": 2, "n_routed_experts": 8},
        {"num_nextn_predict_layers": 1, **PUBLISHED},
        ("model.layers.2.eh_proj.weight",),
    ),
    "deepseek_v3-dense": Tiny(  # without experts tensor parallelism goes without sequence parallelism
        "deepseek_v3",
        {**LATENT, **SIGMOID, "rope_parameters": YARN, "first_k_dense_replace": 2},
        {"n_routed_experts": 0, "n_shared_experts": 0, **PUBLISHED},
    ),
    "kimi_k25": Tiny(
        "deepseek_v3",
        {**LATENT, **SIGMOID, "rope_parameters": YARN, "n_group": 1, "topk_group": 1},
        {"model_type": "kimi_k2", **PUBLISHED},
        ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"),
        "kimi_k25",
    ),
    "moonlight": Tiny("deepseek_v3", {**LATENT, **SIGMOID, "q_lora_rank": None, "n_shared_experts": 2}, PUBLISHED),
    "kimi_k2": Tiny(
        "deepseek_v3",
        {**LATENT, **SIGMOID, "rope_parameters": {**YARN, "beta_fast": 1.0}},
        {"model_type": "kimi_k2", **PUBLISHED},
    ),
    "glm4_moe_lite": Tiny("glm4_moe_lite", {**LATENT, **SIGMOID}),
    "deepseek_v32": Tiny(
        "deepseek_v32", {**LATENT, **SIGMOID, **SPARSE, "num_experts": 4, "rope_parameters": YARN}, PUBLISHED
    ),
    "glm5": Tiny("glm_moe_dsa", {**LATENT, **SIGMOID, **SPARSE}, {"indexer_rope_interleave": True, **PUBLISHED}),
    "glm5.2": Tiny(  # every second layer uses the selection of the one before it
        "glm_moe_dsa",
        {**LATENT, **SIGMOID, **SPARSE, "num_hidden_layers": 8, "index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"indexer_rope_interleave": True, **PUBLISHED},
    ),
    "glm4_moe": Tiny(
        "glm4_moe", {**SIGMOID, "attention_bias": True, "use_qk_norm": True, "rope_parameters": PARTIAL_ROPE}
    ),
    "minimax_m2": Tiny(
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8, "rope_parameters": PARTIAL_ROPE},
        {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
    ),
    "gemma3": Tiny("gemma3_text", GEMMA3),
    "gemma3-whole": Tiny("gemma3_text", GEMMA3, {}, ("vision_tower.norm.weight",), "gemma3"),
    "gemma4": Tiny("gemma4_text", GEMMA4),
    "gemma4-whole": Tiny(  # with a key head for two tensor-parallel ranks
        "gemma4_text", {**GEMMA4, "num_global_key_value_heads": 1}, {}, ("model.vision_tower.norm.weight",), "gemma4"
    ),
    "gemma4_moe": Tiny(
        "gemma4_text",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gpt_oss": Tiny("gpt_oss", GPT_OSS, {"swiglu_limit": 7.0}),
    "mixtral": Tiny("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),  # by mbridge
    "qwen3_next": Tiny("qwen3_next", {**HYBRID, **SHARED_EXPERT}, INTERVAL, ("mtp.fc.weight",)),
    "qwen3_5": Tiny("qwen3_5_text", {**HYBRID, "tie_word_embeddings": True}, INTERVAL),
    "qwen3_5_moe": Tiny("qwen3_5_moe_text", {**HYBRID, **SHARED_EXPERT}, INTERVAL),
    "qwen3_5-whole": Tiny(
        "qwen3_5_text", {**HYBRID, "tie_word_embeddings": True}, INTERVAL, ("model.visual.norm.weight",), "qwen3_5"
    ),
    "qwen3_5_moe-whole": Tiny(
        "qwen3_5_moe_text", {**HYBRID, **SHARED_EXPERT}, INTERVAL, ("model.visual.norm.weight",), "qwen3_5_moe"
    ),
}
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
DENSE = [name for name, tiny in FAMILIES.items() if not any({**tiny.fields, **tiny.config}.get(key) for key in EXPERTS)]
TP2, SP = ("--tensor-model-parallel-size", 2), ("--sequence-parallel",)
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "dp2": (),
    "tp2": TP2,
    "tp2-sp": (*TP2, *SP),
    "pp2": ("--pipeline-model-parallel-size", 2),
    "cp2": ("--context-parallel-size", 2),
    "ep2": ("--expert-model-parallel-size", 2),
}


def families_of(layout: str) -> list[str]:
    """Return the families that are run under ``layout``: experts need sequence parallelism, and ep2 needs experts."""
    if layout == "tp2":
        return DENSE
    return [name for name in FAMILIES if layout != "ep2" or name not in DENSE]


CASES = [(name, layout) for layout in LAYOUTS for name in families_of(layout)]


def make_checkpoint(folder: Path, name: str, *, seed: int = 11, **sizes: Any) -> str:
    """Write the tiny checkpoint ``name`` below ``folder``, every tensor with values of its own; return its path."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tiny, path = FAMILIES[name], folder / name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[tiny.model_type](**{**SIZES, **tiny.fields, **sizes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    written = {**json.loads((path / "config.json").read_text()), **tiny.config}
    if tiny.whole:
        written = {
            "model_type": tiny.whole,
            "tie_word_embeddings": written["tie_word_embeddings"],
            "text_config": written,
        }
    (path / "config.json").write_text(json.dumps(written))
    _rewrite_tensors(path / "model.safetensors", tiny, seed)
    return str(path)


def _rewrite_tensors(path: Path, tiny: Tiny, seed: int) -> None:
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(path).items():
        noise = torch.randn(tensor.shape, generator=generator)
        around_one = "norm" in name or "scal" in name or "sinks" in name
        tensors[name] = 1 + 0.3 * noise if around_one else 0.3 * noise if "bias" in name else 0.15 * noise
        if name.endswith("gate_up_proj_bias"):  # some of gpt-oss's gates are clamped, at 7
            tensors[name] *= 14
    if tiny.whole:
        stored = tensors if tiny.whole == "kimi_k25" else stacked_experts(tensors)
        tensors = in_a_whole_model(stored, tiny.whole)
    tensors.update({name: torch.randn(3, 2, generator=generator) for name in tiny.carried})
    save_file(tensors, path, metadata={"format": "pt"})


def below(whole: str) -> str:
    """Return the beginning of the language model's names in a vision-language checkpoint of this ``model_type``."""
    return "model.language_model." if whole not in ("gemma3", "kimi_k25") else "language_model.model."


def in_a_whole_model(tensors: dict[str, torch.Tensor], whole: str) -> dict[str, torch.Tensor]:
    """Return the language model's tensors under a vision-language model's names."""
    if whole == "kimi_k25":  # the output layer too
        return {f"language_model.{name}": t for name, t in tensors.items()}
    return {name.replace("model.", below(whole), 1): t for name, t in tensors.items()}


def language_model(checkpoint: str, name: str) -> Any:
    """Return the model that transformers makes of the checkpoint, in fp32."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tiny = FAMILIES[name]
    if tiny.whole.startswith("gemma"):  # transformers builds these with their towers
        return _language_model_of_gemma(Path(checkpoint), tiny)
    if tiny.whole == "kimi_k25":  # which transformers does not have
        return _language_model_of_kimi(Path(checkpoint), tiny)
    config = CONFIG_MAPPING[tiny.whole or tiny.model_type].from_pretrained(checkpoint)
    config.model_type = tiny.whole or tiny.model_type  # by which transformers finds how experts are stored
    model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=torch.float32)
    if tiny.model_type == "glm_moe_dsa":
        _interleave_indexers(model)
    return model


def _language_model_of_gemma(checkpoint: Path, tiny: Tiny) -> Any:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[tiny.model_type](**text), dtype=torch.float32)
    weights = {n: t for n, t in load_file(checkpoint / "model.safetensors").items() if n not in tiny.carried}
    model.model.load_state_dict({n.removeprefix(below(tiny.whole)): t for n, t in weights.items()})
    model.eval()
    return model


def _language_model_of_kimi(checkpoint: Path, tiny: Tiny) -> Any:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    weights = {n: t for n, t in load_file(checkpoint / "model.safetensors").items() if n not in tiny.carried}
    folder = checkpoint / "text"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**text, "model_type": tiny.model_type}))
    named = {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference(checkpoint: str, name: str) -> Reference:
    """Return logits and gradients by transformers and autograd, one sequence after the other, without padding."""
    from safetensors.torch import load_file

    tiny, model = FAMILIES[name], language_model(checkpoint, name)
    vocab_size = model.config.get_text_config().vocab_size
    logits = torch.cat([model(s[None]).logits[0] for s in sequences(vocab_size)])
    (logits * output_gradient(vocab_size)).sum().backward()
    weights = load_file(Path(checkpoint) / "model.safetensors")
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if not tiny.whole or tiny.whole == "kimi_k25":
        gradients = _per_expert(gradients, tiny.model_type)
    if tiny.whole:
        gradients = in_a_whole_model(gradients, tiny.whole)
    return Reference(logits.detach(), weights, gradients)


def _interleave_indexers(model: torch.nn.Module) -> None:
    """Let the indexers of GLM rotate neighboring numbers together, as the published models do.

    transformers 5.12 rotates those half of the rotated part apart. That of ``x`` with its even numbers before the odd
    ones is what the published models compute of ``x``: scores depend on no order.
    """
    for layer in model.model.layers:
        if (indexer := layer.self_attn.indexer) is None:
            continue
        rotated, size = indexer.qk_rope_head_dim, indexer.head_dim
        order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, size)]
        with torch.no_grad():
            indexer.wq_b.weight.copy_(indexer.wq_b.weight.unflatten(0, (-1, size))[:, order].flatten(0, 1))
            for parameter in (indexer.wk.weight, indexer.k_norm.weight, indexer.k_norm.bias):
                parameter.copy_(parameter[order].clone())


def _per_expert(gradients: dict[str, torch.Tensor], model_type: str) -> dict[str, torch.Tensor]:
    """Take the experts apart that transformers stacks when it loads them."""
    names = ("gate_proj", "up_proj", "down_proj")
    if model_type in ("gpt_oss", "gemma4_text"):  # whose checkpoints have them stacked, too
        return gradients
    if model_type in ("minimax_m2", "mixtral"):
        names = ("w1", "w3", "w2")
        gradients = {name.replace(".mlp.", ".block_sparse_moe."): gradient for name, gradient in gradients.items()}
    found = {}
    for name, gradient in gradients.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, expert in enumerate(gradient):
                halves = zip(names[:2], expert.chunk(2), strict=True)
                found.update({f"{prefix}.{i}.{half}.weight": part for half, part in halves})
        elif kind == "down_proj":
            found.update({f"{prefix}.{i}.{names[2]}.weight": expert for i, expert in enumerate(gradient)})
        else:
            found[name] = gradient
    return found


def some_families(checkpoints: dict[str, str], scratch: str, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what the layouts make of families on this rank, for ``cases`` of CASES; exports under tp2-sp and pp2."""
    results = {}
    for layout, flags in LAYOUTS.items():
        names = [name for name in families_of(layout) if (name, layout) in cases]
        if names:
            switch_layout(model_args(checkpoints[names[0]], *flags))
        for name in names:
            exported = {"tp2-sp": "tp2"}.get(layout, layout)  # the names under which the check exports
            folder = Path(scratch) / f"{name}-{layout}"
            results[f"{layout}/{name}"] = logits_and_weights(checkpoints[name], exported, flags, folder)
    return results
