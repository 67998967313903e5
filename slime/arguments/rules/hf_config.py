"""The model flags must describe the checkpoint in ``--hf-checkpoint``."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.arguments.errors import ArgumentError

DENSE_FAMILIES = ("llama", "qwen2", "qwen3")


def read_config(hf_checkpoint: str) -> dict[str, Any]:
    """``config.json`` of a checkpoint directory; of a vision-language model its text part. Raises ``ArgumentError``."""
    path = Path(hf_checkpoint) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArgumentError(
            f"--hf-checkpoint {hf_checkpoint}: there is no {path}; give a local Hugging Face checkpoint directory "
            "(`hf download NAME --local-dir DIRECTORY` fetches one)"
        ) from error
    except (OSError, json.JSONDecodeError) as error:
        raise ArgumentError(f"--hf-checkpoint {hf_checkpoint}: cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"--hf-checkpoint {hf_checkpoint}: {path} holds no JSON object")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def check_readable(args: Namespace) -> None:
    """The checkpoint must be there; everything else about the model is compared with it later."""
    if not args.debug_rollout_only:
        read_config(args.hf_checkpoint)


def check_consistency(args: Namespace) -> None:
    """Compare every field both sides have; all differences are reported at once."""
    if args.debug_rollout_only:
        return
    config = read_config(args.hf_checkpoint)
    wrong = [
        f"{option} {seen} but {key}{'' if key.endswith('must be') else ' is'} {expected}"
        for option, seen, key, expected in (*_comparisons(args, config), *_switches(args, config))
        if seen != expected
    ]
    if wrong:
        raise ArgumentError(
            f"the model flags do not describe {args.hf_checkpoint}/config.json: {'; '.join(wrong)}. "
            "Correct the flags or the checkpoint"
        )


def _comparisons(args: Namespace, config: dict[str, Any]) -> list[tuple[str, Any, str, Any]]:
    found: list[tuple[str, Any, str, Any]] = []

    def compare(option: str, seen: Any, key: str, expected: Any = None) -> None:
        expected = config.get(key) if expected is None else expected
        if seen is not None and expected is not None:
            found.append((option, seen, key, expected))

    compare("--num-layers", args.num_layers, "num_hidden_layers")
    compare("--hidden-size", args.hidden_size, "hidden_size")
    compare("--num-attention-heads", args.num_attention_heads, "num_attention_heads")
    if _has_dense_layer(args):
        compare("--ffn-hidden-size", args.ffn_hidden_size, "intermediate_size")
    if not args.multi_latent_attention:
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        compare("--num-query-groups", groups, "num_key_value_heads")
        compare("--kv-channels", args.kv_channels, "head_dim")
    compare("--moe-ffn-hidden-size", args.moe_ffn_hidden_size, "moe_intermediate_size")
    compare(
        "--moe-shared-expert-intermediate-size",
        args.moe_shared_expert_intermediate_size,
        "shared_expert_intermediate_size",
    )
    compare("--vocab-size", args.vocab_size, "vocab_size")
    compare("--norm-epsilon", args.norm_epsilon, "rms_norm_eps")
    compare("--rotary-base", args.rotary_base, "rope_theta", _rope_theta(config))
    if isinstance(config.get("tie_word_embeddings"), bool):
        untied = "given" if args.untie_embeddings_and_output_weights else "absent"
        wanted = "absent" if config["tie_word_embeddings"] else "given"
        if untied != wanted:
            tied = str(config["tie_word_embeddings"]).lower()
            found.append(("--untie-embeddings-and-output-weights is", untied, "tie_word_embeddings", tied))
    return found


def _switches(args: Namespace, config: dict[str, Any]) -> list[tuple[str, Any, str, Any]]:
    """Flags without a number in the config: a wrong one would train a different architecture without a word."""
    family = config.get("model_type")
    if family not in DENSE_FAMILIES or args.spec or args.custom_model_provider_path:
        return []
    wanted: dict[str, tuple[Any, Any]] = {
        "--normalization": (args.normalization, "RMSNorm"),
        "--position-embedding-type": (args.position_embedding_type, "rope"),
        "--swiglu": (_given(args.swiglu), "given"),
        "--disable-bias-linear": (_given(not args.add_bias_linear), "given"),
        "--add-qkv-bias": (_given(args.add_qkv_bias), _given(_has_qkv_bias(config))),
        "--qk-layernorm": (_given(args.qk_layernorm), _given(family == "qwen3")),
        "--use-rope-scaling": (_given(args.use_rope_scaling), _given(_rope_scaling(config) is not None)),
    }
    factor = _rope_scaling(config)
    if factor is not None and args.use_rope_scaling:
        wanted["--rope-scaling-factor"] = (args.rope_scaling_factor, factor)
    return [(f"{option} is", seen, f"for {family} it must be", value) for option, (seen, value) in wanted.items()]


def _given(switch: bool) -> str:
    return "given" if switch else "absent"


def _has_qkv_bias(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "qwen2" or bool(config.get("attention_bias"))


def _rope_scaling(config: dict[str, Any]) -> float | None:
    """The factor of Llama 3's scaling, None without scaling. Other scalings are not compared."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return scaling.get("factor") if scaling.get("rope_type", scaling.get("type")) == "llama3" else None


def _rope_theta(config: dict[str, Any]) -> Any:
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_theta" in parameters:
        return parameters["rope_theta"]
    return config.get("rope_theta")


def _has_dense_layer(args: Namespace) -> bool:
    if args.num_experts is None:
        return True
    frequency = args.moe_layer_freq
    return 0 in frequency if isinstance(frequency, list) else frequency > 1


def suggested_flags(hf_checkpoint: str) -> str:
    """The model flags a dense checkpoint needs, to copy; empty when there is no readable config."""
    try:
        config = read_config(hf_checkpoint)
    except ArgumentError:
        return ""
    words = {
        "--num-layers": config.get("num_hidden_layers"),
        "--hidden-size": config.get("hidden_size"),
        "--ffn-hidden-size": config.get("intermediate_size"),
        "--num-attention-heads": config.get("num_attention_heads"),
        "--group-query-attention --num-query-groups": config.get("num_key_value_heads"),
        "--kv-channels": config.get("head_dim"),
        "--vocab-size": config.get("vocab_size"),
        "--norm-epsilon": config.get("rms_norm_eps"),
        "--rotary-base": _rope_theta(config),
    }
    given = [f"{option} {_plain(value)}" for option, value in words.items() if value is not None]
    if config.get("tie_word_embeddings") is False:
        given.append("--untie-embeddings-and-output-weights")
    if config.get("model_type") in DENSE_FAMILIES:
        given.append("--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear")
        given += ["--add-qkv-bias"] if _has_qkv_bias(config) else []
        given += ["--qk-layernorm"] if config["model_type"] == "qwen3" else []
        factor = _rope_scaling(config)
        given += [f"--use-rope-scaling --rope-scaling-factor {factor}"] if factor is not None else []
    return " ".join(given)


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
