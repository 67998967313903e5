"""The made-up family of the page "Add a model family": registered from its text, then loaded and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.megatron_checks import logits_and_weights
from tests.support.megatron_model import model_args
from tests.support.ranks import switch_layout
from tests.support.run_train import ROOT
from tools.markdown import read_page

PAGE = ROOT / "docs" / "en" / "developer_guide" / "add_a_model_family.md"
RENAMED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def register(folder: Path) -> None:
    """Follow the page in this process: the map of its Python, the entry of its YAML."""
    from slime.backends.megatron_utils.weights import maps
    from slime.models import facts

    fences = {fence.language: fence.text for fence in read_page(PAGE).fences}
    module: dict[str, Any] = {}
    exec(fences["python"], module)
    maps.FAMILIES += (module["FAMILY"],)
    table = facts.FILE.read_text()
    assert table.count("\nfamilies:\n") == 1
    facts.FILE = folder / "facts.yaml"
    facts.FILE.write_text(table.replace("\nfamilies:\n", f"\n{fences['yaml']}\n\n"))


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
