"""Read ``facts.yaml``: families by ``model_type``, models by the name of their script."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("facts.yaml")


@dataclass(frozen=True)
class Model:
    """One published architecture: the merged entry of ``facts.yaml``.

    ``config`` is in the vocabulary of a Hugging Face config and holds ``model_type``; ``megatron`` is what no config
    says. ``variants`` maps further repositories to what differs there. ``parameters`` is in billions.
    ``about`` says which part of the repositories' model this is, where it is not the whole language model.
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
    like: str | None = None


@cache
def _file() -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader))


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
            like=entry.get("like"),
        )
    return found


def family_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The ``megatron`` section of the family of ``config``; None for a family that is not in the table."""
    name = str(config.get("model_type"))
    entry = families().get(name) or families().get(name + "_text")
    return dict(entry["megatron"]) if entry else None
