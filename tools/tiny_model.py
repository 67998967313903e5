"""Make a tiny, randomly initialized Hugging Face checkpoint with a byte-level tokenizer, from nothing.

Nothing is downloaded: the architecture is the family's real one (``FAMILIES``), only small, and the tokenizer knows the
256 bytes plus the chat markers, so any text round-trips. Vision-language families (``VISION_FAMILIES``) have the files
of their processor, too. The quickstart and the tests use it.

    python -m tools.tiny_model --family qwen3 --out /tmp/tiny
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls %}{{ '<tool_call><function=' + call.function.name + '>' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter=' ~ key ~ '>' ~ value ~ '</parameter>' }}{% endfor %}"
    "{{ '</function></tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
# Family -> its configuration class of transformers, and what it has besides SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
}
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
# Another template for engines, too, which find out by it that messages may have parts.
VISION_CHAT_TEMPLATE = CHAT_TEMPLATE.replace(
    " + m['content'] }}",
    " }}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}",
    1,
)
TOWER: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "patch_size": 16,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
INTERLEAVED = {**ROPE, "mrope_interleaved": True}
HALF_ROTATED = {
    "rope_parameters": {**INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "partial_rotary_factor": 0.5,
}
DELTA_NET = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
"""Not half of the hidden size: readers see by the shapes how gates and ups are stored."""


class Vision(NamedTuple):
    """``text`` over SIZES, ``tower`` over TOWER; ``published``: what configs have that transformers does not write."""

    text: dict[str, Any]
    tower: dict[str, Any]
    processor: str = "Qwen3VLProcessor"
    video_processor: str = "Qwen3VLVideoProcessor"
    published: dict[str, dict[str, Any]] = {}  # noqa: RUF012  read only


_LEARNED = {"num_position_embeddings": 64}
_DEEPSTACK = {**_LEARNED, "deepstack_visual_indexes": [0, 2]}  # SGLang wants one for each of the first three layers
_QWEN3_5 = {
    "text_config": {"partial_rotary_factor": 0.5, "full_attention_interval": 2},
    "vision_config": {"deepstack_visual_indexes": []},
}
VISION_FAMILIES: dict[str, Vision] = {
    "qwen3_vl": Vision({"rope_parameters": INTERLEAVED}, _DEEPSTACK),
    "qwen3_vl_moe": Vision({"rope_parameters": INTERLEAVED, **EXPERTS}, _DEEPSTACK),
    "qwen2_5_vl": Vision(
        {"rope_parameters": ROPE},
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        "Qwen2_5_VLProcessor",
        "Qwen2VLVideoProcessor",
    ),
    "qwen3_5": Vision({**HALF_ROTATED, **DELTA_NET}, _LEARNED, published=_QWEN3_5),
    "qwen3_5_moe": Vision(
        {**HALF_ROTATED, **DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32}, _LEARNED, published=_QWEN3_5
    ),
}
MIN_PIXELS, MAX_PIXELS = 56 * 56, 160 * 160


def make_tokenizer(out: Path, *, images: bool = False) -> int:
    """Write a byte-level tokenizer (no merges) with a ChatML template to ``out``; return its vocabulary size (262).

    With ``images`` it has four tokens more, those of images.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=IM_END)
    fast.add_special_tokens({"additional_special_tokens": [IM_START]})
    # The roles are one token each: on a CPU a prompt of 14 tokens instead of 26 is felt.
    fast.add_tokens(["system", "user", "assistant"])
    if images:
        fast.add_special_tokens({"additional_special_tokens": [IM_START, START, END, IMAGE, VIDEO]})
    fast.chat_template = VISION_CHAT_TEMPLATE if images else CHAT_TEMPLATE
    fast.save_pretrained(out)
    return len(fast)


def make_processor_files(out: Path, family: str, *, patch_size: int | None = None, min_pixels: int = MIN_PIXELS) -> int:
    """Write tokenizer and preprocessors of a family of VISION_FAMILIES to ``out``; return the vocabulary size (266).

    ``patch_size``: the family's unless given. Images of fewer than ``min_pixels`` are enlarged.
    """
    out.mkdir(parents=True, exist_ok=True)
    vision = VISION_FAMILIES[family]
    shared = {
        "size": {"shortest_edge": min_pixels, "longest_edge": MAX_PIXELS},
        "patch_size": patch_size or {**TOWER, **vision.tower}["patch_size"], "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "processor_class": vision.processor,
    }  # fmt: skip
    for name, key, kind in (
        ("preprocessor_config", "image_processor_type", "Qwen2VLImageProcessorFast"),
        ("video_preprocessor_config", "video_processor_type", vision.video_processor),
    ):
        (out / f"{name}.json").write_text(json.dumps({**shared, key: kind}))
    return make_tokenizer(out, images=True)


def make_tiny_checkpoint(
    out: str | Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tie_word_embeddings: bool | None = None,
    vision: Mapping[str, Any] | None = None,
    min_pixels: int = MIN_PIXELS,
    **sizes: Any,
) -> Path:
    """Write config, safetensors weights and tokenizer of a random tiny ``family`` model to ``out``; return it.

    ``sizes`` overrides entries of ``SIZES`` (and any other field of the family's Hugging Face config), ``vision`` those
    of the vision tower; ``min_pixels``: see ``make_processor_files``. The vocabulary is the tokenizer's, rounded up to
    a multiple of 128 as Megatron does, unless ``vocab_size`` is given. Embedding and output layer are tied by default,
    except in vision-language families, and in those with experts: SGLang's classes for these never tie them.
    """
    import torch
    import transformers
    from transformers import AutoTokenizer

    from slime.arguments.rules.hf_config import NEVER_TIED

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sees = VISION_FAMILIES.get(family)
    tower = {**(sees.tower if sees else {}), **(vision or {})}
    if sees:
        vocab = make_processor_files(out, family, patch_size=tower.get("patch_size"), min_pixels=min_pixels)
    else:
        vocab = make_tokenizer(out)
    class_name, own = ("", sees.text) if sees else FAMILIES[family]
    padded = -(-vocab // 128) * 128
    tied = not sees and family not in NEVER_TIED if tie_word_embeddings is None else tie_word_embeddings
    fields = {**SIZES, **own, "vocab_size": padded, "tie_word_embeddings": tied, **sizes}
    if family.startswith("qwen3"):
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    tokenizer = AutoTokenizer.from_pretrained(out)
    fields |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    auto: Any = transformers.AutoModelForCausalLM
    if sees:
        auto = transformers.AutoModelForImageTextToText
        config = _vision_config(family, fields, tower, tokenizer)
    else:
        config = getattr(transformers, class_name)(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(out)
    if sees:
        _publish(out, family)
    return out


def _vision_config(family: str, text: Mapping[str, Any], tower: Mapping[str, Any], tokenizer: Any) -> Any:
    """Return the config of transformers for a family of VISION_FAMILIES."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = {"vision_start": START, "vision_end": END, "image": IMAGE, "video": VIDEO}
    return CONFIG_MAPPING[family](
        text_config=dict(text),
        vision_config={**TOWER, "out_hidden_size": text["hidden_size"], **tower},
        tie_word_embeddings=text["tie_word_embeddings"],
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )


def _publish(out: Path, family: str) -> None:
    """Make of the files that transformers 5.12 saves those that published checkpoints have."""
    from safetensors.torch import load_file, save_file

    config = json.loads((out / "config.json").read_text())
    for part, fields in VISION_FAMILIES[family].published.items():
        config[part].update(fields)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    if family in STORED_EXPERTS:
        path = out / "model.safetensors"
        save_file(STORED_EXPERTS[family](load_file(path)), path, metadata={"format": "pt"})


def transposed_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tensors`` with stacked experts [experts, inputs, outputs], as Qwen3-VL stores them, or back."""
    stacked = ("experts.gate_up_proj", "experts.down_proj")
    return {n: t.transpose(1, 2).contiguous() if n.endswith(stacked) else t for n, t in tensors.items()}


def stacked_experts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tensors`` with the experts of each layer in one, as the published Qwen3.5 has them."""
    import torch

    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        number = sum(name.startswith(f"{prefix}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.experts.{i}.{name}_proj.weight"] for i in range(number)])
            for name in ("gate", "up", "down")
        )
        found[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"{prefix}.experts.down_proj"] = down
    return found


STORED_EXPERTS = {"qwen3_vl_moe": transposed_experts, "qwen3_5_moe": stacked_experts}


def megatron_flags(checkpoint: str | Path) -> list[str]:
    """Return the Megatron command-line flags that describe the model in ``checkpoint``, and those without dropout."""
    from slime.models.megatron_flags import megatron_flags as flags_of

    config = json.loads((Path(checkpoint) / "config.json").read_text())
    words = flags_of(config)
    if "--max-position-embeddings" not in words:
        length = config.get("text_config", config)["max_position_embeddings"]
        words += ["--max-position-embeddings", str(length)]
    return [*words, "--attention-dropout", "0", "--hidden-dropout", "0"]


def main() -> None:
    """Command line: write a tiny checkpoint and print its Megatron flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=[*FAMILIES, *VISION_FAMILIES], default="qwen3")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vision", type=json.loads, default={}, help="JSON: what its vision tower has besides")
    parser.add_argument("--min-pixels", type=int, default=MIN_PIXELS, help="smaller images are enlarged to so many")
    for name, value in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    options = vars(parser.parse_args())
    path = make_tiny_checkpoint(options.pop("out"), options.pop("family"), seed=options.pop("seed"), **options)
    print(" ".join(megatron_flags(path)))


if __name__ == "__main__":
    main()
