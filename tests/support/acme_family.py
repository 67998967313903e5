"""The made-up families of the page "Add a model family": registered from its text, then loaded and exported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.megatron_checks import logits_and_weights
from tests.support.megatron_model import model_args
from tests.support.ranks import switch_layout
from tests.support.run_train import ROOT
from tools.markdown import read_page

PAGE = ROOT / "docs" / "en" / "developer_guide" / "add_a_model_family.md"
RENAMED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def register(folder: Path) -> None:
    """Follow the page in this process: the maps and the provider of its Python, the entries of its YAML."""
    from slime.backends.megatron_utils.weights import maps
    from slime.models import facts

    python, yaml = fences("python"), fences("yaml")
    text: dict[str, Any] = {}
    exec(python[0], text)
    vision: dict[str, Any] = {}
    exec(python[1], vision)
    maps.FAMILIES += (text["FAMILY"], vision["ACME_VL"])
    provider = ModuleType("slime_plugins.models.acme_vl")
    exec(python[2], provider.__dict__)
    sys.modules[provider.__name__] = provider
    table = facts.FILE.read_text()
    assert table.count("\nfamilies:\n") == 1
    entries = "\n".join(entry.removeprefix("families:\n") for entry in yaml)
    facts.FILE = folder / "facts.yaml"
    facts.FILE.write_text(table.replace("\nfamilies:\n", f"\nfamilies:\n{entries}\n\n"))


def fences(language: str) -> list[str]:
    """Return the fences of the page in ``language``."""
    return [fence.text for fence in read_page(PAGE).fences if fence.language == language]


def write_checkpoint(source: str, target: Path) -> None:
    """Write a Qwen2 checkpoint as one of the made-up family: other tensor names, another ``model_type``."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    config = json.loads((Path(source) / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "model_type": "acme"}))
    tensors = load_file(Path(source) / "model.safetensors")
    save_file(
        {renamed(name): t for name, t in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"}
    )


def renamed(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(f"mlp.{old}.", f"mlp.{new}.")
    return name


def build(folder: str) -> dict[str, Any]:
    """Build and load the model on this rank; return what a run without model flags reads, and what the model makes."""
    root = Path(folder)
    register(root)
    from slime.arguments import parse_args

    words = f"""--hf-checkpoint {root / "acme"} --disable-rollout-global-dataset --rollout-max-response-len 32
        --rollout-batch-size 4 --global-batch-size 4 --num-rollout 1 --rollout-num-gpus 1 --actor-num-gpus-per-node 1"""
    args = parse_args(words.split())
    read = {name: getattr(args, name) for name in ("num_layers", "add_qkv_bias", "qk_layernorm", "swiglu")}
    switch_layout(model_args(root / "acme"))
    # "tp2" is the layout under whose name the model is exported, too; this is one rank.
    return {"read": read, **logits_and_weights(str(root / "acme"), "tp2", (), root / "exported")}


def write_vision_checkpoint(source: str, target: Path) -> None:
    """Write a Qwen3-VL checkpoint as one of the made-up family: other names of the tower, another ``model_type``."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    config = json.loads((Path(source) / "config.json").read_text())
    text = {**config["text_config"], "model_type": "acme_vl_text"}
    (target / "config.json").write_text(json.dumps({**config, "model_type": "acme_vl", "text_config": text}))
    tensors = load_file(Path(source) / "model.safetensors")
    renamed_tensors = {renamed_tower(name): tensor for name, tensor in tensors.items()}
    save_file(renamed_tensors, target / "model.safetensors", metadata={"format": "pt"})


def renamed_tower(name: str) -> str:
    return name.replace("model.visual.", "vision_model.")


def build_vision(folder: str) -> dict[str, dict[str, Any]]:
    """Build, load and export the vision-language model on this rank, with the tower frozen and trained."""
    from tests.support import vision_families

    root = Path(folder)
    register(root)
    checkpoint = str(root / "acme_vl")
    found = {}
    for name, flags in (("frozen", ()), ("trained", vision_families.TRAINED)):
        switch_layout(model_args(checkpoint, *flags))
        found[name] = vision_families.logits_and_weights(checkpoint, "acme_vl", flags, root / name, exports=True)
    return found
