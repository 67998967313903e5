"""Low-rank adapters: what is trained instead of the whole model."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, flag


class Lora(ArgumentGroup):
    """Low-rank adapters (LoRA)."""

    title = "LoRA"

    lora_rank: int = flag(0, "train adapters of this rank on a frozen model; 0: train the model itself", ge=0)
    lora_alpha: float = flag(32.0, "adapters are scaled by this over --lora-rank", gt=0)
    lora_target_modules: list[str] = flag(
        ["all-linear"],
        "projections with adapters, by the last part of their Hugging Face names: q_proj up_proj ...; all-linear: all",
    )
    lora_dropout: float = flag(0.0, "dropout on the input of adapters while training", ge=0, lt=1)
    lora_sync: Literal["merged", "adapter"] = flag(
        "merged",
        "what engines are sent; merged: all weights, with the adapters merged into them; adapter: the adapters alone, "
        "while they go on generating",
    )
    lora_adapter_path: str | None = flag(None, "directory with an adapter saved by PEFT to start from")
