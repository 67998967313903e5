"""Facts about published models: ``facts.yaml``, and the lookup by the name of a checkpoint's directory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from slime.models.bridges import bridged_settings

FILE = Path(__file__).with_name("facts.yaml")
# A checkpoint in another number format has the same architecture.
_FORMAT = re.compile(r"[-_.](fp8|fp4|nvfp4|mxfp4|mxfp8|bf16|fp16|int4|int8|awq|gptq)$", re.IGNORECASE)

# Published models whose own checkpoints are quantized.
_QUANTIZED = {
    **dict.fromkeys(("deepseek-v3", "deepseek-v3-0324", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v3.2-exp"), "fp8"),
    **dict.fromkeys(("deepseek-r1", "deepseek-r1-0528", "deepseek-r1-zero", "minimax-m2"), "fp8"),
    **dict.fromkeys(("kimi-k2-instruct", "kimi-k2-instruct-0905", "kimi-k2-base"), "fp8"),
    "kimi-k2-thinking": "int4",
}

_QUANTIZATION = re.compile(r"[-_.](fp8|int4|bf16|fp16)$")


@dataclass(frozen=True)
class Model:
    """One published architecture: the merged entry of ``facts.yaml``.

    ``config`` is in the vocabulary of a Hugging Face config and holds ``model_type``; ``megatron`` is what no config
    says. ``variants`` maps further repositories to what differs there. ``parameters`` is in billions.
    ``about`` says which part of the repositories' model this is, where it is not the whole language model.
    ``vision`` are the sizes of the vision tower.
    """

    script: str
    family: str
    config: dict[str, Any]
    megatron: dict[str, Any]
    repositories: tuple[str, ...] = ()
    local_names: tuple[str, ...] = ()
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: float | None = None
    about: str = ""
    vision: dict[str, Any] = field(default_factory=dict)
    like: str | None = None


@dataclass(frozen=True)
class KnownModel:
    """A published model: its repository (or the name by which a shortened one is known), its script, its config."""

    repository: str
    script: str
    config: dict[str, Any]
    vision: dict[str, Any]


@cache
def _file() -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader))


def architecture() -> dict[str, str]:
    """Switches that make another model, with the group of flags that each is in."""
    return dict(_file()["architecture"])


def scaling_of(kind: str) -> dict[str, float]:
    """The values that Megatron's form of a scaling knows only, or by default, by key of ``config.json``."""
    return dict(_file()["scaling"][kind])


def families() -> dict[str, dict[str, Any]]:
    """Every family by its ``model_type``, in the order of the file."""
    return dict(_file()["families"])


@cache
def models() -> dict[str, Model]:
    """Every model by the name of its script, in the order of the file."""
    found: dict[str, Model] = {}
    for script, entry in _file()["models"].items():
        base = found[entry["like"]] if "like" in entry else None
        family_name = base.family if base else entry["family"]
        family = families()[family_name]
        found[script] = Model(
            script=script,
            family=family_name,
            config={
                "model_type": family_name,
                **family["config"],
                **(base.config if base else {}),
                **entry.get("config", {}),
            },
            megatron={**family["megatron"], **(base.megatron if base else {}), **entry.get("megatron", {})},
            repositories=tuple(entry.get("repositories", ())),
            local_names=tuple(entry.get("local_names", ())),
            variants=entry.get("variants", {}),
            parameters=entry.get("parameters"),
            about=entry.get("about", ""),
            vision=entry.get("vision", {}),
            like=entry.get("like"),
        )
    return found


def trained_families() -> list[str]:
    """The ``model_type`` of every family that slime trains."""
    below = (entry["below"] for entry in families().values() if "below" in entry)
    return sorted({*below, *(name.removesuffix("_text") for name in families())})


def family_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The ``megatron`` section of the family of ``config``: the table's, else that of mbridge; None without one."""
    name = str(config.get("model_type"))
    entry = families().get(name) or families().get(name + "_text")
    entry = entry or next((one for one in families().values() if one.get("below") == name), None)
    return dict(entry["megatron"]) if entry else bridged_settings(config).get("megatron")


def defaults_of(model_type: object) -> dict[str, Any]:
    """The values that the models of a family have where their ``config.json`` does not say; {} for most."""
    return dict(families().get(str(model_type), {}).get("defaults", {}))


def caps_logits(spec: object) -> bool:
    """Return True if the family that ``--spec`` builds has ``final_logit_softcapping``."""
    return bool(spec) and any(
        family["megatron"].get("caps_logits") and family["megatron"].get("spec") == spec
        for family in families().values()
    )


def takes_images(spec: object) -> bool:
    """Return True if ``--spec`` builds a model with a vision tower."""
    return bool(spec) and any(family["megatron"].get("images") == spec for family in families().values())


def known_model(checkpoint: str) -> KnownModel | None:
    """The published model named like ``checkpoint``, a path or a repository name; None when the table has none.

    ``/models/Qwen3-4B``, ``Qwen/Qwen3-4B``, ``Qwen3-4B-FP8`` and a snapshot directory of the Hugging Face cache are all
    ``Qwen/Qwen3-4B``. Case does not matter.
    """
    name = _base_name(checkpoint)
    while name not in _by_name():
        shorter = _FORMAT.sub("", name)
        if shorter == name:
            return None
        name = shorter
    return _by_name()[name]


def known_config(checkpoint: str) -> dict[str, Any] | None:
    """The config of the published model named like ``checkpoint``, in Hugging Face vocabulary; see ``known_model``."""
    model = known_model(checkpoint)
    if model is None:
        return None
    return {**model.config, "vision_config": model.vision} if model.vision else dict(model.config)


def quantization_by_name(checkpoint: str) -> str | None:
    """The quantization that a checkpoint's name ends with (``-FP8``), else that of the published model of its name."""
    name = PurePath(checkpoint).name.lower()
    found = _QUANTIZATION.search(name)
    return found.group(1) if found else _QUANTIZED.get(name)


def _base_name(checkpoint: str) -> str:
    parts = PurePath(checkpoint).parts
    cached = next((part for part in parts if part.startswith("models--")), None)
    if cached is not None:
        return cached.split("--")[-1].lower()
    return parts[-1].lower() if parts else ""


@cache
def _by_name() -> dict[str, KnownModel]:
    found: dict[str, KnownModel] = {}
    for model in models().values():
        for repository in (*model.repositories, *model.local_names, *model.variants):
            config = {**model.config, **model.variants.get(repository, {})}
            found.setdefault(_base_name(repository), KnownModel(repository, model.script, config, model.vision))
    return found
