"""Tiny random vision-language checkpoints with their processor files, drawn images, and transformers' log-probs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from tools.tiny_model import make_tokenizer

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
    "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64,
}  # fmt: skip
LEARNED = {**TOWER, "patch_size": 16, "num_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
PARTIAL = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
DELTA_NET = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({"rope_parameters": ROPE}, {**LEARNED, "deepstack_visual_indexes": [0, 1]}),
    "qwen2_5_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}},
        {**TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    ),
    "qwen3_5": ({"rope_parameters": PARTIAL, **DELTA_NET}, LEARNED),
}
"""By ``model_type``: what text and tower have besides TEXT."""
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_5": {
        "text_config": {"partial_rotary_factor": 0.5, "full_attention_interval": 2},
        "vision_config": {"deepstack_visual_indexes": []},
    }
}
"""What SGLang reads in published configs, and transformers does not write."""
MIN_PIXELS, MAX_PIXELS = 56 * 56, 160 * 160
PROCESSORS = {"qwen3_vl": "Qwen3VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_5": "Qwen3VLProcessor"}


def make_processor_files(folder: Path, family: str) -> Any:
    """Write a tokenizer of bytes with the image tokens, and the preprocessor's files; return the tokenizer."""
    from transformers import AutoTokenizer

    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", START, END, IMAGE, VIDEO]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    shared = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": FAMILIES[family][1]["patch_size"], "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "processor_class": PROCESSORS[family],
    }  # fmt: skip
    video = {"qwen2_5_vl": "Qwen2VLVideoProcessor"}.get(family, "Qwen3VLVideoProcessor")
    for name, key, kind in (
        ("preprocessor_config", "image_processor_type", "Qwen2VLImageProcessorFast"),
        ("video_preprocessor_config", "video_processor_type", video),
    ):
        (folder / f"{name}.json").write_text(json.dumps({**shared, key: kind}))
    return tokenizer


def make_vision_checkpoint(folder: Path, family: str, *, seed: int = 11, tower_seed: int | None = None) -> Path:
    """Write a checkpoint of ``family``, with values by ``seed``; the tower's by ``tower_seed``, if given."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_processor_files(folder, family)
    text, tower = FAMILIES[family]
    ids = dict(zip(("vision_start", "vision_end", "image", "video"), (START, END, IMAGE, VIDEO), strict=True))
    own = {"vocab_size": -(-len(tokenizer) // 128) * 128, "eos_token_id": tokenizer.eos_token_id}
    own["pad_token_id"] = tokenizer.pad_token_id
    config = CONFIG_MAPPING[family](
        text_config={**TEXT, **text, **own},
        vision_config=tower,
        tie_word_embeddings=False,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        architecture = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        model = architecture._from_config(config, dtype=torch.float32)
        for part, number in ((model, seed), (model.model.visual, tower_seed)):
            if number is not None:
                _fill(part, number)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    for part, fields in PUBLISHED.get(family, {}).items():
        written[part].update(fields)
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def _fill(part: torch.nn.Module, seed: int) -> None:
    """Give every parameter values that are not those it begins with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(part.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            vector = parameter.ndim == 1
            parameter.copy_((parameter + 0.1 * noise) if vector and "A_log" not in name else 0.08 * noise)


def drawing(seed: int, width: int = 96, height: int = 64) -> Image.Image:
    """Return a picture of rectangles, other ones for every seed."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        left, top = rng.randrange(width), rng.randrange(height)
        box = (left, top, left + rng.randrange(4, 30), top + rng.randrange(4, 30))
        draw.rectangle(box, fill=tuple(rng.randrange(256) for _ in range(3)))
    return image


class VisionReference:
    """Log-probs of a checkpoint by transformers, with attention in plain torch."""

    def __init__(self, checkpoint: Path, exact: Any = None) -> None:
        from transformers import AutoModelForImageTextToText

        loaded = AutoModelForImageTextToText.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model = loaded if exact is None else exact(loaded)
        self.image_id = int(loaded.config.image_token_id)
        self.forbidden = [self.image_id, int(loaded.config.video_token_id)]

    def log_probs(self, prompt: list[int], output: list[int], images: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return ``[len(output)]``, without placeholders; ``prompt`` is expanded, ``images`` are pixels and grids."""
        ids = torch.tensor([prompt + output])
        kinds = {"mm_token_type_ids": (ids == self.image_id).int()} if images else {}
        with torch.no_grad():
            logits = self.model(ids, **images, **kinds, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits[:, self.forbidden] = -torch.inf
        return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(output)[:, None])[:, 0]
