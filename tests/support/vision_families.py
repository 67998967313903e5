"""Tiny random checkpoints of vision-language families, samples with images, and what transformers computes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.megatron_model import hf_gradients, model_args, output_gradient, run_pack
from tests.support.megatron_references import Reference
from tests.support.ranks import error_of, loaded_model, switch_layout
from tools.tiny_model import ROPE, make_tiny_checkpoint, transposed_experts

START, END, IMAGE, VIDEO = 262, 263, 264, 265
"""As the tokenizer of the checkpoints numbers them."""
TEXT = 200
"""Tokens below this are text."""
SMALL = {"patch_size": 4, "num_position_embeddings": 16}
PATCH = 3 * 2 * 4 * 4


class Tiny(NamedTuple):
    """``text`` and ``vision`` over what ``tools.tiny_model`` has for the family."""

    text: dict[str, Any]
    vision: dict[str, Any]


FAMILIES: dict[str, Tiny] = {
    "qwen3_vl": Tiny({"num_hidden_layers": 4}, SMALL),
    "qwen3_vl_moe": Tiny({"moe_intermediate_size": 24, "num_hidden_layers": 4}, SMALL),
    "qwen2_5_vl": Tiny(
        {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}, "tie_word_embeddings": True},
        {"patch_size": 4, "window_size": 16},
    ),
    "qwen3_5": Tiny({}, SMALL),
    "qwen3_5_moe": Tiny({}, SMALL),
}
TP2, SP = ("--tensor-model-parallel-size", 2), ("--sequence-parallel",)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
TRAINED = ("--train-vision-tower",)
PP2 = ("--pipeline-model-parallel-size", 2)
CP2 = ("--context-parallel-size", 2)
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "dp2": (),
    "tp2": TP2,
    "tp2-sp": (*TP2, *SP),
    "pp2": PP2,
    "cp2": CP2,
    "ep2": ("--expert-model-parallel-size", 2),
    "dp2, trained": TRAINED,
    "tp2, trained": (*TRAINED, *TP2),
    "tp2-sp, trained": (*TRAINED, *TP2, *SP),
    "pp2, trained": (*TRAINED, *PP2),
    "cp2, trained": (*TRAINED, *CP2),
    "cp2, recomputed": (*CP2, *FULL),
    "pp2, recomputed, trained": (*TRAINED, *PP2, *FULL),
    "tp2-sp, recomputed, trained": (*TRAINED, *TP2, *SP, *FULL),
    "cp2, recomputed, trained": (*TRAINED, *CP2, *FULL),
}
EXPORTED = ("pp2", "tp2-sp, trained", "pp2, trained")
WITH_EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")
DENSE = [name for name in FAMILIES if name not in WITH_EXPERTS]
OF_SOME = {"tp2": DENSE, "tp2, trained": DENSE, "ep2": WITH_EXPERTS}  # experts need sequence parallelism
CASES = [(name, layout) for layout in LAYOUTS for name in OF_SOME.get(layout, FAMILIES)]

GRIDS = ([(1, 4, 6), (1, 6, 4)], [], [(1, 4, 4)])
"""Images of the samples: of two sizes, none, one."""


class Pack(NamedTuple):
    """``tokens`` of each sample, ``pixels`` [patches, PATCH] and ``grids`` [images, 3] of each, None without images."""

    tokens: list[torch.Tensor]
    pixels: list[torch.Tensor | None]
    grids: list[torch.Tensor | None]


def samples(images: tuple[list[tuple[int, int, int]], ...] = GRIDS) -> Pack:
    """Return made-up samples with ``images``, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    pack = Pack([], [], [])
    for grids, length in zip(images, (5, 7, 4), strict=False):
        tokens, pixels = [], []
        for time, height, width in grids:
            text = torch.randint(0, TEXT, (length,), generator=generator).tolist()
            tokens += [*text, START, *[IMAGE] * (time * height * width // 4), END]
            pixels.append(torch.randn(time * height * width, PATCH, generator=generator))
        tokens += torch.randint(0, TEXT, (length,), generator=generator).tolist()
        pack.tokens.append(torch.tensor(tokens))
        pack.pixels.append(torch.cat(pixels) if pixels else None)
        pack.grids.append(torch.tensor(grids) if grids else None)
    return pack


def joined(pack: Pack) -> dict[str, torch.Tensor]:
    """Return the inputs of a model for the whole pack."""
    pixels, grids = ([x for x in part if x is not None] for part in (pack.pixels, pack.grids))
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)} if grids else {}


def make_checkpoint(folder: Path, name: str, *, seed: int = 14, **text: Any) -> str:
    """Write the tiny checkpoint ``name`` below ``folder``, no two tensors with the same values; return its path."""
    tiny, path = FAMILIES[name], folder / name
    make_tiny_checkpoint(path, name, vision=tiny.vision, **{"intermediate_size": 96, **tiny.text, **text})
    if name == "qwen2_5_vl":
        flatten(path / "config.json")
    randomize(path / "model.safetensors", seed)
    return str(path)


def flatten(path: Path) -> None:
    """Write the config as Qwen2.5-VL is published: the language model's values beside ``vision_config``."""
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    path.write_text(json.dumps({**text, **config, **flat}))


def randomize(path: Path, seed: int) -> None:
    """Give no two tensors of the file the same values."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(path).items():
        noise = torch.randn(tensor.shape, generator=generator)
        is_norm = "norm" in name or "ln_q" in name
        is_bias = name.endswith("bias")
        tensors[name] = 0.3 * noise if is_bias else 1 + 0.3 * noise if is_norm else 0.15 * noise
    save_file(tensors, path, metadata={"format": "pt"})


def whole_model(checkpoint: str) -> Any:
    """Return the model that transformers makes of the checkpoint, in fp32, with its plain attention."""
    from transformers import AutoModelForImageTextToText

    eager = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForImageTextToText.from_pretrained(checkpoint, **eager)


def per_sample(model: Any, pack: Pack) -> list[torch.Tensor]:
    """Return the logits of each sample, computed alone."""
    found = []
    for tokens, pixels, grids in zip(*pack, strict=True):
        inputs = {} if grids is None else {
            "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": (tokens == IMAGE).int()[None],
        }  # fmt: skip
        model.model.rope_deltas = None
        found.append(model(tokens[None], **inputs).logits[0])
    return found


def reference(checkpoint: str, name: str, pack: Pack) -> Reference:
    """Return logits and gradients by transformers and autograd, one sample after the other, without padding."""
    from safetensors.torch import load_file

    model = whole_model(checkpoint)
    logits = torch.cat(per_sample(model, pack))
    (logits * output_gradient(*reversed(logits.shape))).sum().backward()
    weights = load_file(Path(checkpoint) / "model.safetensors")
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if name == "qwen2_5_vl":
        gradients = {_saved(n): gradient for n, gradient in gradients.items()}
    if name == "qwen3_vl_moe":
        gradients = transposed_experts(gradients)
    return Reference(logits.detach(), weights, gradients)


def _saved(name: str) -> str:
    """Return the name in checkpoints of Qwen2.5-VL, which are those of an older transformers."""
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def is_tower(name: str) -> bool:
    return "visual." in name


def some_families(checkpoints: dict[str, str], scratch: str, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what the layouts make of families on this rank, for ``cases`` of CASES."""
    results = {}
    for layout, flags in LAYOUTS.items():
        names = [name for name in FAMILIES if (name, layout) in cases]
        if names:
            switch_layout(model_args(checkpoints[names[0]], *provider(names[0]), *flags))
        for name in names:
            folder = Path(scratch) / f"{name}-{layout}"
            exports = layout in EXPORTED
            results[f"{layout}/{name}"] = logits_and_weights(checkpoints[name], name, flags, folder, exports=exports)
    return results


def provider(name: str) -> tuple[str, ...]:
    """Return the flags that a config of Qwen3.5 does not imply: it is trained without images, too."""
    return ("--spec", "slime_plugins.models.qwen3_5_vl", "get_qwen3_5_vl_model_provider") if "qwen3_5" in name else ()


def logits_and_weights(
    checkpoint: str, name: str, flags: tuple[Any, ...], export_dir: Path, *, exports: bool
) -> dict[str, Any]:
    """Return this rank's logits, gradients and weights; export the model if ``exports``."""
    from slime.backends.megatron_utils.weights import describe_hf_weights, export_hf, iter_hf_weights

    args = model_args(checkpoint, *provider(name), *flags)
    args.use_distributed_optimizer = False  # so that every rank has all gradients
    model = loaded_model(args, checkpoint)
    if exports:
        export_hf(model, args, export_dir)
    own = [(name, tuple(tensor.shape)) for name, tensor in iter_hf_weights(model, args)]
    pack = samples()
    return {
        "weights": [(name, tensor.clone()) for name, tensor in iter_hf_weights(model, args, gather_pp=True)],
        "described": [(n, s) for n, s, _ in describe_hf_weights(model, args)] == own,
        "forward": run_pack(model, args, pack.tokens, **joined(pack)),
        "gradients": hf_gradients(model, args),
    }


def shared(checkpoints: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return logits, gradients and patches that the tower was given, once with all images and once with distinct ones.

    The first two samples have an image in common, which the second has twice; ``uses`` are numbered by hand.
    """
    from slime.backends.megatron_utils.state.parallel import unwrap

    pack = samples(([(1, 4, 6), (1, 6, 4)], [(1, 4, 6), (1, 4, 6)], [(1, 4, 4)]))
    first, second = pack.pixels[:2]
    assert first is not None
    assert second is not None
    second[:24] = second[24:] = first[:24]
    inputs = joined(pack)
    kept = torch.cat([first, inputs["pixel_values"][-16:]])
    once = {**inputs, "pixel_values": kept, "image_uses": torch.tensor([0, 1, 0, 0, 2])}
    found = {}
    for name, checkpoint in checkpoints.items():
        args = model_args(checkpoint, *provider(name), *TRAINED)
        args.use_distributed_optimizer = False
        switch_layout(args)
        for kind, given in (("all", inputs), ("distinct", once)):
            model = loaded_model(args, checkpoint)  # hf_gradients overwrites its weights
            patches: list[int] = []
            tower: Any = unwrap(model[0]).tower
            tower.register_forward_pre_hook(lambda _, given, patches=patches: patches.append(len(given[0])))
            forward = run_pack(model, args, pack.tokens, **given)
            assert forward is not None
            gradients = dict(hf_gradients(model, args))
            found[f"{kind}/{name}"] = {"logits": forward["logits"], "gradients": gradients, "patches": patches}
    return found


def refused(checkpoint: str) -> dict[str, str]:
    """Return the messages for packs whose image tokens are not those of their images."""
    args = model_args(checkpoint)
    switch_layout(args)
    model = loaded_model(args, checkpoint)
    pack = samples()
    inputs = joined(pack)
    cut = {"pixel_values": inputs["pixel_values"][:-16], "image_grid_thw": inputs["image_grid_thw"][:-1]}
    broken = [tokens.clone() for tokens in pack.tokens]
    first = int((broken[0] == IMAGE).nonzero()[0])
    broken[0][first - 1], broken[0][first + 1] = IMAGE, START
    return {
        "one image too few": error_of(lambda: run_pack(model, args, pack.tokens, **cut)),
        "text within an image": error_of(lambda: run_pack(model, args, broken, **inputs)),
        "no images": error_of(lambda: run_pack(model, args, pack.tokens)),
        "no pixels": error_of(lambda: run_pack(model, args, pack.tokens, image_grid_thw=inputs["image_grid_thw"])),
    }
