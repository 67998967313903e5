"""Make a tiny, randomly initialized Hugging Face checkpoint with a byte-level tokenizer, from nothing.

Nothing is downloaded: the architecture is the family's real one (``FAMILIES``), only small, and the tokenizer knows the
256 bytes plus the chat markers, so any text round-trips. The quickstart and the tests use it.

    python -m tools.tiny_model --family qwen3 --out /tmp/tiny
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

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


def make_tokenizer(out: Path) -> int:
    """Write a byte-level tokenizer (no merges) with a ChatML template to ``out``; return its vocabulary size (262)."""
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
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return len(fast)


def make_tiny_checkpoint(
    out: str | Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tie_word_embeddings: bool | None = None,
    **sizes: Any,
) -> Path:
    """Write config, safetensors weights and tokenizer of a random tiny ``family`` model to ``out``; return it.

    ``sizes`` overrides entries of ``SIZES`` (and any other field of the family's Hugging Face config). The vocabulary
    is the tokenizer's, rounded up to a multiple of 128 as Megatron does, unless ``vocab_size`` is given. Embedding and
    output layer are tied by default, except in families with experts: SGLang's classes for these never tie them.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from slime.arguments.rules.hf_config import NEVER_TIED

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    vocab = make_tokenizer(out)
    class_name, own = FAMILIES[family]
    padded = -(-vocab // 128) * 128
    tied = family not in NEVER_TIED if tie_word_embeddings is None else tie_word_embeddings
    fields = {**SIZES, **own, "vocab_size": padded, "tie_word_embeddings": tied, **sizes}
    if family.startswith("qwen3"):
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    config = getattr(transformers, class_name)(
        **fields, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(out)
    return out


def megatron_flags(checkpoint: str | Path) -> list[str]:
    """Return the Megatron command-line flags that describe the model in ``checkpoint``, and those without dropout."""
    import json

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
    parser.add_argument("--family", choices=list(FAMILIES), default="qwen3")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    options = vars(parser.parse_args())
    path = make_tiny_checkpoint(options.pop("out"), options.pop("family"), seed=options.pop("seed"), **options)
    print(" ".join(megatron_flags(path)))


if __name__ == "__main__":
    main()
